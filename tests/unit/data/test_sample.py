"""The built-in sample encyclopedia: what the package carries is what the generator writes."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = ROOT / "llmtrain" / "data" / "sample"
PARQUET = [f"train-{n:05d}-of-00004.parquet" for n in range(4)]
DAYS = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]
TOKENIZER = ["tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory):
    out = tmp_path_factory.mktemp("sample")
    program = ROOT / "scripts" / "make_sample.py"
    subprocess.run([sys.executable, program, "--out", out], check=True, capture_output=True)
    return out


@pytest.fixture(scope="module")
def articles():
    return pa.concat_tables([pq.read_table(SAMPLE / name) for name in PARQUET]).to_pylist()


def find(pattern, text):
    """All matches of the pattern; there are some."""
    found = re.findall(pattern, text)
    assert found, pattern
    return found


def value_of(numeral):
    """Roman to Arabic: a smaller sign before a larger one is taken away."""
    values = [{"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}[s] for s in numeral]
    signs = [-1 if a < b else 1 for a, b in zip(values, [*values[1:], 0], strict=True)]
    return sum(sign * value for sign, value in zip(signs, values, strict=True))


def weekday(year, month, day):
    """Sakamoto's congruence: 0 is Sunday."""
    year -= month < 3
    shift = (0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4)[month - 1]
    return (year + year // 4 - year // 100 + year // 400 + shift + day) % 7


def digest(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def content_digest(file):
    rows = pq.read_table(file).to_pylist()
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def written_by(file):
    return pq.ParquetFile(file).metadata.created_by


def test_the_package_carries_these_files_and_no_others():
    data = sorted(file.name for file in SAMPLE.iterdir() if file.suffix in (".parquet", ".json"))
    assert data == sorted(PARQUET + TOKENIZER)


@pytest.mark.parametrize("name", PARQUET)
@pytest.mark.launches
def test_a_rebuild_gives_the_same_articles(rebuilt, name):
    assert content_digest(rebuilt / name) == content_digest(SAMPLE / name)
    if written_by(rebuilt / name) == written_by(SAMPLE / name):
        assert digest(rebuilt / name) == digest(SAMPLE / name)


@pytest.mark.parametrize("name", TOKENIZER)
@pytest.mark.launches
def test_a_rebuild_gives_the_same_tokenizer(rebuilt, name):
    assert digest(rebuilt / name) == digest(SAMPLE / name)


def test_it_is_laid_out_like_wikipedia_in_several_files_of_several_row_groups():
    for name in PARQUET:
        file = pq.ParquetFile(SAMPLE / name)
        assert file.schema_arrow.names == ["id", "url", "title", "text"]
        assert set(file.schema_arrow.types) == {pa.string()}
        assert file.metadata.num_row_groups >= 3


def test_it_is_small_enough_to_be_part_of_the_package():
    assert sum((SAMPLE / name).stat().st_size for name in PARQUET) <= 1_500_000
    assert sum((SAMPLE / name).stat().st_size for name in TOKENIZER) <= 200_000


def test_it_is_large_enough_to_train_on(articles):
    assert len(articles) >= 2000
    assert sum(len(article["text"].encode()) for article in articles) >= 1_200_000


@pytest.mark.parametrize("column", ["id", "url", "title", "text"])
def test_no_value_is_missing_blank_or_there_twice(articles, column):
    values = [article[column] for article in articles]
    assert all(value and value == value.strip() for value in values)
    assert len(set(values)) == len(values)


def test_texts_are_whole_sentences_without_left_over_fields(articles):
    for article in articles:
        text = article["text"]
        assert not set("{}|;*") & set(text), article["title"]
        for paragraph in text.split("\n\n"):
            assert paragraph[0].isupper() or paragraph[0].isdigit(), paragraph
            assert paragraph.endswith("."), paragraph
            assert "  " not in paragraph, paragraph
            assert ".." not in paragraph, paragraph


def test_articles_are_of_varied_length(articles):
    lengths = sorted(len(article["text"]) for article in articles)
    assert lengths[0] >= 100
    assert lengths[len(lengths) * 9 // 10] >= 1.5 * lengths[len(lengths) // 10]


def test_addresses_do_not_look_like_those_of_an_encyclopedia_on_the_web(articles):
    assert all(article["url"].startswith("sample://") for article in articles)


def test_primes_divisors_and_roman_numerals_are_right(articles):
    text = " ".join(article["text"] for article in articles)
    primes = [n for n in range(2, 400) if all(n % d for d in range(2, n))]
    for n, following in find(r"next prime number after (\d+) is (\d+)", text):
        assert int(following) == min(p for p in primes if p > int(n))
    for n in find(r"(\d+) is a prime number", text):
        assert int(n) in primes
    for n, divisors in find(r"The divisors of (\d+) are ([\d, and]+)\.", text):
        numbers = [int(d) for d in re.findall(r"\d+", divisors)]
        assert numbers == [d for d in range(1, int(n) + 1) if int(n) % d == 0]
    for n, numeral in find(r"In Roman numerals (\d+) is written ([A-Z]+)", text):
        assert int(n) == value_of(numeral)


def test_days_of_the_week_are_right(articles):
    text = " ".join(article["text"] for article in articles)
    for year, day in find(r"Christmas Day of (\d+) fell on a (\w+)", text):
        assert DAYS[weekday(int(year), 12, 25)] == day
    for year, kind, day in find(r"The year (\d+) was a (\w+) year that began on a (\w+)", text):
        assert DAYS[weekday(int(year), 1, 1)] == day
        assert (kind == "leap") == (int(year) in range(1852, 1931, 4) and year != "1900")


def test_molar_masses_are_those_of_the_handbooks(articles):
    text = " ".join(article["text"] for article in articles)
    known = {"water": 18.015, "glucose": 180.156, "methane": 16.043, "sodium chloride": 58.44}
    known |= {"sulfuric acid": 98.08, "ammonia": 17.031, "caffeine": 194.19, "ozone": 47.997}
    found = dict(find(r"mass of ([\w ]+) is about ([\d.]+) grams", text))
    found |= {
        name.lower(): mass
        for name, mass in find(r"One mole of ([\w ]+) weighs about ([\d.]+) grams", text)
    }
    assert len(set(known) & set(found)) >= 4
    for name in set(known) & set(found):
        assert float(found[name]) == pytest.approx(known[name], abs=0.06)


def test_transformers_loads_the_tokenizer_and_every_article_comes_back(articles):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SAMPLE)
    assert tokenizer.eos_token == "<|endoftext|>"
    assert len(tokenizer) in (2048, 4096)
    texts = [article["text"] for article in articles[::10]]
    encoded = tokenizer(texts)["input_ids"]
    assert tokenizer.batch_decode(encoded) == texts
    assert sum(map(len, encoded)) < sum(len(text.encode()) for text in texts) / 2.5
    assert not any(tokenizer.eos_token_id in ids for ids in encoded)
