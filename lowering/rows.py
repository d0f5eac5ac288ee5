"""Rows of tokens, as ops see them: one value that says where each row's new tokens lie and what it held before."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from params.tree import off_tree, static, tree

from .host import HostLengths


@tree
class Rows:
    """Ragged rows: one flat token axis, cut by `query_start` (cumulative, from 0).

    `max_query` is the most new tokens in any row; `uniform` says that every row has exactly that many and there is no
    padding. Tokens at or past `query_start[-1]` are padding and belong to no row. With a state, `lengths` count the
    tokens of each row, new ones included, `page_table` names the pages that hold them in order, and `host` is what the
    host knows of both.
    """

    query_start: Int[Tensor, " ends"]
    lengths: Int[Tensor, " rows"] | None = None
    page_table: Int[Tensor, "rows max_pages"] | None = None
    max_query: int = static(kw_only=True)
    uniform: bool = static(default=False)
    host: HostLengths | None = off_tree(default=None)

    @property
    def count(self) -> int:
        """Number of rows, idle ones included."""
        return self.query_start.shape[0] - 1

    @property
    def paged(self) -> tuple[Int[Tensor, " rows"], Int[Tensor, "rows max_pages"]]:
        """Lengths and page table. `ValueError` for rows without them."""
        if self.lengths is None or self.page_table is None:
            raise ValueError("rows without lengths and a page table hold no pages; give those of a state")
        return self.lengths, self.page_table

    @property
    def new(self) -> Int[Tensor, " rows"]:
        """New tokens of each row."""
        return self.query_start.diff()

    @property
    def past(self) -> Int[Tensor, " rows"]:
        """Tokens of each row before the new ones."""
        return self.paged[0] - self.new

    @property
    def places(self) -> Int[Tensor, "rows max_query"]:
        """Places in their rows of the new tokens; cells past a row's end go on counting."""
        return self.past[:, None] + torch.arange(self.max_query, device=self.query_start.device)

    @property
    def inside(self) -> Bool[Tensor, "rows max_query"]:
        """True where the cell of the rectangle holds a token of its row."""
        return torch.arange(self.max_query, device=self.query_start.device) < self.new[:, None]

    @property
    def inexact(self) -> str | None:
        """For a kernel that reads lengths on the host to say; None where they are known exactly."""
        if self.host is not None and self.host.exact:
            return None
        return "needs exact row lengths on the host, and only an upper bound is known"

    def rectangle(self, x: Tensor) -> Tensor:
        """[tokens ...] as [rows max_query ...]. Cells past a row's end hold zeros."""
        if self.uniform:
            return x.unflatten(0, (self.count, self.max_query))
        index = self.query_start[:-1, None] + torch.arange(self.max_query, device=x.device)
        inside = self.inside
        picked = x[index.clamp(0, x.shape[0] - 1)]
        return torch.where(inside.reshape(*inside.shape, *(1,) * (x.ndim - 1)), picked, 0)

    def flat(self, x: Tensor, tokens: int) -> Tensor:
        """[rows max_query ...] back to [tokens ...]. Padding tokens get zeros."""
        if self.uniform:
            return x.flatten(0, 1)
        row = self.of_tokens(tokens)
        live = row < x.shape[0]
        row = row.clamp(max=x.shape[0] - 1)
        offset = (torch.arange(tokens, device=x.device) - self.query_start[row]).clamp(0, x.shape[1] - 1)
        return torch.where(live.reshape(-1, *(1,) * (x.ndim - 2)), x[row, offset], 0)

    def of_tokens(self, tokens: int) -> Int[Tensor, " tokens"]:
        """The row that each token belongs to; `count`, the scratch row, for padding."""
        if self.uniform:
            at = torch.arange(tokens, device=self.query_start.device)
            return at if self.max_query == 1 else at // self.max_query
        at = torch.arange(tokens, device=self.query_start.device, dtype=self.query_start.dtype)
        return torch.searchsorted(self.query_start[1:].contiguous(), at, right=True)

    def alone(self) -> Rows:
        """The same new tokens with nothing before them, each row a page of its own."""
        table = torch.arange(self.count, device=self.query_start.device)[:, None]
        return replace(self, lengths=self.new, page_table=table, host=None)

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on. Every op of a forward asks its one `Rows`."""
        return self._static_key

    @cached_property
    def _static_key(self) -> tuple[object, ...]:
        tensors = (self.query_start, self.lengths, self.page_table)
        known = None if self.host is None else self.host.static_key()
        return (self.max_query, self.uniform, known, *(None if x is None else (x.shape, x.dtype) for x in tensors))
