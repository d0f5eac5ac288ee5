"""Layouts of paged latents: how a pool of one vector a token lies in memory, as types that cannot be confused.

`NdPages` are plain, a token's vector in one piece. `NzPages` are tiled, the order that Ascend's fused operators read
fastest: sixteen channels of every token of a page, then the next sixteen. Both give and take vectors in logical order,
so only a kernel that reads `values` itself needs to know which one it has: it asks by type.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from params.tree import tree

from . import detect
from .policy import MODE

TILE = 16
"""Channels that lie together in a tiled page."""
TILED = ("ascend910b", "ascend910_93")
"""Targets with operators that attend over tiled pages."""


class Pages(abc.ABC):
    """Pages of one vector a token. Page 0 is scratch; slot s is token s % page_size of page s // page_size."""

    values: Tensor

    @classmethod
    @abc.abstractmethod
    def empty(cls, pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device) -> Pages:
        """Zeros for this many pages."""

    @abc.abstractmethod
    def gather(self, page_table: Int[Tensor, "rows max_pages"]) -> Float[Tensor, "rows keys page_dim"]:
        """The vectors of each row's pages in the order of its tokens; keys = max_pages * page_size."""

    @abc.abstractmethod
    def held(self, pages: Sequence[int], length: int) -> Float[Tensor, "keys page_dim"]:
        """The first `length` vectors in these pages: a view where they lie in one piece, else a copy."""

    @abc.abstractmethod
    def read(self, slots: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens page_dim"]:
        """The vector at each slot."""

    @abc.abstractmethod
    def write(self, new: Float[Tensor, "tokens page_dim"], slots: Int[Tensor, " tokens"]) -> None:
        """Store a vector at each slot, in place."""

    @property
    @abc.abstractmethod
    def page_size(self) -> int:
        """Tokens a page."""

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """Channels a token."""

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        """What the vectors are stored in."""
        return self.values.dtype

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return type(self), self.values.shape, self.values.dtype


@tree
class NdPages(Pages):
    """Plain pages."""

    values: Float[Tensor, "pages page_size page_dim"]

    @classmethod
    def empty(cls, pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device) -> NdPages:
        """Zeros for this many pages."""
        return cls(torch.zeros(pages, page_size, width, dtype=dtype, device=device))

    def gather(self, page_table: Int[Tensor, "rows max_pages"]) -> Float[Tensor, "rows keys page_dim"]:
        """The vectors of each row's pages in the order of its tokens; keys = max_pages * page_size."""
        return self.values[page_table].flatten(1, 2)

    def held(self, pages: Sequence[int], length: int) -> Float[Tensor, "keys page_dim"]:
        """The first `length` vectors in these pages: a view where the pages follow each other, else a copy."""
        count = -(-length // self.page_size)
        first = pages[0] if count else 0
        if tuple(pages[:count]) == tuple(range(first, first + count)):
            return self.values[first : first + count].flatten(0, 1)[:length]
        return self.values[list(pages[:count])].flatten(0, 1)[:length]

    def read(self, slots: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens page_dim"]:
        """The vector at each slot."""
        return self.values.flatten(0, 1)[slots]

    def write(self, new: Float[Tensor, "tokens page_dim"], slots: Int[Tensor, " tokens"]) -> None:
        """Store a vector at each slot, in place."""
        # A view or an error: on a copy the write would be lost.
        self.values.view(-1, self.width).index_copy_(0, slots.long(), new.to(self.dtype))

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.values.shape[1]

    @property
    def width(self) -> int:
        """Channels a token."""
        return self.values.shape[2]


@tree
class NzPages(Pages):
    """Tiled pages: values[page, channel // 16, token, channel % 16] (Ascend's cache mode PA_NZ)."""

    values: Float[Tensor, "pages tiles page_size 16"]

    @classmethod
    def empty(cls, pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device) -> NzPages:
        """Zeros for this many pages, of a width that fills its tiles."""
        return cls(torch.zeros(pages, width // TILE, page_size, TILE, dtype=dtype, device=device))

    def gather(self, page_table: Int[Tensor, "rows max_pages"]) -> Float[Tensor, "rows keys page_dim"]:
        """The vectors of each row's pages in the order of its tokens; keys = max_pages * page_size."""
        return self.values[page_table].transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def held(self, pages: Sequence[int], length: int) -> Float[Tensor, "keys page_dim"]:
        """The first `length` vectors in these pages, as a copy."""
        count = -(-length // self.page_size)
        return self.values[list(pages[:count])].transpose(1, 2).flatten(2, 3).flatten(0, 1)[:length]

    def read(self, slots: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens page_dim"]:
        """The vector at each slot."""
        return self.values[slots // self.page_size, :, slots % self.page_size].flatten(1)

    def write(self, new: Float[Tensor, "tokens page_dim"], slots: Int[Tensor, " tokens"]) -> None:
        """Store a vector at each slot, in place."""
        page, token = slots // self.page_size, slots % self.page_size
        self.values[page, :, token] = new.to(self.dtype).unflatten(1, (-1, TILE))

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.values.shape[2]

    @property
    def width(self) -> int:
        """Channels a token."""
        return self.values.shape[1] * TILE


LAYOUTS: dict[str, type[NdPages] | type[NzPages]] = {"nd": NdPages, "nz": NzPages}
"""Layouts by the name that `init_state` takes."""


def layout_for(
    name: str | None, device: torch.device, dtype: torch.dtype, page_size: int, widths: Sequence[int]
) -> type[NdPages] | type[NzPages]:
    """The layout called `name`, or the one that suits the target in force, which is that of `device` if none is.

    Ascend 910's fused operators take tiled pages of 128 tokens, or a multiple of it, of half precision. `ValueError`
    for an unknown name, or tiled pages of `widths` that do not fill their tiles.
    """
    whole = all(width % TILE == 0 for width in widths)
    if name is None:
        target = MODE.get().target or detect.of_device(device)
        tiled = target.name in TILED and dtype.itemsize == 2 and page_size % 128 == 0 and whole
        return NzPages if tiled else NdPages
    if name not in LAYOUTS:
        raise ValueError(f"layout {name!r:.100} is unknown; known: {', '.join(LAYOUTS)}")
    if name == "nz" and not whole:
        raise ValueError(f"layout 'nz' takes widths in multiples of {TILE}, found {list(widths)}; use 'nd'")
    return LAYOUTS[name]
