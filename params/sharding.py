"""Sharding rules: what each of several ranks holds of a parameter, as data on its `TensorSpec`.

A rule cuts a leaf along one axis, at whole units (heads, usually): every rank gets equally many. Where there are fewer
units than ranks, as with key heads, neighbouring ranks hold the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from params.errors import ConfigError

ROWS_ALIGNED = 64
"""A sharded token table is filled up with rows of zeros to a multiple of this many, and of the ranks."""


@dataclass(frozen=True)
class Ranks:
    """This rank among the `size` that share a model, and the name of their process group.

    With `whole_experts` a rank holds some routed experts whole, else a slice of every one.
    """

    rank: int
    size: int
    group: str
    whole_experts: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} of {self.size}: ranks count from 0 to {self.size - 1}")


class Cut(NamedTuple):
    """What a rank holds of a leaf: these ranges along `axis`, one after the other, and `padding` rows of zeros."""

    axis: int
    ranges: tuple[range, ...]
    padding: int = 0

    @property
    def length(self) -> int:
        """Of the axis, on the rank."""
        return sum(map(len, self.ranges)) + self.padding


@dataclass(frozen=True)
class Outputs:
    """Rows are cut: each rank makes some outputs of a projection, and nothing is exchanged.

    `blocks` are (rows, units), from the first row to the last; those without units are on every rank.
    """

    blocks: tuple[tuple[int, int | None], ...]

    def cut(self, shape: Sequence[int], ranks: Ranks) -> Cut:
        """What the rank holds. `ConfigError` where units cannot be shared out."""
        starts = accumulate((rows for rows, _ in self.blocks), initial=0)
        held = (_held(start, rows, units, ranks) for start, (rows, units) in zip(starts, self.blocks, strict=False))
        return Cut(max(len(shape) - 2, 0), tuple(held))


@dataclass(frozen=True)
class Inputs:
    """Columns are cut, of `units` equal ones: each rank's product is an addend of the whole."""

    units: int

    def cut(self, shape: Sequence[int], ranks: Ranks) -> Cut:
        """What the rank holds. `ConfigError` where units cannot be shared out."""
        if self.units % ranks.size:
            raise ConfigError(f"{self.units} units of inputs cannot be shared out among {ranks.size} ranks")
        return Cut(len(shape) - 1, (_held(0, shape[-1], self.units, ranks),))


@dataclass(frozen=True)
class Vocabulary:
    """Rows of a token table are cut; what is missing to equally many for every rank are rows of zeros."""

    def cut(self, shape: Sequence[int], ranks: Ranks) -> Cut:
        """What the rank holds."""
        rows = -(-shape[0] // ROWS_ALIGNED) * ROWS_ALIGNED
        if rows % ranks.size:
            rows = -(-shape[0] // (ROWS_ALIGNED * ranks.size)) * ROWS_ALIGNED * ranks.size
        each = rows // ranks.size
        first = min(ranks.rank * each, shape[0])
        held = range(first, min(first + each, shape[0]))
        return Cut(0, (held,), each - len(held))


@dataclass(frozen=True)
class OfExperts:
    """Routed experts [experts outputs inputs]: some of them whole, or `inner` of each."""

    inner: Outputs | Inputs

    def cut(self, shape: Sequence[int], ranks: Ranks) -> Cut:
        """What the rank holds. `ConfigError` where experts or units cannot be shared out."""
        if not ranks.whole_experts:
            return self.inner.cut(shape, ranks)
        if shape[0] % ranks.size:
            raise ConfigError(f"{shape[0]} experts cannot be shared out among {ranks.size} ranks")
        return Cut(0, (_held(0, shape[0], shape[0], ranks),))


Rule = Outputs | Inputs | Vocabulary | OfExperts


def _held(start: int, rows: int, units: int | None, ranks: Ranks) -> range:
    """The rank's rows of `rows` from `start` on, of which `units` are shared out."""
    if units is None:
        return range(start, start + rows)
    if rows % units or (units % ranks.size and ranks.size % units):
        raise ConfigError(f"{rows} rows of {units} units cannot be shared out among {ranks.size} ranks at whole units")
    each = max(units // ranks.size, 1)
    first = ranks.rank * each if units >= ranks.size else ranks.rank // (ranks.size // units)
    unit = rows // units
    return range(start + first * unit, start + (first + each) * unit)
