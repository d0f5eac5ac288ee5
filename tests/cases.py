"""The argument sets of every op, which the package holds so that an installed one can check a device."""

from lowering.cases import CASES
from lowering.cases.attention import paged
from lowering.cases.case import DECODE_1, DECODE_8, PROMPT, ROWS, VERIFY, Arguments, Case, Draw, RowCounts
from lowering.cases.delta import delta, faded
from lowering.cases.mla import latent_rows
from lowering.check.comparison import live

__all__ = [
    "CASES", "DECODE_1", "DECODE_8", "PROMPT", "ROWS", "VERIFY", "Arguments", "Case", "Draw", "RowCounts", "cases_of",
    "delta", "faded", "latent_rows", "live", "paged",
]  # fmt: skip


def cases_of(op: str) -> list[Case]:
    """The cases of one op."""
    return [case for case in CASES if case.op == op]
