"""The pairs of a step, of a run that is nothing but its files."""

import json

import pytest
from helpers import chats, corpus
from helpers.config import loaded

from llmtrain.config.binding import dump
from llmtrain.data.audit.ledger import replay
from llmtrain.data.batches import batch_of
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.state import DataState
from llmtrain.data.tokens.encode import open_encoder
from llmtrain.tools.data.which import which
from llmtrain.training.start.prepare import load_manifest, prepare


def rows(loss):
    for n in range(30):
        prompt, chosen = chats.talk(f"Is it {n}?", f"Yes {n}.")
        rejected = {"role": "assistant", "content": f"No {n}."}
        pair = {"prompt": [prompt], "chosen": [chosen], "rejected": [rejected]}
        judged = {"messages": [prompt, chosen], "label": n % 2 == 0}
        yield {"id": f"row {n}", **(judged if loss == "kto" else pair)}


@pytest.mark.parametrize("packing", ["bestfit", "single"])
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_pair_is_named_once_with_both_of_its_halves(tmp_path, loss, packing):
    path = corpus.write_jsonl(tmp_path / "rows.jsonl", list(rows(loss)))
    run = tmp_path / "run"
    run.mkdir()
    given = [f"data.sources=[{{path: {path}}}]", f"run.dir={run}", "data.seq_len=128"]
    given += ["data.heldout=0", "data.lanes=1", f"data.packing={packing}", "chat.template=chatml"]
    config = loaded(tmp_path, *given, f"preference.loss={loss}", "training.global_batch_size=2")
    prepare(config, run, 1)
    (run / "config.yaml").write_text(dump(config))
    manifest = load_manifest(config, run)
    encoder = open_encoder(run / "tokenizer", manifest)
    state = DataState.fresh(manifest)
    numbered = list(replay(manifest, encoder, Reader(Reading(60)), state, 2, 4))
    batch = batch_of(numbered, manifest, first_block=2, wait_seconds=0.0, ended=False)
    start = {"kind": "start", "time": 0.0, "step": 0, "world_size": 1, "micro_batch_size": 2,
             "accumulation": 1, "weights": [1.0]}  # fmt: skip
    trained = {"kind": "train", "time": 1.0, "step": 2, "batch_digest": f"{batch.digest:016x}"}
    corpus.write_jsonl(run / "metrics.jsonl", [start, trained])
    found = which(run, 2, text=True)
    assert found.checked_at == 2
    assert len(found.documents) == len(batch.pairs.rows)
    borders = zip(batch.pairs.rows.tolist(), batch.pairs.borders.tolist(), strict=True)
    for one, (row, (begin, second, stop)) in zip(found.documents, borders, strict=True):
        assert one.g == 2 + row
        assert (one.span[0], *one.second) == (begin, second, stop)
        assert (one.span[1] == second) is (packing == "bestfit")
        number = one.id.partition(" ")[2]
        assert one.text.endswith(f"assistant\nYes {number}.<|im_end|>")
        assert f"Is it {number}?" in one.second_text
        if loss == "dpo":
            assert one.second_text.endswith(f"assistant\nNo {number}.<|im_end|>")
        else:
            assert "Yes" in one.second_text
            assert f"Yes {number}." not in one.second_text
    shown = json.loads(json.dumps(found.to_json()))["documents"][0]
    assert {"text", "second", "second_text"} <= shown.keys()
    assert {"text", "second_text"}.isdisjoint(which(run, 2).to_json()["documents"][0])
