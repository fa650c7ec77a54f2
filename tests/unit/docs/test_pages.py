"""What the pages say can be done: each command parses, each config loads, each link leads on.

tests/docs/test_pages.py gives the commands.
"""

import ast
import re
import tomllib

import pytest
import yaml
from helpers import pages, shown_commands
from helpers.pages import prints
from helpers.ranks import ROOT
from helpers.shown_commands import CannotBeGivenError, check

from llmtrain.config.load import load_config
from llmtrain.errors import UserError

ALL = ["README.md", "CONTRIBUTING.md", *pages.names()]
BASES = (
    *("configs/quickstart.yaml", "configs/finetune/text_full.yaml"),
    *("configs/finetune/text_lora.yaml", "configs/finetune/chat_lora.yaml"),
)


def of_language(page, language):
    return [fence for fence in pages.fences(page) if fence.language == language]


@pytest.mark.parametrize("page", ALL)
def test_every_command_of_readme_and_docs_is_run_or_parses(page):
    for fence in of_language(page, "bash"):
        try:
            check(fence.text)
        except CannotBeGivenError as error:
            pytest.fail(f"{fence}: {error}")
    for fence in of_language(page, "python"):
        ast.parse(fence.text)


@pytest.mark.parametrize("page", ALL)
def test_a_test_that_a_reason_names_is_there(page):
    for fence in pages.fences(page):
        named = re.findall(r"tests/[\w/]+\.py::test_\w+", fence.options.get("reason", ""))
        assert set(named) <= shown_commands.tests_there(), str(fence)
        assert named or "test_" not in fence.options.get("reason", ""), str(fence)


@pytest.mark.parametrize("page", ALL)
def test_every_config_of_a_page_loads(page, tmp_path):
    for fence in of_language(page, "yaml"):
        if fence.options.get("config") != "no":
            refused = [problem for base in BASES if (problem := refusal(fence, base, tmp_path))]
            assert len(refused) < len(BASES), f"{fence}: {refused[0]}"


def refusal(fence, base, folder):
    """Why this part of a config, over that config of ours, does not load; "" if it does."""
    whole = merged(yaml.safe_load((ROOT / base).read_text()), yaml.safe_load(fence.text))
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(whole))
    try:
        load_config(file)
    except UserError as error:
        return str(error)
    return ""


def merged(base, part):
    if not (isinstance(base, dict) and isinstance(part, dict)):
        return part
    return base | {key: merged(base.get(key), value) for key, value in part.items()}


@pytest.mark.parametrize("page", ALL)
def test_every_link_leads_somewhere(page):
    here = pages.path_of(page)
    for link in pages.links(page):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        file = (here.parent / target).resolve() if target else here
        assert file.exists(), f"{page}: {link}"
        if anchor and file.suffix == ".md":
            name = page if file == here else file.relative_to(pages.DOCS.resolve()).as_posix()
            assert anchor in pages.anchors(name), f"{page}: {link}"


@pytest.mark.parametrize("page", ALL)
def test_files_of_the_project_that_a_page_names_are_there(page):
    text = pages.path_of(page).read_text("utf-8")
    folders = "configs|accelerate_configs|scripts|tests|benchmarks|llmtrain"
    files = re.findall(rf"(?<![\w/])(?:{folders})/[\w./-]+\.(?:ya?ml|py|sh|sbatch)\b", text)
    rooms = "|".join(room.name for room in (ROOT / "llmtrain").iterdir() if room.is_dir())
    files += [f"llmtrain/{name}" for name in re.findall(rf"`((?:{rooms})/[\w/]+\.py)`", text)]
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_what_the_diffs_of_the_first_changes_take_away_is_in_the_code():
    code = "\n".join(path.read_text() for path in (ROOT / "llmtrain").rglob("*.py"))
    taken = [
        line[1:]
        for fence in of_language("understand/first-change.md", "diff")
        for line in fence.text.splitlines()
        if not line.startswith(("+", "…"))
    ]
    assert len(taken) > 5
    assert [line for line in taken if line not in code] == []


def test_the_first_page_leads_to_every_other():
    seen, new = set(), {"index.md"}
    while new:
        seen |= new
        new = {target for page in new for target in linked(page)} - seen
    assert seen == set(pages.names())


def linked(page):
    """The pages to which a page links."""
    for link in pages.links(page):
        file = (pages.path_of(page).parent / link.partition("#")[0]).resolve()
        if ":" not in link and file.suffix == ".md" and file.is_relative_to(pages.DOCS.resolve()):
            yield file.relative_to(pages.DOCS.resolve()).as_posix()


def in_navigation(entries):
    for entry in entries:
        for value in entry.values():
            yield from in_navigation(value) if isinstance(value, list) else [value]


def test_every_page_is_in_the_navigation_once():
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert sorted(in_navigation(nav)) == pages.names()


@pytest.mark.parametrize("page", pages.names())
def test_a_page_begins_with_its_title_and_has_no_other(page):
    found = [token.map[0] for token in pages.tokens(page) if token.tag == "h1" and token.map]
    assert found == [0]


@pytest.mark.parametrize("page", pages.by_hand())
def test_sentences_of_pages_that_people_write_are_short(page):
    lengths = [len(words) for words in pages.sentences(page)]
    assert sum(lengths) / len(lengths) <= 22


@pytest.mark.parametrize("page", [page for page in pages.by_hand() if "decisions" not in page])
def test_a_page_that_people_write_has_one_topic(page):
    assert pages.words(page) <= 1200


# --- the checks themselves


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("loss 1.25 in 3 s\n", "loss   7.125 in 3 s\n"),
        ("saved …\n", "saved runs/a/checkpoints/step-00000001\n"),
        ("a\n…\nz\n", "a\nb\nc\nz\n"),
        ("a\n…\n", "a\n"),
        ("1,098.1 MiB", "12.5 MiB"),
    ],
)
def test_wild_cards_and_numbers_that_are_measured(shown, printed):
    assert prints(shown, printed)
    assert not prints(shown, printed, exact=True)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("steps 12", "steps 13"),
        ("loss 1.25", "loss null"),
        ("a", "a\nb"),
        ("a …", "b c"),
        ("a\n…\nz", "a\nb"),
        ("a.b", "axb"),
    ],
)
def test_what_is_not_shown_is_found(shown, printed):
    assert not prints(shown, printed)


@pytest.mark.parametrize(
    "line",
    [
        "llmtrain train configs/quickstart.yaml training.step=4",
        "llmtrain train configs/quickstart.yaml training.steps=none",
        "llmtrain train configs/no_such_file.yaml",
        "llmtrain train my.yaml training.stepz=4",
        "llmtrain trian configs/quickstart.yaml",
        "llmtrain report",
        "llmtrain checkpoints list",
        "llmtrain plan configs/quickstart.yaml --device 3",
        "llmtrain supervise -- llmtrain train configs/quickstart.yaml training.stepz=3",
        "accelerate launch --config_fil x scripts/train.py configs/quickstart.yaml",
        "accelerate launch --config_file accelerate_configs/none.yaml scripts/train.py CONFIG",
        "accelerate launch scripts/train.py configs/quickstart.yaml data.seq=3",
        "torchrun --nproc_per_node 2 -m llmtrain train configs/quickstart.yaml data.seq=3",
        "python scripts/none.py",
        "python benchmarks/plan.py --no-such-option",
        "make no-such-target",
        "pytest tests/unit/test_none.py",
        "cd runs && llmtrain wach runs/a",
        "ssh node-1 'llmtrain wach runs/a'",
        "sbatch --nodes 4 scripts/slurm/train.sbatch CONFIG training.stepz=3",
        "frobnicate",
        "llmtrain train …",
    ],
)
def test_a_command_that_would_be_refused_is_found(line):
    with pytest.raises(CannotBeGivenError):
        check(line)


@pytest.mark.parametrize(
    "line",
    [
        "llmtrain --version",
        "llmtrain train --help",
        "CUDA_VISIBLE_DEVICES=0 llmtrain train my.yaml training.steps=4 > log.txt 2>&1 &",
        "llmtrain config show configs/quickstart.yaml --json | jq .training",
        "torchrun --nproc_per_node 2 -m llmtrain train configs/quickstart.yaml data.seq_len=64",
        "llmtrain supervise -- accelerate launch scripts/train.py CONFIG",
        "for node in a b; do ssh $node 'cd x && llmtrain train CONFIG' & done; wait",
        "srun --ntasks 2 .venv/bin/torchrun -m llmtrain train CONFIG",
    ],
)
def test_a_command_that_works_passes(line):
    check(line)
