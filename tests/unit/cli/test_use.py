"""`llmtrain evaluate`, `generate` and `export` as a person and as a script see them."""

import io
import json
import sys

import pytest
from helpers import used

from llmtrain.cli.main import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run_dir = used.run(tmp_path_factory.mktemp("use") / "run", chat=True)
    used.checkpoint(run_dir, 4, used.model(max_position_embeddings=256), loss=2.0)
    return run_dir


@pytest.fixture
def shown(capsys):
    """Calls a command: (exit code, stdout, stderr)."""

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
        return (ended.value.code or 0, *capsys.readouterr())

    return call


def test_an_evaluation_is_a_few_lines_or_one_object(run, shown):
    code, out, _ = shown("evaluate", run)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["model", "data", "loss", "scored"]
    assert max(map(len, out.splitlines()[1:])) <= 80
    code, out, _ = shown("evaluate", run, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["step"] == 4
    assert {"loss", "perplexity", "bits_per_byte", "tokens", "bytes", "documents"} <= found.keys()


def test_documents_of_a_file_with_a_stride(run, tmp_path, shown):
    (tmp_path / "f.txt").write_text("one\ntwo\n")
    code, out, _ = shown("evaluate", run, "--data", tmp_path / "f.txt", "--stride", 8, "--json")
    assert (code, json.loads(out)["documents"]) == (0, 2)


def test_a_text_is_continued(run, shown):
    code, out, _ = shown("generate", run, "Article 3", "--max-new-tokens", 4)
    assert code == 0
    assert out.startswith("Article 3")
    code, out, _ = shown("generate", run, "Article 3", "--max-new-tokens", 4, "--json")
    found = json.loads(out)
    assert (code, found["prompt"], found["tokens"]) == (0, "Article 3", 4)


def test_chat_is_the_short_form_of_generate_chat(run, shown, monkeypatch):
    said = []
    for command in (["chat", run], ["generate", run, "--chat"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\r\nthree"))
        code, out, err = shown(*command, "--max-new-tokens", 2, "--json")
        assert (code, err) == (0, "")
        said.append([json.loads(line) for line in out.splitlines()])
    assert said[0] == said[1]
    assert [one["prompt"] for one in said[0]] == ["one", "two", "three"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    code, out, _ = shown("chat", run, "--max-new-tokens", 2)
    assert code == 0
    assert out.splitlines() == [one["text"] for one in said[0][:2]]


def test_chat_without_a_message_is_fine_and_a_bad_one_is_one_message(run, shown, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
    assert shown("chat", run) == (0, "", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("x " * 300))
    code, out, err = shown("chat", run)
    assert (code, out, err.count("error:")) == (2, "", 1)
    assert "the model's positions" in err


def test_what_a_full_conversation_leaves_out_is_said(run, shown, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(["moss " * 50] * 4)))
    code, out, err = shown("chat", run, "--max-new-tokens", 8)
    assert (code, len(out.splitlines()) >= 4) == (0, True)
    assert err.startswith("(the oldest 2 messages are left out: the conversation fills")


def test_a_file_of_prompts_becomes_a_file(run, tmp_path, shown):
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "one"}\n{"messages": [{"role": "user", "content": "a"}]}\n'
    )
    options = ["--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 2, "--out"]
    code, out, _ = shown("generate", run, *options, tmp_path / "a")
    assert code == 0
    assert out.splitlines()[0].startswith("2 prompts, 4 tokens written in ")
    assert out.splitlines()[1:] == [str(tmp_path / "a")]
    first, second = (json.loads(line) for line in (tmp_path / "a").read_text().splitlines())
    assert (first["prompt"], first["tokens"], second["tokens"]) == ("one", 2, 2)
    assert second["messages"][0]["content"] == "a"
    code, out, _ = shown("generate", run, *options, tmp_path / "b", "--json")
    found = json.loads(out)
    assert (code, found["out"], found["prompts"], found["tokens"]) == (0, str(tmp_path / "b"), 2, 4)
    code, out, err = shown("generate", run, *options, tmp_path / "b")
    assert (code, out, err.count("error:")) == (2, "", 1)
    assert f"--out = {tmp_path / 'b'}" in err
    code, out, err = shown("generate", run, "x", *options, tmp_path / "c")
    assert (code, out) == (2, "")
    assert "PROMPT = x" in err


def test_ctrl_c_ends_with_code_0(run, shown, monkeypatch):
    from llmtrain.tools.use import generate as tool

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(tool, "_write", interrupt)
    assert shown("generate", run, "one", "--max-new-tokens", 2)[0] == 0


def test_what_the_model_writes_cannot_move_the_cursor(run, shown, monkeypatch):
    from llmtrain.tools.use import generate as tool

    def hostile(opened, prompt, ids, sampling, turn, told):
        told("a\x1b[2Jb\n\tc")
        return tool.Generated(prompt, "", 1, False)

    monkeypatch.setattr(tool, "_write", hostile)
    assert shown("generate", run, "x")[1] == "xa\\x1b[2Jb\n\tc\n"


def test_an_export_lists_its_files_and_ends_with_its_path(run, tmp_path, shown):
    code, out, err = shown("export", run, "--out", tmp_path / "a", "--no-verify")
    assert code == 0
    assert out.splitlines()[-1] == str(tmp_path / "a")
    assert "writing" in err
    code, out, _ = shown("export", run, "--out", tmp_path / "b", "--no-verify", "--json")
    found = json.loads(out)
    assert (found["step"], found["losses"], found["pushed"]) == (4, None, None)
    assert found["bytes"] == sum(found["files"].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "absent/run/here"], "MODEL_OR_RUN = absent/run/here"),
        (["generate", "RUN"], "PROMPT"),
        (["generate", "RUN", "x", "--top-p", "2"], "--top-p = 2.0"),
        (["generate", "RUN", "x " * 300], "the model's positions"),
        (["export", "RUN", "--out", "RUN"], "--out"),
        (["export", "RUN", "--out", "new", "--merge-adapters"], "--merge-adapters"),
        (["evaluate", "RUN", "--stride", "8"], "--stride"),
        (["evaluate", "RUN", "--as", "absent"], "--as = absent"),
        (["generate", "RUN", "--prompts", "p.txt"], "--out"),
        (["generate", "RUN", "--out", "p.txt"], "--prompts"),
        (["generate", "RUN", "--out", "o", "--prompts", "absent.txt"], "--prompts = absent.txt"),
        (["chat", "absent/run/here"], "MODEL_OR_RUN = absent/run/here"),
    ],
)
def test_bad_input_is_one_message_and_code_2(run, shown, arguments, message):
    code, out, err = shown(*(run if one == "RUN" else one for one in arguments))
    assert (code, out) == (2, "")
    assert err.count("error:") == 1
    assert message in err
    assert "Traceback" not in err
