import pytest
from helpers.chats import make, open_chat

from llmtrain.errors import UserError

CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + END }}{% endfor %}"
)
PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TOKENS = ("<|im_start|>", "<|im_end|>", "<|im|>", "<|im_end|>s", "<think>")


@pytest.fixture
def end(tmp_path):
    def find(end="'<|im_end|>\n'", template=CHATML + PROMPT, **settings):
        directory = make(tmp_path / f"t{len(list(tmp_path.iterdir()))}", template, TOKENS)
        text = (directory / "chat_template.jinja").read_text().replace("END", end)
        (directory / "chat_template.jinja").write_text(text)
        return open_chat(directory, **settings).check()

    return find


def test_the_token_after_an_answer_ends_the_turn(end):
    found = end()
    assert (found.text, found.lead, found.header) == ("<|im_end|>", "", "")
    assert end("'\n<|im_end|>\n'").text == "<|im_end|>"
    assert end("'<|im_end|>s'").text == "<|im_end|>s"
    assert end("eos_token").text == "<|endoftext|>"


def test_another_one_that_the_template_writes_can_be_named(end):
    twice = "'<|im_end|>\n<|endoftext|>'"
    assert end(twice).text == "<|im_end|>"
    assert end(twice, end_of_turn="<|endoftext|>").text == "<|endoftext|>"
    with pytest.raises(UserError, match=r"chat\.end_of_turn = <\|im\|>\n.*it writes '<\|im_end\|>"):
        end(twice, end_of_turn="<|im|>")
    with pytest.raises(UserError, match="an added token of the tokenizer"):
        end(end_of_turn="</s>")


@pytest.mark.parametrize("text", ["'\n'", "'.'", "' stop<|im_end|>'"])
def test_no_token_after_the_answer_is_refused(end, text):
    with pytest.raises(UserError, match=r"no end-of-turn token after the answer.*\n.*set chat.end"):
        end(text)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages[0].content }}<|im_end|>", "writes every answer"),
        ("{% for m in messages %}{{ m.content + (m.content | length | string) }}{% endfor %}",
         "same after each"),
        ("{{ raise_exception('never') }}", "never"),
    ],
)  # fmt: skip
def test_a_template_that_shows_no_end_is_refused(end, template, said):
    with pytest.raises(UserError, match=said):
        end(template=template)


def test_a_token_that_the_tokenizer_does_not_find_behind_text_is_refused(tmp_path):
    directory = make(tmp_path / "single", CHATML.replace("END", "'<|im_end|>'") + PROMPT, TOKENS)
    text = (directory / "tokenizer.json").read_text("utf-8")
    (directory / "tokenizer.json").write_text(
        text.replace('"single_word": false', '"single_word": true')
    )
    with pytest.raises(UserError, match=r"chat\.end_of_turn = <\|im_end\|>"):
        open_chat(directory).check()


def test_what_precedes_an_answer_is_a_lead_or_a_header(end):
    template = CHATML.replace("m.content", "('' if m.role == 'user' else LEAD) + m.content")
    found = end(template=template.replace("LEAD", r"'<think>\n\n'") + PROMPT)
    assert (found.lead, found.header) == ("<think>\n\n", "")
    found = end(template=template.replace("LEAD", "'Say: '") + PROMPT)
    assert (found.lead, found.header) == ("", "Say: ")
    found = end(template=template.replace("LEAD", "' '") + PROMPT)
    assert (found.lead, found.header) == ("", " ")
