"""Made-up runs: what a run directory holds, without training anything."""

import json
import math
from pathlib import Path

from llmtrain.hashing import mix
from llmtrain.types import Numbers

HOSTILE = "</script><script>alert(1)</script>\u2028<img src=x onerror=alert(2)>&amp;"


def noise(*key: int) -> float:
    """A number in [−1, 1) that depends on the key alone."""
    return mix(*key) / 2**63 - 1


def loss_at(step: int) -> float:
    return 2.3 + 6.7 * math.exp(-step / 60) + 0.08 * noise(1, step)


def numbers(step: int, **changes: object) -> Numbers:
    """One plausible step."""
    values: dict = {
        "step": step,
        "loss": loss_at(step),
        "learning_rate": 2e-3 * min(1.0, step / 30),
        "grad_norm": 0.6 + 3 * math.exp(-step / 20) + 0.1 * noise(2, step),
        "tokens": step * 8192,
        "step_tokens": 8192,
        "seconds": 0.4 + 0.03 * noise(3, step),
        "data_wait_seconds": 0.002,
        "batch_digest": mix(4, step),
        "skipped": False,
        "sources": {"sample": step * 8192},
        "data_failed": False,
    }
    return Numbers(**(values | changes))


def train_line(step: int, **changes: object) -> dict:
    n = numbers(step)
    line = {
        "kind": "train",
        "time": 1.79e9 + 0.4 * step,
        "step": step,
        "loss": n.loss,
        "learning_rate": n.learning_rate,
        "grad_norm": n.grad_norm,
        "tokens": n.tokens,
        "step_tokens": n.step_tokens,
        "seconds": n.seconds,
        "tokens_per_second": n.tokens_per_second,
        "data_wait_seconds": n.data_wait_seconds,
        "batch_digest": f"{n.batch_digest:016x}",
        "skipped": False,
        "sources": dict(n.sources),
        "memory_gb": 1.2,
        "mfu": None,
        "span_seconds": 10 * n.seconds,
        "span_wait_seconds": 0.02,
    }
    return line | changes


def start_line(step: int, resumed_from: str | None = None) -> dict:
    return {
        "kind": "start",
        "time": 1.79e9 + 0.4 * step,
        "step": step,
        "world_size": 2,
        "strategy": "ddp",
        "device": "cpu",
        "device_type": "cpu",
        "micro_batch_size": 8,
        "accumulation": 2,
        "parameters": 1_234_567,
        "trainable_parameters": 1_234_567,
        "resumed_from": resumed_from,
        "versions": {"llmtrain": "0.1.0", "torch": "2.13.0"},
        "plan": {},
    }


def eval_line(step: int, **changes: object) -> dict:
    loss = loss_at(step) + 0.05
    line = {
        "kind": "eval",
        "time": 1.79e9 + 0.4 * step + 0.1,
        "step": step,
        "split": "heldout",
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss / math.log(2) / 4.1,
        "tokens": 52_000,
        "bytes": 213_200,
        "documents": 120,
        "seconds": 1.7,
    }
    return line | changes


def checkpoint_line(step: int) -> dict:
    return {
        "kind": "checkpoint",
        "time": 1.79e9 + 0.4 * step + 0.2,
        "step": step,
        "name": f"step-{step:08d}",
        "bytes": 14_900_000,
        "seconds": 0.31,
        "blocked_seconds": 0.31,
        "reason": "due",
    }


def sample_line(step: int, text: str, prompt: str = "The planet") -> dict:
    return {
        "kind": "sample",
        "time": 1.79e9 + 0.4 * step + 0.1,
        "step": step,
        "prompt": prompt,
        "text": text,
    }


def event_line(step: int, event: str, **detail: object) -> dict:
    return {
        "kind": "event",
        "time": 1.79e9 + 0.4 * step,
        "step": step,
        "event": event,
        "detail": detail,
    }


def end_line(step: int, state: str = "finished", **changes: object) -> dict:
    line = {
        "kind": "end",
        "time": 1.79e9 + 0.4 * step + 1,
        "step": step,
        "state": state,
        "exit_code": 0,
        "reason": "all steps are done",
        "seconds": 137.2,
        "goodput": 0.91,
    }
    return line | changes


def history(steps: int = 300, every: int = 10, evaluate_every: int = 100) -> list[dict]:
    """The lines of a run that was never interrupted."""
    lines = [start_line(0), eval_line(0), sample_line(0, " xq the the zz")]
    for step in range(1, steps + 1):
        if step == 1 or step % every == 0:
            lines.append(train_line(step))
        if step % evaluate_every == 0:
            lines += [
                eval_line(step),
                sample_line(step, f" Saturn has {step} moons and a thick atmosphere."),
                checkpoint_line(step),
            ]
    return [*lines, end_line(steps)]


def pair_fields(step: int, *, falls: float = 0.1) -> dict:
    """What a line of a run on pairs has beside the others. falls: share of log p that is lost"""
    learned = 1 - math.exp(-step / 60)
    return {
        "loss": math.log(2) - 0.2 * learned + (0.01 * noise(5, step) if step else 0.0),
        "pairs": 32,
        "accuracy": 0.5 + 0.2 * learned,
        "margin": 0.8 * learned,
        "chosen_reward": 0.3 * learned,
        "rejected_reward": -0.5 * learned,
        "chosen_logp": -420.0 * (1 + falls * learned),
        "rejected_logp": -400.0 * (1 + (falls + 0.1) * learned),
        "chosen_loss": 2.1 * (1 + falls * learned),
    }


PREFERENCE = """data:
  seq_len: 2048
preference:
  loss: {loss}
  beta: {beta}
run:
  dir: runs/preferred
"""


def preferred_history(*, evaluated: bool = True, falls: float = 0.1) -> list[dict]:
    """The lines of a run on pairs of answers."""
    lines = []
    for line in history():
        fields = pair_fields(line["step"], falls=falls)
        if line["kind"] == "eval" and evaluated:
            lines.append(line | fields | {"perplexity": None, "bits_per_byte": None})
        elif line["kind"] == "train":
            lines.append(line | fields)
        elif line["kind"] not in ("eval", "sample"):
            lines.append(line)
    return lines


def interrupted_history() -> list[dict]:
    """Killed after step 178, resumed at step 100: lines up to 178 stand twice, and differ."""
    whole = history()
    first = [line for line in whole if line["step"] <= 178 and line["kind"] != "end"]
    lost = [
        line | {"loss": line["loss"] + 1}
        if line["kind"] == "train" and line["step"] > 100
        else line
        for line in first
    ]
    again = [line for line in whole if line["step"] > 100]
    events = [event_line(100, "restart", reason="killed"), event_line(150, "update_skipped")]
    return [*lost, start_line(100, "step-00000100"), *events, train_line(101), *again]


def status(state: str = "finished", step: int = 300, **changes: object) -> dict:
    fields = {
        "run_id": "4f1c",
        "state": state,
        "exit_code": 0,
        "reason": "all steps are done",
        "step": step,
        "checkpoint": f"step-{step:08d}",
        "strategy": "ddp",
        "world_size": 2,
        "restarts": 0,
        "updated": "2026-11-21T20:00:00.000+00:00",
    }
    return fields | changes


def write_run(
    root: Path, lines: list[dict], run_status: dict | None = None, config: str = "training: {}\n"
) -> Path:
    """A run directory that holds these lines."""
    root.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (root / "metrics.jsonl").write_text(text, encoding="utf-8")
    (root / "status.json").write_text(json.dumps(run_status or status()), encoding="utf-8")
    (root / "config.yaml").write_text(config, encoding="utf-8")
    return root
