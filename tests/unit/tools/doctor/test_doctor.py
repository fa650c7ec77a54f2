from pathlib import Path

import pytest
from helpers.cases import SMALL
from helpers.config import SMALLEST, written

from llmtrain.errors import UserError
from llmtrain.tools.doctor import doctor as module
from llmtrain.tools.doctor.doctor import NAMES, doctor

ROOT = Path(__file__).parents[4]
# What takes seconds is tried in files of its own.
SLOW = ("all-reduce", "devices", "compiler")
NODES = "distributed_type: MULTI_GPU\nnum_machines: 2\nmain_process_port: 29500\n"


def looked(*arguments, skip=SLOW, **options):
    return dict(doctor(*arguments, skip=skip, **options))


def launch_file(folder, text):
    path = folder / "accelerate.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_a_config_the_machine_alone_is_looked_at():
    checks = looked()
    assert list(checks) == [name for name in module.OF_MACHINE if name not in SLOW]


@pytest.mark.launches
def test_with_a_config_everything_is_looked_at_and_the_run_is_left_alone(tmp_path):
    path = written(tmp_path, SMALL)
    checks = looked(str(path), [f"run.dir={tmp_path / 'run'}"])
    assert set(checks) == set(NAMES) - set(SLOW) - {"launch"}
    assert {check.state for check in checks.values()} <= {"ok", "warning"}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["my.yaml"]


def test_a_config_that_does_not_load_is_one_line_and_the_machine_is_looked_at(tmp_path):
    path = written(tmp_path, SMALLEST + "optimiser: {}\nrun: {sead: 1}\n")
    checks = looked(str(path))
    assert checks["config"].state == "error"
    assert "optimiser" in checks["config"].found
    assert "run.sead" in checks["config"].found
    assert set(checks) == {"config", *module.OF_MACHINE} - set(SLOW)
    assert looked(str(tmp_path / "none.yaml"))["config"].state == "error"


def test_a_file_that_numbers_no_machine_or_cannot_be_dealt_out_is_an_error(tmp_path):
    static = f"{NODES}main_process_ip: 192.0.2.1\nnum_processes: 4\n"
    checks = looked(accelerate_file=launch_file(tmp_path, static))
    assert checks["launch"].state == "error"
    assert "machine_rank" in checks["launch"].found
    odd = f"{NODES}main_process_ip: 192.0.2.1\nnum_processes: 3\nmachine_rank: 0\n"
    checks = looked(accelerate_file=launch_file(tmp_path, odd))
    assert checks["launch"].state == "error"
    assert "num_processes = 3" in checks["launch"].found
    assert "2 or 4" in checks["launch"].remedy


def test_a_file_that_is_not_there_is_an_error_and_the_others_are_looked_at(tmp_path):
    checks = looked(accelerate_file=tmp_path / "none.yaml")
    assert checks["launch"].state == "error"
    assert checks["rendezvous"].state == "ok"


@pytest.mark.launches
def test_a_good_file_is_looked_at_with_the_config(tmp_path):
    file = launch_file(tmp_path, "distributed_type: MULTI_GPU\nuse_cpu: true\nnum_processes: 2\n")
    checks = looked(str(written(tmp_path)), [f"run.dir={tmp_path / 'run'}"], file)
    assert (checks["launch"].state, checks["environment"].state) == ("ok", "ok")


@pytest.mark.launches
def test_a_file_that_contradicts_the_config_is_an_error(tmp_path):
    file = launch_file(tmp_path, "distributed_type: MULTI_GPU\nuse_cpu: true\nnum_processes: 3\n")
    assert looked(accelerate_file=file)["launch"].state == "ok"
    checks = looked(str(written(tmp_path)), ["training.global_batch_size=8"], file)
    assert checks["launch"].state == "error"
    assert "global_batch_size" in checks["launch"].found


def test_the_launch_files_of_the_repository_are_good():
    for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        checks = looked(accelerate_file=path, skip=(*SLOW, "rendezvous", "versions"))
        assert checks["launch"].state == "ok", checks["launch"]


def test_a_check_that_breaks_is_an_error_line_and_the_others_go_on(monkeypatch):
    def break_down(case):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setitem(module.OF_MACHINE, "memory", break_down)
    checks = looked()
    assert checks["memory"].state == "error"
    assert "ZeroDivisionError: division by zero" in checks["memory"].found
    assert checks["memory"].remedy
    assert checks["clocks"].state == "ok"


def test_a_name_that_is_not_known_is_refused_with_the_names_before_anything_is_looked_at():
    with pytest.raises(UserError, match="memori") as caught:
        doctor(skip=["memori"])
    for name in NAMES:
        assert name in str(caught.value)


def test_overrides_of_nothing_are_refused_and_an_empty_name_is_no_missing_config():
    with pytest.raises(UserError, match=r"run\.seed=1"):
        doctor(None, ["run.seed=1"])
    assert next(doctor(""))[1].state == "error"


def test_what_is_looked_at_is_told_before():
    heard = []
    for name, _ in doctor(skip=SLOW, told=heard.append):
        assert heard[-1] == name


def test_every_error_and_warning_says_what_to_do(tmp_path):
    path = written(tmp_path, SMALLEST)
    overrides = ["run.dir=/proc/run", "model.config.vocab_size=3", "data.sources.0.path=./none"]
    env = {"PMI_SIZE": "2", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    checks = looked(str(path), overrides, env=env)
    assert {"error"} <= {check.state for check in checks.values()}
    assert [name for name, one in checks.items() if one.state != "ok" and not one.remedy] == []
