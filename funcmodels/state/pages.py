"""Host side of a page pool: who holds which page.

A pool hands out page ids; page 0 is scratch and never handed out. A row holds its pages through a lease, shared by
all versions of its state. When the last state with a lease is dropped, or the lease is ended by `release`, its pages
return to the pool.
"""

from __future__ import annotations

import functools
import heapq
import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from lowering.host import HostInt

from ..errors import OutOfPages

F = TypeVar("F", bound=Callable[..., Any])

MOST_PAGES = 2**24
"""Of 128 tokens each they hold two thousand million, more than fits anywhere; a list of them still does."""


def _alone(method: F) -> F:
    """A method of a pool that one thread at a time runs."""

    @functools.wraps(method)
    def run(self: PagePool, *args: Any) -> Any:
        with self.lock:
            return method(self, *args)

    return cast(F, run)


class PagePool:
    """Counts references to the pages 1..`pages` of one pool.

    An `owned` pool belongs to rows that each hold all the pages they can ever need, from the start.
    """

    def __init__(self, pages: int, owned: bool) -> None:
        self.pages = pages
        self.owned = owned
        self._references = [0] * (pages + 1)
        self._free = list(range(1, pages + 1))
        # One that its holder may take again: as garbage, a lease may end in the middle of any method.
        self.lock = threading.RLock()

    def __getstate__(self) -> tuple[int, bool]:
        return self.pages, self.owned

    def __setstate__(self, values: tuple[int, bool]) -> None:
        # A copied or unpickled pool is held only by the leases that come with it: each takes its pages again.
        pages, owned = values
        if not isinstance(pages, int) or not 0 <= pages <= MOST_PAGES:
            raise ValueError(f"a pool of pages has 0..{MOST_PAGES}, found {pages!r:.100}; save the state again")
        self.__init__(pages, owned)

    @property
    def free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    def references(self, page: int) -> int:
        """How many leases hold `page`."""
        return self._references[page]

    @_alone
    def take(self, count: int) -> list[int]:
        """The `count` lowest free pages, now held once."""
        if count > len(self._free):
            raise OutOfPages(
                f"{count} more pages are needed and {len(self._free)} of {self.pages} are free; release or drop states "
                "that are no longer needed, or give init_state(pages=...) more"
            )
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    @_alone
    def share(self, pages: Sequence[int]) -> None:
        """Hold each of `pages` once more."""
        for page in pages:
            self._references[page] += 1

    @_alone
    def claim(self, pages: Sequence[int]) -> None:
        """Hold each of `pages` once more, free or not: for a lease that was copied together with its pool."""
        self.share(pages)
        self._free = sorted(page for page in self._free if not self._references[page])

    @_alone
    def give_back(self, pages: Sequence[int]) -> None:
        """Hold each of `pages` once less; free those that nobody holds."""
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                heapq.heappush(self._free, page)


@dataclass(eq=False)
class Extent:
    """Stands for the lengths of a version: who has the same extent has the same length in each lease.

    `exact` says whether the host knew the lengths, and not only bounds of them, when it was made.
    """

    exact: bool


@dataclass(eq=False)
class Writing:
    """One writing of rows, as their leases know it; `commit` goes on with that of the state it ends.

    `epochs[r]` counts the overwritings that row r's lease had seen when the row's newest tokens were written.
    """

    epochs: tuple[int, ...]


class Overwriting(NamedTuple):
    """What stood from `least` on (from `most` at the latest) was written anew, by a row of this extent.

    The extent is held weakly: when no state has it any more, its place alone matters.
    """

    epoch: int
    least: HostInt
    most: HostInt
    extent: weakref.ref[Extent]


class Lease:
    """The pages of one row, in order. Grows as the row does; ends once.

    Versions of a state write to the same pages, each from its own length on. `overwritings` are those writes that may
    have gone over tokens of another version and that the newest write stands on. Their places never fall from one to
    the next, so a row still is what it was when the first one after its epoch lies at or past its length.
    """

    def __init__(self, pool: PagePool, pages: Sequence[int] = ()) -> None:
        self.pool = pool
        self.pages = tuple(pages)
        self.ended = False
        self.epoch = 0
        self.overwritings: list[Overwriting] = []
        self._newest: Extent | None = None

    def holds(self, epoch: int, length: HostInt, extent: Extent) -> bool:
        """Whether the first `length` tokens are still those that a row of this `epoch` was built from.

        Where the host has only bounds of a length, `length` is the upper one: what may be gone counts as gone.
        """
        if epoch == self.epoch:
            return True
        after = bisect_right(self.overwritings, epoch, key=lambda over: over.epoch)
        first = self.overwritings[after]
        return first.extent() is extent or first.least >= length

    def write(self, epoch: int, least: HostInt, most: HostInt, extent: Extent, new: Extent) -> int:
        """Note that tokens are written behind a row's `least` to `most`; its epoch when its extent is `new`."""
        # What goes on from the newest write overwrites nothing. Of lengths that were not known it is noted all the
        # same: bounds alone would not tell that those before it end where it begins, or earlier.
        linear = self._newest is None or (self._newest is extent and extent.exact)
        self._newest = new
        if linear:
            return self.epoch
        while self.overwritings and _is_covered(self.overwritings[-1], epoch, least, most):
            self.overwritings.pop()
        self.epoch += 1
        self.overwritings.append(Overwriting(self.epoch, least, most, weakref.ref(extent)))
        return self.epoch

    def end(self) -> None:
        """Return the pages. A second call does nothing."""
        with self.pool.lock:
            if not self.ended:
                self.ended = True
                self.pool.give_back(self.pages)

    def move(self) -> Lease:
        """End this lease and hand its pages to a new one."""
        self.pool.share(self.pages)
        moved = Lease(self.pool, self.pages)
        self.end()
        return moved

    def __getstate__(self) -> dict[str, Any]:
        # Copied and pickled are the extents themselves, with the versions that have them.
        extents = [over.extent() or Extent(exact=True) for over in self.overwritings]
        return self.__dict__ | {"overwritings": [over[:3] for over in self.overwritings], "extents": extents}

    def __setstate__(self, values: dict[str, Any]) -> None:
        extents = values.pop("extents")
        self.__dict__.update(values)
        places = zip(values["overwritings"], extents, strict=True)
        self.overwritings = [
            Overwriting(epoch, least, most, weakref.ref(extent)) for (epoch, least, most), extent in places
        ]
        if not self.ended:
            self.pool.claim(self.pages)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():  # the modules are gone by then
            self.end()


def _is_covered(over: Overwriting, epoch: int, least: HostInt, most: HostInt) -> bool:
    """Whether a write by a row of `epoch` undoes an overwriting that it does not stand on, or says as much."""
    return over.epoch > epoch or (least == most <= over.least and over.extent() is None)
