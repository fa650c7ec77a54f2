"""`llmtrain checkpoints …` as a person and as a script see it."""

import json

import pytest
from helpers.checkpoints import RUN, flip, save, saved_run
from helpers.damage import sign

from llmtrain.checkpoint import format as form
from llmtrain.checkpoint.read import tensors_digest
from llmtrain.cli.main import main
from llmtrain.tools import rehearse as tool
from llmtrain.tools.rehearse import Compared, Rehearsal, RehearsedLaunch, RehearsedSizes

MODEL = "model.safetensors"


@pytest.fixture
def run(tmp_path):
    return saved_run(tmp_path)


@pytest.fixture
def shown(capsys):
    """Calls a command: (exit code, stdout, stderr)."""

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["checkpoints", *map(str, arguments)])
        return (ended.value.code or 0, *capsys.readouterr())

    return call


def test_a_list_is_a_line_for_each_with_its_reason(run, shown):
    save(run / "checkpoints", 28, run_id="another")
    (run / "checkpoints" / "step-00000032.partial").mkdir()
    (run / "checkpoints" / "step-00000008" / MODEL).write_bytes(bytes(3))
    code, out, err = shown("list", run)
    assert (code, err) == (0, "")
    head, *lines = out.splitlines()
    assert head.split() == ["name", "size", "loss", "valid", "stays", "as"]
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [
        *(f"step-{step:08d}" for step in (4, 8, 12, 16, 20, 24, 28)),
        "step-00000032.partial",
    ]
    assert lines[0].endswith("4.0000  yes    not kept: goes after the next save, or by prune")
    assert lines[1].endswith("3.5000  no     every 8")
    assert lines[2].startswith(f"    {MODEL}: has 3 bytes instead of ")
    assert lines[3].endswith("2.5000  yes    best")
    assert lines[-2].endswith("yes    of another run: never read, never deleted")
    assert lines[-1].endswith("being written, or cut off: never read")
    assert max(map(len, out.splitlines())) <= 100


def test_a_list_for_scripts_is_one_object(run, shown):
    flip(run / "checkpoints" / "step-00000024" / "manifest.json", 10)
    code, out, _ = shown("list", run, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["run_id"] == RUN
    assert found["policy"] == {"keep_last": 2, "keep_every": 8, "keep_best": 1}
    assert found["checkpoints"][2]["kept"] == ["best"]
    assert found["checkpoints"][2]["loss"] == 2.5
    last = found["checkpoints"][-1]
    assert (last["name"], last["step"], last["kind"], last["valid"]) == (
        "step-00000024",
        24,
        "unreadable",
        False,
    )


def test_an_empty_run_and_no_run_at_all(tmp_path, shown):
    (tmp_path / "status.json").write_text("{}")
    assert shown("list", tmp_path) == (0, "no checkpoints\n", "")
    code, out, err = shown("list", tmp_path / "absent")
    assert (code, out) == (2, "")
    assert err.startswith("error: 1 problem")


def test_a_verification_says_ok_or_names_the_file_and_code_2(run, shown):
    code, out, _ = shown("verify", run)
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()] == [
        [f"step-{step:08d}", "ok"] for step in (4, 8, 12, 16, 20, 24)
    ]
    flip(run / "checkpoints" / "step-00000012" / MODEL)
    code, out, _ = shown("verify", run)
    assert code == 2
    (line,) = (line for line in out.splitlines() if "damaged" in line)
    below = out.splitlines()[out.splitlines().index(line) + 1]
    assert line.startswith("step-00000012   damaged")
    assert below.startswith(f"    {MODEL}: the digest of bytes ")
    assert shown("verify", run, "step-00000024")[0] == 0


def test_a_verification_names_a_format_that_this_llmtrain_does_not_read(run, shown):
    path = run / "checkpoints" / "step-00000024"
    state = {"format": 2, "run_id": RUN, "versions": {"llmtrain": "0.9\x1b[31m"}}
    (path / form.STATE).write_bytes(form.canonical(state))
    sign(path, format=2)
    code, out, _ = shown("verify", run, "step-00000024")
    first, *below = out.splitlines()
    assert code == 2
    assert first.startswith("step-00000024   another format ")
    assert "damaged" not in out
    assert below == [
        "    format 2, written by llmtrain 0.9\\x1b[31m; this needs format 1, the newest that this "
        "llmtrain reads",
        "    try: use llmtrain 0.9\\x1b[31m, or move it away to resume from an older one",
    ]
    (one,) = json.loads(shown("verify", run, "step-00000024", "--json")[1])["checkpoints"]
    assert (one["valid"], len(one["problems"])) == (False, 1)
    assert "format 2" in one["problems"][0]["wrong"]


def test_a_verification_for_scripts(run, shown):
    flip(run / "checkpoints" / "step-00000012" / MODEL)
    code, out, _ = shown("verify", run, "step-00000012", "--json")
    (one,) = json.loads(out)["checkpoints"]
    assert (code, one["name"], one["valid"]) == (2, "step-00000012", False)
    assert [problem["file"] for problem in one["problems"]] == [MODEL]
    assert "digest" in one["problems"][0]["wrong"]


def test_pruning_says_what_would_go_and_then_deletes_it(run, shown):
    code, out, _ = shown("prune", run)
    assert code == 0
    assert out.splitlines()[0].split()[:2] == ["goes", "step-00000004"]
    assert out.splitlines()[-1].startswith("would delete 1 of 6, ")
    assert out.splitlines()[-1].endswith("; --yes deletes")
    assert (run / "checkpoints" / "step-00000004").is_dir()
    found = json.loads(shown("prune", run, "--json")[1])
    assert (found["deleted"], [one["name"] for one in found["goes"]]) == (False, ["step-00000004"])
    code, out, _ = shown("prune", run, "--yes")
    assert (code, out.splitlines()[-1].split(",")[0]) == (0, "deleted 1 of 6")
    assert not (run / "checkpoints" / "step-00000004").exists()
    assert shown("prune", run)[1].splitlines()[-1] == "nothing to delete"


def test_pruning_where_nothing_valid_is_left_warns_and_has_code_2(run, shown):
    for step in (4, 8, 12, 16, 20, 24):
        flip(run / "checkpoints" / f"step-{step:08d}" / "manifest.json", 10)
    code, out, _ = shown("prune", run)
    assert code == 2
    stays, why = out.splitlines()[-4:-2]
    assert stays.split()[:2] == ["stays", "step-00000024"]
    assert stays.endswith("  unreadable")
    assert why.startswith("    manifest.json: ")
    assert out.splitlines()[-2:] == [
        "warning: no checkpoint of this run is valid; what was renamed stays",
        "nothing to delete",
    ]
    code, out, _ = shown("prune", run, "--yes", "--json")
    assert (code, json.loads(out)["lost"]) == (2, True)
    assert "  unreadable: its manifest is not intact" in shown("list", run)[1]


def outcome(folder=None, differences=(), **changes):
    values = {
        "straight": RehearsedLaunch("ddp", 2, 1, None),
        "resumed": RehearsedLaunch("ddp", 2, 1, "step-00000004"),
        "steps": 8,
        "losses": 8,
        "largest_difference": 0.0,
        "files": ("model.safetensors", "optimizer-00001-of-00001.safetensors"),
        "differences": differences,
    }
    return Rehearsal(Compared(**(values | changes)), 6, folder, 61.2)


@pytest.fixture
def rehearsed(monkeypatch):
    """Sets what a rehearsal finds; returns the arguments of the calls."""
    calls = []

    def answer(found):
        def note(*arguments):
            calls.append(arguments[:5])
            arguments[5]("8 steps straight")
            return found

        monkeypatch.setattr(tool, "rehearse", note)
        return calls

    return answer


def test_a_rehearsal_says_what_was_compared(rehearsed, shown):
    calls = rehearsed(outcome())
    code, out, err = shown("rehearse", "a.yaml", "run.seed=1", "--to", "fsdp2", "--processes", "3")
    assert calls == [("a.yaml", ["run.seed=1"], 6, "fsdp2", 3)]
    assert (code, err) == (0, "8 steps straight\n")
    assert out.splitlines() == [
        "straight   ddp, 2 processes",
        "killed     in step 6, resumed from step-00000004",
        "resumed    ddp, 2 processes",
        "batches    of 8 steps, by digest",
        "losses     of 8 steps, at most 0.0e+00 apart",
        "files      2 of weights and optimizer, byte by byte",
        "the same, in 61 s",
    ]


def test_a_rehearsal_that_differs_has_code_2_and_names_what(rehearsed, shown, tmp_path):
    rehearsed(outcome(tmp_path, ("steps 7 had other batches",), losses=0, note="why"))
    code, out, _ = shown("rehearse", "a.yaml", "--kill-at", "4")
    assert code == 2
    assert out.splitlines()[-4:] == [
        "files      2 of weights and optimizer, byte by byte",
        "differs    steps 7 had other batches",
        f"kept       {tmp_path}",
        "different, in 61 s",
    ]
    assert "           why" in out.splitlines()
    code, out, _ = shown("rehearse", "a.yaml", "--json")
    found = json.loads(out)
    assert (code, found["same"], found["differences"]) == (2, False, ["steps 7 had other batches"])
    assert found["resumed"]["resumed_from"] == "step-00000004"


@pytest.mark.parametrize(("hashes", "code"), [(("a1", "a1"), 0), (("a1", "b2"), 2)])
def test_a_rehearsal_of_sizes_shows_each_hash(shown, monkeypatch, tmp_path, hashes, code):
    launches = (RehearsedLaunch("ddp", 1, 2, None), RehearsedLaunch("ddp", 3, 2, None))
    found = RehearsedSizes(8, launches, hashes, tmp_path if code else None, 42.4)
    calls = []

    def note(config, overrides, sizes, tell):
        calls.append((config, overrides, sizes))
        return found

    monkeypatch.setattr(tool, "rehearse_sizes", note)
    ended, out, _ = shown("rehearse", "a.yaml", "--same-bits", "1, 3")
    assert (calls, ended) == ([("a.yaml", [], [1, 3])], code)
    kept = [f"kept       {tmp_path}"] if code else []
    verdict = "different" if code else "the same"
    assert out.splitlines() == [
        f"ddp, 1 process       {hashes[0]}",
        f"ddp, 3 processes     {hashes[1]}",
        *kept,
        f"{verdict}, behind 8 steps, in 42 s",
    ]
    ended, out, _ = shown("rehearse", "a.yaml", "--same-bits", "1,3", "--json")
    assert json.loads(out)["hashes"] == dict(zip("13", hashes, strict=True))
    assert json.loads(out)["same"] == (code == 0)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--same-bits", "1,x"], "--same-bits"),
        (["--same-bits", "0,1"], "--same-bits"),
        (["--same-bits", ""], "--same-bits"),
        (["--same-bits", "1,2", "--to", "fsdp2"], "--to"),
        (["--same-bits", "1,2", "--kill-at", "6"], "--kill-at"),
        (["--same-bits", "1,2", "--processes", "2"], "--processes"),
    ],
)
def test_a_rehearsal_of_sizes_that_is_asked_for_wrongly_is_refused(shown, options, key):
    code, out, err = shown("rehearse", "a.yaml", *options)
    assert (code, out) == (2, "")
    assert f"\n  {key} = " in err


def test_a_checkpoint_is_told_with_the_hash_of_its_tensors(shown, run):
    code, out, _ = shown("verify", run, "step-00000004", "--hash")
    assert code == 0
    digest = tensors_digest(run / "checkpoints" / "step-00000004")
    assert out.splitlines()[1:] == [f"    sha256 of all tensors: {digest}"]
    _, out, _ = shown("verify", run, "step-00000004", "--hash", "--json")
    assert json.loads(out)["checkpoints"][0]["sha256"] == digest
