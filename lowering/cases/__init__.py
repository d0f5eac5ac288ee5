"""Argument sets of every op, for tests, benches and the device check: model shapes in small, real widths, awkward ones.

A case makes its arguments from a seed and a dtype, the same each time. Tests and `python -m lowering check` run them
all; benches run those marked `bench`, which have a model's real widths. One file an op family.
"""

from __future__ import annotations

from . import (
    attention,
    attention_residual,
    delta,
    hyper_connection,
    linear,
    mla,
    moe,
    ngram,
    norm,
    quant,
    rotary,
    sampling,
    sparse,
)
from .case import Case

_FAMILIES = (
    norm,
    linear,
    moe,
    quant,
    sampling,
    rotary,
    attention,
    mla,
    delta,
    sparse,
    hyper_connection,
    attention_residual,
    ngram,
)
CASES: tuple[Case, ...] = tuple({str(case): case for family in _FAMILIES for case in family.cases()}.values())
"""Every case, each under its own name."""
