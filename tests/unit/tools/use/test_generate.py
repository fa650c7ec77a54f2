"""`generate`, against transformers' own."""

import pytest
import torch
from helpers import chats, corpus, used
from helpers.checkpoints import RUN
from helpers.runs import status, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmtrain import generate
from llmtrain.errors import UserError
from llmtrain.rundir import contents
from llmtrain.tools.use import generate as tool
from llmtrain.tools.use.generate import Sampling, converse

PROMPT = "Article 7\nstones lie"


@pytest.fixture(scope="module", params=[False, True], ids=["no begin token", "begin token"])
def made(request, tmp_path_factory):
    """A model directory."""
    folder = tmp_path_factory.mktemp("generate")
    files = used.tokenizer(folder / "tokenizer", bos=request.param)
    return used.directory(folder / "model", used.model(), files)


def plainly(directory, ids, count, **options):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    row = torch.tensor([ids])
    mask = torch.ones_like(row)
    found = model.generate(row, attention_mask=mask, max_new_tokens=count, **options)
    return found[0, len(ids) :].tolist()


def test_greedy_is_what_transformers_writes(made):
    tokenizer = AutoTokenizer.from_pretrained(made)
    expected = plainly(made, tokenizer(PROMPT).input_ids, 12, do_sample=False)
    parts = []
    found = generate(made, PROMPT, max_new_tokens=12, on_text=parts.append)
    assert found.text == tokenizer.decode(expected, skip_special_tokens=True)
    assert (found.prompt, found.tokens) == (PROMPT, len(expected))
    assert "".join(parts) == found.text
    assert found.to_json() == {
        "prompt": PROMPT,
        "text": found.text,
        "tokens": found.tokens,
        "ended": found.ended,
    }


def test_a_seed_decides_what_is_drawn_and_nobody_elses_numbers_change(made):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    options = {"max_new_tokens": 20, "temperature": 1.5}
    found = [generate(made, PROMPT, seed=seed, **options).text for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tiny_top_p_leaves_only_the_likeliest(made):
    greedy = generate(made, PROMPT, max_new_tokens=12)
    drawn = generate(made, PROMPT, max_new_tokens=12, temperature=2.0, top_p=1e-6, seed=9)
    assert drawn == greedy


def test_options_in_the_models_own_files_have_no_effect(made, tmp_path):
    from transformers import GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    other = used.directory(tmp_path / "other", model, made)
    GenerationConfig(do_sample=True, repetition_penalty=5.0, eos_token_id=0).save_pretrained(other)
    assert generate(other, PROMPT, max_new_tokens=12) == generate(made, PROMPT, max_new_tokens=12)


def test_a_checkpoint_continues_a_text_behind_what_it_was_trained_behind(tmp_path):
    run = used.run(tmp_path / "run")
    directory = used.checkpoint(run, 4, used.model())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = [tokenizer.eos_token_id, *tokenizer(PROMPT).input_ids]
    expected = plainly(directory, ids, 12, do_sample=False)
    assert generate(run, PROMPT, max_new_tokens=12).text == tokenizer.decode(
        expected, skip_special_tokens=True
    )
    assert generate(run, "", max_new_tokens=3).tokens == 3


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A run whose model repeats one token, which is not the end of a turn."""
    return used.run(tmp_path_factory.mktemp("chat") / "run", chat=True)


def ended(run, step, word):
    """A checkpoint that always writes this word; a turn ends at END_OF_TURN."""
    tokenizer = AutoTokenizer.from_pretrained(run / contents.TOKENIZER)
    model = used.one_word(tokenizer.convert_tokens_to_ids(word))
    turn = tokenizer.convert_tokens_to_ids(used.END_OF_TURN)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, turn]
    return used.checkpoint(run, step, model)


def test_an_answer_ends_at_the_end_of_the_turn(chat):
    directory = ended(chat, 4, used.END_OF_TURN)
    found = generate(directory, "Hi?", chat=True)
    assert (found.text, found.tokens, found.ended) == ("", 1, True)
    found = generate(ended(chat, 8, "e"), "Hi?", chat=True, max_new_tokens=5)
    assert (found.text, found.tokens, found.ended) == ("eeeee", 5, False)


@pytest.fixture
def asked(monkeypatch):
    """Gives the messages of a conversation; returns the ids before each answer, and the answers."""
    seen = []
    real = tool._write

    def write(opened, prompt, ids, *rest):
        seen.append(ids)
        return real(opened, prompt, ids, *rest)

    def call(directory, *messages):
        seen.clear()
        sampling = Sampling(max_new_tokens=2)
        answers = list(converse(directory, messages, sampling, lambda text: None))
        return list(seen), [answer.text for answer in answers]

    monkeypatch.setattr(tool, "_write", write)
    return call


def test_a_conversation_holds_what_was_said_before(chat, asked):
    directory = ended(chat, 12, "e")
    (_, second), answers = asked(directory, "one", "two")
    assert answers == ["ee", "ee"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    turns = chats.talk("one", "ee", "two")
    assert second == tokenizer.apply_chat_template(turns, add_generation_prompt=True).input_ids


@pytest.mark.parametrize("most", [2, 40])
def test_a_full_conversation_leaves_out_its_oldest_messages(chat, asked, most, monkeypatch):
    directory = ended(chat, 16, "e")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    messages, forgotten, ids = [f"{n} stones lie" for n in range(5)], [], []
    real = tool.complete

    def complete(opened, rows, *rest):
        ids.extend(rows)
        return real(opened, rows, *rest)

    monkeypatch.setattr(tool, "complete", complete)
    sampling = Sampling(max_new_tokens=most)
    answers = list(converse(directory, messages, sampling, print, forgotten.append))
    turns = []
    for message, answer, given in zip(messages, answers, ids, strict=True):
        turns.append({"role": "user", "content": message})
        whole = [
            tokenizer.apply_chat_template(turns[n:], add_generation_prompt=True).input_ids
            for n in range(0, len(turns), 2)
        ]
        fits = [one for one in whole if len(one) <= 64 - min(most, 16)]
        assert given == fits[0]  # as many of the last messages as leave room
        assert answer.tokens == min(most, 64 - len(given))
        turns.append({"role": "assistant", "content": answer.text})
    assert forgotten
    assert all(count % 2 == 0 for count in forgotten)


def test_a_message_that_cannot_be_answered_is_as_if_it_had_not_been_said(chat, asked):
    directory, refused = ended(chat, 20, "e"), []
    said = ["one", "x " * 300, "\udcff", "two"]
    sampling = Sampling(max_new_tokens=2)
    answers = list(converse(directory, said, sampling, print, refused=refused.append))
    assert [one.prompt for one in answers] == ["one", "two"]
    assert [error.problems[0].key for error in refused] == ["PROMPT", "message 3"]
    with pytest.raises(UserError, match="the model's positions"):
        list(converse(directory, said, sampling, print))


# As templates of some models: a text that a variable decides, an empty block before each answer.
LEAD = "<think>\n\n</think>\n\n"
TEMPLATE = (
    "{{ raise_exception('five are too many') if messages | length > 4 else tone | default('') }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}LEAD{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
).replace("LEAD", LEAD)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of a run on conversations, and how that run encodes them."""
    run = write_run(tmp_path_factory.mktemp("trained") / "run", [], status(run_id=RUN))
    tokens = ("<|im_start|>", used.END_OF_TURN, "<think>", "</think>")
    files = chats.make(run / contents.TOKENIZER, TEMPLATE, tokens)
    rows = corpus.write_jsonl(run.parent / "chat.jsonl", chats.rows_of(5))
    chat = {"template_kwargs": {"tone": "Be brief. "}}
    manifest, encoder = chats.data_of(files, rows, chat=chat)
    (run / contents.MANIFEST).write_bytes(manifest.to_bytes())
    return used.checkpoint(run, 4, used.model("gpt2", rows=2052)), encoder.chat


def test_a_checkpoint_of_conversations_is_prompted_as_in_training(trained, asked):
    directory, chat = trained
    (first, second), answers = asked(directory, "one", "two")
    assert first == chat.prompt_ids(chats.talk("one"))
    assert second == chat.prompt_ids(chats.talk("one", answers[0], "two"))
    text = chats.plain(directory).decode(first, False)
    assert text == f"Be brief. <|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n{LEAD}"


def test_messages_that_the_template_of_the_run_refuses_are_bad_input(trained, asked):
    with pytest.raises(UserError, match="five are too many") as caught:
        asked(trained[0], "one", "two", "three")
    assert [(one.key, one.value) for one in caught.value.problems] == [("--chat", "three")]


def test_a_directory_outside_of_a_run_is_prompted_by_its_template_alone(trained, asked, tmp_path):
    files = trained[0].parents[1] / contents.TOKENIZER
    directory = used.directory(tmp_path / "model", used.model("gpt2", rows=2052), files)
    (ids,), _ = asked(directory, "one")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    turns = chats.talk("one")
    assert ids == tokenizer.apply_chat_template(turns, add_generation_prompt=True).input_ids
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"max_new_tokens": 0}, "--max-new-tokens"),
        ({"temperature": -0.1}, "--temperature"),
        ({"temperature": 1e-300}, "--temperature"),
        ({"temperature": float("inf")}, "--temperature"),
        ({"top_p": 0.0}, "--top-p"),
        ({"chat": True}, "chat template"),
    ],
)
def test_options_that_make_no_sense_are_refused(made, options, key):
    with pytest.raises(UserError, match=key):
        generate(made, PROMPT, **options)


def test_a_prompt_that_is_not_utf_8_is_refused_by_name(made):
    with pytest.raises(UserError, match=r"PROMPT = 'a \\udcff b'") as caught:
        generate(made, "a \udcff b")
    assert "UTF-8; the character at position 3 is not" in str(caught.value)


def test_a_prompt_longer_than_the_positions_is_refused_and_a_long_text_ends_there(made):
    with pytest.raises(UserError, match="the model's positions"):
        generate(made, PROMPT * 60)
    length = len(AutoTokenizer.from_pretrained(made)(PROMPT).input_ids)
    assert generate(made, PROMPT, max_new_tokens=1000).tokens <= 64 - length


def test_pickled_weights_are_refused_under_the_name_of_the_argument(made, tmp_path):
    other = used.directory(tmp_path / "other", used.model(), made)
    (other / "model.safetensors").rename(other / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickled pytorch_model\.bin") as caught:
        generate(other, PROMPT)
    assert [problem.key for problem in caught.value.problems] == ["MODEL_OR_RUN"]


def test_an_adapter_ends_where_its_own_files_say(tmp_path):
    from transformers import GenerationConfig

    files = used.tokenizer(tmp_path / "tokenizer", chat=True)
    base = used.directory(tmp_path / "base", used.one_word(70), files)
    # A trained row of the embedding changes nothing that this model writes.
    folder = used.adapter(tmp_path / "a", base, files, target_modules=["c_fc"])
    GenerationConfig(eos_token_id=[0, 70]).save_pretrained(folder)
    assert generate(folder, "Hi?", chat=True).tokens == 1
    assert generate(base, "Hi?", chat=True, max_new_tokens=7).tokens == 7
