"""Batches: the new tokens of each row, laid end to end."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from lowering.detect import device_named
from lowering.host import HostInt, readable, valueless
from lowering.jit.tape import beforehand
from lowering.protocols import Carried, Ragged
from params.modes import lasting
from params.tree import off_tree, static, tree, unchecked

from .ledger import Ledger

if TYPE_CHECKING:
    from .state import State


@tree
class Batch(Ragged):
    """Ragged new tokens: row r has `tokens[query_start[r]:query_start[r+1]]`, possibly none.

    Tokens at or past `query_start[-1]` are padding: they read and write nothing live. `positions` overrides the
    rotary positions (text continues each row; images need three axes). `max_query` bounds the tokens of any row;
    `uniform` says that every row has exactly that many and nothing is padded. `counts` are the rows' token counts on
    the host; a batch that is neither uniform nor has them leaves the state with upper bounds of its lengths.

    A forward reads `query_start` where it lies on a CPU, and refuses what contradicts it. Of batches on a device shapes
    and hints alone are looked at there: `check` holds one that was made by hand against its values.
    """

    tokens: Int[Tensor, " tokens"]
    query_start: Int[Tensor, " ends"]
    positions: Int[Tensor, "axes tokens"] | None = None
    max_query: int = static(kw_only=True)
    uniform: bool = static(default=False)
    counts: tuple[HostInt, ...] = off_tree(default=())

    @property
    def rows(self) -> int:
        """Number of rows, idle ones included."""
        return self.query_start.shape[0] - 1

    @property
    def most(self) -> tuple[HostInt, ...]:
        """The most tokens that each row may get: its count, or `max_query` where the host does not know it."""
        return self.counts or (self.max_query,) * self.rows

    @property
    def counted(self) -> bool:
        """Whether the host knows each row's count."""
        return self.uniform or bool(self.counts)

    @staticmethod
    @lasting
    def from_lists(
        lists: Sequence[Sequence[int]],
        state: State | None = None,
        *,
        vocab: int | None = None,
        device: torch.device | str | None = None,
    ) -> Batch:
        """A batch of one list of token ids a row; an empty list leaves its row idle.

        With a state, ids are checked against its vocabulary, rows and room against the state, and tensors are put on
        its device. Raises `TypeError` for what are no token ids, `ValueError` for ids or room, `StateError` for rows.
        """
        vocab = state.vocab if state is not None and vocab is None else vocab
        if not isinstance(lists, Iterable):
            raise TypeError(f"from_lists: expected a list of token ids a row, found {lists!r:.100}")
        for row, ids in enumerate(lists):
            _check_ids(row, ids, vocab)
        flat = torch.tensor([operator.index(token) for ids in lists for token in ids], dtype=torch.int64, device="cpu")
        return Batch.from_tokens(flat, [len(ids) for ids in lists], state, device=device)

    @staticmethod
    @lasting
    def from_tokens(
        tokens: Int[Tensor, " tokens"],
        counts: Sequence[int],
        state: State | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Batch:
        """A batch of tokens that are already a tensor, with each row's count known on the host. Ids are not read."""
        if sum(counts) != tokens.shape[0] or min(counts, default=0) < 0:
            raise ValueError(f"counts {_shown(counts)} add up to {sum(counts)}, there are {tokens.shape[0]} tokens")
        if state is not None:
            beforehand(Ledger.check_room, state.ledger, tuple(counts), state.max_len)
            device = state.lengths.device if device is None else device
        if device is not None and not isinstance(device, torch.device):
            device = device_named(device)
        tokens = tokens.to(device)
        most = max(counts, default=0)
        uniform = most > 0 and min(counts) == most
        if uniform:
            starts = torch.arange(0, (len(counts) + 1) * most, most, dtype=torch.int32, device=tokens.device)
        else:
            starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device="cpu").to(tokens.device)
        return Batch(tokens, starts, max_query=max(most, 1), uniform=uniform, counts=tuple(counts))

    def pad(self, tokens: int, max_query: int | None = None) -> Batch:
        """The same rows with padding up to `tokens` tokens. With another bound `max_query` the batch is ragged."""
        extra = tokens - self.tokens.shape[0]
        if extra < 0:
            raise ValueError(f"a batch of {self.tokens.shape[0]} tokens does not fit in {tokens}")
        padded = torch.cat((self.tokens, self.tokens.new_zeros(extra)))
        positions = self.positions
        if positions is not None:
            positions = torch.cat((positions, positions.new_zeros(positions.shape[0], extra)), 1)
        uniform = self.uniform and extra == 0 and max_query is None
        return unchecked(
            Batch,
            tokens=padded,
            query_start=self.query_start,
            positions=positions,
            max_query=self.max_query if max_query is None else max_query,
            uniform=uniform,
            counts=self.counts,
        )

    def check(self) -> None:
        """See `check_layout`."""
        check_layout(self)

    def host_ints(self) -> tuple[HostInt, ...]:
        """What the host knows of the rows and changes from call to call: the counts, which a uniform batch fixes."""
        return () if self.uniform else self.counts

    def with_host_ints(self, values: tuple[HostInt, ...]) -> Batch:
        """The batch as if these were its `host_ints`."""
        fixed = (self.max_query,) * self.rows if self.uniform else values
        return unchecked(Batch, **vars(self) | {"counts": fixed})

    def host_facts(self) -> tuple[bool, ...]:
        """Whether the counts are known, which a choice of kernel may depend on."""
        return (self.counted,)

    def idle(self, tokens: int, max_query: int, uniform: bool) -> Batch:
        """A batch of as many rows and this size whose tokens are all padding: to capture with, not to run."""
        positions = self.positions
        return unchecked(
            Batch,
            tokens=self.tokens.new_zeros(tokens),
            query_start=torch.zeros_like(self.query_start),
            positions=None if positions is None else positions.new_zeros(positions.shape[0], tokens),
            max_query=max_query,
            uniform=uniform,
            counts=(max_query if uniform else 0,) * self.rows,
        )


def check(batch: Batch, state: State | None = None) -> None:
    """Hold a batch that was made by hand against itself, and against the state that it is for. Reads the device.

    Raises `ValueError` for what contradicts itself, ids out of the state's vocabulary and rows without room,
    `StateError` for another number of rows or a state that can be used no more, `TypeError` for what is no batch.
    """
    if not isinstance(batch, Batch):
        raise TypeError(f"check: expected a Batch, found a {type(batch).__name__}; make one with Batch.from_lists")
    if state is not None:
        if not isinstance(state, Carried):
            raise TypeError(f"check: expected a State, found a {type(state).__name__}; make one with model.init_state")
        state.check()
    check_layout(batch)
    starts = batch.query_start.tolist()
    _check_starts(batch, starts)
    _check_id_range(batch, None if state is None else state.vocab)
    if state is not None:
        state.ledger.check_room([end - start for start, end in pairwise(starts)], state.max_len)


def check_layout(batch: Batch) -> None:
    """`ValueError` for a batch without tokens, or whose parts contradict each other; values are read on a CPU alone."""
    tokens = batch.tokens.shape[0]
    for name, value, shape in (
        ("tokens", batch.tokens, "[tokens]"),
        ("query_start", batch.query_start, "[rows + 1]"),
        ("positions", batch.positions, "[axes, tokens]"),
    ):
        if value is not None and (value.ndim != shape.count(",") + 1 or value.dtype not in _INTEGERS):
            # Only here: text made of a size fixes it, where a call is compiled for all sizes.
            shape = shape.replace(", tokens", f", {tokens}")
            raise ValueError(
                f"the batch's {name} must be integers {shape} of 64 or 32 bits, found {value.dtype} {list(value.shape)}"
            )
    if batch.positions is not None and batch.positions.shape[1] != tokens:
        raise ValueError(
            f"the batch has {tokens} tokens, and positions {list(batch.positions.shape)}; give one place a token on "
            "each axis, or leave them out"
        )
    if batch.positions is not None and batch.positions.shape[0] not in (1, 3):
        raise ValueError(
            f"positions have {batch.positions.shape[0]} axes; give one for text, three (time, height, width) for "
            "images, or leave them out"
        )
    if not isinstance(batch.max_query, int) or batch.max_query < 1:
        found = f"found {batch.max_query!r:.100}"
        raise ValueError(f"the batch's max_query must be an integer of at least 1, {found}; {_MAKE}")
    if tokens == 0:
        raise ValueError("the batch has no tokens: every row idles; skip the call, or pad the batch")
    if batch.rows < 1:
        raise ValueError("the batch has no rows: query_start must hold 0 and the end of each row")
    if batch.uniform and batch.rows * batch.max_query != tokens:
        raise ValueError(
            f"the batch says uniform, {batch.rows} rows of {batch.max_query} tokens, and holds {tokens} tokens; {_MAKE}"
        )
    if valueless(batch.tokens):
        return
    if sum(batch.counts) > tokens or not all(0 <= count <= batch.max_query for count in batch.counts):
        raise ValueError(
            f"the batch's counts {list(batch.counts)} do not fit its {tokens} tokens and max_query={batch.max_query}; "
            f"{_MAKE}"
        )
    if batch.counts and len(batch.counts) != batch.rows:
        raise ValueError(f"the batch has {batch.rows} rows and counts for {len(batch.counts)}; {_MAKE}")
    if readable(batch.query_start):
        _check_starts(batch, batch.query_start.tolist())


_MAKE = "make it with Batch.from_lists or Batch.from_tokens"


_INTEGERS = (torch.int64, torch.int32)


def _check_starts(batch: Batch, starts: list[int]) -> None:
    """`ValueError` unless rows begin at 0, follow each other within the tokens, and are as long as the hints say."""
    tokens = batch.tokens.shape[0]
    if starts[0] != 0 or starts[-1] > tokens or any(start > end for start, end in pairwise(starts)):
        raise ValueError(
            f"the batch's query_start {_shown(starts)} must begin at 0, never fall, and end within its {tokens} "
            f"tokens; {_MAKE}"
        )
    counts = [end - start for start, end in pairwise(starts)]
    if max(counts) > batch.max_query or (batch.uniform and min(counts) < batch.max_query):
        kind = "exactly" if batch.uniform else "at most"
        raise ValueError(
            f"the batch's rows have {_shown(counts)} tokens by query_start, and {kind} max_query={batch.max_query} are "
            f"promised; {_MAKE}"
        )
    if batch.counts and counts != list(batch.counts):
        raise ValueError(
            f"the batch's rows have {_shown(counts)} tokens by query_start, and counts say {_shown(batch.counts)}; "
            f"{_MAKE}"
        )


def _shown(values: Sequence[int]) -> str:
    """The values, of many only the first."""
    rest = f", ... {len(values)} in all" if len(values) > 16 else ""
    return f"[{', '.join(map(str, values[:16]))}{rest}]"


def check_ids(batch: Batch, vocab: int) -> None:
    """`ValueError` for a token outside of the vocabulary, where ids can be read without waiting for a device."""
    if readable(batch.tokens):
        _check_id_range(batch, vocab)


def _check_id_range(batch: Batch, vocab: int | None) -> None:
    if batch.tokens.numel() == 0:
        return
    low, high = (int(end) for end in batch.tokens.aminmax())
    if low < 0 or (vocab is not None and high >= vocab):
        wrong = low if low < 0 else high
        place = int((batch.tokens == wrong).int().argmax())
        limit = "at least 0" if vocab is None else f"in 0..{vocab - 1}"
        raise ValueError(f"token {place} of the batch: id {wrong} is out of range; ids must be {limit}")


def _check_ids(row: int, ids: Sequence[int], vocab: int | None) -> None:
    if not isinstance(ids, Iterable):
        raise TypeError(f"row {row}: expected a list of token ids, found {ids!r:.100}")
    most = 2**63 if vocab is None else vocab
    for at, token in enumerate(ids):
        try:
            if token is True or token is False:
                raise TypeError
            inside = 0 <= operator.index(token) < most
        except TypeError:
            fix = "model.tokenizer.encode(text) makes them of text"
            raise TypeError(f"row {row}, token {at}: {token!r:.100} is no token id, an integer; {fix}") from None
        if not inside:
            limit = "" if vocab is None else f"; ids must be in 0..{vocab - 1}"
            raise ValueError(f"row {row}, token {at}: id {token} is out of range{limit}")
