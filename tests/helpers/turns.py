"""Small templates that end and write turns as those of some models do, on one token a letter.

With such a tokenizer ids can be written down by hand: a control token is one id, and so is each
letter of a text.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from helpers.chats import make
from tokenizers import decoders, models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"
# A call ends with another token than an answer, and history with a third.
GPT_OSS = """
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- set function = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + function.name + '<|channel|>commentary json<|message|>' }}
{{- function.arguments | tojson + '<|call|>' }}
{%- elif m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson + '<|end|>' }}
{%- else %}
{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}"""
# The first token of a tool's answer ends a call; what follows the answer belongs to the same turn.
GEMMA_4 = """
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- 'response:' + m.name + '{value:<|"|>' + m.content + '<|"|>}<tool_response|>' }}
{%- else %}
{%- if not (loop.index0 and messages[loop.index0 - 1].role == 'tool') %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '<|tool_call>call:' + call.function.name + '{' }}
{%- for key, value in call.function.arguments | dictsort %}
{{- key + ':<|"|>' + value + '<|"|>' }}
{%- endfor %}
{{- '}<tool_call|>' }}
{%- endfor %}
{{- m.content }}
{{- '<|tool_response>' if m.tool_calls else '<turn|>\n' }}
{%- endif %}
{%- endfor %}
{{- '<|turn>model\n' if add_generation_prompt and messages[-1].role != 'tool' }}"""
# No token ends a turn: that is left to the next message.
GLM = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|assistant|>\n<think></think>' }}
{{- '\n' + m.content if m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>' + call.function.name + '\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' + value + '</arg_value>\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{{- '<|observation|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- else %}
{{- '<|' + m.role + '|>\n' + m.content }}
{%- endif %}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt }}"""
# Arguments are put behind a string, so they have to be one.
DEEPSEEK_V3 = """
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}
{{- '<｜tool▁outputs▁begin｜>' + m.content + '<｜tool▁outputs▁end｜>' }}
{%- else %}
{{- '<｜Assistant｜>' if messages[loop.index0 - 1].role != 'tool' }}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}
{{- call.function.arguments + '\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor %}
{{- '<｜Assistant｜>' if add_generation_prompt and messages[-1].role != 'tool' }}"""
TOKENS = {
    GPT_OSS: ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
    GEMMA_4: (
        *("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>"),
        *("<|tool_response>", "<tool_response|>", '<|"|>'),
    ),
    GLM: (
        *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>"),
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        *("<tool_response>", "</tool_response>"),
    ),
    DEEPSEEK_V3: (
        *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>"),
        "<｜tool▁outputs▁end｜>",
    ),
}  # fmt: skip
ROW: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Weather in Ulm?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "abcdefghi",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'},
                }
            ],
        },
        {
            "role": "tool",
            "tool_call_id": "abcdefghi",
            "name": "get_weather",
            "content": '{"temp": 21}',
        },
        {"role": "assistant", "content": "It has 21 degrees in Ulm."},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Weather of a city",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
    ],
}


def letters(directory: Path) -> Path:
    """A tokenizer whose every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({one: n for n, one in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END_OF_TEXT])
    directory.mkdir(parents=True)
    made.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return directory


def family(directory: Path, template: str, *more: str) -> Path:
    """That tokenizer with one of the templates and its tokens. more: further tokens"""
    source = letters(directory.with_name(f"{directory.name}-letters"))
    return make(directory, template, (*TOKENS.get(template, ()), *more), source=source)


def by_hand(directory: Path, *pieces: str) -> list[int]:
    """The ids of control tokens and texts in ASCII, looked up one by one."""
    vocabulary = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()
    added = {token for token in vocabulary if len(token) > 1}
    ids = []
    for piece in pieces:
        for one in [piece] if piece in added else piece.replace(" ", "Ġ").replace("\n", "Ċ"):
            ids.append(vocabulary[one])
    return ids
