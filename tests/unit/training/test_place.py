import json
from contextlib import closing
from pathlib import Path

import pytest
from helpers.tiny import tiny_config

from llmtrain.config.schema import Config
from llmtrain.errors import RunError, UserError
from llmtrain.metrics.jsonl import Lines
from llmtrain.metrics.status import read_status, write_status
from llmtrain.training.place import Auto, claim, write_atomically


def config(run_dir: Path, **changes: object) -> Config:
    return Config.model_validate(tiny_config(run_dir, **changes))


def test_a_claim_makes_the_directory_and_says_that_the_run_is_starting(tmp_path: Path) -> None:
    run_dir = tmp_path / "a" / "run"
    with claim(config(run_dir), 2, "ddp") as place:
        assert place.checkpoint is None
        assert place.takeover is None
        told = read_status(run_dir)
        assert (told["state"], told["run_id"], told["world_size"]) == ("running", place.run_id, 2)
    assert (run_dir / "config.yaml").is_file()


def test_a_second_claim_keeps_the_runs_id_and_knows_its_checkpoint(tmp_path: Path) -> None:
    with claim(config(tmp_path), 1, "ddp") as first:
        write_status(tmp_path, checkpoint="step-00000004", step=4)
    with claim(config(tmp_path), 3, "ddp") as second:
        assert second.run_id == first.run_id
        assert second.checkpoint == "step-00000004"
        assert read_status(tmp_path)["restarts"] == 1


def begin(run_dir: Path) -> None:
    """Claim the directory and write the line that says that a run began in it."""
    with claim(config(run_dir), 1, "ddp"), closing(Lines(run_dir)) as lines:
        lines.write("start", 0)


def test_a_start_that_was_refused_binds_nothing(tmp_path: Path) -> None:
    with claim(config(tmp_path), 1, "ddp"):
        (tmp_path / "manifest.json").write_text("of the wrong config")
        (tmp_path / "tokenizer").mkdir()
    with claim(config(tmp_path, data__seq_len=64), 1, "ddp"):
        assert not (tmp_path / "manifest.json").exists()
        assert not (tmp_path / "tokenizer").exists()
    assert "seq_len: 64" in (tmp_path / "config.yaml").read_text()


def test_a_lost_status_is_made_up_for_by_the_record(tmp_path: Path) -> None:
    begin(tmp_path)
    with closing(Lines(tmp_path)) as lines:
        lines.write("checkpoint", 4, name="step-00000004")
    (tmp_path / "status.json").unlink()
    with claim(config(tmp_path), 1, "ddp") as place:
        assert place.checkpoint == "step-00000004"


def test_a_damaged_auto_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "auto.json").write_text("{")
    with pytest.raises(UserError, match=r"auto\.json"):
        Auto(tmp_path, "ddp/cpu/1")


def test_another_config_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    begin(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError) as raised, claim(config(tmp_path, data__seq_len=64), 1, "ddp"):
        pass
    assert [problem.key for problem in raised.value.problems] == ["data.seq_len"]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_claim_inside_a_claim_is_refused(tmp_path: Path) -> None:
    with (
        claim(config(tmp_path), 1, "ddp"),
        pytest.raises(UserError, match="in use"),
        claim(config(tmp_path), 1, "ddp"),
    ):
        pass


def test_bad_input_22_a_store_without_rename_is_refused_before_a_status_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.rename", refused)
    with (
        pytest.raises(UserError, match="Operation not supported"),
        claim(config(tmp_path), 1, "ddp"),
    ):
        pytest.fail("the directory was taken")
    assert {path.name for path in tmp_path.iterdir()} <= {"lock"}


def test_auto_keeps_what_is_frozen_for_the_run_and_for_each_kind_of_launch(tmp_path: Path) -> None:
    one = Auto(tmp_path, "ddp/cpu/2")
    one.run["precision"] = "fp32"
    one.launch["micro_batch_size"] = 4
    one.save()
    same, other = Auto(tmp_path, "ddp/cpu/2"), Auto(tmp_path, "ddp/cpu/3")
    assert same.run == other.run == {"precision": "fp32"}
    assert same.launch == {"micro_batch_size": 4}
    assert other.launch == {}
    assert json.loads((tmp_path / "auto.json").read_text())["launches"] == {
        "ddp/cpu/2": {"micro_batch_size": 4}
    }


def test_an_atomic_write_leaves_the_old_file_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
