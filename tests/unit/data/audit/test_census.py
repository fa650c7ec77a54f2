import pytest
from helpers import corpus
from helpers.reference_stream import is_heldout, unit_rows

from llmtrain.data.audit.census import census
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.tokens.encode import Encoder
from llmtrain.data.tokens.tokenizer import open_tokenizer

ROWS = [*corpus.articles(900), {"id": "blank", "title": "", "text": " \n"}]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("census")
    corpus.write_tokenizer(root / "tokenizer")
    corpus.write_parquet(root / "a" / "1.parquet", ROWS, group=20)
    corpus.write_jsonl(root / "a" / "2.jsonl", corpus.articles(300, 2000))
    return root


def take(place, limit, **data):
    manifest = corpus.manifest_of(place / "tokenizer", place / "a", **data)
    tokenizer = open_tokenizer(place / "tokenizer")
    return manifest, tokenizer, census(manifest, 0, Encoder(tokenizer), Reader(Reading(60)), limit)


def test_all_rows_are_counted_by_what_is_trained_on_and_what_is_held_out(place):
    manifest, tokenizer, found = take(place, 0, heldout=0.05)
    source = manifest.sources[0]
    texts: dict[bool, list[str]] = {False: [], True: []}
    for u, unit in enumerate(source.units):
        for name, text in unit_rows(source, unit):
            if text.strip():
                texts[is_heldout(source, u, name, manifest.seed)].append(text)
    both = [*texts[False], *texts[True]]
    for amount, expected in ((found.all, both), (found.training, texts[False])):
        tokens = sum(len(tokenizer.encode(text)) + 1 for text in expected)
        size = sum(len(text.encode()) for text in expected)
        assert amount == (len(expected), size, tokens)
    assert texts[True]
    assert found.exact
    assert (found.dropped, found.looked_at) == (1, 1201)
    assert sum(found.lengths.values()) == 1200


def test_a_sample_of_rows_stands_for_all_of_its_format(place):
    exact, found = (take(place, limit, heldout=0.05)[2] for limit in (0, 200))
    assert not found.exact
    assert 200 <= found.looked_at < 300
    for estimate, number in ((found.all, exact.all), (found.training, exact.training)):
        assert estimate == pytest.approx(number, rel=0.15)


def test_a_limit_above_all_rows_counts_them_all(place):
    assert take(place, 5000)[2] == take(place, 0)[2]
