"""State: everything a model remembers of its rows, as one value.

Entries of a layer are of two kinds. *Appended* entries live in pages of a pool; a reader never looks at or past its
own length, so a write beyond it changes no older state. *Recurrent* entries are returned as new values. After
`forward(..., keep_steps=True)` a state is *pending* until `commit` fixes how many of the newest tokens count.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from jaxtyping import Int
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._C._functorch import is_functorch_wrapped_tensor

from lowering import captured_with
from lowering.host import HostInt, readable, valueless
from lowering.jit.tape import noted
from lowering.layouts import Pages
from lowering.protocols import Carried
from params.modes import lasting
from params.tree import dotted, leaves, num_bytes, off_tree, size, static, tree, unchecked

from ..errors import StateError
from .ledger import Buffers, Ledger
from .pages import Lease, PagePool
from .space import Space
from .token_log import TokenLog, stale_rows

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


def places(layers: Sequence[Any]) -> tuple[int, ...]:
    """Where the tensors of appended entries lie in memory; none where nothing lies there, as in a trace."""
    entries = [entry for entry in layers if isinstance(entry, Appended)]
    tensors = [leaf for entry in entries for leaf in leaves(entry) if type(leaf) in (Tensor, torch.nn.Parameter)]
    if any(x.is_meta or valueless(x) or is_functorch_wrapped_tensor(x) for x in tensors):
        return ()
    return tuple(x.untyped_storage().data_ptr() for x in tensors)


def _holds_lengths(state: State, ledger: Ledger) -> bool:
    """Whether the ledger knows of these lengths, where they can be read without waiting for a device."""
    if state.lengths.shape != (len(ledger.lengths),):
        return False
    held = state.lengths.tolist() if readable(state.lengths) else ledger.lengths
    return all(least <= length <= most for least, length, most in zip(ledger.least, held, ledger.lengths, strict=True))


def _holds_pages(state: State, ledger: Ledger) -> bool:
    """Whether the page table has the leases' pages, where it can be read without waiting for a device."""
    if state.page_table.shape != (len(ledger.leases), -(-state.max_len // state.page_size)):
        return False
    if not readable(state.page_table):
        return True
    held = zip(state.page_table.tolist(), ledger.leases, ledger.in_table, strict=True)
    return all(tuple(row[:count]) == lease.pages[:count] for row, lease, count in held)


def _is_moved(state: State) -> bool:
    """Whether the first pool is none of the ledger's, as far as both are known."""
    first = next((entry for entry in state.layers if isinstance(entry, Appended)), None)
    found = places(() if first is None else [first])
    return bool(found) and bool(state.ledger.pools) and set(found).isdisjoint(state.ledger.pools)


@tree
class State(Carried):
    """Lengths, page table and one entry a layer. `pending` holds the tokens a row may still drop, or None."""

    lengths: Int[Tensor, " rows"]
    page_table: Int[Tensor, "rows max_pages"]
    layers: tuple[Entry, ...]
    pending: Int[Tensor, " rows"] | None
    log: TokenLog | None
    page_size: int = static()
    max_len: int = static()
    vocab: int = static()
    ledger: Ledger = off_tree()

    def mapped(self) -> State:
        """A state that was made by mapping another's tensors: a value of its own if no pool of pages is the other's.

        One whose lengths or page table contradict its ledger can be printed and mapped on, and is refused elsewhere.
        """
        known = all(isinstance(part, Tensor) for part in (self.lengths, self.page_table))
        if not known or not isinstance(self.ledger, Ledger) or not isinstance(self.layers, tuple):
            return self
        if not _is_moved(self):  # as nearly always: the other pools need not be looked at
            return self
        ledger = self.ledger.of_pools(places(self.layers))
        if ledger is self.ledger:
            return self
        if not (_holds_lengths(self, ledger) and _holds_pages(self, ledger)):
            ledger.buffers.used = "made by a map that changed its lengths or its page table"
            ledger.buffers.instead = "map so that these stay as they are, or make a state with model.init_state"
        # A map to another dtype leaves integers what they are, the same tensors; of the copy they are its own.
        pools = {id(pool) for pool in self.pools()}
        parts, structure = pytree.tree_flatten([getattr(self, name) for name in _TENSORS])
        own = [part if id(part) in pools or not isinstance(part, Tensor) else part.clone() for part in parts]
        values = zip(_TENSORS, pytree.tree_unflatten(own, structure), strict=True)
        return unchecked(State, **vars(self) | dict(values) | {"ledger": ledger})

    def __setstate__(self, fields: dict[str, Any]) -> None:
        vars(self).update(fields)
        found = places(self.layers)
        if self.ledger is not None and found != self.ledger.pools:  # copied with its tensors, or unpickled
            vars(self)["ledger"] = replace(self.ledger, pools=found)

    @property
    def rows(self) -> int:
        """Capacity: number of rows, empty ones included."""
        return self.lengths.shape[0]

    def check(self) -> None:
        """`StateError` for a state that was donated or released, or that `torch.compile` would have to follow."""
        check_unused(self)

    def mark_used(self, how: str, instead: str = Buffers.instead) -> None:
        """Let nobody use this value again, nor one that shares its lengths or recurrent entries: it was `how`."""
        self.ledger.buffers.used, self.ledger.buffers.instead = how, instead

    def with_ledger(self, ledger: Ledger | None) -> State:
        """The tensors with this ledger, none to be of no use; what was donated to make them is their own."""
        if ledger is not None and ledger.buffers.used:
            ledger = replace(ledger, buffers=Buffers())
        return unchecked(State, **vars(self) | {"ledger": ledger})

    def host_ints(self) -> tuple[HostInt, ...]:
        """What the host knows of the rows and changes from call to call: their lengths, and their bounds if inexact."""
        return self.ledger.lengths if self.ledger.exact else (*self.ledger.lengths, *self.ledger.least)

    def with_host_ints(self, values: tuple[HostInt, ...]) -> State:
        """The state as if these were its `host_ints`."""
        return self.with_ledger(replace(self.ledger, lengths=values[: self.rows], least=values[-self.rows :]))

    def host_facts(self) -> tuple[bool, ...]:
        """What of the host's knowledge a choice of kernel may depend on."""
        return self.ledger.exact, self.ledger.fits

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
        bound = "=" if self.ledger.exact else "<="
        status = self.ledger.used or ("pending" if self.pending is not None else None)
        tail = f", {status}" if status else ""
        return (
            f"State(rows={self.rows}, lengths{bound}{list(self.ledger.lengths)}, max_len={self.max_len}, "
            f"page_size={self.page_size}, {shown}, {size(num_bytes(self))}{tail})"
        )


_TENSORS = ("lengths", "page_table", "layers", "pending", "log")


def empty(
    layers: tuple[Entry, ...],
    *,
    rows: int,
    max_len: int,
    page_size: int,
    pool: PagePool,
    vocab: int,
    device: torch.device,
    checked: bool,
) -> State:
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
        layers=layers,
        pending=None,
        log=log,
        page_size=page_size,
        max_len=max_len,
        vocab=vocab,
        ledger=replace(Ledger.empty(leases), pools=places(layers)),
    )


def like(state: State, entries: Callable[[Space], tuple[Entry, ...]], room: int = 0) -> State:
    """An empty state of the same rows and kind of pool, with the entries of another model and `room` for more tokens.

    `entries(space)` makes them, in the dtypes of the first appended and recurrent tensors of `state`; where it has no
    recurrent ones, all in that of the former.
    """
    pool = state.ledger.leases[0].pool
    max_len = state.max_len + room
    more = -(-max_len // state.page_size) - state.page_table.shape[1]
    pool = PagePool(pool.pages + more * state.rows, pool.owned)
    dtype = _dtype(state, Appended) or torch.get_default_dtype()
    device = state.lengths.device
    recurrent = _dtype(state, Recurrent) or dtype
    layers = entries(Space(state.rows, pool.pages, state.page_size, dtype, recurrent, device))
    return empty(
        layers,
        rows=state.rows,
        max_len=max_len,
        page_size=state.page_size,
        pool=pool,
        vocab=state.vocab,
        device=device,
        checked=state.log is not None,
    )


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
    for row, lease in enumerate(state.ledger.leases):
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
    used = state.ledger.used
    if used is not None:
        raise StateError(f"this state was {used} and cannot be used again; {state.ledger.buffers.instead}")


def check_fresh(state: State, rows: Sequence[int] | None = None) -> None:
    """`StaleStateError` naming the first stale one of `rows` (all by default); left out while tracing.

    From what the host knows of the leases' writes. Of a checked state the tokens are looked up too (a host read).
    """
    check_followed()
    if valueless(state.lengths):
        return
    _check_agreed(state)
    for row in sorted({*state.ledger.overwritten, *(_changed_rows(state) if state.log is not None else ())}):
        if rows is None or row in rows:
            raise state.ledger.stale(row)


def _check_agreed(state: State) -> None:
    """`StateError` for tensors that are not those of the ledger: of lengths only where that needs no device sync."""
    ledger, width = state.ledger, -(-state.max_len // state.page_size)
    if state.page_table.shape != (len(ledger.lengths), width):
        raise StateError(
            f"this state's page table is {list(state.page_table.shape)}, and {len(ledger.lengths)} rows of "
            f"max_len={state.max_len} in pages of {state.page_size} take [{len(ledger.lengths)}, {width}]; {_MADE}"
        )
    if not _holds_lengths(state, ledger):
        bound = "holds" if ledger.exact else "holds at most"
        found = f"this state's lengths are {known(state.lengths)}, and by its ledger it {bound}"
        raise StateError(f"{found} {list(ledger.lengths)}; {_MADE}")
    if _is_moved(state):
        raise StateError(f"this state's pools of pages are not those of its ledger; {_MADE}")


_MADE = "take states as they are made, by forward, commit, fork, select or a map over all their tensors"


def _changed_rows(state: State) -> list[int]:
    """The rows of a checked state whose slots hold other tokens than they were built from."""
    assert state.log is not None
    changed = stale_rows(state.log, state.page_table, state.lengths).tolist()
    return [row for row, stale in enumerate(changed) if stale]


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


def rewound(state: State, before: State) -> State:
    """`state`, grown from `before` by forwards, with only the tokens that `before` held; for appended entries alone."""
    log = state.log
    if log is not None and before.log is not None:
        log = replace(log, tip=before.log.tip)
    ledger = noted(Ledger.rewind, state.ledger, before.ledger)
    return replace(state, lengths=before.lengths, log=log, ledger=ledger)


def _counts(fit: Callable[[Any], Any], state: State, accepted: Tensor | Sequence[int]) -> dict[str, Any]:
    return {"accepted": _tensor_of(state, accepted)}


@captured_with(_counts)
@lasting
def commit(state: State, accepted: Int[Tensor, " rows"] | Sequence[int]) -> State:
    """End a pending state: of each row's newest tokens the first `accepted` count, the rest are dropped.

    Raises `StateError` when nothing is pending, `ValueError` for a count below zero or above what was offered (read
    on the host only where that needs no device sync).
    """
    counts = _tensor_of(state, accepted)
    ledger = noted(_committed, state.ledger, accepted)
    pending = state.pending
    assert pending is not None
    accepted = counts.to(device=pending.device, dtype=pending.dtype)
    lengths = state.lengths - pending + accepted
    layers = tuple(entry.after(accepted) if isinstance(entry, Recurrent) else entry for entry in state.layers)
    log = state.log if state.log is None else state.log.after(accepted)
    return replace(state, lengths=lengths, layers=layers, pending=None, log=log, ledger=ledger)


def _committed(ledger: Ledger, accepted: Tensor | Sequence[int] | None) -> Ledger:
    """The ledger after `commit`; a captured call does not have the counts before its program has run."""
    return ledger.commit(None if accepted is None else known(accepted))


def known(values: Tensor | Sequence[int]) -> list[int] | None:
    """Values as a list where reading them costs no device sync, else None."""
    if not isinstance(values, Tensor):
        return list(values)
    return values.tolist() if readable(values) else None


def _tensor_of(state: State, accepted: Tensor | Sequence[int]) -> Tensor:
    """The accepted counts as a tensor, checked to be one for each row of a pending state."""
    check_unused(state)
    if state.pending is None or state.ledger.pending is None:
        raise StateError("commit: nothing is pending; only a state from forward(..., keep_steps=True) can be committed")
    if not isinstance(accepted, Tensor):
        accepted = torch.tensor([operator.index(count) for count in accepted], dtype=torch.int32, device="cpu")
    if accepted.is_floating_point() or accepted.dtype == torch.bool:
        raise TypeError(f"commit: accepted must be integers, found {accepted.dtype}")
    if accepted.shape != state.pending.shape:
        raise ValueError(f"commit: accepted has shape {list(accepted.shape)}, expected one count a row, [{state.rows}]")
    return accepted


def read_lengths(state: State) -> State:
    """The state with its rows' lengths known on the host, read from the device where only bounds of them are.

    After a captured round on a device, kernels that take lengths as lists on the host need it.
    """
    check_unused(state)
    return state if state.ledger.exact else replace(state, ledger=state.ledger.at(state.lengths.tolist()))


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
