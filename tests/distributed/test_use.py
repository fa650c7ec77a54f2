"""A run that was trained, evaluated, let write and exported, each in a process of its own."""

import fcntl
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios

import pytest
import torch
from helpers import bases, chats, corpus, used
from helpers.ranks import PATIENCE_SECONDS, ROOT
from helpers.rings import needs
from helpers.tiny import lines, tiny_config, write_config
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from llmtrain.text import harmless
from llmtrain.tools.use.generate import Sampling, converse

STEPS = 8
HERE = {"PYTHONPATH": str(ROOT)}  # for processes that a command starts
# A process that loads what it is given with lm-eval alone; prints bits per byte for each model.
LM_EVAL = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
tasks, *models = sys.argv[1:]
manager = TaskManager(include_path=tasks, include_defaults=False)
for model in models:
    options = {"pretrained": model, "dtype": "float32", "add_bos_token": False}
    found = simple_evaluate("hf", options, ["mine"], task_manager=manager, device="cpu")
    print("found:", json.dumps(found["results"]["mine"]["bits_per_byte,none"]))
"""
TASK = """\
task: mine
dataset_path: text
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""


def train(server, folder, world_size, **changes):
    """A tiny run that evaluates and saves every four steps."""
    made = tiny_config(
        folder / "run",
        training__steps=STEPS,
        training__global_batch_size=8,
        checkpoint__every_steps=4,
        evaluation__every_steps=4,
        **changes,
    )
    made["evaluation"]["prompts"] = ["The planet"]
    if world_size > 1:
        made["distributed"] = {"strategy": "fsdp2", "timeout_minutes": 2.0}
        made["data"]["packing"] = "bestfit"
    path = write_config(folder, made)
    codes = server.run(["train", str(path)], world_size, folder)
    assert codes == [0] * world_size, (folder / "output.txt").read_text()
    return folder / "run"


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "fsdp2 on 2"])
def run(request, server, tmp_path_factory):
    return train(server, tmp_path_factory.mktemp("use"), request.param)


def told(server, folder, *arguments):
    """The JSON that a command prints."""
    folder.mkdir(exist_ok=True)
    out = folder / "stdout.json"
    words = ["call", "helpers.used", "command", str(out), *map(str, arguments), "--json"]
    assert server.run(words, 1, folder, HERE) == [0], (folder / "output.txt").read_text()
    return json.loads(out.read_text())


def test_an_evaluation_repeats_the_line_of_the_best_checkpoint(server, run, tmp_path):
    evaluated = {line["step"]: line for line in lines(run, "eval")}
    best = min((4, 8), key=lambda step: evaluated[step]["loss"])
    found = told(server, tmp_path, "evaluate", run)
    same = ("kind", "split", "step", "loss", "perplexity", "bits_per_byte", "tokens", "bytes")
    assert {key: found[key] for key in same} == {key: evaluated[best][key] for key in same}
    other = run / "checkpoints" / "step-00000004"
    assert told(server, tmp_path, "evaluate", other)["loss"] == evaluated[4]["loss"]


def tune(server, folder, base, kind, precision, world):
    """A run on conversations that adds ChatML's tokens, and pads the rows."""
    made = tiny_config(
        folder / "run",
        training__steps=2,
        training__global_batch_size=8,
        training__precision=precision,
        data__seq_len=256,
        data__heldout=0.1,
    )
    rows = corpus.write_jsonl(folder / "chat.jsonl", chats.rows_of(80))
    made["data"]["sources"] = [{"path": str(rows)}]
    made["model"] = {"from": str(base), "pad_vocab_to": bases.ENTRIES + 64}
    made |= {"chat": {"template": "chatml"}, "adapter": {"kind": kind}}
    path = write_config(folder, made)
    codes = server.run(["train", str(path)], world, folder)
    assert codes == [0] * world, (folder / "output.txt").read_text()
    return folder / "run"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return bases.save_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def tuned(server, base, tmp_path_factory):
    return tune(server, tmp_path_factory.mktemp("tuned"), base, "none", "fp32", 1)


FIGURES = ("kind", "split", "loss", "perplexity", "bits_per_byte", "tokens", "bytes", "documents")


@pytest.mark.parametrize(
    ("kind", "precision", "world"), [("lora", "fp32", 2), ("lora", "bf16", 1), ("dora", "bf16", 1)]
)
def test_a_base_as_a_run_of_adapters_is_the_line_of_its_step_0_to_the_last_digit(
    server, base, tmp_path, kind, precision, world
):
    run = tune(server, tmp_path, base, kind, precision, world)
    check_step_0(server, base, run, tmp_path / "told")


def test_a_base_as_a_full_run_is_the_line_of_its_step_0_to_the_last_digit(
    server, base, tuned, tmp_path
):
    check_step_0(server, base, tuned, tmp_path)


def test_a_run_with_one_conversation_a_block_repeats_its_lines_to_the_last_digit(server, tmp_path):
    """On a CPU, torch's convolution of Mamba depends on whether its weights are trained."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    config = AutoConfig.for_model("mamba", vocab_size=bases.ENTRIES, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    base = bases.save_tokenizer(tmp_path / "base")
    run = tune(server, tmp_path, base, "none", "fp32", 1)
    assert json.loads((run / "manifest.json").read_text())["packing"] == "single"
    check_step_0(server, base, run, tmp_path / "told")
    *_, last = lines(run, "eval")
    found = told(server, tmp_path / "told", "evaluate", run)
    assert {key: found[key] for key in FIGURES} == {key: last[key] for key in FIGURES}


def check_step_0(server, base, run, folder):
    first, *_ = lines(run, "eval")
    assert first["step"] == 0
    found = told(server, folder, "evaluate", base, "--as", run)
    assert {key: found[key] for key in FIGURES} == {key: first[key] for key in FIGURES}
    assert (found["as"], found["model"]) == (str(run), str(base))


def test_other_models_are_measured_as_the_run_does(server, base, tuned, tmp_path):
    """Its own checkpoint, and weights of another seed, which have no rows for the new tokens."""
    *_, last = lines(tuned, "eval")
    found = told(server, tmp_path / "one", "evaluate", tuned, "--as", tuned)
    assert found["loss"] == last["loss"]
    other = bases.save_base(tmp_path / "other", seed=9)
    found = told(server, tmp_path / "two", "evaluate", other, "--as", tuned)
    run = tune(server, tmp_path / "run", other, "none", "fp32", 1)
    assert found["loss"] == lines(run, "eval")[0]["loss"] != lines(tuned, "eval")[0]["loss"]


@pytest.mark.parametrize(
    ("case", "options", "said"),
    [
        ("short", {}, "the 256 positions of a block of .*; it has 128"),
        ("more", {}, r"its own is another; 2 entries differ \('<\|more-0\|>'"),
        ("vocabulary", {}, "its own is another; [0-9,]+ entries differ"),
        ("splits", {}, "its own is another; they split texts differently"),
        ("no run", {}, "a run that has begun, not a model or a checkpoint; no config.yaml"),
        ("nothing held out", {}, "a run that held documents out"),
        ("base", {"data": "x.txt"}, "--data = x.txt\n.*left out: --as scores"),
        ("base", {"stride": 4, "tasks": ["a"], "chat": True}, "3 problems"),
    ],
)
def test_what_cannot_be_measured_as_a_run_is_refused(base, tuned, tmp_path, case, options, said):
    from llmtrain import UserError, evaluate

    model, run = tmp_path / "model", tuned
    if case == "short":
        bases.save_base(model, max_position_embeddings=128)
    elif case == "more":  # two of its ids that mean ChatML's tokens to the run
        bases.save_base(model, rows=bases.ENTRIES + 3)
        bases.save_tokenizer(model, 3)
    elif case == "vocabulary":
        used.directory(model, used.model(), used.tokenizer(tmp_path / "tokenizer"))
    elif case == "splits":
        bases.save_base(model, seed=9)
        file = model / "tokenizer.json"
        changed = json.loads(file.read_text())
        changed["model"]["merges"] = changed["model"]["merges"][:40]
        file.write_text(json.dumps(changed))
    else:
        model = base
    if case == "no run":
        run = base
    elif case == "nothing held out":
        run = tmp_path / "run"
        shutil.copytree(tuned, run)
        (run / "eval.safetensors").unlink()
    with pytest.raises(UserError, match=said):
        evaluate(model, as_run=run, **options)


def test_an_export_is_proved_by_another_process_and_scores_as_the_run(server, run, tmp_path):
    out = tmp_path / "out"
    found = told(server, tmp_path, "export", run, "--out", out)
    assert abs(found["losses"]["run"] - found["losses"]["export"]) <= 1e-5
    loss = {line["step"]: line["loss"] for line in lines(run, "eval")}[found["step"]]
    scored = told(server, tmp_path, "evaluate", out, "--data", run)
    assert abs(scored["loss"] - loss) <= 1e-5


def test_a_checkpoint_of_any_strategy_writes_in_one_process(server, run, tmp_path):
    found = told(server, tmp_path, "generate", run, "The planet", "--max-new-tokens", 12)
    directory = told(server, tmp_path, "evaluate", run)["model"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer("The planet").input_ids]])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)
    expected = tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True)
    assert found["text"] == expected


def test_chat_holds_over_three_turns_in_a_terminal(tmp_path):
    """A real process in a terminal of 80 × 24; one message is too long for the model."""
    run = used.run(tmp_path / "run", chat=True)
    used.checkpoint(run, 4, used.model(max_position_embeddings=512))
    messages, terminal = ["one moss", "two hills", "three stones"], Terminal(24, 80)
    command = ["-m", "llmtrain", "chat", str(run), "--max-new-tokens", "80"]
    process = terminal.start([sys.executable, *command], os.environ | HERE | {"TERM": "xterm"})
    shown = [terminal.read_until("\n> ")]
    assert "Ctrl-D ends" in shown[0]
    for said in messages:
        terminal.type(f"{said}\n")
        shown.append(terminal.read_until("\n> "))
    terminal.type(f"{'x ' * 400}\n")  # more than the line of a terminal's own editor
    assert "error: 1 problem" in (refused := terminal.read_until("\n> "))
    assert "the model's positions" in refused
    terminal.type("\x04")
    assert process.wait(60) == 0
    assert terminal.read_until("\n").strip() == ""
    sampling = Sampling(max_new_tokens=80)
    answers = list(converse(run, messages, sampling, lambda text: None))
    assert len({answer.text for answer in answers}) == 3
    assert max(len(answer.text) for answer in answers) > 80  # it needs several lines
    for said, answer, one in zip(messages, answers, shown[1:], strict=True):
        assert one == f"{said}\n{harmless(answer.text, keep=chr(10) + chr(9))}\n> "


class Terminal:
    """A terminal, of which a process is started in the foreground."""

    def __init__(self, rows, columns):
        self._ours, self._theirs = pty.openpty()
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._unread = ""

    def start(self, command, env):
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), self._theirs)
        process = subprocess.Popen(command, env=env, start_new_session=True, **ends)
        os.close(self._theirs)
        return process

    def type(self, text):
        os.write(self._ours, text.encode())

    def read_until(self, end):
        """What was shown up to here, without the sequences that move the cursor in a line."""
        while end not in self._unread:
            ready, _, _ = select.select([self._ours], [], [], PATIENCE_SECONDS)
            assert ready, self._unread
            shown = os.read(self._ours, 4096).decode()
            plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
            self._unread += plain.replace("\r\n", "\n").replace("\r", "")
        found, _, self._unread = self._unread.partition(end)
        return found + end


@pytest.mark.parametrize("merged", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_export_of_adapters_is_proved_by_another_process(server, tmp_path, merged):
    run = used.run(tmp_path / "run")
    base = used.directory(tmp_path / "base", used.model(), run / "tokenizer")
    adapter = used.adapter(tmp_path / "adapter", base, run / "tokenizer", use_dora=True)
    used.adapter_checkpoint(run, 4, adapter)
    options = ["--merge-adapters"] if merged else []
    found = told(server, tmp_path, "export", run, "--out", tmp_path / "out", *options)
    assert abs(found["losses"]["run"] - found["losses"]["export"]) <= 1e-5
    scored = [told(server, tmp_path, "evaluate", m, "--data", run) for m in (run, tmp_path / "out")]
    assert abs(scored[0]["loss"] - scored[1]["loss"]) <= 1e-5


def test_an_export_that_computes_something_else_is_not_published(tmp_path, monkeypatch):
    from llmtrain import RunError, export
    from llmtrain.tools.use import merge

    run = used.run(tmp_path / "run")
    used.checkpoint(run, 4, used.model())
    real = merge.cast
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(merge, "cast", lambda tensor, dtype: real(tensor * 1.01, dtype))
    with pytest.raises(RunError, match="another loss") as caught:
        export(run, tmp_path / "out")
    assert caught.value.exit_code == 1
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial").is_dir()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two model directories: without and with a begin token."""
    folder = tmp_path_factory.mktemp("lm_eval")
    found = []
    for name, bos in (("plain", False), ("begins", True)):
        files = used.tokenizer(folder / f"{name}-tokenizer", bos=bos)
        found.append(used.directory(folder / name, used.model(), files))
    texts = [row["text"].replace("\n", " ").encode() for row in corpus.articles(12)]
    assert max(map(len, texts)) > 300  # the models have 64 positions
    corpus.write_lines(folder / "documents.txt", texts)
    (folder / "tasks").mkdir()
    task = TASK.replace("FILE", str(folder / "documents.txt"))
    (folder / "tasks" / "mine.yaml").write_text(task)
    (folder / "tasks" / "group.yaml").write_text("group: all_of_mine\ntask: [mine]\n")
    return found


@needs("lm_eval")
def test_documents_are_scored_as_by_lm_eval(server, models):
    folder = models[0].parent
    command = [sys.executable, "-c", LM_EVAL, str(folder / "tasks"), *map(str, models)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("found:")]
    assert len(said) == 2, done.stderr
    # The second by a group, which lm-eval knows by its own name, not by those of its tasks.
    for model, line, file in zip(models, said, ("mine", "group"), strict=True):
        task = folder / "tasks" / f"{file}.yaml"
        options = ["--data", folder / "documents.txt", "--tasks", task]
        found = told(server, folder / "told", "evaluate", model, *options)
        expected = json.loads(line.partition(":")[2])
        assert abs(found["bits_per_byte"] - expected) <= 1e-4
        assert abs(found["tasks"]["mine"]["bits_per_byte"] - expected) <= 1e-4


@needs("lm_eval")
def test_a_task_whose_data_is_gone_is_one_message(server, models, tmp_path):
    task = tmp_path / "mine.yaml"
    task.write_text(TASK.replace("FILE", str(tmp_path / "gone.txt")))
    words = ["evaluate", str(models[0]), "--tasks", str(task)]
    call = ["call", "helpers.used", "command", str(tmp_path / "stdout"), *words]
    assert server.run(call, 1, tmp_path, HERE) == [2]
    said = (tmp_path / "output.txt").read_text()
    assert said.count("error:") == 1
    assert "tasks whose data can be read" in said
    assert "gone.txt" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_an_export_needs_little_more_memory_than_its_shards(tmp_path):
    run = used.run(tmp_path / "run")
    large = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    used.checkpoint(run, 4, used.model(**large))
    shard = 48 << 20
    imports = (
        "import llmtrain.tools.use.export, transformers.models.llama.modeling_llama, "
        "safetensors.torch"
    )
    work = f"import llmtrain; llmtrain.export({str(run)!r}, {str(tmp_path / 'out')!r}, verify=False"
    baseline, needed = peak(imports), peak(f"{work}, shard_gb={shard / 2**30})")
    size = sum(f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors"))
    assert size > 4 * shard
    assert needed - baseline <= 1.5 * shard, (needed, baseline)


def peak(code):
    """Most resident bytes of a process that runs this code."""
    ask = "; print([l for l in open('/proc/self/status') if l.startswith('VmHWM')][0].split()[1])"
    done = subprocess.run(
        [sys.executable, "-c", code + ask], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stdout.split()[-1])
