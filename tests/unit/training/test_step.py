"""What a step costs beside the model: it waits for nothing, and makes no more calls than before."""

import importlib
import importlib.util
import json
import math
import random  # noqa: TID251  # what is seeded
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import chats, corpus
from helpers.step_counts import reads
from helpers.tiny import lines, tiny_config, write_config

import llmtrain
from llmtrain.config.schema import DistributedConfig
from llmtrain.distributed.engines import engine
from llmtrain.distributed.engines.accelerator import close, make_accelerator
from llmtrain.pairs import Pairs
from llmtrain.training import journal, loop, stop as requests
from llmtrain.training.journal import RunLog
from llmtrain.training.step import begin, group_order, host_part, in_groups, seed_generators
from llmtrain.types import FLAGS, SLOTS, Batch, Flags, ModelCut, rank_layout

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "benchmarks" / "results" / "loop.json"
STEPS = 8
ORIGINAL = 100  # tokens, from which a rope has other factors
MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}


@pytest.fixture(params=[None, 50], ids=["always full", "summed"])
def config(request, tmp_path):
    """A run whose blocks are always full, and one whose trained tokens are summed."""
    changes = {"training__steps": STEPS, "training__global_batch_size": 4}
    values = tiny_config(tmp_path / "run", **changes)
    source = {"path": "sample", "max_epochs": request.param}
    values["data"] |= {"sources": [source], "heldout": 0.0}
    return llmtrain.load_config(write_config(tmp_path, values))


def each_step(monkeypatch, begins):
    """Call `begins(run, step)` where a step begins, and with None when the last one is over."""
    begin, finish = loop.begin, loop.finish
    monkeypatch.setattr(loop, "begin", lambda run, step: (begins(run, step), begin(run, step)))
    monkeypatch.setattr(loop, "finish", lambda run: (begins(run, None), finish(run))[1])


def test_a_step_reads_nothing_from_the_device(config, monkeypatch):
    """As where operations are queued. The last step, behind which the run is saved, is left out."""
    monkeypatch.setattr(engine, "is_asynchronous", lambda device: True)
    found: list[str] = []
    sent_up: list[object] = []
    made, reading = torch.tensor, reads(found)

    def tensor(*given, **more):
        sent_up.extend(more.keys() & {"device"})
        return made(*given, **more)

    def begins(_run, step):
        if step == 2:
            reading.__enter__()
            monkeypatch.setattr(torch, "tensor", tensor)
        if step == STEPS:
            reading.__exit__(None, None, None)
            monkeypatch.setattr(torch, "tensor", made)

    each_step(monkeypatch, begins)
    llmtrain.train(config)
    assert {Path(name).name for name in found} == {"meter.py"}
    assert len(found) == STEPS - 2  # one vector a step
    assert sent_up == []


@pytest.mark.parametrize("config", [50], indirect=True, ids=["summed"])
def test_metrics_are_right_one_step_late(config, monkeypatch):
    """Right: equal to the loss that the model itself computes on the step's rows."""
    own: list[float] = []
    received: list[tuple[int, int]] = []
    update, training = loop.update, RunLog.training

    def updated(run, batch, factor):
        ids, labels = torch.from_numpy(batch.ids[:, :-1]).long(), torch.from_numpy(batch.labels)
        with torch.no_grad():
            logits = run.built.model(ids, use_cache=False).logits.flatten(0, 1)
        own.append(float(torch.nn.functional.cross_entropy(logits, labels.flatten())))
        update(run, batch, factor)

    def told(log, numbers):
        received.append((len(own), numbers.step))
        training(log, numbers)

    monkeypatch.setattr(loop, "update", updated)
    monkeypatch.setattr(RunLog, "training", told)
    llmtrain.train(config)
    assert received == [*((step + 1, step) for step in range(1, STEPS)), (STEPS, STEPS)]
    logged = lines(config.run_dir, "train")
    assert [line["loss"] for line in logged] == pytest.approx(own, rel=1e-5)
    assert not any("router_loss" in line for line in logged)


def test_a_step_adds_no_more_to_a_tuned_loop_than_was_recorded(tmp_path, monkeypatch):
    """The tuned loop is counted beside it, as torch and Python have their own numbers of calls."""
    recorded = [json.loads(line) for line in RECORDED.read_text().splitlines()][-1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # On a busy machine every step would take longer than these, and have the calls of both.
    monkeypatch.setattr(requests, "_FILES_SECONDS", math.inf)
    monkeypatch.setattr(journal, "_STATUS_SECONDS", math.inf)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = added(importlib.import_module("loop").counted(tmp_path))
    most = added(recorded["counts"])
    whole = recorded["counts"]["llmtrain"]  # of which 1 % may come from where a test runs
    over = {name: count - most[name] for name, count in found.items()}
    assert {name for name, more in over.items() if more > 0.01 * whole[name]} == set()


def added(counts):
    """The counts of llmtrain's step less those of the tuned loop's."""
    own, tuned = counts["llmtrain"], counts["bare_tuned"]
    return {name: count - tuned[name] for name, count in own.items()}


def test_what_a_step_draws_depends_on_the_seed_the_rank_and_the_step_alone():
    def drawn(*of):
        seed_generators(torch.device("cpu"), *of)
        return random.random(), np.random.random(), torch.rand(()).item()

    first = drawn(42, 0, 5)
    np.random.standard_normal()  # keeps a second number
    random.gauss(0, 1)
    others = [drawn(42, 1, 5), drawn(42, 0, 6), drawn(43, 0, 5)]
    assert drawn(42, 0, 5) == first
    for numbers in zip(first, *others, strict=True):
        assert len(set(numbers)) == 4


def test_processes_that_share_rows_draw_other_numbers_for_other_positions():
    def drawn(rank, cut):
        run = SimpleNamespace(
            device=torch.device("cpu"),
            config=SimpleNamespace(run=SimpleNamespace(seed=42)),
            layout=rank_layout(rank, 4, cut),
            feed=SimpleNamespace(begin=lambda step: None),
            meter=SimpleNamespace(begin=lambda step: None),
            signals=SimpleNamespace(begin=lambda: None),
            log=SimpleNamespace(profile=None),
        )
        begin(run, 5)
        return torch.rand(()).item()

    apart = [drawn(rank, ModelCut()) for rank in range(4)]
    assert len(set(apart)) == 4
    assert [drawn(rank, ModelCut(sequence=2)) for rank in range(4)] == apart
    assert [drawn(rank, ModelCut(tensor=2)) for rank in range(4)] == [
        *apart[:1] * 2,
        *apart[1:2] * 2,
    ]


def test_each_number_of_the_host_is_in_its_slot():
    ids = np.zeros((1, 2), np.int32)
    batch = Batch(
        ids, ids, 5, None, {}, 0x4444333322221111, 0, {"b": 5}, {}, 3.0, ended=True, real_tokens=7
    )
    for flag in FLAGS:
        asked, sources = Flags(**{flag: True}), ("a", "b")
        said = host_part(batch, asked, rank_layout(0, 2), sources, failed=True)
        named = dict(zip(SLOTS[3:], said, strict=False))
        assert {name for name in FLAGS if named[name]} == {flag}
        assert [named[f"digest_{k}"] for k in range(4)] == [0x1111, 0x2222, 0x3333, 0x4444]
        assert (named["data_failed"], named["wait_seconds"], named["ended"]) == (1.0, 1.5, 1.0)
        assert (named["padding_only"], named["real_tokens"]) == (0.0, 7.0)
        assert said[len(SLOTS) - 3 :] == [0.0, 5.0]
        # Another process of the same group fails and asks as well, but has read nothing else.
        alike = host_part(batch, asked, rank_layout(1, 4, ModelCut(tensor=2)), sources, failed=True)
        counted = {"data_failed", *FLAGS}
        assert alike == [
            (number if name in counted else 0)
            for name, number in zip([*SLOTS[3:], *sources], said, strict=True)
        ]


def test_a_rank_is_the_place_in_a_grid_of_data_stages_and_tensor():
    grid = np.arange(24).reshape(4, 3, 2)  # (data, stages, tensor), the last neighbours
    for rank in range(24):
        one = rank_layout(rank, 24, ModelCut(tensor=2, pipeline=3))
        assert grid[one.data_rank, one.stage, one.tensor_rank] == rank
        assert one.data_size == 4
        assert one.leads == (rank in grid[:, 0, 0])
    plain = rank_layout(3, 5)
    assert (plain.data_rank, plain.data_size, plain.leads) == (3, 5, True)


def test_rows_that_are_padded_have_the_rope_of_each_alone_and_a_router_that_skips_padding(
    tmp_path, monkeypatch
):
    """Right: each conversation without padding, and transformers' router loss with its mask."""
    changes = {"training__global_batch_size": 8, "training__micro_batch_size": 4}
    changes |= {"training__steps": 2, "data__seq_len": 256, "data__packing": "single"}
    values = tiny_config(tmp_path / "run", **changes, evaluation__max_documents=4)
    values["model"]["config"] = MIXTURE | {
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
            "short_factor": [1.0] * 8,
            "long_factor": [8.0] * 8,
        },
    }
    path = corpus.write_jsonl(tmp_path / "chat.jsonl", chats.rows_of(40))
    values["data"]["sources"] = [{"path": str(path)}]
    values["chat"] = {"template": "chatml"}
    right: list[tuple[float, float]] = []
    lengths: list[int] = []
    update = loop.update

    @torch.no_grad()
    def count_alone(run, batch):
        ids, labels = torch.from_numpy(batch.ids[:, :-1]).long(), torch.from_numpy(batch.labels)
        stops = [int((row != -100).nonzero()[-1]) + 1 for row in labels]
        real = torch.arange(ids.shape[1]) < torch.tensor(stops)[:, None]
        places = torch.arange(ids.shape[1]).where(real, 0)
        loss = router = 0.0
        for rows in (slice(0, 4), slice(4, 8)):
            given = {"attention_mask": real[rows].long(), "position_ids": places[rows]}
            aux = run.built.model(ids[rows], use_cache=False, **given).aux_loss
            router += 0.5 * float(aux) * int((labels[rows] != -100).sum())
        for row, targets, stop in zip(ids, labels, stops, strict=True):
            logits = run.built.model(row[None, :stop], use_cache=False).logits[0]
            nll = torch.nn.functional.cross_entropy(logits, targets[:stop], reduction="sum")
            loss += float(nll)
        lengths.extend(stops)
        right.append((loss / batch.trained_tokens, router / batch.trained_tokens))

    def updated(run, batch, factor):
        count_alone(run, batch)
        update(run, batch, factor)

    monkeypatch.setattr(loop, "update", updated)
    config = llmtrain.load_config(write_config(tmp_path, values))
    llmtrain.train(config)
    assert min(lengths) <= ORIGINAL < max(lengths)
    found = [(line["loss"], line["router_loss"]) for line in lines(config.run_dir, "train")]
    assert found == [pytest.approx(one, abs=1e-5) for one in right]


def test_a_run_logs_the_loss_of_its_tokens_and_that_of_its_router_beside_it(tmp_path, capfd):
    """The same 8 rows as micro-batches of 8 and of 1; the coefficient is made large."""
    first, evaluated = {}, {}
    for size in (8, 1):
        changes = {"training__steps": 2, "training__global_batch_size": 8}
        values = tiny_config(tmp_path / str(size), **changes)
        values["model"]["config"] = MIXTURE
        values["training"]["micro_batch_size"] = size
        config = llmtrain.load_config(write_config(tmp_path, values))
        llmtrain.train(config)
        first[size] = lines(config.run_dir, "train")[0]
        evaluated[size] = lines(config.run_dir, "eval")[0]["loss"]
        assert " router_loss=" in capfd.readouterr().err
    assert first[8]["batch_digest"] == first[1]["batch_digest"]
    assert first[8]["loss"] == pytest.approx(first[1]["loss"], abs=1e-6)
    assert min(one["router_loss"] for one in first.values()) > 0.9  # two of four, times the half
    assert abs(first[8]["router_loss"] - first[1]["router_loss"]) > 1e-5
    assert evaluated[8] == pytest.approx(evaluated[1], abs=1e-6)
    assert evaluated[8] == pytest.approx(math.log(2048), abs=0.1)  # without the router's


@pytest.mark.parametrize("config", [None], indirect=True, ids=["always full"])
def test_a_step_searches_no_packages(config, monkeypatch):
    searched: list[str] = []

    def begins(_run, step):
        if step == 2:
            monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: searched.append(name))
        if step is None:
            monkeypatch.undo()

    each_step(monkeypatch, begins)
    llmtrain.train(config)
    assert searched == []


def test_ddp_gets_no_static_graph():
    """A first backward inside `no_sync` would die of it."""
    launched = make_accelerator("ddp", "fp32", DistributedConfig(timeout_minutes=1.0))
    try:
        assert launched.accelerator.ddp_handler.to_kwargs().get("static_graph", False) is False
    finally:
        close()


def blocks_of(rank, ranks, total):
    """A rank's part of a step whose blocks and pairs have their numbers in them."""
    own = np.arange(rank, total, ranks)
    of = np.repeat(np.arange(len(own)), own % 3)  # of 0, 1 or 2 pairs a block
    within = np.concatenate([np.arange(n % 3) for n in own])
    keys = np.stack([own[of], within], 1).astype(np.uint64)
    pairs = Pairs(of, np.zeros((len(of), 3), np.int64), keys, np.ones(len(of), np.bool_))
    ids, starts = own[:, None].repeat(3, 1), tuple(np.array([0, n]) for n in own)
    return Batch(ids, ids[:, 1:], 0, starts, {}, 0, 0, {}, {}, 0.0, pairs=pairs)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_with_same_bits_each_micro_batch_has_the_same_blocks_on_any_number_of_ranks(size, ranks):
    total = 72
    count = total // size  # groups of the step
    found = {}
    for rank in range(ranks):
        order = group_order(total // ranks, size)
        batch = in_groups(blocks_of(rank, ranks, total), order)
        for number, first in enumerate(range(0, total // ranks, size)):
            part = slice(first, first + size)
            rows = batch.ids[part, 0].tolist()
            assert batch.labels[part, 0].tolist() == rows
            assert [one[1] for one in batch.starts[part]] == rows
            pairs = batch.pairs.of_blocks(part.start, part.stop)
            assert [rows[row] for row in pairs.rows] == pairs.keys[:, 0].tolist()
            within = [n for row in rows for n in range(row % 3)]
            assert pairs.keys[:, 1].tolist() == within
            found[rank + ranks * number] = rows
    assert found == {group: list(range(group, total, count)) for group in range(count)}
