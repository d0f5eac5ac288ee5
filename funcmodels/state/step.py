"""One forward's view of its rows: `begin` works it out once from state and batch, `finish` makes the new state.

Everything a layer needs to know beside its own parameters and past is in a `Step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, is_functorch_wrapped_tensor

from lowering import Rows
from lowering.host import HostLengths, symbolic, valueless
from lowering.jit.tape import beforehand, noted
from lowering.ops.sampling import mix
from params.tree import leaves, tree_map

from ..errors import StateError
from .batch import Batch, check_layout
from .ledger import Ledger
from .rows import reserve
from .state import Appended, Entry, Recurrent, State, check_followed, check_fresh, check_usable, places
from .token_log import TokenLog, written

E = TypeVar("E", bound=Entry)
A = TypeVar("A", bound=Appended)

MAX_KEPT_STEPS = 16
"""Most tokens a row may offer with `keep_steps` when a layer is recurrent: what kernels of the delta rule that go token
by token are meant for. The window of a DFlash block, at its default size, is as long."""


@dataclass(frozen=True)
class Step:
    """The rows of one forward.

    `row` is each token's row (padding: the scratch row), `positions` its place in the row. Without a state, `slots` is
    None.
    """

    rows: Rows
    positions: Int[Tensor, " tokens"]
    row: Int[Tensor, " tokens"]
    keep_steps: bool
    places: Int[Tensor, " tokens"] | None = None
    hashes: Int[Tensor, " tokens"] | None = None
    state: State | None = None
    ledger: Ledger | None = None

    @cached_property
    def slots(self) -> Int[Tensor, " tokens"] | None:
        """Where each token's appended entries go. Whoever asks writes there: the first time, the leases note it.

        So ask after all checks: what is refused before has overwritten nobody's tokens.
        """
        if self.state is not None and self.ledger is not None and not valueless(self.state.lengths):
            self.ledger.claim(self.state.ledger)
        return self.places

    def past(self, layer: int, kind: type[E]) -> E | None:
        """The entry of `layer` before this forward, None without a state. `StateError` unless it is of that kind."""
        if self.state is None:
            return None
        if layer >= len(self.state.layers):
            raise StateError(_other_model(self.state, f"more than {layer}"))
        return _entry(self.state, layer, kind)


def begin(
    state: State | None,
    batch: Batch,
    keep_steps: bool = False,
    *,
    axes: Sequence[int] = (),
    kinds: Sequence[type[Entry]] = (),
) -> Step:
    """Check the call, reserve pages, and lay out the rows.

    `axes` are the numbers of axes of positions that the caller reads: a batch with others is a `ValueError`. `kinds`
    are those of its layers' entries: a state with others is refused before a token is written to it. Without them each
    layer's is held against the state when `Step.past` is asked for it.
    """
    check_layout(batch)
    _check_positions(batch, axes)
    tokens, start = batch.tokens.shape[0], batch.query_start
    rows = Rows(start, max_query=batch.max_query, uniform=batch.uniform)
    row = rows.of_tokens(tokens)
    if state is None:
        if keep_steps:
            raise StateError("keep_steps=True needs a state to commit; pass one, or leave keep_steps out")
        offset = torch.arange(tokens, device=row.device) - start[row.clamp(max=batch.rows - 1)]
        return Step(rows, offset, row, False)
    check_followed()
    _check_kinds(state, kinds)
    state, ledger = _grown(state, batch, keep_steps)
    positions = _positions(state, batch, row)
    hashes = None if state.log is None else _hashes(batch, positions)
    held, host = state.lengths + rows.new, _host_lengths(batch, ledger)
    places = _slots(state, row, positions, padded=not rows.uniform)
    rows = replace(rows, lengths=held, page_table=state.page_table, host=host)
    return Step(rows, positions, row, keep_steps, places, hashes, state, ledger)


def finish(step: Step, layers: Sequence[Entry | None]) -> State | None:
    """The state after the forward, with the layers' new entries; pending when steps are kept."""
    state = step.state
    if state is None:
        return None
    entries = tuple(entry for entry in layers if entry is not None)
    if len(entries) != len(state.layers):
        raise StateError(_other_model(state, str(len(entries))))
    new = step.rows.new
    return replace(
        state,
        lengths=state.lengths + new,
        layers=entries,
        pending=new if step.keep_steps else None,
        log=_logged(step, state),
        ledger=_where_copied(step.ledger, entries),
    )


def _where_copied(ledger: Ledger | None, entries: Sequence[Entry]) -> Ledger | None:
    """The ledger of pools that `writable` has copied, as it does under autograd."""
    if ledger is None or not torch.is_grad_enabled():
        return ledger
    pools = [leaf for entry in entries if isinstance(entry, Appended) for leaf in leaves(entry)]
    return replace(ledger, pools=places(entries)) if any(pool.requires_grad for pool in pools) else ledger


def _logged(step: Step, state: State) -> TokenLog | None:
    """The state's log with the new tokens. The leases note these here where no layer has pages."""
    slots = step.slots
    if state.log is None or step.hashes is None or slots is None:
        return None
    kept = step.rows.max_query if step.keep_steps else None
    return written(state.log, step.hashes, slots, step.row, step.rows.query_start, kept)


def writable(pages: A, *made: Tensor) -> A:
    """`pages` to write new tokens to in place; a copy under autograd, where a backward reads them as they were.

    `made` are all the tensors that the layer puts into the pages, or attends to them with.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*made, *leaves(pages))):
        return tree_map(torch.clone, pages)
    return pages


def text_positions(batch: Batch, step: Step) -> Int[Tensor, " tokens"]:
    """Rotary positions of a model of text, whose step has one axis of them: the batch's own, or the tokens' places."""
    return step.positions if batch.positions is None else batch.positions[0]


def _check_positions(batch: Batch, axes: Sequence[int]) -> None:
    if batch.positions is None or batch.positions.shape[0] in axes:
        return
    found = f"positions have {batch.positions.shape[0]} axes, and this model"
    if not axes:
        raise ValueError(f"{found} reads none: tokens stand where they lie in their rows; leave positions out")
    raise ValueError(f"{found} takes those of text; give one axis, or leave them out")


def _check_kinds(state: State, kinds: Sequence[type[Entry]]) -> None:
    if kinds and len(kinds) != len(state.layers):
        raise StateError(_other_model(state, str(len(kinds))))
    for layer, kind in enumerate(kinds):
        _entry(state, layer, kind)


def _entry(state: State, layer: int, kind: type[E]) -> E:
    entry = state.layers[layer]
    if not isinstance(entry, kind):
        raise StateError(
            f"the state's entry for layer {layer} is {type(entry).__name__}, the layer needs {kind.__name__}; make "
            "the state with the init_state of a model whose config is that of the parameters"
        )
    return entry


def _other_model(state: State, layers: str) -> str:
    return (
        f"the state has entries for {len(state.layers)} layers, the parameters have {layers}; make the state with the "
        "init_state of a model whose config is that of the parameters"
    )


def _grown(state: State, batch: Batch, keep_steps: bool) -> tuple[State, Ledger]:
    """The state, checked and with pages for its new tokens, and the ledger of the state that has them."""
    check_usable(state)
    _check_transforms(state)
    beforehand(Ledger.check_room, state.ledger, batch.most, state.max_len)
    recurrent = any(isinstance(entry, Recurrent) for entry in state.layers)
    if keep_steps and recurrent and batch.max_query > MAX_KEPT_STEPS:
        raise ValueError(
            f"keep_steps=True with {batch.max_query} new tokens in a row; at most {MAX_KEPT_STEPS} can be kept. "
            "Run the prompt without keep_steps, then the window to verify with it"
        )
    growth = (batch.most, batch.counted, keep_steps)
    ledger = noted(Ledger.grow, state.ledger, *growth, writes=ready)
    if valueless(state.lengths):  # nothing is written: what runs the trace reserves pages, and claims them
        return state, ledger
    before, state = state, ready(state, [ledger])
    return state, ledger if state is before else state.ledger.grow(*growth)


def ready(state: State, versions: Sequence[Ledger]) -> State:
    """The state, checked to be fresh, with pages for what these versions that it grows to hold. See `reserve`."""
    check_usable(state)
    check_fresh(state)
    return reserve(state, [max(lengths) for lengths in zip(*(one.lengths for one in versions), strict=True)])


def _host_lengths(batch: Batch, ledger: Ledger) -> HostLengths:
    """What kernels may know on the host: each row's length with its new tokens, and its pages."""
    # A trace outlives the pages that rows hold now.
    pages = () if symbolic(ledger.lengths) else tuple(lease.pages for lease in ledger.leases)
    return HostLengths(batch.most, ledger.lengths, pages, ledger.extent.exact, ledger.fits)


def _check_transforms(state: State) -> None:
    stack = get_interpreter_stack()
    if not stack:
        return
    if any(level.key() == TransformType.Vmap for level in stack):
        raise StateError("a state's pages cannot be mapped over by torch.func.vmap; pass state=None to train or score")
    if not is_functorch_wrapped_tensor(state.lengths):
        raise StateError(
            "a state made outside a function transform cannot be written inside it; pass state=None to "
            "train or score, or make the state inside the transformed function"
        )


def _positions(state: State, batch: Batch, row: Tensor) -> Tensor:
    """Each token's place in its row; padding counts on from 0."""
    if batch.uniform and batch.max_query == 1:
        return state.lengths
    first = torch.cat((state.lengths, state.lengths.new_zeros(1)))
    return first[row] + torch.arange(len(row), device=row.device, dtype=torch.int32) - batch.query_start[row]


def _slots(state: State, row: Tensor, positions: Tensor, padded: bool) -> Tensor:
    """Each token's slot in the pools."""
    page, offset = positions // state.page_size, positions % state.page_size
    if not padded:
        return state.page_table[row, page].long() * state.page_size + offset
    live = row < state.rows
    table = state.page_table[row.clamp(max=state.rows - 1), torch.where(live, page, 0).long()]
    # Padding goes to the scratch page, spread over it, at slots that no row ever reads.
    scratch = torch.arange(row.shape[0], device=row.device) % state.page_size
    return torch.where(live, table.long() * state.page_size + offset, scratch)


def _hashes(batch: Batch, positions: Tensor) -> Tensor:
    """A hash of each token at its place, and at its rotary positions where those are given."""
    hashes = mix(batch.tokens, positions)
    for axis in () if batch.positions is None else batch.positions:
        hashes = mix(hashes, axis)
    return hashes
