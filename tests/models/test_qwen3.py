"""Qwen3 against transformers, and what its configs may say."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import funcmodels as fm
from funcmodels.models.qwen3_config import FULL, SLIDING
from tests.oracle.families import Pair, check_family, check_nearness, paired
from tests.oracle.gemma3 import run

seeds = pytest.mark.parametrize("seed", range(4))


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


def pair(seed: int, dtype: torch.dtype = torch.float32) -> Pair:
    """A random model of transformers, and ours with the same values."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**sizes(seed))
    config._attn_implementation = "eager"
    return paired(Qwen3ForCausalLM(config), seed, dtype)


@seeds
def test_it_is_that_of_transformers(seed: int, tmp_path: Path) -> None:
    check_family(pair(seed), run, tmp_path, seed)


@seeds
def test_bfloat16_is_as_near_the_truth_as_transformers(seed: int) -> None:
    low, high = pair(seed, torch.bfloat16), pair(seed, torch.bfloat16)
    high.theirs.float()
    check_nearness(low, high, run, seed, ("layers.0", "layers.2"))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 5, "num_key_value_heads": 2}, "num_attention_heads must be a multiple"),
    ({"head_dim": 7}, "head_dim must be even"), ({"layer_types": [FULL]}, "layer_types has 1 entries"),
    ({"layer_types": [FULL, "chunked", FULL]}, "layer_types may hold full_attention and sliding_attention"),
    ({"use_sliding_window": False}, "sliding_window must be positive"), ({"hidden_act": "gelu"}, "only silu is"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn' is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=str)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ConfigError, match=message):
        fm.build({**sizes(0), "layer_types": [FULL, SLIDING, FULL], **changes})


@pytest.mark.parametrize("changes", [{}, {"use_sliding_window": False}, {"max_window_layers": 1}], ids=str)
def test_layers_are_of_the_kinds_that_transformers_reads(changes: dict[str, Any]) -> None:
    from transformers import Qwen3Config

    given = {**sizes(0), "layer_types": None, **changes}
    assert list(fm.build(given).config.layer_types) == Qwen3Config(**given).layer_types
