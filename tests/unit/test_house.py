"""The papers of the project agree with each other."""

import ast
import os
import re
import shutil
import subprocess
import tomllib
from email import message_from_string
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = PROJECT["dependencies"]
EXTRAS = [one for extra in PROJECT["optional-dependencies"].values() for one in extra]


def normal(requirement):
    name = re.match(r"[A-Za-z0-9._-]+", requirement).group()
    return re.sub(r"[-_.]+", "-", name).lower()


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.]+", line) for line in pinned)
    return dict(line.split("==") for line in pinned)


def tracked():
    """The project's text files that git knows, and their text."""
    git = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if git.returncode:
        pytest.skip("not a git checkout: which files are the project's is not known")
    for path in (ROOT / name for name in git.stdout.decode().split("\0") if name):
        if path.is_file() and b"\0" not in (data := path.read_bytes()[:100_000]):
            yield path, data.decode("utf-8", errors="replace")


def test_the_base_installation_has_at_most_20_direct_dependencies():
    assert len(DIRECT) <= 20


def test_deepspeed_is_in_the_base_installation_on_linux_and_its_extra_is_an_empty_alias():
    from packaging.requirements import Requirement

    (found,) = (one for one in map(Requirement, DIRECT) if one.name == "deepspeed")
    assert found.marker is not None
    assert found.marker.evaluate({"sys_platform": "linux"})
    assert not found.marker.evaluate({"sys_platform": "darwin"})
    assert PROJECT["optional-dependencies"]["deepspeed"] == []


def test_nothing_sends_anybody_to_the_extra_of_deepspeed():
    sent = re.compile(r"llmtrain\[[a-z,]*deepspeed|extra `deepspeed`|\.\[[a-z,]*deepspeed")
    own = Path(__file__)
    assert [path.name for path, text in tracked() if path != own and sent.search(text)] == []


def test_every_dependency_has_a_lower_bound():
    unbounded = [one for one in DIRECT if ">=" not in one]
    assert unbounded == []


def test_every_dependency_is_pinned():
    missing = {normal(one) for one in [*DIRECT, *EXTRAS]} - pins().keys()
    assert missing == set()


def test_pins_satisfy_the_bounds():
    from packaging.requirements import Requirement

    pinned = pins()
    outside = [
        str(requirement)
        for requirement in map(Requirement, [*DIRECT, *EXTRAS])
        if not requirement.specifier.contains(pinned[normal(requirement.name)], prereleases=True)
    ]
    assert outside == []
    assert pinned["torch"] == "2.13.0"  # without a local part: any build of it will do


def test_every_dependency_has_its_reason_in_the_decisions():
    text = (ROOT / "docs" / "understand" / "decisions.md").read_text(encoding="utf-8")
    table = text[text.index("## Dependencies") :]
    named = {normal(name) for row in table.splitlines() for name in names_of(row)}
    assert {normal(one) for one in [*DIRECT, *EXTRAS]} - named == set()


def names_of(row):
    if not row.startswith("| ") or row.startswith("| package"):
        return []
    first = re.sub(r"\(.*?\)", "", row.split("|")[1])
    return [name.strip() for name in first.split(",") if name.strip()]


def test_no_tracked_file_names_a_place_of_one_machine_or_a_package_host():
    # Written in pieces, or this file would find itself.
    patterns = [
        r"/(?:work|home|root|Users)" + r"/\w",
        r"pypi\." + "org",
        "/opt/" + "(?:pypi|wheels)",
    ]
    patterns += [r"pythonhosted\." + "org", r"download\.pytorch\." + "org", "artifact" + "ory"]
    places = re.compile("|".join(patterns))
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path, text in tracked()
        if (match := places.search(text))
    ]
    assert found == []


def test_nothing_pickled_is_written_or_read():
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    calls = {"torch.save", "torch.load"}
    found = []
    for path in sorted((ROOT / "llmtrain").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names=names):
                    used = {alias.name.split(".")[0] for alias in names} & banned
                case ast.ImportFrom(module=str(module), names=names):
                    full = {f"{module}.{alias.name}" for alias in names}
                    used = ({module.split(".")[0]} & banned) | (full & calls)
                case ast.Attribute():
                    used = {ast.unparse(node)} & calls
                case _:
                    continue
            found += [f"{path.name}:{node.lineno} {name}" for name in used]
    assert found == []


def test_ranks_send_each_other_tensors_and_no_objects():
    """torch pickles what its object collectives send, and accelerate's `gather_object` is one."""
    names = {
        f"{path.name}:{node.lineno} {name}"
        for path in sorted((ROOT / "llmtrain").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (getattr(node, "attr", None), getattr(node, "id", None))
        if name and re.search(r"(gather|broadcast|scatter|send|recv)_object|_for_metrics$", name)
    }
    assert names == set()


def test_each_failure_seen_elsewhere_has_a_test():
    counts = {"df": 42, "di": 34, "ft": 35, "ux": 35, "bad_input": 35}
    lines = (ROOT / "tests" / "helpers" / "seen_elsewhere.txt").read_text("utf-8").splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    numbers = {(kind, int(number)) for kind, number, _ in rows}
    assert numbers == {(kind, n + 1) for kind, count in counts.items() for n in range(count)}
    assert {name for _, _, name in rows} - set(names_of_tests()) == set()


def test_names_of_tests_say_what_is_promised_without_a_code():
    """Only scenarios of faults have theirs, which `docs/reference/faults.md` is made of."""
    code = re.compile(r"test_(?!f\d\d_)([a-z]_|[a-z]{2,3}_|bad_input_|case_|f)\d+_")
    known = ("test_rank_0_", "test_bf16_", "test_gpt2_", "test_usr2_", "test_xxh3_", "test_fp32_")
    assert [n for n in names_of_tests() if code.match(n) and not n.startswith(known)] == []


@cache
def names_of_tests():
    files = (ROOT / "tests").rglob("test_*.py")
    return [n for f in files for n in re.findall(r"^ *def (test_\w+)", f.read_text("utf-8"), re.M)]


def test_the_changelog_has_its_four_parts():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = PROJECT["version"]
    newest = text[text.index("\n## ") :]
    assert newest.strip().startswith(f"## {version}")
    assert re.findall(r"^### (\w+)", newest, flags=re.M)[:4] == [
        "Added",
        "Changed",
        "Fixed",
        "Numerics",
    ]


def test_the_ci_gives_the_command_that_people_give():
    ci = ROOT / ".ci" / "run"
    assert ci.stat().st_mode & 0o111
    assert ci.read_text().rstrip().endswith("exec make check")


@pytest.mark.parametrize(
    "target", ["quickstart", "test", "test-all", "check", "docs", "format", "help"]
)
def test_the_makefile_offers(target):
    assert re.search(rf"^{target}:.*## ", (ROOT / "Makefile").read_text(), flags=re.M)


def test_make_says_what_is_missing_when_there_is_no_python(tmp_path):
    command = ["make", "test", "PYTHON=/nonexistent/python", f"VENV={tmp_path / 'venv'}"]
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "needs Python 3.11 or newer" in result.stderr
    assert "/nonexistent/python" in result.stderr


def test_make_installs_again_only_where_pip_gets_something_else(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')  # shows what it is given
    python.chmod(0o755)

    def make(*words):
        environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
        command = ["make", "test", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if " install " in line]

    pip = "-m pip --disable-pip-version-check install"
    tools = "-e .[dev,trackers,eval,quantized]"
    assert make() == [f"{pip} -c constraints.txt {tools}"]
    assert make() == []
    assert make("PIP_ARGS=") == [f"{pip} {tools}"]
    assert make("PIP_ARGS=") == []
    assert make("PIP_ARGS=--pre", "EXTRAS=dev") == [f"{pip} --pre -e .[dev]"]
    assert make() == [f"{pip} -c constraints.txt {tools}"]


def test_hooks_are_local_and_need_no_network():
    import yaml

    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in hooks["repos"]] == ["local"]
    assert {hook["language"] for hook in hooks["repos"][0]["hooks"]} == {"system"}


def needed(requirements):
    """Every installed distribution that these requirements bring, as pip follows them."""
    from packaging.requirements import Requirement

    found, ahead = {}, [(Requirement(one), "") for one in requirements]
    while ahead:
        one, extra = ahead.pop()
        if one.marker is not None and not one.marker.evaluate({"extra": extra}):
            continue
        there = metadata.distribution(one.name)
        for asked in {"", *one.extras}:
            if (normal(one.name), asked) not in found:
                found[normal(one.name), asked] = there
                ahead += [(Requirement(text), asked) for text in there.requires or ()]
    return {name: there for (name, _), there in found.items()}


def test_the_base_installation_needs_no_compiler():
    there = needed(DIRECT)
    assert {"torch", "numpy", "jinja2", "markupsafe", "hf-xet"} < there.keys()
    compiled_here = []
    for name, one in there.items():
        record = message_from_string(one.read_text("WHEEL") or "")
        tags = record.get_all("Tag") or ["none"]
        # What a registry gives is for any Linux, macOS or Windows of that age. What a compiler has
        # made here is for `linux_x86_64`, without an age.
        if any(re.search(r"-linux_\w+$|^none$", tag) for tag in tags):
            compiled_here.append((name, tags))
    assert compiled_here == []
    # Its makers give no wheel. What pip builds of it has no compiled part.
    if "deepspeed" in there:
        assert "Tag: py3-none-any" in (there["deepspeed"].read_text("WHEEL") or "")
