"""Ledger: what the host knows of one version of a state. Its changes are pure, and each stands once.

`grow`, `commit` and `rewind` say what a forward, a commit and a draft's way back make of it, `take` what moving rows
does. `claim` alone changes something: it notes in the leases that rows are written to.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from lowering.host import HostInt, known_equal, symbolic
from lowering.protocols import HostSide

from ..errors import StaleStateError, StateError
from .pages import Extent, Lease, PagePool, Writing


@dataclass
class Buffers:
    """Stands for the tensors, pools aside, that versions of a state have in common; `used` says why they hold no more.

    A version whose lengths and recurrent entries are all its own has one of its own. `instead` is what to do then.
    """

    used: str | None = None
    instead: str = "use the state that replaced it"


class Growth(NamedTuple):
    """Each row's new tokens: at most `most`, at least `least`. Equal where the host knows the counts."""

    most: tuple[HostInt, ...]
    least: tuple[HostInt, ...]


@dataclass(frozen=True)
class Ledger(HostSide):
    """Rows hold at least `least` and at most `lengths` tokens, equal unless accepted counts stayed on the device.

    `in_table[r]` pages of row r's lease are written in the device page table. `pending` are the tokens offered to
    `commit`. `writing` and `extent` say which of the leases' tokens are the version's own.
    """

    lengths: tuple[HostInt, ...]
    least: tuple[HostInt, ...]
    leases: tuple[Lease, ...]
    in_table: tuple[int, ...]
    writing: Writing
    extent: Extent
    pending: Growth | None = None
    pools: tuple[int, ...] = ()
    """Where the tensors of the state's pools lie in memory; none where that is not known, as in a trace."""
    buffers: Buffers = field(default_factory=Buffers)
    ended: list[str] = field(default_factory=list, init=False, compare=False)
    """Why this version alone can be used no more, if it cannot: what is made of it begins anew."""

    @staticmethod
    def empty(leases: tuple[Lease, ...]) -> Ledger:
        """Rows that hold nothing yet, in these leases."""
        none = (0,) * len(leases)
        return Ledger(none, none, leases, _held(leases), Writing(none), Extent(exact=True))

    @property
    def used(self) -> str | None:
        """Why the state can be used no more."""
        return self.ended[0] if self.ended else self.buffers.used

    @property
    def exact(self) -> bool:
        """Whether every row's length is known."""
        if symbolic(self.lengths):
            return all(map(known_equal, self.least, self.lengths))
        return self.least == self.lengths

    @property
    def fits(self) -> bool:
        """Whether the pool has as many pages as all rows hold, those they share counted for each."""
        return sum(len(lease.pages) for lease in self.leases) <= self.leases[0].pool.pages

    @property
    def overwritten(self) -> list[int]:
        """The rows some of whose tokens another continuation has overwritten."""
        known = zip(self.leases, self.writing.epochs, self.lengths, strict=True)
        return [row for row, (lease, epoch, length) in enumerate(known) if not lease.holds(epoch, length, self.extent)]

    def stale(self, row: int) -> StaleStateError:
        """The error that `row` is stale."""
        return StaleStateError(
            f"row {row} of this state is stale: another continuation of the same state has overwritten its newest "
            "tokens; fork(state) before continuing it twice"
        )

    def check_room(self, counts: Sequence[HostInt], max_len: int) -> None:
        """`StateError` unless there is one count a row, `ValueError` when a row would outgrow `max_len`."""
        if len(counts) != len(self.lengths):
            raise StateError(
                f"the batch has {len(counts)} rows, the state has {len(self.lengths)}; give one list a row ([] idles)"
            )
        for row, (held, count) in enumerate(zip(self.lengths, counts, strict=True)):
            if held + count > max_len:
                bound = "" if self.exact else "at most "
                raise ValueError(
                    f"row {row}: {count} new tokens do not fit: it holds {bound}{held}, and max_len is {max_len}; "
                    "shorten the prompt or give init_state a larger max_len"
                )

    def grow(self, most: tuple[HostInt, ...], counted: bool, keep: bool) -> Ledger:
        """After a forward: each row has `most` more tokens, or no more than these unless they are `counted`.

        A state that becomes pending (`keep`) still holds the recurrent entries of the one before. `claim` is to follow.
        """
        growth = Growth(most, most if counted else (0,) * len(most))
        return replace(
            self,
            lengths=added(self.lengths, growth.most),
            least=added(self.least, growth.least),
            writing=Writing(self.writing.epochs),
            extent=Extent(self.exact and counted),
            pending=growth if keep else None,
            buffers=self.buffers if keep else Buffers(),
        )

    def claim(self, before: Ledger) -> None:
        """Note in the leases that the tokens are written which this version has and `before` has not.

        The last that the host does before they are: what has failed until then has overwritten nobody's tokens.
        """
        known = zip(self.leases, before.writing.epochs, before.least, before.lengths, self.lengths, strict=True)
        self.writing.epochs = tuple(
            epoch if after == length else lease.write(epoch, least, length, before.extent, self.extent)
            for lease, epoch, least, length, after in known
        )

    def commit(self, accepted: Sequence[int] | None) -> Ledger:
        """After `commit`, the counts unknown if None. `ValueError` for one below zero or above what was offered."""
        assert self.pending is not None
        most, least = self.pending
        after = replace(self, pending=None, extent=Extent(self.exact and accepted is not None), buffers=Buffers())
        if accepted is None:
            return replace(after, least=_less(self.least, least))
        for row, (count, offered) in enumerate(zip(accepted, most, strict=True)):
            if not 0 <= count <= offered:
                raise ValueError(
                    f"commit: row {row} was offered {offered} tokens, {count} were accepted; give 0..{offered}"
                )
        lengths = added(_less(self.lengths, most), accepted)
        return replace(after, lengths=lengths, least=added(_less(self.least, least), accepted))

    def rewind(self, before: Ledger) -> Ledger:
        """With the tokens alone that `before` held, which this one is grown from."""
        same = before if self.leases is before.leases else before.moved(self.leases)
        return replace(self, lengths=same.lengths, least=same.least, writing=same.writing, extent=same.extent)

    def moved(self, leases: tuple[Lease, ...]) -> Ledger:
        """The same rows in these leases."""
        return replace(self, leases=leases, writing=_kept(self, leases, range(len(leases))))

    def take(
        self, rows: Sequence[int], leases: tuple[Lease, ...], lengths: Sequence[HostInt], least: Sequence[HostInt]
    ) -> Ledger:
        """Of `rows` (-1: an empty one), which lie in `leases` now."""
        kept = _kept(self, leases, rows)
        return Ledger(tuple(lengths), tuple(least), leases, _held(leases), kept, self.extent, pools=self.pools)

    def of_pools(self, pools: tuple[int, ...]) -> Ledger:
        """This ledger for tensors that lie there: one of its own, with its own leases, if they are none of its pools.

        Whoever copied all of a state's pools has another value, which neither writes nor releases pages of the first.
        """
        if not pools or not self.pools or not set(pools).isdisjoint(self.pools):
            return self
        return replace(copy.deepcopy(self), pools=pools)

    def known_as(self, found: Ledger) -> Ledger:
        """`found`, which is this version when more was known of it: written to the leases as this one was."""
        self.extent.exact = found.extent.exact
        return replace(found, writing=self.writing, extent=self.extent)

    def at(self, lengths: Sequence[int]) -> Ledger:
        """When the host has learned the lengths."""
        known = tuple(lengths)
        return replace(self, lengths=known, least=known)


# A saved state holds these beside its tensors, and may be read without trust in who wrote it, as trees may.
torch.serialization.add_safe_globals([Ledger, Buffers, Growth, PagePool, Lease, Extent, Writing])


def added(counts: Sequence[HostInt], more: Sequence[HostInt]) -> tuple[HostInt, ...]:
    """The sum of each pair."""
    return tuple(count + extra for count, extra in zip(counts, more, strict=True))


def _less(counts: Sequence[HostInt], less: Sequence[HostInt]) -> tuple[HostInt, ...]:
    return tuple(count - dropped for count, dropped in zip(counts, less, strict=True))


def _held(leases: Sequence[Lease]) -> tuple[int, ...]:
    return tuple(len(lease.pages) for lease in leases)


def _kept(ledger: Ledger, leases: Sequence[Lease], rows: Sequence[int]) -> Writing:
    """The writing of rows (-1: none) in these leases; what lies in a new one was never overwritten."""
    held = zip(leases, rows, strict=True)
    kept = [row if row >= 0 and lease is ledger.leases[row] else -1 for lease, row in held]
    return Writing(tuple(ledger.writing.epochs[row] if row >= 0 else 0 for row in kept))
