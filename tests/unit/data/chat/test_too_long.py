import pytest
from helpers.chats import make, open_chat, plain, spans, talk

from llmtrain.data.chat.rows import BadRowError, Example

LONG = talk("moss " * 8, "rain " * 8, "moss " * 8, "rain " * 8, "moss " * 8, "rain " * 8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make(tmp_path_factory.mktemp("long") / "chatml", "chatml")


def sequences(directory, messages, seq_len, **settings):
    chat = open_chat(directory, seq_len, **settings)
    return chat.sequences(Example(messages))


def test_a_row_that_is_too_long_is_bad(directory):
    (one,) = sequences(directory, LONG, 1000).sequences
    size = len(one.ids)
    assert sequences(directory, LONG, size).sequences == (one,)
    with pytest.raises(BadRowError) as error:
        sequences(directory, LONG, size - 1)
    assert error.value.key == "too_long"
    assert str(error.value) == (
        f"{size} tokens, at most {size - 1} (data.seq_len); chat.too_long=truncate or split"
    )


def test_truncation_keeps_the_start_and_its_mask(directory):
    (whole,) = sequences(directory, LONG, 1000).sequences
    for limit in range(1, len(whole.ids), 9):
        found = sequences(directory, LONG, limit, too_long="truncate")
        if not any(whole.trained[:limit]):
            continue
        (one,) = found.sequences
        assert one.ids == whole.ids[: len(one.ids)]
        assert one.trained == whole.trained[: len(one.ids)]
        assert one.trained[-1]
        assert not any(whole.trained[len(one.ids) : limit])
        assert found.counts["truncated"] == 1


def test_a_sequence_without_a_trained_token_is_dropped_and_counted(directory):
    found = sequences(directory, LONG, 5, too_long="truncate")
    assert found.sequences == ()
    assert found.counts == {"dropped": 1}


def test_a_split_keeps_the_system_message_and_whole_exchanges(directory):
    messages = [{"role": "system", "content": "Brief."}, *LONG]
    (whole,) = sequences(directory, messages, 1000).sequences
    found = sequences(directory, messages, len(whole.ids) - 1, too_long="split")
    texts = [plain(directory).decode(one.ids, False) for one in found.sequences]
    chat = open_chat(directory)
    pieces = [messages[:5], [messages[0], *messages[5:]]]
    assert [f"{text}\n" for text in texts] == [chat.render(piece) for piece in pieces]
    assert [len(spans(one.ids, one.trained)) for one in found.sequences] == [2, 1]
    assert found.counts["split"] == 2
    assert found.counts["longest_ids"] == found.counts["ids"]
    assert "truncated" not in found.counts


def test_an_exchange_that_is_too_long_alone_is_truncated(directory):
    messages = talk("Hi?", "Yes.", "moss " * 8, "rain " * 50, "Hi?", "No.")
    found = sequences(directory, messages, 40, too_long="split")
    assert found.counts["split"] == 3
    assert found.counts["truncated"] == 1
    assert [len(one.ids) <= 40 for one in found.sequences] == [True] * 3


def test_a_piece_without_a_trained_turn_is_left_out(directory):
    messages = talk("Hi?", "rain " * 10, "moss " * 8, "rain " * 10)
    found = sequences(directory, messages, 45, too_long="split", train_turns="last")
    assert len(found.sequences) == 1
    assert found.counts["split"] == 2


def test_exchanges_begin_at_a_user_message_that_follows_none(directory):
    said = {"role": "assistant", "content": "rain " * 6}
    messages = [said, *talk("a"), *talk("b", "rain " * 6), *talk("c"), said, said]
    found = sequences(directory, messages, 30, too_long="split")
    texts = [plain(directory).decode(one.ids, False) for one in found.sequences]
    assert ["\na<" in text and "\nb<" in text for text in texts] == [True, False]
    assert ["\nc<" in text for text in texts] == [False, True]


def test_strings_that_are_too_long_are_truncated(directory):
    chat = open_chat(directory, 6, too_long="split")
    found = chat.sequences(Example((), text=("a b", " c d e f g h i")))
    (one,) = found.sequences
    assert len(one.ids) == 6
    assert found.counts["truncated"] == 1
