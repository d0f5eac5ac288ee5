"""Random Qwen3 models of transformers, and ours with the same values."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch

from funcmodels.models.qwen3_config import FULL, SLIDING
from tests.oracle.families import paired
from tests.oracle.gemma3 import run
from tests.oracle.qwen3_5 import Pair

__all__ = ["made", "pair", "run", "sizes"]


def sizes(seed: int) -> dict[str, Any]:
    """Random config fields: odd seeds tie the embedding, every third has biases, windows are shorter than prompts."""
    draw = random.Random(f"qwen3 {seed}")
    kv_heads = draw.randint(1, 3)
    return {
        "model_type": "qwen3", "vocab_size": draw.randint(50, 99), "hidden_size": draw.choice((20, 33, 42)),
        "intermediate_size": draw.choice((14, 25, 40)), "num_hidden_layers": 3, "head_dim": draw.choice((8, 16, 20)),
        "num_attention_heads": kv_heads * draw.randint(1, 3), "num_key_value_heads": kv_heads,
        "layer_types": draw.sample([FULL, SLIDING, draw.choice((FULL, SLIDING))], 3), "use_sliding_window": True,
        "sliding_window": draw.randint(2, 9), "attention_bias": seed % 3 == 2, "tie_word_embeddings": bool(seed % 2),
        "rms_norm_eps": draw.choice((1e-6, 1e-3)), "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip


def made(seed: int, dtype: torch.dtype = torch.float32) -> Pair:
    """A random model of each, the same for the same seed."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**sizes(seed))
    config._attn_implementation = "eager"
    return paired(Qwen3ForCausalLM(config), seed, dtype)


pair = functools.cache(made)
