"""`export`: what it writes computes what the checkpoint computed.

That another process proves it is tested in `tests/distributed/test_use.py`.
"""

import importlib
import json
import os
import resource
import shutil
import stat
import subprocess
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import used
from helpers.checkpoints import flip
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmtrain import export
from llmtrain.errors import RunError, UserError
from llmtrain.rundir import contents
from llmtrain.tools.use import proof


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run_dir = used.run(tmp_path_factory.mktemp("export") / "run", chat=True)
    used.checkpoint(run_dir, 4, used.model(seed=1), loss=2.0)
    used.checkpoint(run_dir, 8, used.model("gpt2", seed=2), loss=3.0)
    return run_dir


def reloaded(directory, **options):
    made, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, **options
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return made.eval()


def stored(directory):
    files = sorted(directory.glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_a_checkpoint_becomes_a_directory_that_transformers_loads(run, tmp_path):
    out = tmp_path / "out"
    found = export(run, out, verify=False)
    checkpoint = run / "checkpoints" / "step-00000004"
    assert found.step == 4
    assert torch.equal(used.logits(reloaded(out)), used.logits(reloaded(checkpoint)))
    assert sorted(found.files) == [
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert found.files == {p.name: p.stat().st_size for p in out.iterdir()}
    assert found.bytes == sum(found.files.values())
    text = "Article 3 <|im_start|>"
    assert AutoTokenizer.from_pretrained(out)(text) == AutoTokenizer.from_pretrained(checkpoint)(
        text
    )
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert not (tmp_path / "out.partial").exists()


def test_files_are_as_open_as_the_umask_lets_them(run, tmp_path):
    before = os.umask(0o022)
    try:
        export(run, tmp_path / "out", verify=False)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == {0o644}


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_weights_are_cast_and_the_config_says_so(run, tmp_path, dtype, name):
    out = tmp_path / "out"
    export(run / "checkpoints" / "step-00000008", out, dtype=dtype, verify=False)
    assert json.loads((out / "config.json").read_text())["dtype"] == name
    wanted = getattr(torch, name)
    expected = stored(run / "checkpoints" / "step-00000008")
    found = stored(out)
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key].to(wanted))
    assert AutoModelForCausalLM.from_pretrained(out).dtype == wanted


def test_shards_are_as_small_as_asked_and_indexed(run, tmp_path):
    out = tmp_path / "out"
    export(run, out, shard_gb=4000 / 2**30, verify=False)
    files = sorted(out.glob("model-*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert {*index["weight_map"].values()} == {file.name for file in files}
    for file in files:
        held = load_file(file)
        assert sum(t.nbytes for t in held.values()) <= 4000 or len(held) == 1
    same = reloaded(run / "checkpoints" / "step-00000004")
    assert torch.equal(used.logits(reloaded(out)), used.logits(same))


def test_no_more_than_two_files_are_in_memory(tmp_path, monkeypatch):
    """Counted at each read: the bytes of the tensors that were read and are still in use."""
    from llmtrain.tools.use import load

    live, most, read = {}, [0], load.Stored.read

    def counted(stored, name):
        found = read(stored, name)
        live[name] = weakref.ref(found), found.nbytes
        most.append(sum(size for alive, size in live.values() if alive() is not None))
        return found

    monkeypatch.setattr(load.Stored, "read", counted)
    deep = used.run(tmp_path / "run")
    used.checkpoint(deep, 4, used.model(num_hidden_layers=16))
    found = export(deep, tmp_path / "out", shard_gb=20_000 / 2**30, verify=False)
    largest = max(size for name, size in found.files.items() if name.startswith("model-"))
    total = sum(size for _, size in live.values())
    assert largest / 2 < max(most) <= 2 * largest < total / 2


def test_an_export_ends_where_the_checkpoint_said(run, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(run / contents.TOKENIZER)
    turn = tokenizer.convert_tokens_to_ids(used.END_OF_TURN)
    model = used.one_word(turn)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, turn]
    used.checkpoint(run, 12, model, loss=9.0)
    out = tmp_path / "out"
    export(run / "checkpoints" / "step-00000012", out, verify=False)
    ids = AutoTokenizer.from_pretrained(out).apply_chat_template(
        [{"role": "user", "content": "Hi?"}], add_generation_prompt=True, return_tensors="pt"
    )
    said = AutoModelForCausalLM.from_pretrained(out).generate(**ids, max_new_tokens=9)
    assert said[0, ids.input_ids.shape[1] :].tolist() == [turn]


def test_files_that_the_manifest_does_not_list_are_not_exported(run, tmp_path):
    """A link to a person's files, and whatever else lies in the directory of a checkpoint."""
    run = shutil.copytree(run, tmp_path / "copy")
    place = run / "checkpoints" / "step-00000004"
    expected = export(run, tmp_path / "first", verify=False)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    (place / "linked.json").symlink_to(tmp_path / "private" / "key")
    (place / "folder").symlink_to(tmp_path / "private")
    (place / "notes.txt").write_text("mine")
    (place / "model-00001-of-00001.safetensors").symlink_to(place / "model.safetensors")
    found = export(run, tmp_path / "second", verify=False)
    assert found.files == expected.files
    there = {p.relative_to(found.path).as_posix() for p in found.path.rglob("*")}
    assert there == found.files.keys()


def test_a_checkpoint_with_a_link_in_place_of_a_file_is_not_exported(run, tmp_path):
    run = shutil.copytree(run, tmp_path / "copy")
    file = run / "checkpoints" / "step-00000004" / "config.json"
    (tmp_path / "elsewhere.json").write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(UserError, match="is not a regular file of this directory"):
        export(run / "checkpoints" / "step-00000004", tmp_path / "out", verify=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x" * 250, "a directory that can be made (File name too long)"),
        ("file/out", "a directory that can be made (Not a directory)"),
        ("a\0b", "embedded null"),  # byte, or character in path, by the release of Python
        ("pipe", "a directory that does not exist yet"),
        ("free", "is free while it is written"),
    ],
)
def test_a_place_that_an_export_cannot_take_is_refused(run, tmp_path, name, said):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "free.partial").symlink_to(tmp_path / "file")
    with pytest.raises(UserError, match="--out") as caught:
        export(run, tmp_path / name, verify=False)
    assert said in str(caught.value)
    assert (tmp_path / "free.partial").is_symlink()


# --- adapters
LORA = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}


def adapter_run(tmp_path, base, **settings):
    """A run whose one checkpoint is an adapter of a model, and the adapter's directory."""
    run = used.run(tmp_path / "run", chat=True)
    adapter = used.adapter(tmp_path / "adapter", base, run / contents.TOKENIZER, **settings)
    return run, used.adapter_checkpoint(run, 4, adapter)


def with_adapter(base, checkpoint, rows=None):
    """The base with the adapter as peft loads it, not merged."""
    from peft import PeftModel

    made = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if rows:
        made.resize_token_embeddings(rows, mean_resizing=False)
    with used.quiet():
        return PeftModel.from_pretrained(made, checkpoint).eval()


def base_of(tmp_path, model):
    return used.directory(tmp_path / "base", model, used.tokenizer(tmp_path / "tokens", chat=True))


# GPT-2's square `c_proj` would take the wrong way round without an error.
TRANSPOSED = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}


@pytest.mark.parametrize(("name", "settings"), [("llama", {}), ("gpt2", TRANSPOSED)])
@pytest.mark.parametrize("kind", LORA)
def test_merged_adapters_compute_what_the_adapters_do(tmp_path, kind, name, settings):
    base = base_of(tmp_path, used.model(name))
    run, checkpoint = adapter_run(tmp_path, base, **LORA[kind], **settings)
    export(run, tmp_path / "out", merge_adapters=True, verify=False)
    expected = used.logits(with_adapter(base, checkpoint))
    found = used.logits(reloaded(tmp_path / "out"))
    assert float((found - expected).abs().max()) <= 1e-5
    assert float((found - used.logits(reloaded(base))).abs().max()) > 1e-2


def test_a_tied_head_is_not_written_and_stays_tied(tmp_path):
    base = base_of(tmp_path, used.model())
    run, _ = adapter_run(tmp_path, base)
    export(run, tmp_path / "out", merge_adapters=True, verify=False)
    assert "lm_head.weight" not in stored(tmp_path / "out")
    made = reloaded(tmp_path / "out")
    assert made.lm_head.weight is made.model.embed_tokens.weight


def test_a_head_with_an_adapter_of_its_own_is_no_longer_tied(tmp_path):
    base = base_of(tmp_path, used.model())
    targets = ["q_proj", "lm_head"]
    run, checkpoint = adapter_run(tmp_path, base, target_modules=targets)
    export(run, tmp_path / "out", merge_adapters=True, verify=False)
    made = reloaded(tmp_path / "out")
    assert made.config.tie_word_embeddings is False
    expected = used.logits(with_adapter(base, checkpoint))
    assert float((used.logits(made) - expected).abs().max()) <= 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_trained_token_rows_are_merged_into_grown_embeddings(tmp_path, tied):
    rows = len(AutoTokenizer.from_pretrained(used.tokenizer(tmp_path / "t", chat=True)))
    small = used.model(rows=rows - 2, tie_word_embeddings=tied)
    base = base_of(tmp_path, small)
    from llmtrain.tools.use.load import grow, open_model
    from llmtrain.tools.use.target import find_target

    bigger = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    grow(bigger, rows)
    mean = bigger.get_input_embeddings().weight[: rows - 2].double().mean(0).float()
    assert torch.equal(bigger.get_input_embeddings().weight[rows - 1], mean)
    grown = used.directory(tmp_path / "grown", bigger, tmp_path / "tokens")
    indices = {"embed_tokens": [rows - 2, rows - 1]} | ({} if tied else {"lm_head": [rows - 1]})
    _, checkpoint = adapter_run(tmp_path, grown, trainable_token_indices=indices)
    path = checkpoint / "adapter.json"  # the adapter was trained on the smaller model, grown
    named = json.dumps({"base": {"path": str(base)}})
    path.write_text(named)
    from llmtrain.tools.use import export as tool

    expected = used.logits(with_adapter(grown, checkpoint), rows)
    opened = open_model(find_target(str(checkpoint))).model
    bound = 1e-5 * float(expected.abs().max())
    assert float((used.logits(opened, rows) - expected).abs().max()) <= bound
    weights = tool.merge.merged_weights(find_target(str(checkpoint)), rows, "F32")
    found = {name: weights.read(name) for name in weights.specs}
    config = weights.config
    made = AutoModelForCausalLM.from_config(config)
    made.load_state_dict(found, strict=False)
    assert float((used.logits(made.eval(), rows) - expected).abs().max()) <= bound
    assert ("lm_head.weight" in found) is not tied


def test_an_adapter_alone_keeps_its_files_and_loads_with_peft(tmp_path):
    base = base_of(tmp_path, used.model())
    run, checkpoint = adapter_run(tmp_path, base)
    found = export(run, tmp_path / "out", verify=False)
    expected = used.logits(with_adapter(base, checkpoint))
    assert torch.equal(used.logits(with_adapter(base, tmp_path / "out")), expected)
    names = {"adapter_model.safetensors", "adapter_config.json", "adapter.json"}
    assert names <= found.files.keys()
    assert not any(name.startswith(("model", "optimizer")) for name in found.files)


def test_an_adapter_that_lacks_a_tensor_or_has_another_is_refused(tmp_path):
    base = base_of(tmp_path, used.model())
    _, checkpoint = adapter_run(tmp_path, base)
    settings = json.loads((checkpoint / "adapter_config.json").read_text())
    for targets, found in ((["q_proj"], "not in the model"), (["q_proj", "lm_head"], "missing")):
        if found == "missing":
            targets += settings["target_modules"]
        (checkpoint / "adapter_config.json").write_text(
            json.dumps(settings | {"target_modules": targets})
        )
        from llmtrain.tools.use import merge
        from llmtrain.tools.use.target import find_target

        with pytest.raises(UserError, match=found):
            merge.merged_weights(find_target(str(checkpoint)), 1, "F32")


def test_an_adapter_whose_base_is_gone_is_refused(tmp_path):
    base = base_of(tmp_path, used.model())
    run, _ = adapter_run(tmp_path, base)
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="base"):
        export(run, tmp_path / "out", merge_adapters=True, verify=False)


# --- what is refused, and what is left behind
def test_what_cannot_be_exported_is_refused_before_anything_is_written(run, tmp_path):
    (tmp_path / "there").mkdir()
    model = used.directory(tmp_path / "model", used.model(), run / contents.TOKENIZER)
    for source, out, options, key in (
        (run, "there", {}, "--out"),
        (run, "out", {"dtype": "int8"}, "--dtype"),
        (run, "out", {"merge_adapters": True}, "--merge-adapters"),
        (run, "out", {"shard_gb": 0.0}, "--shard-gb"),
        (run, "out", {"push": "owner/name"}, "HF_TOKEN"),
        (model, "out", {}, "a run or one of its checkpoints"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("HF_TOKEN", raising=False)
            with pytest.raises(UserError, match=key):
                export(source, tmp_path / out, verify=False, **options)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_a_damaged_checkpoint_is_refused(tmp_path):
    run = used.run(tmp_path / "run")
    directory = used.checkpoint(run, 4, used.model())
    flip(directory / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        export(run, tmp_path / "out", verify=False)


def test_what_a_killed_export_left_is_made_again(run, tmp_path):
    left = tmp_path / "out.partial"
    left.mkdir()
    (left / "model.safetensors").write_text("half")
    (left / "other").write_text("")
    assert "other" not in export(run, tmp_path / "out", verify=False).files
    assert not left.exists()


@pytest.mark.parametrize(
    ("losses", "equal"),
    [
        ([2.0, 2.000001], True),
        ([2.0, 2.0001], False),
        ([2.0, float("nan")], False),
        ([float("nan"), float("nan")], False),
        ([2.0, float("inf")], False),
    ],
)
def test_an_export_with_another_loss_or_none_does_not_get_its_name(
    run, tmp_path, monkeypatch, losses, equal
):
    printed = SimpleNamespace(returncode=0, stdout=f"loading …\n{json.dumps(losses)}\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: printed)
    out = tmp_path / "out"
    if equal:
        found = export(run, out)
        assert [found.losses.run, found.losses.export] == losses
        return
    with pytest.raises(RunError, match="computes another loss") as raised:
        export(run, out)
    assert raised.value.exit_code == 1
    assert not out.exists()
    assert (tmp_path / "out.partial" / "model.safetensors").is_file()


@pytest.mark.parametrize("most", [100, 5000])  # bytes of a file: no weights, some of them
def test_a_full_disk_is_74_and_the_name_does_not_appear(run, tmp_path, most):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        with pytest.raises(RunError, match=r"cannot write .*model.safetensors: .*too large") as one:
            export(run, tmp_path / "out", verify=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert one.value.exit_code == 74
    assert not (tmp_path / "out").exists()


# --- the card and the Hub
def test_the_card_names_data_and_losses_and_no_directory_of_this_machine(run, tmp_path):
    from huggingface_hub import ModelCard

    export(run, tmp_path / "out", verify=False)
    text = (tmp_path / "out" / "README.md").read_text()
    assert ModelCard(text).data.library_name == "transformers"
    assert "| data | articles.parquet |" in text
    assert "| step | 4 |" in text
    assert "| held-out loss (step 4) | 2.0000 |" in text
    assert "llmtrain 0.1.0, torch 2.13.0" in text
    assert str(tmp_path.parent) not in text


def test_the_card_of_an_adapter_names_its_base_and_takes_over_its_licence(tmp_path):
    base = base_of(tmp_path, used.model())
    (base / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    run, checkpoint = adapter_run(tmp_path, base)
    export(run, tmp_path / "out", verify=False)
    text = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: peft" in text
    assert "license: mit" in text
    assert "| base | base |" in text
    (checkpoint / "adapter.json").write_text(
        json.dumps({"base": {"path": "owner/name", "revision": "abc"}})
    )
    from llmtrain.tools.use.export import card
    from llmtrain.tools.use.target import find_target

    text = card(find_target(str(checkpoint)), "fp32", merged=True)
    assert "base_model: owner/name" in text
    assert "| base | owner/name at abc |" in text
    assert "library_name: transformers" in text
    assert "preference loss" not in text


@pytest.mark.parametrize(
    ("settings", "row", "task"),
    [
        ({"preference.loss": "dpo"}, "| preference loss | dpo, beta 0.1 |", "text-generation"),
        (
            {"preference.loss": "kto", "preference.beta": 0.5},
            "| preference loss | kto, beta 0.5 |",
            "text-generation",
        ),
        ({"preference.loss": "reward"}, "| preference loss | reward |", "text-classification"),
    ],
)
def test_the_card_names_the_loss_of_pairs(run, tmp_path, settings, row, task):
    from llmtrain.tools.use.export import card
    from llmtrain.tools.use.target import find_target

    target = find_target(str(run))
    state = {**target.state, "config": {**target.state.get("config", {}), **settings}}
    text = card(replace(target, state=state), "fp32", merged=True)
    assert row in text
    assert f"pipeline_tag: {task}" in text


class Hub:
    """What the Hub's client does, without the Hub."""

    def __init__(self, private):
        self.private, self.calls = private, []

    def __call__(self, token):
        self.calls.append(("token", token))
        return self

    def model_info(self, name):
        from types import SimpleNamespace

        if self.private is None:
            from huggingface_hub.errors import RepositoryNotFoundError, Response

            client = importlib.import_module(Response.__module__)
            request = client.Request("GET", "https://hub.invalid")
            raise RepositoryNotFoundError("404", response=Response(404, request=request))
        return SimpleNamespace(private=self.private)

    def create_repo(self, name, private, exist_ok):
        from huggingface_hub import RepoUrl

        self.calls.append(("create", name, private))
        return RepoUrl(f"https://huggingface.co/{name}")

    def upload_folder(self, repo_id, folder_path):
        self.calls.append(("upload", repo_id, sorted(p.name for p in Path(folder_path).iterdir())))


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-token-of-the-environment")


@pytest.mark.parametrize("private", [None, True])
def test_a_push_goes_to_a_private_repository_with_the_token_of_the_environment(
    run, tmp_path, monkeypatch, token, private
):
    hub = Hub(private)
    monkeypatch.setattr(proof, "HfApi", hub)
    found = export(run, tmp_path / "out", push="owner/name", verify=False)
    assert {call[1] for call in hub.calls if call[0] == "token"} == {"a-token-of-the-environment"}
    assert hub.calls[-2] == ("create", "owner/name", True)
    assert hub.calls[-1] == ("upload", "owner/name", sorted(found.files))
    assert found.pushed == "https://huggingface.co/owner/name"


def test_an_adapter_alone_on_a_directory_of_this_machine_is_not_pushed(
    tmp_path, monkeypatch, token
):
    hub = Hub(True)
    monkeypatch.setattr(proof, "HfApi", hub)
    base = base_of(tmp_path, used.model())
    run, _ = adapter_run(tmp_path, base)
    with pytest.raises(UserError, match="an adapter whose base is on the Hub") as caught:
        export(run, tmp_path / "out", push="owner/name", verify=False)
    (problem,) = caught.value.problems
    assert (problem.key, problem.remedy) == ("--push", "--merge-adapters")
    assert str(base) in problem.expected
    assert hub.calls == []
    assert not (tmp_path / "out").exists()
    found = export(run, tmp_path / "out", push="owner/name", merge_adapters=True, verify=False)
    assert found.pushed == "https://huggingface.co/owner/name"


def test_a_push_to_a_public_repository_is_refused(run, tmp_path, monkeypatch, token):
    monkeypatch.setattr(proof, "HfApi", Hub(False))
    with pytest.raises(UserError, match="a private repository"):
        export(run, tmp_path / "out", push="owner/name", verify=False)
    assert not (tmp_path / "out").exists()
