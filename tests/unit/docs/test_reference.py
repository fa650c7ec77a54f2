"""The pages that follow from the code are up to date, and the code has words for everything."""

import ast
import re
import runpy

import pytest
from helpers.pages import DOCS
from helpers.ranks import ROOT

from llmtrain.checkpoint.candidates import _EVENTS
from llmtrain.errors import EXIT_CODES
from llmtrain.pairs import PAIR_SLOTS, pair_figures
from llmtrain.rundir import contents, words
from llmtrain.rundir.status import _EMPTY
from llmtrain.rundir.words import WORDS
from llmtrain.tools.doctor.doctor import NAMES
from llmtrain.types import Evaluation, Sample

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "reference.py"))


@pytest.mark.parametrize("name", SCRIPT["PAGES"])
def test_a_page_is_what_the_program_writes(name):
    page = (DOCS / "reference" / name).read_text("utf-8")
    assert SCRIPT["page"](name) == page, "if this is meant: python scripts/reference.py"


def test_every_event_of_the_code_has_words_and_no_other():
    reported, strings = set(_EVENTS.values()), set()
    for path in (ROOT / "llmtrain").rglob("*.py"):
        if path.name != "events.py":
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    strings.add(node.value)
                if isinstance(node, ast.Call):
                    reported |= names_of_events(node)
    assert reported - WORDS.keys() == set()
    assert WORDS.keys() - strings == set()


def names_of_events(call):
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    values = [keyword.value for keyword in call.keywords if keyword.arg == "event"]
    values += call.args[:1] if name == "event" else []
    return {value.value for value in values if isinstance(value, ast.Constant)}


def test_every_name_in_a_run_directory_has_words():
    internal = {contents.SHARED, contents.OPERATORS}  # in a claim, and in profile/
    names = {v for k, v in vars(contents).items() if k.isupper() and isinstance(v, str)} - internal
    told = {path.partition("/")[0] for path in contents.WORDS}
    assert {name for name in names if not name.startswith("_")} - told == {
        contents._FOLDER,
        contents._FILE,
    }


def test_the_fields_of_status_and_of_what_is_recorded_whole_have_words():
    assert words.STATUS.keys() == _EMPTY.keys()
    assert words.FIELDS.keys() == words.KINDS.keys()
    scored = set(Evaluation.__dataclass_fields__) - {"sources"} | {"split"}
    assert words.FIELDS["eval"].keys() == scored | words.OF_PAIRS.keys()
    assert words.OF_PAIRS.keys() == pair_figures([1.0] * len(PAIR_SLOTS)).keys() | {"divergence"}
    assert words.FIELDS["sample"].keys() == set(Sample.__dataclass_fields__)


def test_supervise_says_what_it_does_for_each_exit_code():
    page = (DOCS / "guides" / "stop-and-resume.md").read_text("utf-8")
    table = page.partition("\n## What is started again\n")[2].partition("\n## ")[0]
    codes = {f"{code}" for code in EXIT_CODES}
    assert set(re.findall(r"^\| [^|]+ \| (\d+)", table, flags=re.M)) == codes


def test_every_check_of_the_doctor_has_its_row_and_no_other():
    page = (DOCS / "start" / "doctor.md").read_text("utf-8")
    assert set(re.findall(r"^\| `([\w-]+)` \|", page, flags=re.M)) == set(NAMES)
