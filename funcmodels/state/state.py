"""State: everything a model remembers of its rows, as one value.

Entries of a layer are of two kinds. *Appended* entries live in pages of a pool; a reader never looks at or past its
own length, so a write beyond it changes no older state. *Recurrent* entries are returned as new values. After
`forward(..., keep_steps=True)` a state is *pending* until `commit` fixes how many of the newest tokens count.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.utils._pytree as pytree
from jaxtyping import Int
from torch import Tensor
from torch._C._dynamo import eval_frame

from lowering import HostSide, host_side
from lowering.host import HostInt, HostLengths, known_equal, readable, symbolic, valueless
from lowering.layouts import Pages
from params.modes import lasting
from params.tree import dotted, leaves, num_bytes, off_tree, size, static, tree, unchecked

from ..errors import StaleStateError, StateError
from .pages import Extent, Lease, PagePool, Version
from .token_log import TokenLog, stale_rows

if TYPE_CHECKING:
    from .batch import Batch

E = TypeVar("E", bound="Recurrent")


class Appended:
    """An entry whose tensors are all pools `[pages ...]`, page 0 being scratch.

    A pool is plain, `[pages page_size ...]` (or has fewer entries a page, each of some whole tokens), or a
    `lowering.layouts.Pages`, which knows how its tokens lie.
    """


class Recurrent(abc.ABC):
    """An entry whose tensors are all `[slots ...]`: one a row, then a scratch slot; and a `trail` while pending."""

    trail: Any

    @abc.abstractmethod
    def after(self: E, accepted: Int[Tensor, " rows"]) -> E:
        """The entry after the first `accepted` of each row's pending tokens, no longer pending."""


Entry = Appended | Recurrent


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

    @property
    def known(self) -> bool:
        """Whether these are counts, and not mere bounds."""
        return self.least is self.most  # not compared: they may be symbols

    @classmethod
    def of(cls, batch: Batch) -> Growth:
        """That by a batch, whose rows may get fewer than `max_query` tokens, down to none, where it does not say."""
        most = batch.counts or (batch.max_query,) * batch.rows
        return cls(most, most if batch.counted else (0,) * batch.rows)


@dataclass
class Host:
    """What the host knows of one version of a state: rows hold at least `least` and at most `lengths` tokens.

    The two are equal unless accepted counts stayed on the device. `in_table[r]` pages of row r's lease are written in
    the device page table. `pending` are the tokens offered to `commit`. `used` says why the state can be used no more.
    """

    lengths: tuple[HostInt, ...]
    leases: tuple[Lease, ...]
    in_table: tuple[int, ...]
    least: tuple[HostInt, ...]
    version: Version
    pending: Growth | None = None
    used: str | None = None
    buffers: Buffers = field(default_factory=Buffers)

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

    def mark_used(self, how: str, instead: str = Buffers.instead) -> None:
        """Let nobody use this value again, nor one that shares its lengths or recurrent entries: it was `how`."""
        self.host.buffers.used, self.host.buffers.instead = how, instead

    def without_host(self) -> State:
        """The tensors alone, holding no pages; of no use until `replace(..., host=...)` gives it a host."""
        return unchecked(State, **vars(self) | {"host": None})

    def host_ints(self) -> tuple[HostInt, ...]:
        """What the host knows of the rows and changes from call to call: their lengths, and their bounds if inexact."""
        return self.host.lengths if self.host.exact else (*self.host.lengths, *self.host.least)

    def with_host_ints(self, values: tuple[HostInt, ...]) -> State:
        """The state as if these were its `host_ints`."""
        host = replace(self.host, lengths=values[: self.rows], least=values[-self.rows :])
        return replace(self, host=host)

    def host_facts(self) -> tuple[bool, ...]:
        """What of the host's knowledge a choice of kernel may depend on."""
        return self.host.exact, self.host.fits

    def emptied(self) -> State:
        """The same pools with empty rows that hold no pages: to run a program with that must leave this state alone."""
        pools = {id(pool) for pool in self.pools()}
        return pytree.tree_map(lambda leaf: leaf if id(leaf) in pools else torch.zeros_like(leaf), self)

    def pools(self) -> list[Tensor]:
        """The pools of the appended entries: all versions of a state share these tensors."""
        return [pool for entry in self.layers if isinstance(entry, Appended) for pool in leaves(entry)]

    def __repr__(self) -> str:
        kinds = [type(entry).__name__ for entry in self.layers]
        shown = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
        bound = "=" if self.host.exact else "<="
        status = self.host.used or self.host.buffers.used or ("pending" if self.pending is not None else None)
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
    version = Version((0,) * rows, Extent(exact=True))
    return State(
        lengths=torch.zeros(rows, dtype=torch.int32, device=device),
        page_table=page_table(leases, each, device),
        layers=layers, pending=None, log=log, page_size=page_size, max_len=max_len, vocab=vocab,
        host=Host((0,) * rows, leases, tuple(len(lease.pages) for lease in leases), (0,) * rows, version),
    )  # fmt: skip


def like(state: State, entries: Callable[..., tuple[Entry, ...]], room: int = 0) -> State:
    """An empty state of the same rows and kind of pool, with the entries of another model and `room` for more tokens.

    `entries(rows, pages, page_size, dtype, recurrent_dtype, device)` makes them, in the dtypes of the first appended
    and recurrent tensors of `state` (the former's where it has no recurrent ones).
    """
    host = state.host
    max_len = state.max_len + room
    more = -(-max_len // state.page_size) - state.page_table.shape[1]
    pool = PagePool(host.leases[0].pool.pages + more * state.rows, host.leases[0].pool.owned)
    dtype = _dtype(state, Appended) or torch.get_default_dtype()
    device = state.lengths.device
    layers = entries(state.rows, pool.pages, state.page_size, dtype, _dtype(state, Recurrent) or dtype, device)
    return empty(
        layers, rows=state.rows, max_len=max_len, page_size=state.page_size, pool=pool, vocab=state.vocab,
        device=device, checked=state.log is not None,
    )  # fmt: skip


def _dtype(state: State, kind: type) -> torch.dtype | None:
    found = [leaf.dtype for entry in state.layers if isinstance(entry, kind) for leaf in leaves(entry)]
    return found[0] if found else None


def page_table(leases: Sequence[Lease], max_pages: int, device: torch.device) -> Int[Tensor, "rows max_pages"]:
    """The leases' page ids, one row each, filled up with the scratch page."""
    rows = [[*lease.pages, *(0,) * (max_pages - len(lease.pages))] for lease in leases]
    return torch.tensor(rows, dtype=torch.int32, device="cpu").reshape(len(leases), max_pages).to(device)


def check_usable(state: State) -> None:
    """`StateError` for a state that was donated, released, or is pending."""
    check_unused(state)
    for row, lease in enumerate(state.host.leases):
        if lease.ended:
            raise StateError(f"row {row} of this state was released; use the state that replaced it")
    if state.pending is not None:
        raise StateError("this state is pending after keep_steps=True; call commit(state, accepted) first")


def check_followed() -> None:
    """`StateError` inside of `torch.export` and `torch.compile`, also where it runs a part plainly.

    They leave out what the host does.
    """
    traced = torch.compiler.is_exporting() or torch.compiler.is_dynamo_compiling()
    if traced or eval_frame.get_eval_frame_callback() not in (None, False):
        raise StateError(
            "torch.compile and torch.export cannot follow a state, whose pages and lengths are kept on the host; "
            "capture the function with lowering.jit, or pass state=None"
        )


def check_unused(state: State) -> None:
    """`StateError` for a state that was donated or released, or that `torch.compile` would have to follow."""
    check_followed()
    if not isinstance(state, State):
        raise TypeError(f"expected a State, found a {type(state).__name__}; make one with model.init_state")
    how = state.host.used or state.host.buffers.used
    if how is not None:
        raise StateError(f"this state was {how} and cannot be used again; {state.host.buffers.instead}")


def check_fresh(state: State, rows: Sequence[int] | None = None) -> None:
    """`StaleStateError` naming the first stale one of `rows` (all by default); left out while tracing.

    From what the host knows of the leases' writes. Of a checked state the tokens are looked up too (a host read).
    """
    check_followed()
    if valueless(state.lengths):
        return
    for row in sorted({*overwritten_rows(state), *(_changed_rows(state) if state.log is not None else ())}):
        if rows is None or row in rows:
            raise StaleStateError(
                f"row {row} of this state is stale: another continuation of the same state has overwritten its newest "
                "tokens; fork(state) before continuing it twice"
            )


def overwritten_rows(state: State) -> list[int]:
    """The rows some of whose tokens another continuation has overwritten, by what the host knows."""
    host = state.host
    known = zip(host.leases, host.version.epochs, host.lengths, strict=True)
    extent = host.version.extent
    return [row for row, (lease, epoch, length) in enumerate(known) if not lease.holds(epoch, length, extent)]


def _changed_rows(state: State) -> list[int]:
    """The rows of a checked state whose slots hold other tokens than they were built from."""
    assert state.log is not None
    changed = stale_rows(state.log, state.page_table, state.lengths).tolist()
    return [row for row, stale in enumerate(changed) if stale]


def new_version(host: Host, growth: Growth) -> Version:
    """That of a state grown from the one with this host; `claim` says when it is written."""
    return Version(host.version.epochs, Extent(host.exact and growth.known))


def claim(host: Host, most: Sequence[HostInt], new: Version) -> None:
    """Note in the leases that up to `most` tokens are written behind each row, and that `new` is the version with them.

    The last that the host does before they are written: what has failed until then has overwritten nobody's tokens.
    """
    check_followed()
    old = host.version
    rows = zip(host.leases, old.epochs, host.least, host.lengths, most, strict=True)
    new.epochs = tuple(
        lease.write(epoch, least, length, old.extent, new.extent) if count else epoch
        for lease, epoch, least, length, count in rows
    )


def check_rows(call: str, state: State, rows: Iterable[int], least: int = 0) -> list[int]:
    """The rows as integers. `TypeError` naming `call` for others, `ValueError` for none, or one that is not there."""
    try:
        rows = list(rows)
        if any(isinstance(row, bool) or getattr(row, "dtype", None) == torch.bool for row in rows):
            raise TypeError
        found = [operator.index(row) for row in rows]
    except TypeError:
        raise TypeError(f"{call}: rows must be a list of integers, found {rows!r:.100}") from None
    if not found:
        raise ValueError(f"{call}: no rows are given; name at least one of 0..{state.rows - 1}")
    for row in found:
        if not least <= row < state.rows:
            raise ValueError(f"{call}: row {row} is not in {least}..{state.rows - 1}")
    return found


def host_lengths(state: State, growth: Growth) -> HostLengths:
    """What kernels may know on the host: each row's length with its new tokens, and its pages."""
    host = state.host
    # A trace outlives the pages that rows hold now.
    pages = () if symbolic(host.lengths) else tuple(lease.pages for lease in host.leases)
    return HostLengths(growth.most, _sum(host.lengths, growth.most), pages, host.exact and growth.known, host.fits)


def grown(
    state: State, layers: tuple[Entry, ...], log: TokenLog | None, counts: Tensor, growth: Growth, version: Version,
    keep: bool,
) -> State:  # fmt: skip
    """The state after a forward: `counts` more tokens a row, pending when steps were kept."""
    host = grown_host(state.host, growth, version, keep)
    pending = counts if keep else None
    return replace(state, lengths=state.lengths + counts, layers=layers, pending=pending, log=log, host=host)


def grown_host(host: Host, growth: Growth, version: Version, keep: bool) -> Host:
    """The host's part of `grown`. A state that becomes pending still holds the recurrent entries of the one before."""
    pending, buffers = (growth, host.buffers) if keep else (None, Buffers())
    lengths, least = _sum(host.lengths, growth.most), _sum(host.least, growth.least)
    return replace(host, lengths=lengths, least=least, version=version, pending=pending, buffers=buffers)


def replayed(host: Host) -> Host:
    """`host` of a state that a replay made: what was donated to it is now its own."""
    return replace(host, buffers=Buffers()) if host.buffers.used else host


def rewound(state: State, before: State) -> State:
    """`state`, grown from `before` by forwards, with only the tokens that `before` held; for appended entries alone."""
    log = state.log
    if log is not None and before.log is not None:
        log = replace(log, tip=before.log.tip)
    version = version_in(state.host.leases, before.host, range(state.rows))
    host = replace(state.host, lengths=before.host.lengths, least=before.host.least, version=version)
    return replace(state, lengths=before.lengths, log=log, host=host)


def version_in(leases: Sequence[Lease], host: Host, rows: Sequence[int]) -> Version:
    """The version of `rows` of a state (-1: none) in these leases; what lies in a new one was never overwritten."""
    held = zip(leases, rows, strict=True)
    kept = [row if row >= 0 and lease is host.leases[row] else -1 for lease, row in held]
    return Version(tuple(host.version.epochs[row] if row >= 0 else 0 for row in kept), host.version.extent)


def _sum(counts: Sequence[HostInt], more: Sequence[HostInt]) -> tuple[HostInt, ...]:
    return tuple(count + extra for count, extra in zip(counts, more, strict=True))


def _difference(counts: Sequence[HostInt], less: Sequence[HostInt]) -> tuple[HostInt, ...]:
    return tuple(count - dropped for count, dropped in zip(counts, less, strict=True))


def _commit_on_host(
    fit: Callable[[Any], Any], state: State, accepted: Int[Tensor, " rows"] | Sequence[int]
) -> HostSide:
    """What the host does where a captured `commit` replays."""
    accepted, host = _counted(state, accepted)
    return HostSide({"accepted": accepted}, lambda committed: replace(committed, host=host))


@host_side(_commit_on_host)
@lasting
def commit(state: State, accepted: Int[Tensor, " rows"] | Sequence[int]) -> State:
    """End a pending state: of each row's newest tokens the first `accepted` count, the rest are dropped.

    Raises `StateError` when nothing is pending, `ValueError` for a count below zero or above what was offered (read
    on the host only where that needs no device sync).
    """
    accepted, host = _counted(state, accepted)
    assert state.pending is not None
    lengths = state.lengths - state.pending + accepted
    layers = tuple(entry.after(accepted) if isinstance(entry, Recurrent) else entry for entry in state.layers)
    log = state.log if state.log is None else state.log.after(accepted)
    return replace(state, lengths=lengths, layers=layers, pending=None, log=log, host=host)


def _counted(state: State, accepted: Tensor | Sequence[int]) -> tuple[Tensor, Host]:
    """The accepted counts, checked, as `commit` computes with them; and the host's part of the state after it."""
    check_unused(state)
    pending = state.pending
    if pending is None or state.host.pending is None:
        raise StateError("commit: nothing is pending; only a state from forward(..., keep_steps=True) can be committed")
    counts = known(accepted)
    if not isinstance(accepted, Tensor):
        accepted = torch.tensor([operator.index(count) for count in accepted], dtype=torch.int32, device="cpu")
    if accepted.is_floating_point() or accepted.dtype == torch.bool:
        raise TypeError(f"commit: accepted must be integers, found {accepted.dtype}")
    if accepted.shape != pending.shape:
        raise ValueError(f"commit: accepted has shape {list(accepted.shape)}, expected one count a row, [{state.rows}]")
    return accepted.to(device=pending.device, dtype=pending.dtype), committed_host(state.host, counts)


def known(values: Tensor | Sequence[int]) -> list[int] | None:
    """Values as a list where reading them costs no device sync, else None."""
    if not isinstance(values, Tensor):
        return list(values)
    return values.tolist() if readable(values) else None


def committed_host(host: Host, accepted: list[int] | None) -> Host:
    """The host's part of `commit`. `ValueError` for a count below zero or above what was offered."""
    assert host.pending is not None
    most, least = host.pending
    version = Version(host.version.epochs, Extent(host.exact and accepted is not None))
    host = replace(host, pending=None, version=version, buffers=Buffers())
    if accepted is None:
        return replace(host, least=_difference(host.least, least))
    for row, (count, offered) in enumerate(zip(accepted, most, strict=True)):
        if not 0 <= count <= offered:
            raise ValueError(
                f"commit: row {row} was offered {offered} tokens, {count} were accepted; give 0..{offered}"
            )
    lengths, least = (
        _sum(_difference(known, new), accepted) for known, new in ((host.lengths, most), (host.least, least))
    )
    return replace(host, lengths=lengths, least=least)


def read_lengths(state: State) -> State:
    """The state with its rows' lengths known on the host, read from the device where only bounds of them are.

    After a captured round on a device, kernels that take lengths as lists on the host need it.
    """
    check_unused(state)
    if state.host.exact:
        return state
    lengths = tuple(state.lengths.tolist())
    return replace(state, host=replace(state.host, lengths=lengths, least=lengths))


def logical(state: State, row: int) -> dict[str, Tensor]:
    """What row `row` remembers: each entry as a dense tensor, appended ones cut to the row's length.

    Keys are `layers.3.k` and the like. Reads the row's length from the device. Raises `StateError` for a state that is
    pending or can no longer be used, `StaleStateError` for a row that is stale.
    """
    check_usable(state)
    [row] = check_rows("logical", state, [row])
    check_fresh(state, [row])
    length = int(state.lengths[row])
    found: dict[str, Tensor] = {}
    for index, entry in enumerate(state.layers):
        for path, leaf in _parts(entry):
            if isinstance(leaf, Pages):
                value = leaf.gather(state.page_table[row : row + 1])[0, :length]
            elif isinstance(entry, Appended):
                count = length * leaf.shape[1] // state.page_size
                value = leaf[state.page_table[row].long()].flatten(0, 1)[:count]
            else:
                value = leaf[row].clone()
            found[f"layers.{index}.{path}"] = value
    return found


def _parts(entry: Entry) -> list[tuple[str, Any]]:
    """What an entry holds, by name: tensors, and pages that know their layout."""
    found = pytree.tree_flatten_with_path(entry, is_leaf=lambda part: isinstance(part, Pages))[0]
    return [(dotted(path), part) for path, part in found]
