"""Families as a list: what each claims, and that nothing outside of it knows it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import funcmodels as fm
from funcmodels.family import by_model_type
from funcmodels.models import FAMILIES, gemma3, qwen3_5


def test_two_families_of_one_type_are_refused() -> None:
    other = replace(gemma3.FAMILY, model_types=("gemma4", "qwen3_5"))
    with pytest.raises(ValueError, match="model_type 'qwen3_5' is that of Qwen35Params and Gemma3Params; leave it to"):
        by_model_type([qwen3_5.FAMILY, other])
    assert by_model_type([gemma3.FAMILY]) == {"gemma3": gemma3.FAMILY, "gemma3_text": gemma3.FAMILY}


@pytest.mark.parametrize("kind", ["llama", ["qwen3_5"], None], ids=str)
def test_a_type_of_no_family_is_refused_with_those_there_are(kind: Any) -> None:
    sentence = f"model_type {kind!r} is not a known architecture; known: {', '.join(FAMILIES)}"
    with pytest.raises(fm.ConfigError, match=re.escape(sentence)):
        fm.build({"model_type": kind})


def test_nothing_but_families_imports_one() -> None:
    package = Path(fm.__file__).parent
    for path in package.rglob("*.py"):
        if path.parent.name != "models":
            assert not re.search(r"models(\.\w+)* import (?!FAMILIES)", path.read_text(encoding="utf-8")), path
