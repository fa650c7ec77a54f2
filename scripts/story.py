"""From raw text to a model that answers, on a machine without a GPU: `story.py --out DIR …`.

Each step is a command of llmtrain, printed as it is given:

    pretrain    a small model on articles, its tokenizer too; the tokens of ChatML are reserved
    evaluate    on the articles that were held out
    adapt       LoRA on conversations (configs/finetune/chat_lora.yaml), others are held out
    evaluate    model and adapted model on the held-out conversations
    export      one model, the adapters merged into it, reloaded and compared by another process

Then transformers alone, without llmtrain, loads the export and answers the first messages of
held-out conversations, greedily. What was measured is printed, and written to DIR/story.json.

Exit code 0 if the held-out loss has fallen and more than half of the answers end by themselves.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = 20
NEW_TOKENS = 256
POSITIONS = 512


def main() -> int:
    """Run the story. Returns the exit code."""
    asked = parse()
    asked.out.mkdir(parents=True)
    begun = time.perf_counter()
    base, tuned, exported = (asked.out / name for name in ("base", "tuned", "exported"))
    pretrain(asked, base)
    text = evaluate(base)
    adapt(asked, base, tuned)
    before, after = evaluate(base, tuned), evaluate(tuned)
    command("export", str(tuned), "--merge-adapters", "--out", str(exported))
    plain = evaluate(exported, tuned)
    ended, answers = answer(exported, asked.heldout, asked.prompts)
    found = {
        "articles_loss": text,
        "conversations_loss_before": before,
        "conversations_loss_after": after,
        "conversations_loss_of_the_export": plain,
        "answers": answers,
        "answers_that_end": ended,
        "seconds": round(time.perf_counter() - begun),
    }
    (asked.out / "story.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    return 0 if after < before and 2 * ended > answers else 1


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Pretrain, adapt, measure and export a model.")
    parser.add_argument("--out", type=Path, required=True, help="a directory to be made")
    parser.add_argument("--articles", required=True, help="parquet files with a column `text`")
    parser.add_argument("--conversations", required=True, help="conversations to train on")
    parser.add_argument("--heldout", type=Path, required=True, help="others to measure on, JSONL")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="messages to answer")
    parser.add_argument("--base", nargs="*", default=[], metavar="KEY=VALUE", help="of pretraining")
    parser.add_argument("--adapt", nargs="*", default=[], metavar="KEY=VALUE", help="of adapting")
    return parser.parse_args()


def pretrain(asked: argparse.Namespace, run: Path) -> None:
    """Train a model and its tokenizer on articles: 700 steps of 2,048 tokens.

    So small a model, and so many small steps at a high rate, learn most in ten minutes.
    """
    model = {
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "intermediate_size": 512,
        "max_position_embeddings": POSITIONS,
    }
    command(
        "train",
        str(ROOT / "configs/pretrain/wikipedia_small.yaml"),
        f"run.dir={run}",
        *(f"model.config.{key}={value}" for key, value in model.items()),
        "data.sources.0.name=null",
        "data.sources.0.revision=null",
        f"data.sources.0.path={asked.articles}",
        f"data.seq_len={POSITIONS}",
        "training.steps=700",
        "training.global_batch_size=4",
        "optimizer.name=adamw",
        "optimizer.groups=[]",
        "optimizer.learning_rate=4e-3",
        "optimizer.warmup_steps=0.05",
        "optimizer.schedule=cosine",
        "optimizer.min_lr_ratio=0.1",
        "evaluation.every_steps=350",
        "evaluation.max_documents=60",
        "checkpoint.every_steps=350",
        "logging.every_steps=50",
        *asked.base,
    )


def adapt(asked: argparse.Namespace, base: Path, run: Path) -> None:
    """Train adapters on conversations that are not too long; the others are skipped and counted.

    A model like this one never comes to an end if most conversations that it sees are cut before
    theirs: cut at 512 tokens none of 20 answers ended, cut at 160 five, skipped beyond 160 fifteen.
    """
    command(
        "train",
        str(ROOT / "configs/finetune/chat_lora.yaml"),
        f"run.dir={run}",
        f"model.from={base}",
        f"data.sources.0.path={asked.conversations}",
        f"evaluation.sources=[{{path: {asked.heldout}}}]",
        "data.seq_len=160",
        "chat.too_long=error",
        "chat.bad_rows=skip",
        "training.epochs=null",
        "training.steps=400",
        "training.global_batch_size=12",
        "optimizer.learning_rate=4e-3",  # of a model as small as this one
        "evaluation.every_steps=200",
        "evaluation.max_documents=200",
        "logging.every_steps=50",
        *asked.adapt,
    )


def evaluate(model: Path, data: Path | None = None) -> float:
    """Return the held-out loss of a model on its own run's held-out set, or on another run's."""
    where = [] if data is None else ["--data", str(data)]
    loss: float = json.loads(command("evaluate", str(model), *where, "--json"))["loss"]
    return loss


def command(*words: str) -> str:
    """Give a command of llmtrain, print it and return its output. Ends this program if it fails."""
    print(f"\n$ llmtrain {shlex.join(words)}", flush=True)
    wanted = subprocess.PIPE if "--json" in words else None
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", *words], stdout=wanted, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.returncode)
    if done.stdout:
        print(done.stdout, end="", flush=True)
    return done.stdout or ""


def answer(model: Path, heldout: Path, most: int) -> tuple[int, int]:
    """Let transformers answer first messages; return how many answers end, and how many there are.

    Messages that leave less than `NEW_TOKENS` of the model's positions are passed over.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    ends = loaded.generation_config.eos_token_id
    ended = answers = 0
    for line in heldout.read_text("utf-8").splitlines():
        messages = json.loads(line)["messages"]
        first = next(n for n, one in enumerate(messages) if one["role"] == "user")
        ids = tokenizer.apply_chat_template(
            messages[: first + 1], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        if ids.shape[1] + NEW_TOKENS > POSITIONS:
            continue
        out = loaded.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )[0]
        answers += 1
        ended += int(out[-1]) in (ends if isinstance(ends, list) else [ends])
        said = tokenizer.decode(out[ids.shape[1] :], skip_special_tokens=True)
        print(f"\n> {messages[first]['content'][:200]}\n{said[:300]}", flush=True)
        if answers == most:
            break
    return ended, answers


if __name__ == "__main__":
    sys.exit(main())
