"""The argument sets of every op, which the package holds so that an installed one can check a device."""

from lowering.cases import (
    CASES,
    DECODE_1,
    DECODE_8,
    PROMPT,
    ROWS,
    VERIFY,
    Arguments,
    Case,
    Draw,
    Rows,
    cases_of,
    delta,
    faded,
    latent_rows,
    paged,
)
from lowering.check.comparison import live

__all__ = [
    "CASES", "DECODE_1", "DECODE_8", "PROMPT", "ROWS", "VERIFY", "Arguments", "Case", "Draw", "Rows", "cases_of",
    "delta", "faded", "latent_rows", "live", "paged",
]  # fmt: skip
