import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import xxhash
from helpers import chats, corpus, megatron
from helpers.config import loaded

import llmtrain
from llmtrain.cli.data import inspection
from llmtrain.data import manifest as manifests
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import UserError
from llmtrain.tools.data.inspect import inspect
from llmtrain.training.start.prepare import prepare

SAMPLE = Path(llmtrain.__file__).parent / "data" / "sample"
TEXTS = ["same text", None, "", " \n\t", "another", "same text", "a third one, longer", "same text"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Parquet with dropped and repeated texts; JSON lines with bytes that are no UTF-8."""
    root = tmp_path_factory.mktemp("inspect")
    (root / "a").mkdir()
    rows = [{"id": str(n), "text": text} for n, text in enumerate(TEXTS)]
    rows += corpus.articles(300, 1000)
    pq.write_table(pa.Table.from_pylist(rows), root / "a" / "1.parquet", row_group_size=50)
    lines = [json.dumps(row).encode() for row in corpus.articles(400, 5000)]
    lines[7] = b'{"id": "bad", "text": "a \xff broken one"}'
    lines[9] = b'{"id": "empty", "text": null}'
    corpus.write_lines(root / "b.jsonl", lines)
    return root


def config_of(place, folder, *overrides):
    sources = f"[{{path: {place}/a, weight: 3}}, {{path: {place}/b.jsonl}}]"
    given = [f"data.sources={sources}", "data.seq_len=32", "data.heldout=0.05", f"run.dir={folder}"]
    return loaded(folder.parent, *given, "training.global_batch_size=8", *overrides)


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory):
    """Everything looked at."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return inspect(config_of(place, folder), documents=0, blocks=30)


def usable(place):
    """(texts, ids) of both sources by ordinary means."""
    table = pq.read_table(place / "a" / "1.parquet").to_pylist()
    lines = (place / "b.jsonl").read_bytes().decode("utf-8", "replace").splitlines()
    return [
        [(row["id"], row["text"]) for row in rows if row["text"] and row["text"].strip()]
        for rows in (table, map(json.loads, lines))
    ]


def test_counts_over_all_documents_are_those_of_an_independent_count(place, whole):
    reference = tokenizers.Tokenizer.from_file(str(SAMPLE / "tokenizer.json"))
    for source, documents, dropped, replaced in zip(
        whole.sources, usable(place), (3, 1), (0, 1), strict=True
    ):
        texts = [text for _, text in documents]
        assert source.documents == len(texts) == source.looked_at - dropped
        assert (source.dropped, source.replaced) == (dropped, replaced)
        assert source.duplicates == len(texts) - len(set(texts))
        assert source.bytes == sum(len(text.encode()) for text in texts)
        encoded = reference.encode_batch(texts, add_special_tokens=False)
        assert source.tokens == sum(len(one.ids) + 1 for one in encoded)
        assert source.estimated == ()
    assert [one.name for one in whole.sources] == ["a", "b.jsonl"]
    assert [one.files for one in whole.sources] == [1, 1]
    assert whole.estimated == ("documents_cut",)
    total = [sum(getattr(one, name) for one in whole.sources) for name in ("tokens", "bytes")]
    assert whole.tokens_per_byte == total[0] / total[1]


def test_what_is_held_out_is_counted_as_the_manifest_splits(place, whole, tmp_path):
    config = config_of(place, tmp_path / "run")
    (tmp_path / "run").mkdir()
    prepare(config, tmp_path / "run", 1, None)
    manifest = manifests.load(tmp_path / "run" / "manifest.json", config.data.sources)
    for source, found, documents in zip(
        manifest.sources, whole.sources, usable(place), strict=True
    ):
        assert len(source.units) == found.units
        below = {
            name
            for name, _ in documents
            if xxhash.xxh3_64_intdigest(name.encode(), seed=42) < source.threshold
        }
        assert 0 < found.heldout <= len(below)
        if len(source.heldout_units) == len(source.units):
            assert found.heldout == len(below)


def test_lengths_are_a_histogram_of_all_documents_by_powers_of_two(place, whole):
    reference = tokenizers.Tokenizer.from_file(str(SAMPLE / "tokenizer.json"))
    lengths = [
        len(reference.encode(text, add_special_tokens=False).ids) + 1
        for documents in usable(place)
        for _, text in documents
    ]
    for bucket in whole.lengths:
        assert bucket.most == 2 * bucket.least - 1
        inside = sum(bucket.least <= length <= bucket.most for length in lengths)
        assert inside == bucket.documents
    assert sum(bucket.documents for bucket in whole.lengths) == len(lengths)


def test_an_epoch_is_all_training_tokens_in_steps_of_whole_batches(place, whole):
    trained = sum(one.tokens for one in whole.sources)  # and of these, held-out documents are few
    assert 0.85 * trained / (32 * 8) < whole.steps_per_epoch <= trained / (32 * 8) + 1


def test_epochs_of_a_source_follow_its_share_of_the_blocks(whole):
    for source, share in zip(whole.sources, (0.75, 0.25), strict=True):
        trained = source.tokens * (1 - source.heldout / source.documents)
        assert source.epochs == pytest.approx(10 * 8 * 32 * share / trained, rel=0.1)


def test_blocks_shown_are_those_that_a_run_begins_with(place, whole, tmp_path):
    config = config_of(place, tmp_path / "run")
    tokenizer = open_tokenizer(SAMPLE)
    with llmtrain.open_stream(config) as stream:
        ids = [row for _ in range(4) for row in next(stream).ids]
    assert [block.g for block in whole.blocks] == list(range(30))
    for block, row in zip(whole.blocks, ids, strict=False):
        pieces = [block.text[a:b] for a, b in pairwise((0, *block.borders, None))]
        assert len("".join(pieces)) == len(block.text)
        assert block.text == tokenizer.decode(row) or "\ufffd" in block.text
        assert all(piece.endswith("<|endoftext|>") for piece in pieces[:-1])
        assert "<|endoftext|>" not in "".join(piece[:-13] for piece in pieces[:-1])
    assert {block.source for block in whole.blocks} == {"a", "b.jsonl"}


def test_the_first_token_is_no_target_and_all_others_are(whole):
    for block in whole.blocks:
        ((begin, end),) = block.trained
        assert 0 < begin < 30
        assert end == len(block.text)
        assert block.padding == 0


def test_with_a_document_mask_nothing_across_a_border_is_trained(place, tmp_path):
    found = inspect(config_of(place, tmp_path / "run", "data.packing=bestfit"), blocks=200)
    assert any(block.borders for block in found.blocks)
    for block in found.blocks:
        assert len(block.trained) == len(block.borders) + 1
        assert not any(
            begin <= border < end for border in block.borders for begin, end in block.trained
        )


def test_bestfit_cuts_only_documents_longer_than_a_block(place, tmp_path):
    long = config_of(
        place, tmp_path / "run", "data.packing=bestfit", "data.seq_len=512", "data.lanes=2"
    )
    assert inspect(long).documents_cut == 0
    cut = inspect(config_of(place, tmp_path / "run", "data.packing=bestfit"), documents=0)
    reference = tokenizers.Tokenizer.from_file(str(SAMPLE / "tokenizer.json"))
    lengths = [
        [len(reference.encode(text).ids) + 1 for _, text in documents]
        for documents in usable(place)
    ]
    longer = [sum(length > 33 for length in one) / len(one) for one in lengths]
    assert min(longer) * 0.9 < cut.documents_cut < max(longer) * 1.1
    assert 0 < cut.padding < 0.1


def test_a_sample_says_which_numbers_are_estimates_and_comes_near(place, whole, tmp_path):
    found = inspect(config_of(place, tmp_path / "run"), documents=150)
    for one, exact in zip(found.sources, whole.sources, strict=True):
        assert 150 <= one.looked_at < 190
        assert set(one.estimated) >= {"documents", "dropped", "bytes", "tokens", "heldout"}
        assert one.documents == pytest.approx(exact.documents, rel=0.1)
        assert one.bytes == pytest.approx(exact.bytes, rel=0.2)
        assert one.tokens == pytest.approx(exact.tokens, rel=0.2)
    assert set(found.estimated) >= {"tokens_per_byte", "lengths"}
    assert found.tokens_per_byte == pytest.approx(whole.tokens_per_byte, rel=0.05)


def test_a_run_directory_is_looked_at_without_changing_it(place, tmp_path):
    run_dir = tmp_path / "run"
    config = config_of(place, run_dir, "data.on_bad_unit=skip")
    run_dir.mkdir()
    prepare(config, run_dir, 6, None)  # as for six processes: other lanes than alone
    (run_dir / "skipped-units.jsonl").write_text("")
    before = {p: (p.stat().st_mtime_ns, p.is_dir() or p.read_bytes()) for p in run_dir.rglob("*")}
    lanes = manifests.glance(run_dir / "manifest.json")["lanes"]
    assert inspect(config, blocks=0).lanes == lanes
    after = {p: (p.stat().st_mtime_ns, p.is_dir() or p.read_bytes()) for p in run_dir.rglob("*")}
    assert after == before


def test_a_run_of_other_sources_does_not_limit_what_is_looked_at(place, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    prepare(loaded(tmp_path, f"run.dir={run_dir}"), run_dir, 1, None)  # of the sample
    before = {p: (p.stat().st_mtime_ns, p.is_dir() or p.read_bytes()) for p in run_dir.rglob("*")}
    mine = inspect(loaded(tmp_path, f"run.dir={run_dir}", f"data.sources.0.path={place}/a"))
    assert [one.name for one in mine.sources] == ["a"]
    assert [one.name for one in inspect(config_of(place, run_dir)).sources] == ["a", "b.jsonl"]
    after = {p: (p.stat().st_mtime_ns, p.is_dir() or p.read_bytes()) for p in run_dir.rglob("*")}
    assert after == before


def test_a_directory_with_more_than_the_file_of_the_run_is_another_source(place, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (tmp_path / "d").mkdir()
    first = tmp_path / "d" / "1.jsonl"
    corpus.write_jsonl(first, corpus.articles(80))
    prepare(
        loaded(tmp_path, f"run.dir={run_dir}", f"data.sources.0.path={first}"), run_dir, 1, None
    )
    corpus.write_jsonl(tmp_path / "d" / "2.jsonl", corpus.articles(90, 100))
    config = loaded(tmp_path, f"run.dir={run_dir}", f"data.sources.0.path={tmp_path}/d")
    (source,) = inspect(config, documents=0).sources
    assert (source.files, source.documents) == (2, 170)


def test_data_of_a_run_that_was_moved_is_looked_at_as_the_run_has_it(place, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    prepare(config_of(place, run_dir), run_dir, 6, None)  # as for six processes
    shutil.copytree(place, tmp_path / "moved")
    moved = config_of(tmp_path / "moved", run_dir)
    lanes = manifests.glance(run_dir / "manifest.json")["lanes"]
    assert inspect(moved, blocks=0).lanes == lanes
    with pytest.raises(UserError, match=r"data\.seq_len = 64"):
        inspect(config_of(tmp_path / "moved", run_dir, "data.seq_len=64"))


def test_a_path_with_nothing_there_is_reported_beside_a_run_too(place, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    prepare(loaded(tmp_path, f"run.dir={run_dir}"), run_dir, 1, None)
    with pytest.raises(UserError, match=r"data\.sources\.0\.path = \./none"):
        inspect(loaded(tmp_path, f"run.dir={run_dir}", "data.sources.0.path=./none"))


def test_nothing_is_left_in_a_run_directory_that_was_not_there(place, tmp_path):
    inspect(config_of(place, tmp_path / "run"), blocks=1)
    assert not (tmp_path / "run").exists()


def test_documents_of_one_directory_in_several_formats_are_all_counted(tmp_path):
    corpus.write_parquet(tmp_path / "d" / "1.parquet", corpus.articles(80))
    corpus.write_jsonl(tmp_path / "d" / "2.jsonl.gz", corpus.articles(90, 100))
    lines = [row["text"].replace("\n", " ").encode() for row in corpus.articles(70, 300)]
    corpus.write_lines(tmp_path / "d" / "3.txt", lines)
    config = loaded(tmp_path, f"data.sources=[{{path: {tmp_path}/d}}]", "data.seq_len=32")
    (source,) = inspect(config, documents=0).sources
    assert source.documents == 240
    (sampled,) = inspect(config, documents=60).sources
    assert sampled.documents == 240
    assert sampled.bytes == pytest.approx(source.bytes, rel=0.35)


def test_the_object_for_scripts_has_the_agreed_names(whole):
    found = json.loads(json.dumps(whole.to_json()))
    assert found.keys() >= {
        *("sources", "lanes", "backend", "tokens_per_byte", "steps_per_epoch", "padding"),
        *("documents_cut", "lengths", "blocks"),
    }
    assert found["sources"][0].keys() >= {
        *("name", "revision", "files", "units", "documents", "dropped", "replaced"),
        *("duplicates", "bytes", "tokens", "heldout"),
    }
    assert found["blocks"][0].keys() >= {"g", "source", "text", "borders", "trained"}


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_a_token_cache_is_counted_by_its_tokens(place, whole, tmp_path, packing):
    tokenizer = open_tokenizer(SAMPLE)
    texts = [text for documents in usable(place) for _, text in documents]
    megatron.write(
        tmp_path / "cache" / "a.idx", [[ids.tolist()] for ids in tokenizer.documents(texts)] + [[]]
    )
    given = [f"data.sources=[{{path: {tmp_path}/cache}}]", f"data.packing={packing}"]
    config = loaded(tmp_path, *given, "data.seq_len=32", "training.global_batch_size=8")
    found = inspect(config, documents=0)
    (source,) = found.sources
    assert (source.documents, source.dropped, source.replaced) == (len(texts), 1, 0)
    assert source.duplicates == len(texts) - len(set(texts))
    assert source.bytes == sum(len(text.encode()) for text in texts)
    assert source.tokens == sum(one.tokens for one in whole.sources)
    assert found.lengths == whole.lengths
    assert found.steps_per_epoch == pytest.approx(source.tokens / 32 / 8, rel=0.1)
    sampled = inspect(config, documents=100).sources[0]
    assert sampled.tokens == pytest.approx(source.tokens, rel=0.2)


# `data inspect` of conversations: what is trained is marked, and counted as by hand.
TOKENS = ("<|im_start|>", "<|im_end|>")
# Reasoning is written of the last message alone, so history is not what was answered.
REWRITES = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ '(' + m.reasoning_content + ') ' if m.reasoning_content and loop.last else '' }}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The blank behind the prompt merges with the first word of the answer.
STRADDLES = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
)


def rows_of(reasoning):
    """Conversations of one to three turns; every tenth cannot be used."""
    rows = []
    for n in range(30):
        texts = [f"{who} {n}.{turn}" for turn in range(n % 3 + 1) for who in ("Why", "the answer")]
        messages = chats.talk(*texts)
        if reasoning:
            for message in messages[1::2]:
                message["reasoning_content"] = f"thought {n}"
        if n % 10 == 5:
            messages[0]["role"] = "bot"
        rows.append({"messages": messages})
    return rows


def from_a_user(reasoning=False):
    return [m for row in rows_of(reasoning) if (m := row["messages"])[0]["role"] == "user"]


@pytest.fixture
def look(tmp_path):
    """Inspects these rows with the sample's tokenizer and a template."""

    def call(template, reasoning=False, **options):
        tokenizer = chats.make(tmp_path / "tokenizer", template, TOKENS)
        path = corpus.write_jsonl(tmp_path / "chat.jsonl", rows_of(reasoning))
        given = [f"data.sources=[{{path: {path}}}]", f"model.tokenizer={tokenizer}"]
        given += ["data.seq_len=128", "data.heldout=0", "chat.bad_rows=skip"]
        return inspect(loaded(tmp_path, *given), documents=0, **options)

    return call


def test_answers_with_their_end_of_turn_are_marked(look):
    found = look("chatml", blocks=8)
    known = {
        m["content"] for messages in from_a_user() for m in messages if m["role"] == "assistant"
    }
    expected = {f"{answer}<|im_end|>" for answer in known}
    seen = set()
    for block in found.blocks:
        assert block.conversations
        marked = [block.text[begin:end] for begin, end in block.trained]
        assert set(marked) <= expected
        documents = [block.text[a:b] for a, b in pairwise((0, *block.borders, None))]
        assert len(marked) == sum(one.count("<|im_start|>assistant") for one in documents)
        seen.update(marked)
    assert len(seen) > 5
    whole = [one for one in shown(found) if not one.endswith("characters)")]
    assert len(whole) > 3
    for text in whole:
        marked = re.findall("⟦(.*?)⟧", text)
        assert len(marked) == text.count("<|im_start|>assistant") == text.count("⟦")
        assert {squeezed(one) for one in marked} <= {squeezed(one) for one in expected}


def squeezed(text):
    """Without the blanks at which lines end."""
    return "".join(text.split())


def shown(found):
    """The documents of the blocks as they are printed; of a long one, the beginning."""
    lines = list(inspection(found))
    first = next(i for i, line in enumerate(lines) if line.startswith("block 0"))
    text = "".join(f"\n{one}" if one.startswith("block") else one[4:] for one in lines[first:])
    return re.split(r"-{8} (?:document border|\d+ more documents)|\nblock.*?padding", text)[1:]


def test_a_template_that_rewrites_history_is_counted_with_what_it_costs(look, tmp_path):
    found = look(REWRITES, True, blocks=0)
    encode = chats.plain(tmp_path / "tokenizer").encode
    lengths = []
    for messages in from_a_user(True):
        turns, before = [], ""
        for ask, answer in zip(messages[::2], messages[1::2], strict=True):
            before += f"<|im_start|>user\n{ask['content']}<|im_end|>\n<|im_start|>assistant\n"
            said = f"({answer['reasoning_content']}) {answer['content']}<|im_end|>"
            turns.append(len(encode(before + said, add_special_tokens=False).ids))
            before += f"{answer['content']}<|im_end|>\n"
        lengths.append(turns)
    ids = sum(map(sum, lengths))
    assert found.sequences == sum(map(len, lengths))
    assert found.straddles == 0
    assert found.rejected == {"role": 3}
    assert found.rewriting == pytest.approx(ids / sum(map(max, lengths)))
    assert found.sources[0].tokens == ids
    lines = list(inspection(found))
    factor = f"{found.rewriting:.2f} tokens for each of whole conversations"
    assert f"chat      {found.sequences} sequences, {factor}, 0 cut in two" in lines
    assert "          3 rows rejected: role" in lines


def test_turns_whose_answer_merges_with_the_prompt_are_counted(look):
    found = look(STRADDLES, blocks=0)
    turns = sum(len(messages) // 2 for messages in from_a_user())
    assert (found.sequences, found.straddles) == (turns, turns)
    assert found.rewriting is not None
    assert found.rewriting > 1.2


def test_the_steps_of_an_epoch_are_an_estimate(look):
    """A run counts them up to where its last lane ends."""
    assert "steps_per_epoch" in look("chatml", blocks=0).estimated


# Pairs of answers, and judged answers.
def preferred(n):
    """Every fourth pair is too long, every fifth has equal answers."""
    rejected = "Yes." if n % 5 == 4 else f"No {n}."
    chosen = "Yes." if n % 5 == 4 else f"Yes {n}." + " moss" * (200 if n % 4 == 3 else n % 7)
    return {"prompt": chats.talk(f"Is it {n}?"), "chosen": chats.talk("", chosen)[1:],
            "rejected": chats.talk("", rejected)[1:], "score": 3}  # fmt: skip


def judged(n):
    row = preferred(n)
    return {"messages": [*row["prompt"], *row["chosen"]], "label": n % 3 == 0}


@pytest.fixture
def look_at_answers(tmp_path):
    """Inspects pairs or judged answers with the sample's tokenizer and a template."""
    tokenizer = chats.make(tmp_path / "tokenizer", "chatml", TOKENS)

    def call(make, loss, *overrides, **options):
        path = corpus.write_jsonl(tmp_path / "rows.jsonl", [make(n) for n in range(40)])
        given = [f"data.sources=[{{path: {path}}}]", f"model.tokenizer={tokenizer}"]
        given += ["data.seq_len=128", "data.heldout=0", "chat.bad_rows=skip"]
        given += [f"preference.loss={loss}", "chat.too_long=drop", *overrides]
        return inspect(loaded(tmp_path, *given), documents=0, **options)

    return call, tokenizer


def sizes_of(tokenizer, make):
    """Tokens of the prompt and of the answers of each row, by the library alone."""
    encode = chats.plain(tokenizer).encode
    for row in map(make, range(40)):
        asked = f"<|im_start|>user\n{row['prompt'][0]['content']}<|im_end|>\n"
        prompt = len(encode(f"{asked}<|im_start|>assistant\n", add_special_tokens=False).ids)
        answers = [
            len(encode(f"{row[name][0]['content']}<|im_end|>", add_special_tokens=False).ids)
            for name in ("chosen", "rejected")
        ]
        if row["chosen"] != row["rejected"]:
            yield prompt, *answers


def test_pairs_are_counted_with_their_lengths(look_at_answers):
    look, tokenizer = look_at_answers
    found = look(preferred, "dpo", "training.steps=null", "training.epochs=1", blocks=0)
    sizes = [one for one in sizes_of(tokenizer, preferred) if sum(one) + one[0] <= 128]
    assert found.pairs.pairs == len(sizes) == 24
    assert found.pairs.too_long == 8
    assert found.pairs.equal == 8
    assert found.rejected == {"equal": 8}
    assert (found.pairs.desirable, found.pairs.undesirable) == (None, None)
    for told, column in zip((found.pairs.prompt, *found.pairs.answers), zip(*sizes, strict=True),
                            strict=True):  # fmt: skip
        ordered = sorted(column)
        assert told.most == ordered[-1]
        assert told.median == ordered[(len(ordered) - 1) // 2]
        assert told.most_of_90 == ordered[int(0.9 * (len(ordered) - 1))]
    assert found.pairs.a_block == pytest.approx(24 / found.measured_blocks)
    assert found.documents_cut == 0
    assert json.loads(json.dumps(found.to_json()))["pairs"]["pairs"] == 24
    assert found.sources[0].unread == {"score": 40}
    lines = list(inspection(found))
    assert f"pairs     24 pairs; {found.pairs.a_block:.2f} in a block" in lines
    assert "          8 left out as too long, 0 cut, 8 with equal answers" in lines
    assert "          8 rows rejected: equal" in lines
    assert not [line for line in lines if line.startswith("chat ") or len(line) > 80]


def test_judged_answers_are_counted_by_their_label(look_at_answers):
    look, _ = look_at_answers
    found = look(judged, "kto", blocks=0)
    labels = [judged(n)["label"] for n in range(40) if n % 4 != 3 or n % 5 == 4]
    assert (found.pairs.desirable, found.pairs.undesirable) == (labels.count(True),
                                                                labels.count(False))  # fmt: skip
    assert found.pairs.pairs == len(labels)
    assert len(found.pairs.answers) == 1
    (told,) = [line for line in inspection(found) if line.startswith("pairs ")]
    good, bad = labels.count(True), labels.count(False)
    assert f"{len(labels)} answers, {good} of them desirable and {bad} undesirable" in told


@pytest.mark.parametrize("packing", ["bestfit", "single"])
def test_a_pair_is_shown_with_what_is_trained_of_both_halves(look_at_answers, packing):
    look, _ = look_at_answers
    found = look(preferred, "dpo", f"data.packing={packing}", blocks=4)
    known = {
        tuple(f"{row[name][0]['content']}<|im_end|>" for name in ("chosen", "rejected"))
        for row in map(preferred, range(40))
    }
    for block in found.blocks:
        marked = [block.text[begin:end] for begin, end in block.trained]
        assert block.halves == ("chosen", "rejected") * (len(marked) // 2)
        assert set(zip(marked[::2], marked[1::2], strict=True)) <= known
        assert len(block.borders) == len(marked) - 1
        assert "<|endoftext|>" not in block.text
    lines = list(inspection(found))
    first = lines.index("    -------- pair 1: chosen")
    second = lines.index("    -------- pair 1: rejected")
    for at in (first, second):
        assert "⟦" in "".join(lines[at + 1 : at + 4])


def test_of_a_judged_answer_the_half_beside_it_is_named(look_at_answers):
    look, _ = look_at_answers
    (block,) = look(judged, "kto", blocks=1).blocks
    assert set(block.halves[::2]) <= {"desirable", "undesirable"}
    assert set(block.halves[1::2]) == {"the answer of another row"}
