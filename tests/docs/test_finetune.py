"""The files of configs/finetune/, each trained for two steps by the command in its first lines."""

import shlex

import pytest
from helpers import preferred
from helpers.bases import ENTRIES, save_base
from helpers.chats import rows_of
from helpers.corpus import articles, write_jsonl, write_parquet
from helpers.ranks import ROOT
from helpers.tiny import lines, status

SHORTER = (
    *("training.epochs=null", "training.steps=2", "training.global_batch_size=2"),
    *("data.seq_len=128", "evaluation.max_documents=4"),
)
# Of the base: sizes, and the linear layers of a block.
HIDDEN, BLOCKS = 32, 2
LINEAR = [(32, 32)] * 4 + [(64, 32)] * 2 + [(32, 64)]
WHOLE = ENTRIES * HIDDEN + BLOCKS * (sum(m * n for m, n in LINEAR) + 2 * HIDDEN) + HIDDEN
MATRICES = 16 * BLOCKS * sum(m + n for m, n in LINEAR)  # r = 16
TRAINED = {
    "text_full": WHOLE,
    "text_lora": MATRICES,
    "chat_lora": MATRICES + 2 * HIDDEN,  # and the rows of the two tokens that chatml adds
    "preference_full": WHOLE + 2 * HIDDEN,
    "preference_lora": MATRICES + 2 * HIDDEN,
}


def command(name):
    """The words of the command that a file begins with."""
    text = (ROOT / "configs" / "finetune" / f"{name}.yaml").read_text("utf-8")
    (found,) = (line for line in text.splitlines() if line.startswith("#   llmtrain "))
    return shlex.split(found.removeprefix("#   llmtrain "))


@pytest.fixture(scope="module")
def folder(server, tmp_path_factory):
    """All of them were trained here, beside each other."""
    place = tmp_path_factory.mktemp("finetune")
    (place / "configs").symlink_to(ROOT / "configs")
    save_base(place / "base")
    write_parquet(place / "my.parquet", articles(200))
    write_jsonl(place / "chat.jsonl", rows_of(60))
    write_jsonl(place / "pairs.jsonl", preferred.pairs(60))
    others = (f"model.from={place / 'base'}", *SHORTER)
    answers = ("data.seq_len=160", "chat.template=chatml")  # the base has no template
    started = [
        server.start([*command(name), *others, *answers * name.startswith("pref")], 1, place)
        for name in TRAINED
    ]
    codes = [ranks.wait() for ranks in started]
    assert codes == [[0]] * len(TRAINED), (place / "output.txt").read_text()
    return place


def test_there_is_a_row_for_each_file():
    assert {path.stem for path in (ROOT / "configs" / "finetune").iterdir()} == TRAINED.keys()


@pytest.mark.parametrize("name", list(TRAINED))
def test_a_config_trains_and_saves_what_it_says(folder, name):
    run_dir = folder / "runs" / name
    found = status(run_dir)
    assert (found["state"], found["step"]) == ("finished", 2)
    (start,) = lines(run_dir, "start")
    assert start["trainable_parameters"] == TRAINED[name]
    saved = {path.name for path in (run_dir / "checkpoints" / "step-00000002").iterdir()}
    alone, whole = {"adapter_model.safetensors", "adapter.json"}, {"model.safetensors"}
    assert saved & (alone | whole) == (whole if name.endswith("full") else alone)
