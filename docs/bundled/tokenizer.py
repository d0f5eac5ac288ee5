"""The bundled model's tokenizer: byte-level BPE, 4096 entries, made for Python's newlines and indentation.

    python docs/bundled/tokenizer.py OUT     # corpus.json, tokenizer.json, tokenizer_config.json, {train,heldout}.npy

Trained on the training documents of `corpus.py` only. Every byte string that is UTF-8 comes back unchanged. The token
files are uint16, documents separated by (and ending with) the end-of-text token, id 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import corpus
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 4096
END = "<|endoftext|>"
MAX_LENGTH = 4096
PIECES = "|".join(
    (
        r"(?:[ \t]*\r?\n)+[ \t]*",  # line ends with the indentation that follows them: one piece
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word, with the space, dot, underscore or bracket before it
        r"\p{N}{1,3}",  # digits, at most three
        r" ?[^\s\p{L}\p{N}]+",  # punctuation
        r"\s+",
    )
)


def train(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of `VOCAB` entries learnt from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(END, special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, out: Path) -> None:
    """Write the two files that `transformers` reads."""
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """uint16 ids of all documents, each followed by the end-of-text id."""
    end = tokenizer.token_to_id(END)
    rows = [np.asarray([*found.ids, end], np.uint16) for found in tokenizer.encode_batch(texts)]
    return np.concatenate(rows)


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    docs = corpus.documents()
    facts: dict[str, Any] = corpus.describe(docs)
    texts = {flag: [doc.text for doc in docs if doc.held_out is flag] for flag in (False, True)}
    tokenizer = train(texts[False])
    save(tokenizer, out)
    for name, split, flag in (("train", "train", False), ("heldout", "held_out", True)):
        ids = encode(tokenizer, texts[flag])
        np.save(out / f"{name}.npy", ids)
        facts[split]["tokens"] = len(ids)
        facts[split]["bytes_per_token"] = round(facts[split]["bytes"] / (len(ids) - facts[split]["documents"]), 4)
    facts["held_out_paths"] = [doc.path for doc in docs if doc.held_out]
    (out / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
