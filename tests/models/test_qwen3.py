"""Qwen3: what its configs may say. `test_contract` holds it to what every family must satisfy."""

from __future__ import annotations

from typing import Any

import pytest

import funcmodels as fm
from funcmodels.models.qwen3_config import FULL, SLIDING
from tests.oracle.qwen3 import sizes

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
