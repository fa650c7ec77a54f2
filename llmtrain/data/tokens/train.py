"""Trains a byte-level BPE on texts, and makes the files of a tokenizer directory.

The tokenizer has the form of GPT-2's: every byte is a symbol, so no text is unknown and decoding
returns exactly the same bytes; GPT-2's pattern cuts text into words before merging. `<|endoftext|>`
has id 0 and is the only special token. The same texts give the same files, with any number of
threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from llmtrain.errors import Problem, UserError

END_OF_TEXT = "<|endoftext|>"
SMALLEST = 256 + 1  # the byte symbols and the special token


def train_bpe(texts: Iterable[str], entries: int) -> str:
    """Train on `texts` and return the text of a `tokenizer.json` with exactly `entries` entries.

    It keeps one count for each distinct word in memory. Raises UserError if `entries` is less than
    the 256 byte symbols and the special token, or if the texts are too small to reach it.
    """
    asked = f"{{train: {entries}}}"
    if entries < SMALLEST:
        raise UserError(Problem("model.tokenizer", asked, f"at least {SMALLEST} entries"))
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    reached = tokenizer.get_vocab_size()
    if reached != entries:
        expected = f"text enough for {entries} entries; the training text gives {reached}"
        remedy = f"{{train: {reached}}}, or more text"
        raise UserError(Problem("model.tokenizer", asked, expected, remedy))
    return str(tokenizer.to_str(pretty=False))


def tokenizer_config() -> str:
    """Return the `tokenizer_config.json` with which transformers loads such a tokenizer.

    `<|endoftext|>` ends a document. Since no text contains it, it also begins a text and pads.
    Nothing is added to a text when it is encoded.
    """
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,  # transformers' own number for "no limit"
    }
    return json.dumps(fields, indent=2) + "\n"
