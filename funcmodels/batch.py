"""Batches: the new tokens of each row, laid end to end."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from lowering.host import HostInt, symbolic
from params.tree import off_tree, static, tree, unchecked

from .errors import StateError

if TYPE_CHECKING:
    from .state import State


@tree
class Batch:
    """Ragged new tokens: row r has `tokens[query_start[r]:query_start[r+1]]`, possibly none.

    Tokens at or past `query_start[-1]` are padding: they read and write nothing live. `positions` overrides the
    rotary positions (text continues each row; images need three axes). `max_query` bounds the tokens of any row;
    `uniform` says that every row has exactly that many and nothing is padded. `counts` are the rows' token counts on
    the host; a batch that is neither uniform nor has them leaves the state with upper bounds of its lengths.
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
    def counted(self) -> bool:
        """Whether the host knows each row's count."""
        return self.uniform or bool(self.counts)

    @staticmethod
    def from_lists(
        lists: Sequence[Sequence[int]],
        state: State | None = None,
        *,
        vocab: int | None = None,
        device: torch.device | str | None = None,
    ) -> Batch:
        """A batch of one list of token ids a row; an empty list leaves its row idle.

        With a state, ids are checked against its vocabulary, rows and room against the state, and tensors are put on
        its device. Raises `ValueError` for ids or room, `StateError` for rows.
        """
        vocab = state.vocab if state is not None and vocab is None else vocab
        for row, ids in enumerate(lists):
            _check_ids(row, ids, vocab)
        flat = torch.tensor([operator.index(token) for ids in lists for token in ids], dtype=torch.int64)
        return Batch.from_tokens(flat, [len(ids) for ids in lists], state, device=device)

    @staticmethod
    def from_tokens(
        tokens: Int[Tensor, " tokens"],
        counts: Sequence[int],
        state: State | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Batch:
        """A batch of tokens that are already a tensor, with each row's count known on the host. Ids are not read."""
        if sum(counts) != tokens.shape[0] or min(counts, default=0) < 0:
            raise ValueError(f"counts {list(counts)} add up to {sum(counts)}, there are {tokens.shape[0]} tokens")
        if state is not None:
            check_room(state, counts)
            device = state.lengths.device if device is None else device
        tokens = tokens.to(device)
        most = max(counts, default=0)
        uniform = most > 0 and min(counts) == most
        if uniform:
            starts = torch.arange(0, (len(counts) + 1) * most, most, dtype=torch.int32, device=tokens.device)
        else:
            starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32).to(tokens.device)
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
            Batch, tokens=padded, query_start=self.query_start, positions=positions,
            max_query=self.max_query if max_query is None else max_query, uniform=uniform, counts=self.counts,
        )  # fmt: skip

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

    def without_host(self) -> Batch:
        """The batch without its counts."""
        return unchecked(Batch, **vars(self) | {"counts": ()})

    def idle(self, tokens: int, max_query: int, uniform: bool) -> Batch:
        """A batch of as many rows and this size whose tokens are all padding: to capture with, not to run."""
        positions = self.positions
        return unchecked(
            Batch, tokens=self.tokens.new_zeros(tokens), query_start=torch.zeros_like(self.query_start),
            positions=None if positions is None else positions.new_zeros(positions.shape[0], tokens),
            max_query=max_query, uniform=uniform, counts=(max_query if uniform else 0,) * self.rows,
        )  # fmt: skip


def check_room(state: State, counts: Sequence[HostInt]) -> None:
    """`StateError` unless there is one count a row, `ValueError` when a row would outgrow the state's `max_len`.

    Symbols are not compared: where a captured call is traced, its host side has checked their values.
    """
    if len(counts) != state.rows:
        raise StateError(
            f"the batch has {len(counts)} rows, the state has {state.rows}; give one list a row ([] idles)"
        )
    if symbolic((*state.host.lengths, *counts)):
        return
    for row, (held, count) in enumerate(zip(state.host.lengths, counts, strict=True)):
        if held + count > state.max_len:
            bound = "" if state.host.exact else "at most "
            raise ValueError(
                f"row {row}: {count} new tokens do not fit: it holds {bound}{held}, and max_len is {state.max_len}; "
                "shorten the prompt or give init_state a larger max_len"
            )


def _check_ids(row: int, ids: Sequence[int], vocab: int | None) -> None:
    for at, token in enumerate(ids):
        if token < 0 or (vocab is not None and token >= vocab):
            limit = "" if vocab is None else f"; ids must be in 0..{vocab - 1}"
            raise ValueError(f"row {row}, token {at}: id {token} is out of range{limit}")
