"""Rows and their pages: `reserve` before a forward, `fork`, `fork_into`, `select` and `release` between forwards.

These run on the host, between device programs; their tensor parts have fixed shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowering.host import HostInt
from params.modes import lasting
from params.tree import tree_map

from .pages import Lease, PagePool
from .state import (
    Appended,
    Entry,
    State,
    check_fresh,
    check_rows,
    check_usable,
    page_table,
    places,
)

Copies = list[tuple[int, int]]
"""Pairs of page ids: from, to."""


def reserve(state: State, most: Sequence[HostInt]) -> State:
    """Take the pages that rows of `most` tokens need, all or nothing; `OutOfPages` when there are too few.

    A page that another lease shares (a fork's) is never written: the row first gets a copy of it.
    """
    ledger = state.ledger
    need = [-(-length // state.page_size) for length in most]
    more = [max(0, pages - len(lease.pages)) for pages, lease in zip(need, ledger.leases, strict=True)]
    kept = [_private(state, row, length > ledger.lengths[row]) for row, length in enumerate(most)]
    split = [row for row, pages in enumerate(kept) if pages is not None]
    if split or any(more):
        state = _grown(state, kept, need, more)
    elif all(pages <= known for pages, known in zip(need, ledger.in_table, strict=True)):
        return state
    leases = state.ledger.leases
    table = page_table(leases, state.page_table.shape[1], state.lengths.device)
    return replace(
        state, page_table=table, ledger=replace(state.ledger, in_table=tuple(len(lease.pages) for lease in leases))
    )


def _private(state: State, row: int, written: bool) -> int | None:
    """How many pages row `row` can keep when it is `written` to, None when all; later ones are shared."""
    first = max(state.ledger.least[row], 0) // state.page_size
    lease = state.ledger.leases[row]
    shared = written and any(lease.pool.references(page) > 1 for page in lease.pages[first:])
    return first if shared else None


def _grown(state: State, kept: Sequence[int | None], need: Sequence[int], more: Sequence[int]) -> State:
    """The state with pages taken: leases that only grow do so in place, one that has to split becomes another."""
    ledger = state.ledger
    pool = ledger.leases[0].pool
    counts = [extra if first is None else pages - first for first, pages, extra in zip(kept, need, more, strict=True)]
    taken = pool.take(sum(counts))
    leases, copies = list(ledger.leases), []
    for row, (first, count) in enumerate(zip(kept, counts, strict=True)):
        fresh, taken = taken[:count], taken[count:]
        if first is None:
            leases[row].pages += tuple(fresh)
            continue
        held = leases[row].pages
        pool.share(held[:first])
        leases[row] = Lease(pool, (*held[:first], *fresh))
        filled = -(-ledger.lengths[row] // state.page_size)
        copies += zip(held[first:filled], fresh, strict=False)
    if copies:
        state = _map_appended(state, lambda pages: _copied(pages, pages, copies))
    return replace(state, ledger=ledger.moved(tuple(leases)))


@lasting
def fork(state: State, rows: Sequence[int] | None = None) -> State:
    """Copies of `rows` (all by default, repeats allowed) that can be continued independently of the original.

    In a shared pool full pages are shared and each partly filled page is copied to a fresh one; where every row owns
    its pages, the copies get a pool of their own. Reads the rows' lengths from the device.
    """
    check_usable(state)
    rows = check_rows("fork", state, range(state.rows) if rows is None else rows)
    check_fresh(state, rows)
    held = state.lengths.tolist()
    lengths = [held[row] for row in rows]
    if state.ledger.leases[0].pool.owned:
        moved, leases = _moved(state, rows, lengths)
    else:
        moved, leases = _shared(state, rows, lengths)
    return _take_rows(moved, rows, leases, lengths, least=lengths)


@lasting
def fork_into(state: State, rows: Sequence[int], source: State, row: int) -> State:
    """`state` with a copy of `row` of `source` in each of `rows`, in place of what they held; the other rows stay.

    `source` is `state` itself, or a fork of its rows: both lie in one shared pool (`ValueError` if not), so full pages
    are shared and a partly filled one is copied. Reads the copied row's length from the device.
    """
    check_usable(state)
    check_usable(source)
    rows = check_rows("fork_into", state, rows)
    [row] = check_rows("fork_into", source, [row])
    check_fresh(state, [kept for kept in range(state.rows) if kept not in rows])
    check_fresh(source, [row])
    if len(set(rows)) < len(rows):
        raise ValueError(f"fork_into: rows {rows!s:.100} name a row twice")
    pool = state.ledger.leases[0].pool
    if pool.owned or source.ledger.leases[0].pool is not pool:
        raise ValueError(
            "fork_into: both states must lie in one shared pool; make the first with init_state(pages=...) and fork it"
        )
    length = int(source.lengths[row])
    _, taken = _shared(source, [row] * len(rows), [length] * len(rows))
    for gone in rows:
        state.ledger.leases[gone].end()
    return _put_rows(state, dict(zip(rows, taken, strict=True)), source, row, length)


def _put_rows(state: State, leases: Mapping[int, Lease], source: State, row: int, length: int) -> State:
    """The state with `row` of `source`, `length` tokens long, in the rows that `leases` name."""
    ledger, device = state.ledger, state.lengths.device
    index = torch.tensor(list(leases), device=device)

    def put(old: Tensor, new: Tensor) -> Tensor:
        return old.index_copy(0, index, new[row].expand(len(leases), *new.shape[1:]))

    def put_entry(old: Entry, new: Entry) -> Entry:
        return old if isinstance(old, Appended) else tree_map(put, old, new)

    held = tuple(leases.get(at, lease) for at, lease in enumerate(ledger.leases))
    lengths, least = (
        tuple(length if at in leases else count for at, count in enumerate(known))
        for known in (ledger.lengths, ledger.least)
    )
    log = state.log
    if log is not None and source.log is not None:
        log = replace(log, tip=put(log.tip, source.log.tip))
    return replace(
        state,
        lengths=put(state.lengths, source.lengths),
        page_table=page_table(held, state.page_table.shape[1], device),
        layers=tuple(put_entry(*pair) for pair in zip(state.layers, source.layers, strict=True)),
        log=log,
        ledger=ledger.take(range(state.rows), held, lengths, least),
    )


def _moved(state: State, rows: Sequence[int], lengths: Sequence[HostInt]) -> tuple[State, tuple[Lease, ...]]:
    """Rows (-1: none) copied to a new pool in which each owns its pages."""
    width = state.page_table.shape[1]
    pool = PagePool(len(rows) * width, owned=True)
    leases = tuple(Lease(pool, pool.take(width)) for _ in rows)
    copies = [
        pair
        for row, lease, length in zip(rows, leases, lengths, strict=True)
        for pair in zip(state.ledger.leases[row].pages[: -(-length // state.page_size)], lease.pages, strict=False)
    ]
    return _map_appended(state, lambda old: _copied(old, old.new_zeros(pool.pages + 1, *old.shape[1:]), copies)), leases


def _shared(state: State, rows: Sequence[int], lengths: Sequence[int]) -> tuple[State, tuple[Lease, ...]]:
    """Rows whose full pages are shared with the original, and whose last, partly filled page is a copy."""
    pool, page_size = state.ledger.leases[0].pool, state.page_size
    held = [state.ledger.leases[row].pages for row in rows]
    full = [length // page_size for length in lengths]
    # A draft's state may count tokens that it keeps nothing of: there is no page to copy then.
    part = [
        length % page_size > 0 and count < len(pages) for length, count, pages in zip(lengths, full, held, strict=True)
    ]
    fresh = iter(pool.take(sum(part)))
    leases, copies = [], []
    for pages, count, partial in zip(held, full, part, strict=True):
        pool.share(pages[:count])
        own = [next(fresh)] if partial else []
        copies += [(pages[count], page) for page in own]
        leases.append(Lease(pool, (*pages[:count], *own)))
    return _map_appended(state, lambda pages: _copied(pages, pages, copies)), tuple(leases)


def _copied(source: Tensor, target: Tensor, copies: Copies) -> Tensor:
    """`target` with pages copied from `source`, in place: the pages written belong to nobody yet."""
    if copies:
        old, new = torch.tensor(copies, device=source.device).unbind(1)
        target[new] = source[old]
    return target


@lasting
def select(state: State, rows: Sequence[int]) -> State:
    """The state of distinct `rows`, in that order; -1 makes an empty row. `ValueError` for a repeat: `fork` copies.

    Where every row owns its pages and too few are free for the empty rows, all rows are copied to a larger pool.
    """
    check_usable(state)
    rows = check_rows("select", state, rows, least=-1)
    check_fresh(state, rows)
    live = [row for row in rows if row >= 0]
    if len(set(live)) < len(live):
        raise ValueError(
            f"select: rows {rows!s:.100} name a row twice, and both would share its pages; fork(state, rows) copies"
        )
    ledger = state.ledger
    lengths, least = ([known[row] if row >= 0 else 0 for row in rows] for known in (ledger.lengths, ledger.least))
    pool, width = ledger.leases[0].pool, state.page_table.shape[1]
    if pool.owned and (len(rows) - len(live)) * width > pool.free:
        moved, leases = _moved(state, rows, lengths)
        return _take_rows(moved, rows, leases, lengths, least)
    empty = width if pool.owned else 0
    leases = tuple(ledger.leases[row] if row >= 0 else Lease(pool, pool.take(empty)) for row in rows)
    return _take_rows(state, rows, leases, lengths, least)


@lasting
def release(state: State, rows: Sequence[int] | None = None) -> State:
    """Return pages. Without `rows` the whole state ends; with them, a state in which these rows are empty."""
    check_usable(state)
    ledger = state.ledger
    if rows is None:
        for lease in ledger.leases:
            lease.end()
        ledger.ended.append("released")
        return state
    gone = set(check_rows("release", state, rows))
    kept = [row if row not in gone else -1 for row in range(state.rows)]
    leases = tuple(_released(lease) if row in gone else lease for row, lease in enumerate(ledger.leases))
    lengths, least = (
        [0 if row in gone else known[row] for row in range(state.rows)] for known in (ledger.lengths, ledger.least)
    )
    return _take_rows(state, kept, leases, lengths, least)


def _released(lease: Lease) -> Lease:
    if lease.pool.owned:
        return lease.move()
    lease.end()
    return Lease(lease.pool)


def _take_rows(
    state: State, rows: Sequence[int], leases: tuple[Lease, ...], lengths: Sequence[HostInt], least: Sequence[HostInt]
) -> State:
    """The state with its rows picked, -1 giving an empty one."""
    device = state.lengths.device
    index = torch.tensor([*(max(row, 0) for row in rows), state.rows], device=device)
    live = torch.tensor([*(row >= 0 for row in rows), True], device=device)

    def pick(entry: Entry) -> Entry:
        if isinstance(entry, Appended):
            return entry
        return tree_map(lambda x: torch.where(live.reshape(-1, *(1,) * (x.ndim - 1)), x[index], 0), entry)

    def pick_row(x: Tensor) -> Tensor:
        return torch.where(live[:-1], x[index[:-1]], 0)

    log = state.log if state.log is None else replace(state.log, tip=pick_row(state.log.tip))
    ledger = state.ledger.take(rows, leases, lengths, least)
    return replace(
        state,
        lengths=pick_row(state.lengths),
        page_table=page_table(leases, state.page_table.shape[1], device),
        layers=tuple(pick(entry) for entry in state.layers),
        log=log,
        ledger=replace(ledger, pools=places(state.layers)),
    )


def _map_appended(state: State, function: Callable[[Tensor], Tensor]) -> State:
    layers = tuple(tree_map(function, entry) if isinstance(entry, Appended) else entry for entry in state.layers)
    log = state.log
    if log is not None:
        log = replace(log, token=function(log.token), prefix=function(log.prefix))
    return replace(state, layers=layers, log=log)
