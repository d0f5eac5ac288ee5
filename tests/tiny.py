"""A tiny random Qwen3.5 with a tokenizer, as transformers writes it to disk; shared by the tests of the outer layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 320
END = "<|end|>"
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "max_position_embeddings": 128, "intermediate_size": 40, "bos_token_id": None,
    "eos_token_id": None, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    },
}  # fmt: skip


def oracle(seed: int = 0, **changes: Any) -> Any:
    """A transformers model with every parameter random."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**SIZES, **changes})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 6)
    return model


def tokenizer() -> Tokenizer:
    """Byte-level BPE: every byte, some pairs, and the end-of-text token as id 0."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 20,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = ["def read(self, path): return the lines of the file", "größer naïve 語 ☃ 🙂"]
    tokens.train_from_iterator(texts * 3, trainer)
    return tokens


def write(directory: Path, model: Any = None, end: int | list[int] = 0) -> Path:
    """A checkpoint directory with weights, tokenizer and end-of-text ids."""
    (model or oracle()).save_pretrained(directory)
    tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    return directory


def byte_ids(text: str) -> list[int]:
    """The tokens of the single bytes of `text`."""
    ids, split = tokenizer().get_vocab(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [ids[char] for word, _ in split.pre_tokenize_str(text) for char in word]
