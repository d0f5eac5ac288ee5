"""A config may ask for anything: what the files do not hold is refused before work or memory follows the number."""

from __future__ import annotations

import json
import shutil
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import funcmodels as fm
from tests.checkpoints import CONFIGS, DRAFTS, written
from tests.oracle.states import refuses

SECONDS, BYTES = 2, 100 * 2**20
"""Processor time and memory that a refusal may take; under `tracemalloc` everything takes about twice its time."""


@contextmanager
def bounded() -> Iterator[None]:
    """Fails where what runs inside takes too much."""
    tracemalloc.start()
    began = time.process_time()
    try:
        yield
        assert time.process_time() - began < SECONDS
        assert tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()


HUGE = (1000, 16_384, 60_000, 10**6, 10**9, 2**31, 2**62, 2**63, 10**30)


def changed(config: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """A config with a field changed wherever it stands, or else added where the model's fields stand."""
    found = {key: changed(inner, name, value) if isinstance(inner, dict) else inner for key, inner in config.items()}
    text = found.get("text_config", found)
    if found == config and name not in config and "model_type" in text:
        text = text | {name: value}
        return {**found, "text_config": text} if "text_config" in found else text
    return found | ({name: value} if name in found else {})


def integers(config: dict[str, Any]) -> list[str]:
    """The names of all integers in a config."""
    inner = [name for value in config.values() if isinstance(value, dict) for name in integers(value)]
    return [name for name, value in config.items() if type(value) is int] + inner


FIELDS = [(family, name) for family, make in CONFIGS.items() for name in sorted({*integers(make())})]
