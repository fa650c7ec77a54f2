import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import corpus

from llmtrain.config.binding import data_settings
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.documents.skipped import UnreadableError
from llmtrain.data.documents.units import as_array, refuse_other_encoding
from llmtrain.data.survey import survey
from llmtrain.errors import UserError

GERMAN = "Über die Flüsse führen alte Brücken, und im Süden blühen die Bäume früher. "


def encoded(root, kind, encoding):
    """A file of a few hundred documents, in another encoding than UTF-8."""
    texts = [f"{n} {GERMAN * (1 + n % 5)}" for n in range(300)]
    if kind == "text":
        path = root / "a.txt"
        path.write_bytes("\n".join(texts).encode(encoding))
    elif kind == "jsonl":
        path = root / "a.jsonl"
        lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
        path.write_bytes("\n".join(lines).encode(encoding))
    else:
        path = root / "a.parquet"
        raw = pa.array([text.encode(encoding) for text in texts], pa.binary())
        pq.write_table(pa.table({"text": raw.view(pa.string())}), path)
    return path


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le", "utf-16-be"])
def test_a_file_in_another_encoding_is_refused_before_training(tmp_path, kind, encoding):
    path = encoded(tmp_path, kind, encoding)
    with pytest.raises(UserError) as raised:
        survey(data_settings(corpus.config(path, heldout=0.05)), 1)
    told = str(raised.value)
    assert path.name in told
    # A line of JSON with a NUL behind each letter is no JSON, whatever the encoding.
    assert "not UTF-8" in told or (kind == "jsonl" and "a.jsonl, line 1" in told)


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_the_same_file_in_utf_8_is_read(tmp_path, kind):
    path = encoded(tmp_path, kind, "utf-8")
    (source,) = survey(data_settings(corpus.config(path)), 1).sources
    reader = Reader(Reading(60))
    found = [reader.rows(source, unit) for unit in source.units]
    texts = [rows.text(row) for rows in found for row in range(len(rows))]
    assert [text for text, _ in texts] == [f"{n} {GERMAN * (1 + n % 5)}" for n in range(300)]
    assert not any(replaced for _, replaced in texts)


def test_a_file_in_another_encoding_is_skipped_where_bad_units_are(tmp_path):
    encoded(tmp_path, "text", "latin-1")
    corpus.write_jsonl(tmp_path / "good.jsonl", corpus.articles(30))
    found = survey(data_settings(corpus.config(tmp_path / "*", on_bad_unit="skip")), 1)
    reader = Reader(found.reading)
    (source,) = found.sources
    read = {source.files[unit.file].name: len(reader.rows(source, unit)) for unit in source.units}
    assert read["a.txt"] == 0
    assert read["good.jsonl"] > 0


def judged(*texts):
    refuse_other_encoding(pa.array(texts, pa.large_binary()), "a.txt, byte 0")


def test_up_to_one_percent_of_replaced_characters_is_repaired_not_refused():
    good = b"x" * 990
    judged(good, b"\xff" * 10)
    with pytest.raises(UnreadableError, match=r"11 of 1001 characters"):
        judged(good, b"\xff" * 11)


def test_a_unit_of_one_line_with_a_damaged_word_is_repaired_not_refused():
    judged(b"caf\xe9 and \xff more", None)


def test_replacement_characters_that_the_author_wrote_are_text():
    judged("\ufffd".encode() * 500, b"\xff")


def test_null_and_empty_texts_are_no_other_encoding():
    judged(None, b"", None)
    judged()


def test_a_judged_slice_is_not_blamed_for_its_neighbours():
    texts = pa.array([b"\0" * 100, b"fine" * 100], pa.large_binary())
    refuse_other_encoding(texts.slice(1), "a.txt, byte 0")
    with pytest.raises(UnreadableError):
        refuse_other_encoding(texts, "a.txt, byte 0")


@pytest.mark.parametrize(
    "values", [[], [None], [b""], [b"a", None, b"", "Ế".encode() * 50] * 7, [None] * 9]
)
def test_an_array_made_without_pandas_is_that_of_pyarrow(values):
    found, expected = as_array(iter(values)), pa.array(values, pa.large_binary())
    found.validate(full=True)
    assert found.equals(expected)
    assert found.null_count == expected.null_count
