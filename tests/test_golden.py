"""Numbers, tokens and choices of kernels are what they were: see `tests.golden`, which keeps and compares them."""

from __future__ import annotations

import functools
import json
import warnings
from typing import Any

import pytest

from lowering import RecaptureWarning
from tests import golden

# Tracing takes seconds, and these families share their layers with the others.
LONG = ("captured/kimi_k3", "captured/kimi_linear", "captured/qwen3_5_moe", "captured/gemma3", "generate/captured")
NAMES = [pytest.param(name, marks=[pytest.mark.sweep] * (name in LONG)) for name in golden.PARTS]


@functools.cache
def stored() -> dict[str, Any]:
    return json.loads(golden.FILE.read_text())


@pytest.mark.plain
@pytest.mark.parametrize("name", NAMES)
def test_what_was_computed_is_computed_still(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecaptureWarning)
        found = golden.differences(name, stored()["parts"][name], stored()["machine"] == golden.machine())
    assert not found, "\n".join(found) + "\npython -m tests.golden --write keeps what is meant"
