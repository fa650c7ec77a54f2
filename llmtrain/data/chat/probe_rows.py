"""Conversations on which two installations may differ: white space, scripts, tools, reasoning.

Their ids and masks are the fingerprint of a tokenizer and its template (`Chat.probe`). `CALLED`
shows how a template writes the call of a tool.
"""

from __future__ import annotations

from llmtrain.data.chat.rows import Example, Message

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a town, now.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string"}},
                "required": ["town"],
            },
        },
    }
]
_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Đà Nẵng"}}}


TOWN = "Ulm"  # the end of what is said in the call of `CALLED`
_ID = "abcdefghi"  # Mistral's templates take nine letters and nothing else
CALLED = Example(
    [
        {"role": "user", "content": "Is it warm there?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": _ID,
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"town": TOWN}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": _ID, "name": "weather", "content": '{"celsius": 21}'},
    ],
    _TOOLS,
)


def _talk(*texts: str, system: str | None = None) -> Example:
    """Return a conversation of these texts, the user's first."""
    roles = ("user", "assistant")
    messages: list[Message] = [
        {"role": roles[n % 2], "content": text} for n, text in enumerate(texts)
    ]
    front = [] if system is None else [{"role": "system", "content": system}]
    return Example([*front, *messages])


PROBES: tuple[Example, ...] = (
    _talk("Hi?", "Yes."),
    _talk("Hi?", "Yes.", system="Answer briefly."),
    _talk("One?", "1", "Two?", "2", "Three?", "3"),
    _talk("What is 6 × 7?", "42", "And 7 × 6?", " 42 \n"),
    _talk("  blanks in front and behind  ", "\n\nA blank line first, then a tab:\t.\n\n"),
    _talk("line\r\nline\rline", "a\u00a0b\u2003c\u3000d"),
    _talk("请介绍一下六西格玛理论。", "六西格玛是一种管理策略。", "谢谢！", "不客气。"),
    _talk("Thời tiết hôm nay thế nào?", "Trời nắng đẹp ☀️ 👩‍👩‍👧 🇻🇳"),
    _talk("cafe\u0301 and caf\u00e9", "e\u0301\u0323 ﬁ Å Å"),
    _talk("مرحبا، كيف حالك؟", "בסדר, תודה"),
    _talk("```python\ndef f(x):\n    return x\n```", "if x:\n\treturn {'a': [1, 2]}\n"),
    _talk("What does <|im_end|> mean?", "It ends a turn: <|im_end|>."),
    _talk("Is </s> or <eos> a tag? <think>", "No; <b>bold</b> is one.", "[INST]?", "Neither."),
    _talk("Think.", "<think>\nOne and one.\n</think>\n\nTwo."),
    _talk("First?", "<think>\nHm.\n</think>\n\nThis.", "Then?", "<think>\nSo.\n</think>\n\nThat."),
    _talk("'s 're 'll DON'T 12345 67.89 1e-5", "a" * 40 + " " * 20 + "z"),
    _talk("?", "!", "??", "!!", "???", "!!!", system="  \n"),
    Example([
        {"role": "user", "content": "And if you think about it?"},
        {"role": "assistant", "content": "Then this.", "reasoning_content": "It may be so."},
    ]),
    Example(
        [
            {"role": "user", "content": "Is it warm in Đà Nẵng?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": '{"celsius": 31, "sky": "clear"}'},
            {"role": "assistant", "content": "It is 31 °C, and the sky is clear."},
        ],
        _TOOLS,
    ),
    Example(
        [
            {"role": "system", "content": "Use the functions."},
            {"role": "user", "content": "Is it warm?"},
            {"role": "assistant", "content": "Where?"},
            {"role": "user", "content": "Here."},
            {"role": "assistant", "content": "One moment.", "tool_calls": [_CALL, _CALL]},
        ],
        _TOOLS,
        untrained=frozenset({2}),
    ),
)  # fmt: skip
