"""What the pages say can be done: each command parses, each config loads, each link leads on.

tests/docs/test_pages.py gives the commands.
"""

import ast
import json
import re
import tomllib
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from helpers import chats, corpus, pages, shown_commands
from helpers.pages import prints
from helpers.ranks import ROOT
from helpers.shown_commands import CannotBeGivenError, check

from llmtrain.config.binding import data_settings
from llmtrain.config.keys import all_keys, foreign, guess
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.data.audit.first_rows import check_first_rows, count_unread
from llmtrain.data.chat.chat import Chat
from llmtrain.data.chat.rows import NEEDED, PAIR_FORMS
from llmtrain.data.documents.reader import Reader
from llmtrain.data.heldout import training_texts
from llmtrain.data.survey import survey
from llmtrain.data.tokens.encode import DocumentEncoder, settings_of
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import UserError

ALL = ["README.md", "CONTRIBUTING.md", *pages.names()]
BASES = (
    *("configs/quickstart.yaml", "configs/finetune/text_full.yaml"),
    *("configs/finetune/text_lora.yaml", "configs/finetune/chat_lora.yaml"),
    *("configs/finetune/preference_lora.yaml", "configs/finetune/preference_full.yaml"),
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


def test_the_diffs_of_the_first_changes_add_calls_of_what_exists():
    code = "\n".join(path.read_text() for path in (ROOT / "llmtrain").rglob("*.py"))
    added = "\n".join(fence.text for fence in of_language("understand/first-change.md", "diff"))
    classes = set(re.findall(r"\b_?[A-Z][a-z]\w+(?=\()", added))
    own = set(re.findall(r"class (\w+)", added))
    assert {name for name in classes - own if f"class {name}" not in code} == set()


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


# The tables of docs/guides/coming-from.md agree with the program, and their tests exist.
COMING_FROM = (ROOT / "docs" / "guides" / "coming-from.md").read_text("utf-8")


def rows(heading):
    """The cells of the first table below a heading, without its head."""
    below = COMING_FROM.partition(f"\n## {heading}\n")[2]
    lines = [line for line in below.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def named(row):
    """The names of other trainers in a row, and the key beside them; "" for no key."""
    first, second, ours, _ = row
    key = "" if ours == "no key" else ours.strip("`")
    names = [cell.strip("`") for cell in (first, second) if cell != "–"]
    assert names
    return names, key


def meant(name):
    return guess(name).key.replace(".0.", ".*.")


def test_each_name_of_another_trainer_leads_to_the_key_beside_it():
    fine_tuning = rows("Fine-tuning")
    assert len(fine_tuning) >= 20
    for names, key in map(named, fine_tuning):
        for name in names:
            assert name == key or meant(name) == key, f"{name}: {meant(name)}, not {key}"


def test_no_name_of_a_pretrainer_leads_to_another_key_than_the_one_beside_it():
    pretraining = rows("Pretraining")
    assert len(pretraining) >= 10
    ours = {key.name for key in all_keys()} | {""}
    for names, key in map(named, pretraining):
        assert key in ours
        assert all(meant(name) in (key, "") for name in names), names
        assert all(meant(name) == key for name in names if name in foreign()), names


def test_the_message_is_that_of_the_program(monkeypatch):
    monkeypatch.chdir(ROOT)
    overrides = ["training.per_device_train_batch_size=8", "tensor_parallel_size=2"]
    with pytest.raises(UserError) as raised:
        load_config("configs/quickstart.yaml", overrides)
    assert f"```text\nerror: {raised.value}\n```" in COMING_FROM


# The messages of docs/guides/wrong.md are those of the program.
WRONG = (ROOT / "docs" / "guides" / "wrong.md").read_text("utf-8")
_JOINED = re.compile(r'"\s*\n\s*f?"')  # two literals that Python joins


def first_cells():
    """The cells in which a row shows a message or an event."""
    return re.findall(r'^\| <a id="[\w-]+"></a>([^|]+) \|', WRONG, flags=re.M)


def source():
    texts = (file.read_text("utf-8") for file in sorted((ROOT / "llmtrain").rglob("*.py")))
    return _JOINED.sub("", "\n".join(texts))


def test_each_message_is_one_of_the_program():
    program = source()
    cells = first_cells()
    assert len(cells) >= 30
    for cell in cells:
        shown = re.match(r"`([^`]+)`|\*([^*]+)\*", cell)
        assert shown, cell
        for part in (shown[1] or shown[2]).split("…"):
            text = part.strip().rstrip("?")
            assert re.search(re.escape(text), program, re.IGNORECASE), f"{cell}: {text!r}"


def test_each_row_has_a_name_of_its_own_to_link_to():
    names = re.findall(r'<a id="([\w-]+)">', WRONG)
    assert len(names) == len(set(names)) == len(first_cells())


def test_the_first_message_is_that_of_the_program(monkeypatch):
    monkeypatch.chdir(ROOT)
    overrides = ["training.global_batch_size=10", "training.micro_batch_size=4"]
    with pytest.raises(UserError) as raised:
        load_config("configs/quickstart.yaml", overrides)
    assert f"```text\nerror: {raised.value}\n```" in WRONG


# The tables of the page on rows: each row is tried, and becomes what the page says.
ROWS_PAGE = Path(__file__).parents[3] / "docs" / "reference" / "rows.md"
LETTERS = {
    "U": '{"role": "user", "content": "Hi?"}',
    "A": '{"role": "assistant", "content": "Yes."}',
    "B": '{"role": "assistant", "content": "No."}',
}
# Beginnings of what becomes of a row → the loss of the run that reads it.
LOSSES = {"chosen: ": "dpo", "desirable: ": "kto", "undesirable: ": "kto"}
LOSSES |= {"refused by dpo: ": "dpo", "refused by kto: ": "kto"}
ROWS = re.findall(r"^\| `(\{.*\})` \| (.*) \|$", ROWS_PAGE.read_text("utf-8"), re.MULTILINE)
# As chatml, but with the names of the functions that are called.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokens = ("<|im_start|>", "<|im_end|>")
    return chats.make(tmp_path_factory.mktemp("rows") / "tokenizer", TEMPLATE, tokens)


def test_each_form_and_key_stands_on_the_page():
    assert len(ROWS) > 50
    text = ROWS_PAGE.read_text("utf-8")
    for name in ("weight", "train", "history", "system", "function_call", "functions", "kto_tag"):
        assert f'"{name}"' in text
    for form in PAIR_FORMS:
        assert all(f'"{name}"' in text for name in NEEDED[form])


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(("row", "told"), ROWS, ids=[str(n) for n in range(len(ROWS))])
def test_a_row_becomes_what_the_page_says(tmp_path, tokenizer, row, told, suffix):
    for letter, message in LETTERS.items():
        row = re.sub(rf"(?<![\w\"]){letter}(?![\w\"])", lambda _, of=message: of, row)
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        corpus.write_parquet(path, [json.loads(row)])
    else:
        path.write_text(f"[{row}]" if suffix == "json" else f"{row}\n")
    loss = next((of for key, of in LOSSES.items() if told.startswith(key)), "none")
    config = Config.model_validate({
        "data": {"sources": [{"path": str(path)}], "seq_len": 512, "heldout": 0.0},
        "preference": {"loss": loss},
        "training": {"steps": 1},
    })  # fmt: skip
    chat = Chat(tokenizer, settings_of(config.chat, chats.DEFAULTS.date), 512)
    encoder = DocumentEncoder(open_tokenizer(tokenizer), chat)
    expected = re.findall("`([^`]+)`", told)
    if told.startswith("refused"):
        with pytest.raises(UserError) as caught:
            check_first_rows(survey(data_settings(config), 1), encoder)
        assert expected[0] in str(caught.value)
        return
    found = survey(data_settings(config), 1)
    (source,), reader = found.sources, Reader(found.reading)
    assert (source.form is None) is (told == "a document")
    if source.form is None:
        return
    check_first_rows(found, encoder)
    trained, _, unread = told.partition("; not read: ")
    assert sorted(count_unread(source, 42, reader, encoder)) == re.findall("`([^`]+)`", unread)
    (text,) = training_texts(source, 0, 42, reader)
    (encoded,) = encoder.documents(source, [text])
    said = []
    if config.preference.loss == "kto":
        assert encoded.desirable is told.startswith("desirable")
    edges = (0, encoded.second, len(encoded.ids)) if encoded.second else encoded.cuts
    for begin, end in pairwise(edges):
        ids, flags = encoded.ids[begin:end].tolist(), encoded.trained[begin:end].tolist()
        said += [chats.plain(tokenizer).decode(one, False) for _, one in chats.spans(ids, flags)]
    said = [re.sub(r"<\|(im_end|endoftext)\|>$", "", one) for one in said]
    expected = re.findall("`([^`]+)`", trained)
    calls = re.findall("a call of `([^`]+)`", trained)
    assert said == [f"[{one}]" if one in calls else one for one in expected]


# The pictures of README and of the pages: they exist, are small, and are shown somewhere.
PICTURES = sorted((ROOT / "docs" / "images").iterdir())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SVG = "{http://www.w3.org/2000/svg}"
NARROW = 343  # pixels that a page has for a picture on a screen of 390


def shown():
    """The file of every picture that a page shows."""
    pattern = r'(?:src|srcset)="([^":]+)"|!\[[^\]]*\]\(([^):]+)\)'
    for page in PAGES:
        for tag, markdown in re.findall(pattern, page.read_text("utf-8")):
            yield (page.parent / (tag or markdown)).resolve()


def test_every_picture_that_is_shown_exists_and_every_one_that_exists_is_shown():
    assert set(shown()) == {picture.resolve() for picture in PICTURES}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_small(picture):
    assert picture.stat().st_size < 150_000


@pytest.mark.parametrize(
    "picture", [one for one in PICTURES if one.suffix == ".svg"], ids=lambda one: one.name
)
def test_a_drawing_has_a_dark_form_words_for_who_cannot_see_it_and_text_to_read_when_narrow(
    picture,
):
    root = ElementTree.fromstring(picture.read_text("utf-8"))
    assert root.find(f"{SVG}title") is not None
    assert root.find(f"{SVG}desc") is not None
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")
    width = float(root.attrib["viewBox"].split()[2])
    assert float(root.attrib["font-size"]) * NARROW / width >= 11


def test_the_picture_of_the_report_is_as_wide_light_as_dark():
    sizes = {
        path.read_bytes()[16:20] for path in PICTURES if path.name.startswith("report-")
    }  # the width in the header of a PNG
    assert len(sizes) == 1
