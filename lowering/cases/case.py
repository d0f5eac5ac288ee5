"""What a case is made of: random tensors, rows of tokens, pages; and the rows that every op over rows meets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..host import HostLengths
from ..rows import Rows

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Draw:
    """Random tensors of one dtype from one seed."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal values."""
        return torch.randn(shape, generator=self._generator).to(dtype or self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Float32 values in [low, high)."""
        return low + (high - low) * torch.rand(shape, generator=self._generator)

    def ids(self, below: int, *shape: int) -> Tensor:
        """Integers in [0, below)."""
        return torch.randint(below, shape, generator=self._generator)

    def distinct(self, below: int, rows: int, columns: int) -> Tensor:
        """[rows columns] integers in [0, below), distinct within a row."""
        return torch.rand(rows, below, generator=self._generator).argsort(-1)[:, :columns]


@dataclass(frozen=True)
class Case:
    """One call of an op. `length` is that of its longest sum, for the tolerance.

    `quantized`: x is quantised as the weight is, so that nothing has a derivative.
    """

    op: str
    name: str
    make: Callable[[Draw], Arguments]
    length: int = 1
    bench: bool = False
    quantized: bool = False

    def __str__(self) -> str:
        return f"{self.op}[{self.name}]"

    def arguments(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> Arguments:
        """The positional and keyword arguments, made afresh."""
        with torch.device("cpu"):
            return self.make(Draw(dtype, seed))


@dataclass(frozen=True)
class RowCounts:
    """New tokens and past tokens of each row, and padding behind them."""

    name: str
    counts: tuple[int, ...]
    past: tuple[int, ...]
    padding: int = 0

    @property
    def tokens(self) -> int:
        """Length of the token axis."""
        return sum(self.counts) + self.padding

    def query_start(self) -> Tensor:
        """Where each row starts, and the end of the last."""
        return torch.tensor([0, *accumulate(self.counts)], dtype=torch.int32)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, new ones included."""
        return [past + count for past, count in zip(self.past, self.counts, strict=True)]

    def made(self, table: Tensor | None = None, pages: Sequence[tuple[int, ...]] | None = None) -> Rows:
        """The rows as ops take them; with a page table those of a state, with page ids as the host knows it."""
        uniform = len(set(self.counts)) == 1 and not self.padding and self.counts[0] > 0
        rows = Rows(self.query_start(), max_query=max(self.counts), uniform=uniform)
        if table is None:
            return rows
        host = None if pages is None else HostLengths(self.counts, tuple(self.lengths), tuple(pages), exact=True)
        return replace(rows, lengths=torch.tensor(self.lengths, dtype=torch.int32), page_table=table, host=host)


ROWS = (
    RowCounts("one_token", (1,), (9,)),
    RowCounts("decode", (1, 1, 1), (4, 0, 11)),
    RowCounts("uniform", (9, 9), (0, 5)),
    RowCounts("ragged", (5, 0, 1, 12), (3, 7, 0, 2), padding=3),
    RowCounts("idle_first", (0, 4), (6, 0), padding=1),
    RowCounts("two_chunks_and_tail", (130, 18), (0, 1)),
)
"""Rows that every op over rows meets."""
VERIFY = RowCounts("verify", (4, 4, 4), (5, 2, 0))
PROMPT = RowCounts("prompt_512", (512,), (0,))
DECODE_8 = RowCounts("decode_8", (1,) * 8, (400,) * 8)
VERIFY_8 = RowCounts("verify_8", (4,) * 8, (400,) * 8)
DECODE_1 = RowCounts("decode_1", (1,), (400,))
BLOCK = RowCounts("block", (7, 7, 7), (5, 0, 140))
BLOCK_512 = RowCounts("block_512", (7,) * 8, (512,) * 8)
DECODE_4K = RowCounts("decode_4k", (1,), (4096,))
LONG = RowCounts("long_decode", (1, 1, 1), (300, 17, 129))


def scattered(lengths: Sequence[int], page_size: int) -> tuple[list[tuple[int, ...]], Tensor]:
    """Page ids of rows, neighbours apart and page 0 left out, and the page table with a column to spare."""
    used = [-(-length // page_size) for length in lengths]
    ids = iter([*range(1, sum(used) + 1, 2), *range(2, sum(used) + 1, 2)])
    pages = [tuple(next(ids) for _ in range(count)) for count in used]
    table = torch.zeros(len(used), max(used) + 1, dtype=torch.int32)
    for row, held in enumerate(pages):
        table[row, : len(held)] = torch.tensor(held, dtype=torch.int32)
    return pages, table


def pool(draw: Draw, lengths: Sequence[int], page_size: int, *shape: int) -> Tensor:
    """A pool over `scattered` pages, NaN in every slot that no row holds."""
    pages, _ = scattered(lengths, page_size)
    pool = torch.full((sum(map(len, pages)) + 2, page_size, *shape), torch.nan, dtype=draw.dtype)
    for held, length in zip(pages, lengths, strict=True):
        at = torch.arange(length)
        pool[torch.tensor(held, dtype=torch.int64)[at // page_size], at % page_size] = draw.normal(length, *shape)
    return pool
