"""State: everything a model remembers of its rows, as one value.

Entries of a layer are of two kinds. *Appended* entries live in pages of a pool; a reader never looks at or past its
own length, so a write beyond it changes no older state. *Recurrent* entries are returned as new values. After
`forward(..., keep_steps=True)` a state is *pending* until `commit` fixes how many of the newest tokens count.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from jaxtyping import Int
from torch import Tensor

from lowering.host import HostLengths
from params.tree import dotted, map, num_bytes, off_tree, size, static, tree

from .errors import StaleStateError, StateError
from .pages import Lease, PagePool
from .token_log import TokenLog, stale_rows

E = TypeVar("E", bound="Recurrent")


class Appended:
    """An entry whose tensors are all pools `[pages page_size ...]`, page 0 being scratch."""


class Recurrent(abc.ABC):
    """An entry whose tensors are all `[slots ...]`: one a row, then a scratch slot; and a `trail` while pending."""

    trail: Any

    @abc.abstractmethod
    def after(self: E, accepted: Int[Tensor, " rows"]) -> E:
        """The entry after the first `accepted` of each row's pending tokens, no longer pending."""


Entry = Appended | Recurrent


@dataclass
class Host:
    """What the host knows of one version of a state. `lengths` are exact, or upper bounds when `exact` is false.

    `in_table[r]` pages of row r's lease are written in the device page table. `pending` are the tokens offered to
    `commit`. `used` says why the state can be used no more.
    """

    lengths: tuple[int, ...]
    leases: tuple[Lease, ...]
    in_table: tuple[int, ...]
    exact: bool = True
    pending: tuple[int, ...] | None = None
    used: str | None = None


@tree
class State:
    """Lengths, page table and one entry a layer. `pending` holds the tokens a row may still drop, or None."""

    lengths: Int[Tensor, " rows"]
    page_table: Int[Tensor, "rows max_pages"]
    layers: tuple[Entry, ...]
    pending: Int[Tensor, " rows"] | None
    log: TokenLog | None
    page_size: int = static()
    max_len: int = static()
    vocab: int = static()
    host: Host = off_tree()

    @property
    def rows(self) -> int:
        """Capacity: number of rows, empty ones included."""
        return self.lengths.shape[0]

    def __repr__(self) -> str:
        kinds = [type(entry).__name__ for entry in self.layers]
        shown = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
        bound = "=" if self.host.exact else "<="
        status = self.host.used or ("pending" if self.pending is not None else None)
        tail = f", {status}" if status else ""
        return (
            f"State(rows={self.rows}, lengths{bound}{list(self.host.lengths)}, max_len={self.max_len}, "
            f"page_size={self.page_size}, {shown}, {size(num_bytes(self))}{tail})"
        )


def empty(
    layers: tuple[Entry, ...], *, rows: int, max_len: int, page_size: int, pool: PagePool, vocab: int,
    device: torch.device, checked: bool,
) -> State:  # fmt: skip
    """A state of `rows` empty rows over freshly made entries. An owned pool gives every row its pages now."""
    each = -(-max_len // page_size)
    leases = tuple(Lease(pool, pool.take(each) if pool.owned else ()) for _ in range(rows))
    log = None
    if checked:
        slots = torch.zeros(pool.pages + 1, page_size, dtype=torch.int64, device=device)
        log = TokenLog(slots, slots.clone(), torch.zeros(rows, dtype=torch.int64, device=device))
    return State(
        lengths=torch.zeros(rows, dtype=torch.int32, device=device),
        page_table=page_table(leases, each, device),
        layers=layers, pending=None, log=log, page_size=page_size, max_len=max_len, vocab=vocab,
        host=Host((0,) * rows, leases, tuple(len(lease.pages) for lease in leases)),
    )  # fmt: skip


def page_table(leases: Sequence[Lease], max_pages: int, device: torch.device) -> Int[Tensor, "rows max_pages"]:
    """The leases' page ids, one row each, filled up with the scratch page."""
    rows = [[*lease.pages, *(0,) * (max_pages - len(lease.pages))] for lease in leases]
    return torch.tensor(rows, dtype=torch.int32).reshape(len(leases), max_pages).to(device)


def check_usable(state: State) -> None:
    """`StateError` for a state that was donated, released, or is pending."""
    if state.host.used is not None:
        raise StateError(f"this state was {state.host.used} and cannot be used again; use the state that replaced it")
    for row, lease in enumerate(state.host.leases):
        if lease.ended:
            raise StateError(f"row {row} of this state was released; use the state that replaced it")
    if state.pending is not None:
        raise StateError("this state is pending after keep_steps=True; call commit(state, accepted) first")


def check_fresh(state: State) -> None:
    """`StaleStateError` naming the first stale row of a checked state (a host read; left out while tracing)."""
    if state.log is None or torch._C._len_torch_dispatch_stack():
        return
    for row, stale in enumerate(stale_rows(state.log, state.page_table, state.lengths).tolist()):
        if stale:
            raise StaleStateError(
                f"row {row} of this state is stale: another continuation of the same state has overwritten its newest "
                "tokens; fork(state) before continuing it twice"
            )


def reserve(state: State, counts: Sequence[int]) -> State:
    """Take the pages that `counts` more tokens a row may need, all or nothing; `OutOfPages` when there are too few."""
    host = state.host
    need = [-(-(length + count) // state.page_size) for length, count in zip(host.lengths, counts, strict=True)]
    more = [max(0, pages - len(lease.pages)) for pages, lease in zip(need, host.leases, strict=True)]
    if any(more):
        pool = host.leases[0].pool
        pages = iter(pool.take(sum(more)))
        for lease, count in zip(host.leases, more, strict=True):
            lease.pages += tuple(next(pages) for _ in range(count))
    if all(pages <= known for pages, known in zip(need, host.in_table, strict=True)):
        return state
    table = page_table(host.leases, state.page_table.shape[1], state.lengths.device)
    return replace(state, page_table=table, host=replace(host, in_table=tuple(len(x.pages) for x in host.leases)))


def host_lengths(state: State, counts: Sequence[int]) -> HostLengths:
    """What kernels may know on the host: each row's length with its new tokens, and its pages."""
    host = state.host
    lengths = tuple(length + count for length, count in zip(host.lengths, counts, strict=True))
    return HostLengths(tuple(counts), lengths, tuple(lease.pages for lease in host.leases), host.exact)


def grown(
    state: State,
    layers: tuple[Entry, ...],
    log: TokenLog | None,
    counts: Tensor,
    host_counts: Sequence[int],
    keep: bool,
) -> State:
    """The state after a forward: `counts` more tokens a row, pending when steps were kept."""
    lengths = tuple(length + count for length, count in zip(state.host.lengths, host_counts, strict=True))
    host = replace(state.host, lengths=lengths, pending=tuple(host_counts) if keep else None)
    pending = counts if keep else None
    return replace(state, lengths=state.lengths + counts, layers=layers, pending=pending, log=log, host=host)


def commit(state: State, accepted: Int[Tensor, " rows"] | Sequence[int]) -> State:
    """End a pending state: of each row's newest tokens the first `accepted` count, the rest are dropped.

    Raises `StateError` when nothing is pending, `ValueError` for a count below zero or above what was offered (read
    on the host only where that needs no device sync).
    """
    pending = state.pending
    if pending is None or state.host.pending is None:
        raise StateError("commit: nothing is pending; only a state from forward(..., keep_steps=True) can be committed")
    known = _known(accepted)
    if not isinstance(accepted, Tensor):
        accepted = torch.tensor([operator.index(count) for count in accepted], dtype=torch.int32)
    if accepted.is_floating_point() or accepted.dtype == torch.bool:
        raise TypeError(f"commit: accepted must be integers, found {accepted.dtype}")
    if accepted.shape != pending.shape:
        raise ValueError(f"commit: accepted has shape {list(accepted.shape)}, expected one count a row, [{state.rows}]")
    accepted = accepted.to(device=pending.device, dtype=pending.dtype)
    host = _committed(state.host, known)
    lengths = state.lengths - pending + accepted
    layers = tuple(entry.after(accepted) if isinstance(entry, Recurrent) else entry for entry in state.layers)
    log = state.log if state.log is None else state.log.after(accepted)
    return replace(state, lengths=lengths, layers=layers, pending=None, log=log, host=host)


def _known(values: Tensor | Sequence[int]) -> list[int] | None:
    """Values as a list where reading them costs no device sync, else None."""
    if not isinstance(values, Tensor):
        return list(values)
    tracing = torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling()
    return None if tracing or values.device.type != "cpu" else values.tolist()


def _committed(host: Host, accepted: list[int] | None) -> Host:
    offered = host.pending or ()
    if accepted is None:
        return replace(host, pending=None, exact=False)
    for row, (count, most) in enumerate(zip(accepted, offered, strict=True)):
        if not 0 <= count <= most:
            raise ValueError(f"commit: row {row} was offered {most} tokens, {count} were accepted; give 0..{most}")
    lengths = tuple(length - most + count for length, most, count in zip(host.lengths, offered, accepted, strict=True))
    return replace(host, lengths=lengths, pending=None)


def fork(state: State, rows: Sequence[int] | None = None) -> State:
    """Copies of `rows` (all by default, repeats allowed) that can be continued independently of the original.

    In a shared pool full pages are shared and each partly filled page is copied to a fresh one; where every row owns
    its pages, the copies get a pool of their own.
    """
    check_usable(state)
    rows = list(range(state.rows) if rows is None else rows)
    _check_rows("fork", state, rows)
    lengths = state.lengths.tolist()
    pool = state.host.leases[0].pool
    width = state.page_table.shape[1]
    if pool.owned:
        pool = PagePool(len(rows) * width, owned=True)
        leases = [Lease(pool, pool.take(width)) for _ in rows]
        used = [-(-lengths[row] // state.page_size) for row in rows]
        copies = [
            (old, new)
            for row, lease, count in zip(rows, leases, used, strict=True)
            for old, new in zip(state.host.leases[row].pages[:count], lease.pages, strict=False)
        ]
        moved = _map_appended(
            state, lambda pages: _copied(pages, pages.new_zeros(pool.pages + 1, *pages.shape[1:]), copies)
        )
    else:
        leases, copies = _share(state, rows, lengths)
        moved = _map_appended(state, lambda pages: _copied(pages, pages, copies))
    return _take_rows(moved, rows, tuple(leases), [lengths[row] for row in rows])


def _share(state: State, rows: list[int], lengths: list[int]) -> tuple[list[Lease], list[tuple[int, int]]]:
    pool = state.host.leases[0].pool
    partial = [row for row in rows if lengths[row] % state.page_size]
    fresh = iter(pool.take(len(partial)))
    leases, copies = [], []
    for row in rows:
        full = lengths[row] // state.page_size
        held = state.host.leases[row].pages
        pool.share(held[:full])
        pages = list(held[:full])
        if lengths[row] % state.page_size:
            pages.append(next(fresh))
            copies.append((held[full], pages[-1]))
        leases.append(Lease(pool, pages))
    return leases, copies


def _copied(source: Tensor, target: Tensor, copies: list[tuple[int, int]]) -> Tensor:
    """`target` with pages copied from `source`, in place: the pages written belong to nobody yet."""
    if copies:
        old, new = torch.tensor(copies, device=source.device).unbind(1)
        target[new] = source[old]
    return target


def select(state: State, rows: Sequence[int]) -> State:
    """The state of distinct `rows`, in that order; -1 makes an empty row. `ValueError` for a repeat: `fork` copies."""
    check_usable(state)
    rows = list(rows)
    _check_rows("select", state, rows, least=-1)
    live = [row for row in rows if row >= 0]
    if len(set(live)) < len(live):
        raise ValueError(
            f"select: rows {rows} name a row twice, and both would share its pages; fork(state, rows) copies"
        )
    pool = state.host.leases[0].pool
    leases = tuple(state.host.leases[row] if row >= 0 else Lease(pool) for row in rows)
    return _take_rows(state, rows, leases, [state.host.lengths[row] if row >= 0 else 0 for row in rows])


def release(state: State, rows: Sequence[int] | None = None) -> State:
    """Return pages. Without `rows` the whole state ends; with them, a state in which these rows are empty."""
    check_usable(state)
    host = state.host
    if rows is None:
        for lease in host.leases:
            lease.end()
        host.used = "released"
        return state
    _check_rows("release", state, rows)
    gone = set(rows)
    kept = [row if row not in gone else -1 for row in range(state.rows)]
    leases = tuple(_released(lease) if row in gone else lease for row, lease in enumerate(host.leases))
    lengths = [0 if row in gone else length for row, length in enumerate(host.lengths)]
    return _take_rows(state, kept, leases, lengths)


def _released(lease: Lease) -> Lease:
    if lease.pool.owned:
        return lease.move()
    lease.end()
    return Lease(lease.pool)


def _check_rows(call: str, state: State, rows: Sequence[int], least: int = 0) -> None:
    if not rows:
        raise ValueError(f"{call}: no rows are given; name at least one of 0..{state.rows - 1}")
    for row in rows:
        if not least <= row < state.rows:
            raise ValueError(f"{call}: row {row} is not in {least}..{state.rows - 1}")


def _take_rows(state: State, rows: list[int], leases: tuple[Lease, ...], lengths: list[int]) -> State:
    """The state with its rows picked, -1 giving an empty one."""
    device = state.lengths.device
    index = torch.tensor([*(max(row, 0) for row in rows), state.rows], device=device)
    live = torch.tensor([*(row >= 0 for row in rows), True], device=device)

    def pick(entry: Entry) -> Entry:
        if isinstance(entry, Appended):
            return entry
        return map(lambda x: torch.where(live.reshape(-1, *(1,) * (x.ndim - 1)), x[index], 0), entry)

    def pick_row(x: Tensor) -> Tensor:
        return torch.where(live[:-1], x[index[:-1]], 0)

    log = state.log if state.log is None else replace(state.log, tip=pick_row(state.log.tip))
    return replace(
        state,
        lengths=pick_row(state.lengths),
        page_table=page_table(leases, state.page_table.shape[1], device),
        layers=tuple(pick(entry) for entry in state.layers),
        log=log,
        host=Host(tuple(lengths), leases, tuple(len(x.pages) for x in leases), state.host.exact),
    )


def _map_appended(state: State, function: Any) -> State:
    layers = tuple(map(function, entry) if isinstance(entry, Appended) else entry for entry in state.layers)
    log = state.log
    if log is not None:
        log = replace(log, token=function(log.token), prefix=function(log.prefix))
    return replace(state, layers=layers, log=log)


def logical(state: State, row: int) -> dict[str, Tensor]:
    """What row `row` remembers: each entry as a dense tensor, appended ones cut to the row's length.

    Keys are `layers.3.k` and the like. Reads the row's length from the device. Raises `StateError` for a state that is
    pending or can no longer be used, `StaleStateError` for a checked one that is stale.
    """
    check_usable(state)
    _check_rows("logical", state, [row])
    check_fresh(state)
    length = int(state.lengths[row])
    found: dict[str, Tensor] = {}
    for index, entry in enumerate(state.layers):
        for path, leaf in _tensors(entry):
            if isinstance(entry, Appended):
                value = leaf[state.page_table[row].long()].flatten(0, 1)[:length]
            else:
                value = leaf[row].clone()
            found[f"layers.{index}.{path}"] = value
    return found


def _tensors(entry: Entry) -> list[tuple[str, Tensor]]:
    return [(dotted(path), leaf) for path, leaf in pytree.tree_flatten_with_path(entry)[0]]
