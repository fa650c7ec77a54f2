import io
import logging
import sys
from dataclasses import replace

import pytest

from llmtrain.cli.data import inspection, step_documents
from llmtrain.cli.main import main
from llmtrain.cli.options import show
from llmtrain.text import columns, fit, harmless, wrap
from llmtrain.tools.data.inspect import Bucket, Inspection, Shown, SourceFacts
from llmtrain.tools.data.which import DocumentSpan, StepDocuments

HOSTILE = "bell\x07, colour\x1b[31m, back\x08, up\x9bA, right-to-left\u202e, half\ud800, nul\0"
TEXT = "The river flows past the hills.\n\nRain falls. "
SOURCE = SourceFacts(
    name="wikipedia/20140304.en",
    revision="0123456789abcdef0123456789abcdef01234567",
    files=8,
    units=96,
    documents=64_183,
    dropped=12,
    replaced=0,
    duplicates=3,
    bytes=94_811_123,
    tokens=21_462_735,
    heldout=321,
    epochs=1.4958,
    looked_at=1_000,
    estimated=("documents", "dropped", "replaced", "heldout", "bytes", "tokens", "epochs"),
    unread={},
)
INSPECTION = Inspection(
    sources=(SOURCE,),
    lanes=24,
    backend="tiktoken",
    seq_len=1024,
    packing="concat",
    tokens_per_byte=0.22637,
    steps_per_epoch=82,
    padding=0.0,
    documents_cut=0.2534,
    measured_blocks=512,
    measured_documents=1_497,
    lengths=(Bucket(32, 63, 4), Bucket(64, 127, 990), Bucket(128, 255, 6)),
    blocks=(
        Shown(0, "wikipedia/20140304.en", TEXT + "Next one.", (len(TEXT),), ((4, 54),), 0),
        Shown(1, "wikipedia/20140304.en", TEXT * 9, (), ((4, 405),), 17),
    ),
    estimated=("lengths", "tokens_per_byte", "documents_cut"),
)


def test_keys_that_nobody_reads_are_in_the_lines_of_their_source():
    keys = {"score": 100, "messages.name": 3, **{f"another_key_{n}": 1 for n in range(5)}}
    found = replace(INSPECTION, sources=(replace(SOURCE, unread=keys),))
    lines = list(inspection(found))
    first = next(n for n, line in enumerate(lines) if "not read of its first rows" in line)
    text = " ".join(line.strip() for line in lines[first:])
    assert "messages.name (3), score (100)" in text
    assert all(len(line) <= 80 for line in lines)


def test_an_inspection_reads_like_this():
    assert list(inspection(INSPECTION)) == [
        "data      1 source, 24 lanes",
        "tokens    ~0.226 a byte, tokenized by tiktoken",
        "blocks    1,024 tokens, concat",
        "epoch     82 steps",
        "padding   0.0% of the tokens in the first 512 blocks",
        "cut       ~25.3% of the 1,497 documents in the first 512 blocks",
        "",
        "source wikipedia/20140304.en: 8 files, 96 units",
        "    revision 0123456789abcdef0123456789abcdef01234567",
        "    ~ estimated from 1,000 documents",
        "    documents  ~64,183                  held out   ~321",
        "    dropped    ~12                      replaced   ~0",
        "    bytes      ~94,811,123              tokens     ~21,462,735",
        "    duplicates 3 of 1,000               epochs     ~1.50 in the run",
        "",
        "lengths in tokens, of the documents that were looked at",
        "                32-63           4 #",
        "               64-127         990 ########################################",
        "              128-255           6 #",
        "",
        "block 0 of wikipedia/20140304.en: 93% trained",
        "    The river flows past the hills.\\n\\nRain falls.",
        "    -------- document border",
        "    Next one.",
        "",
        "block 1 of wikipedia/20140304.en: 99% trained, 17 tokens of padding",
        "    The river flows past the hills.\\n\\nRain falls. The river flows past the",
        "    hills.\\n\\nRain falls. The river flows past the hills.\\n\\nRain falls. The",
        "    river flows past the hills.\\n\\nRain falls. The river flows past the",
        "    ... (405 characters)",
    ]


def found(**changes):
    values = {
        "source": "wikipedia/20140304.en",
        "id": "18225001",
        "title": "Saturn",
        "url": None,
        "g": 120,
        "span": (0, 31),
        "tokens": (5, 36),
        "file": "train-00003.parquet",
        "group": 2,
        "at": 17,
        "text": None,
    }
    return DocumentSpan(**values | changes)


def test_the_documents_of_a_step_read_like_this():
    documents = (
        found(),
        found(g=120, span=(31, 1025), title=None, url="https://example.org/wiki/Mimas", id="2"),
        found(g=121, span=(0, 1025), title=None, id=None, text="a\nb " * 30),
        found(g=121, title=None, id=None, group=None, file="notes.txt", at=12_345),
        found(g=121, title="土星の衛星と環についての長い記事" * 3),
    )
    step = StepDocuments(6, "0123456789abcdef", 6, 2, documents)
    shown = list(step_documents(step))
    assert shown == [
        "step 6: 2 blocks, digest 0123456789abcdef",
        "checked: metrics.jsonl has the same digest",
        "",
        "block  tokens   source                 id        title",
        "120    0:31     wikipedia/20140304.en  18225001  Saturn",
        "120    31:1025  wikipedia/20140304.en  2         https://example.org/wiki/Mimas",
        "121    0:1025   wikipedia/20140304.en  -         train-00003.parquet 2:17",
        "    " + " ".join(["a\\nb"] * 15),
        "    " + " ".join(["a\\nb"] * 15),
        "121    0:31     wikipedia/20140304.en  -         notes.txt 12345",
        "121    0:31     wikipedia/20140304.en  18225001  土星の衛星と環についての長い記…",
    ]
    assert max(columns(line) for line in shown) <= 80


@pytest.mark.parametrize(
    ("checked_at", "said"), [(8, "checked at step 8 only"), (None, "not checked")]
)
def test_a_step_without_a_digest_of_its_own_is_said_to_be_unchecked(checked_at, said):
    lines = list(step_documents(StepDocuments(6, "0" * 16, checked_at, 0, ())))
    assert lines[1].startswith(said)
    assert max(map(len, lines)) <= 80


def test_a_warning_without_a_log_file_is_harmless(monkeypatch, capsys):
    monkeypatch.setattr(logging, "lastResort", logging.StreamHandler())
    with pytest.raises(SystemExit):
        main(["--version"])
    shown = logging.lastResort.format(logging.makeLogRecord({"msg": HOSTILE}))
    assert shown == harmless(HOSTILE)


def test_lines_are_printed_without_anything_that_a_terminal_obeys(capsys):
    show([HOSTILE])
    assert capsys.readouterr().out == harmless(HOSTILE) + "\n"


def test_nothing_in_a_document_reaches_the_terminal_as_a_command(capsys):
    block = replace(INSPECTION.blocks[0], text=HOSTILE, source=HOSTILE, borders=())
    source = replace(SOURCE, name=HOSTILE)
    show(inspection(replace(INSPECTION, blocks=(block,), sources=(source,))))
    document = found(source=HOSTILE, id=HOSTILE, title=HOSTILE, text=HOSTILE)
    show(step_documents(StepDocuments(6, "0" * 16, 6, 1, (document,))))
    written = capsys.readouterr().out
    assert "\\x1b[31m" in written
    assert all(char.isprintable() or char == "\n" for char in written)
    assert max(columns(line) for line in written.splitlines()) <= 80


def test_a_terminal_that_lacks_a_character_gets_an_escape(monkeypatch):
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    show(["Tiếng Việt"])
    sys.stdout.flush()
    assert output.getvalue() == b"Ti\\u1ebfng Vi\\u1ec7t\n"


def test_only_a_few_documents_of_a_block_are_shown():
    borders = tuple(range(10, 400, 10))
    block = replace(INSPECTION.blocks[1], borders=borders)
    lines = list(inspection(replace(INSPECTION, blocks=(block,))))
    assert lines[-1] == "    -------- 34 more documents"
    block = replace(block, halves=("chosen", "rejected") * 20)
    lines = list(inspection(replace(INSPECTION, blocks=(block,))))
    assert lines[-1] == "    -------- 17 more pairs"
    assert "    -------- pair 3: rejected" in lines


def test_a_long_prompt_does_not_hide_the_answer():
    text = "word " * 99 + "Yes." + "word " * 99 + "No."
    trained = ((495, 499), (994, 997))
    shown = Shown(0, "pairs", text, (499,), trained, 0, True, ("chosen", "rejected"))
    lines = list(inspection(replace(INSPECTION, blocks=(shown,))))
    assert sum("⟦Yes.⟧" in line or "⟦No.⟧" in line for line in lines) == 2


def test_a_pair_is_one_line_with_both_halves():
    one = found(span=(0, 31), second=(31, 70), text="Hi? Yes.", second_text="Hi? No.")
    lines = list(step_documents(StepDocuments(6, "0" * 16, 6, 1, (one,))))
    assert "0:31:31:70" in lines[-4]
    assert [line.strip() for line in lines[-3:]] == [
        "Hi? Yes.",
        "-------- the second half of the pair",
        "Hi? No.",
    ]


@pytest.mark.parametrize("text", ["", "a", "word " * 40, "x" * 200, "中" * 99, "e\u0301" * 90])
def test_wrapping_keeps_every_character_and_the_width(text):
    lines = list(wrap(text, 30))
    assert all(columns(line) <= 30 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_clipping_says_that_something_is_missing():
    assert fit("short", 10) == "short"
    assert fit("x" * 11, 10) == "xxxxxxxxx…"
    assert columns(fit("中" * 11, 10)) <= 10


def test_what_is_harmless_stays_as_it_is():
    assert harmless("Größe, 中文, é, 👩") == "Größe, 中文, é, 👩"
