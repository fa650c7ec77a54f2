"""Write the small tokenizers with which the tests encode, into `tests/tokenizers/`.

    python scripts/make_test_tokenizers.py [--out DIR]

All are trained on the text of the built-in sample, so they know few words and cut everything else
into pieces, down to bytes. The same versions of tokenizers and of the sample give the same bytes.

    thinking   byte-level BPE in Qwen3's form: NFC, a pattern of its own, added tokens of which
               some are not special, no begin token, and a template with reasoning and tool calls
    fallback   BPE in Mistral's form: `▁` for a blank and in front of a text, bytes for what it
               does not know, a begin token that its post-processor adds, no pad token
    bare       byte-level BPE in GPT-2's form and files, vocab.json and merges.txt, with neither a
               begin nor a pad token, and a template that marks roles by words alone
"""

import argparse
import json
import string
from pathlib import Path

import pyarrow.parquet as pq
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "llmtrain" / "data" / "sample"
HOME = ROOT / "tests" / "tokenizers"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
END_OF_TEXT = "<|endoftext|>"
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)

THINKING = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}
{{- tool | tojson + '\\n' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(question=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- set last.question = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set answer = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1] %}
{%- if '</think>' not in m.content %}
{%- set thought = m.reasoning_content or '' %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.question and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- answer }}
{%- for call in m.tool_calls or [] %}
{{- '\\n' if answer or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking }}
{%- endif %}"""
FALLBACK = """\
{%- set front = '' %}
{%- if messages[0].role == 'system' %}
{%- set front = messages[0].content + '\\n\\n' %}
{%- set messages = messages[1:] %}
{%- endif %}
{{- bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/assistant after the optional system message') }}
{%- elif m.role == 'user' %}
{{- '[INST] ' + (front if loop.first else '') + m.content + ' [/INST]' }}
{%- else %}
{{- ' ' + m.content + eos_token }}
{%- endif %}
{%- endfor %}"""
BARE = """\
{%- for m in messages %}
{{- '### ' + m.role + ':\\n' + m.content }}
{{- (eos_token if m.role == 'assistant' else '') + '\\n\\n' }}
{%- endfor %}
{{- '### assistant:\\n' if add_generation_prompt }}"""


def main() -> None:
    """Write all of them into the directory that the command line names."""
    parser = argparse.ArgumentParser(description="Rebuild the tokenizers of the tests.")
    parser.add_argument("--out", type=Path, default=HOME, help="directory to write to")
    out: Path = parser.parse_args().out
    texts = [
        text
        for file in sorted(SAMPLE.glob("*.parquet"))
        for text in pq.read_table(file, columns=["text"])["text"].to_pylist()
    ]
    for write in (write_thinking, write_fallback, write_bare):
        directory = out / write.__name__.removeprefix("write_")
        directory.mkdir(parents=True, exist_ok=True)
        write(directory, texts)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"{size:,} bytes in {out}")


def write_thinking(directory: Path, texts: list[str]) -> None:
    """Write the one in Qwen3's form; its control tokens have the ids behind all others."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel(trim_offsets=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False, use_regex=False)
    train(tokenizer, texts, entries=1200, alphabet=ALPHABET)
    tokenizer.add_special_tokens([END_OF_TEXT, "<|im_start|>", "<|im_end|>"])
    pairs = [(f"<{name}>", f"</{name}>") for name in ("tool_call", "tool_response", "think")]
    tokenizer.add_tokens([token for pair in pairs for token in pair])
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    write_settings(
        directory, THINKING, bos_token=None, eos_token="<|im_end|>", pad_token=END_OF_TEXT
    )


def write_fallback(directory: Path, texts: list[str]) -> None:
    """Write the one in Mistral's form; the entries of bytes are no added tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(marks)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # to train alone
    own, given = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    train(tokenizer, texts, entries=1000, first=[*own, *given], alphabet=list(string.punctuation))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    found = json.loads(tokenizer.to_str())
    found["pre_tokenizer"] = None
    found["added_tokens"] = [one for one in found["added_tokens"] if one["content"] in own]
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    write_settings(directory, FALLBACK, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def write_bare(directory: Path, texts: list[str]) -> None:
    """Write the one in GPT-2's form, as vocab.json and merges.txt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    train(tokenizer, texts, entries=600, first=[END_OF_TEXT], alphabet=ALPHABET)
    tokenizer.model.save(str(directory))
    write_settings(
        directory, BARE, kind="GPT2Tokenizer", bos_token=None, eos_token=END_OF_TEXT, pad_token=None
    )


def train(
    tokenizer: Tokenizer,
    texts: list[str],
    entries: int,
    first: list[str] | None = None,
    alphabet: list[str] | None = None,
) -> None:
    """Train a tokenizer with this number of entries. first: those with the lowest ids"""
    trainer = BpeTrainer(
        vocab_size=entries,
        special_tokens=first or [],
        initial_alphabet=alphabet or [],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    assert tokenizer.get_vocab_size() == entries


def write_settings(
    directory: Path, template: str, kind: str = "PreTrainedTokenizerFast", **tokens: str | None
) -> None:
    """Write `tokenizer_config.json`, the chat template inside."""
    fields = {"tokenizer_class": kind, **tokens, "chat_template": template}
    fields |= {"clean_up_tokenization_spaces": False, "model_max_length": 131072}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
