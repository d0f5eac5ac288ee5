"""Memories of a core and arguments of a kernel, and the views that a program has of them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .errors import OutOfBounds, Unknown

DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "i1": torch.bool,
}
BURST = 32
"""Bytes that the buffer is written in at least, and in which accesses are told apart there."""
POISON = 255
"""Every byte that nobody has written: no number, in every float type."""
_TYPE = re.compile(r"memref<((?:[\d?]+x)*)(\w+)(?:, strided<.*?>|, #map\d*)?(?:, #hivm\.address_space<(\w+)>)?>")


@dataclass(frozen=True)
class MemrefType:
    """A static or partly dynamic (None) shape, a dtype, and the space of a `memref<...>`."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    space: str

    @classmethod
    def of(cls, text: str) -> MemrefType:
        """The type written in the text. `Unknown` for an element that has no dtype here."""
        found = _TYPE.search(text)
        if found is None or found[2] not in DTYPES:
            raise Unknown(f"{text} is no type of memory that is known")
        shape = tuple(None if size == "?" else int(size) for size in found[1].split("x")[:-1])
        return cls(shape, DTYPES[found[2]], found[3] or "gm")


@dataclass(frozen=True)
class Memory:
    """A memory as flat elements: an argument in its own dtype, or the bytes of a buffer of the core."""

    name: str
    data: Tensor

    @property
    def is_bytes(self) -> bool:
        """Whether views have dtypes of their own."""
        return self.data.dtype == torch.uint8


@dataclass(frozen=True)
class View:
    """A part of a memory: an offset, sizes and strides, in elements of the dtype (bits of truth values).

    `base` is where the memref begins that it is a part of: an argument's first element, or a buffer's address.
    """

    memory: Memory
    dtype: torch.dtype
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    base: int = 0

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.sizes)

    @property
    def last(self) -> int:
        """The place of the last element."""
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    def check(self, line: int, does: str) -> None:
        """`OutOfBounds` for elements that the memory does not have."""
        if not self.count:
            return
        whole = self.memory.data.numel()
        if self.memory.is_bytes:
            whole = 8 * whole if self.dtype == torch.bool else whole // self.dtype.itemsize
        if min(self.offset, self.last) < 0 or max(self.offset, self.last) >= whole:
            raise OutOfBounds(
                f"line {line} {does} elements {self.offset} to {self.last} of {self.memory.name}, which has {whole}"
            )

    def read(self) -> Tensor:
        """A copy of the values."""
        if self.memory.is_bytes and self.dtype == torch.bool:
            places = self.places()
            return (self.memory.data[places >> 3] >> (places & 7) & 1).bool()
        return self._strided().clone()

    def holds(self, values: Tensor) -> bool:
        """Whether these values, or NaN where they are NaN, stand there already."""
        found, values = self.read(), values.to(self.dtype)
        return bool(((found == values) | ((found != found) & (values != values))).all())

    def write(self, values: Tensor) -> None:
        """Put values of the same shape, or one that fits it, in the view's dtype."""
        if not self.count:
            return
        if self.memory.is_bytes and self.dtype == torch.bool:
            self._write_bits(values.expand(self.sizes))
        else:
            self._strided().copy_(values)

    def poison(self) -> None:
        """Put there what is no number."""
        if self.count and self.dtype == torch.bool:
            self.write(torch.tensor(True, device="cpu"))
        elif self.count:
            whole = self.memory.data.view(self.dtype).as_strided(self.sizes, self.strides, self.offset)
            whole.copy_(nobodys(self.dtype))

    def places(self) -> Tensor:
        """The place of each element, in elements of the memory's beginning."""
        found = torch.tensor(self.offset, device="cpu")
        for size, stride in zip(self.sizes, self.strides, strict=True):
            found = found[..., None] + torch.arange(size, device="cpu") * stride
        return found

    def units(self) -> Tensor | slice:
        """What of the memory is touched: elements of an argument, bursts of a buffer."""
        if not self.memory.is_bytes:
            return slice(self.offset, self.last + 1) if self._dense() else self.places().flatten()
        bits = 1 if self.dtype == torch.bool else 8 * self.dtype.itemsize
        if self._dense():
            return slice(self.offset * bits // (8 * BURST), (self.last * bits + bits - 1) // (8 * BURST) + 1)
        return (self.places().flatten() * bits // (8 * BURST)).unique()

    def _dense(self) -> bool:
        """Whether it is one run of elements without gaps."""
        return self.last - self.offset + 1 == self.count

    def _strided(self) -> Tensor:
        data = self.memory.data.view(self.dtype) if self.memory.is_bytes else self.memory.data
        return data.as_strided(self.sizes, self.strides, self.offset)

    def _write_bits(self, values: Tensor) -> None:
        places = self.places().flatten()
        first, end = int(places.min()) >> 3, (int(places.max()) >> 3) + 1
        bits = torch.arange(8, device="cpu")
        flat = (self.memory.data[first:end, None] >> bits & 1).flatten()
        flat[places - 8 * first] = values.flatten().to(flat.dtype)
        self.memory.data[first:end] = (flat.view(-1, 8) << bits).sum(1).to(torch.uint8)

    # Views of views

    def reinterpreted(self, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> View:
        """The same memref from its beginning."""
        return replace(self, offset=self.base + offset, sizes=tuple(sizes), strides=tuple(strides))

    def subview(self, offsets: Sequence[int], sizes: Sequence[int], steps: Sequence[int], rank: int) -> View:
        """A part of this view; axes of size 1 go until `rank` are left."""
        offset = self.offset + sum(at * stride for at, stride in zip(offsets, self.strides, strict=True))
        axes = [(size, stride * step) for size, stride, step in zip(sizes, self.strides, steps, strict=True)]
        while len(axes) > rank:
            axes.remove(next(axis for axis in axes if axis[0] == 1))
        return replace(self, offset=offset, sizes=tuple(a for a, _ in axes), strides=tuple(b for _, b in axes))

    def collapsed(self, groups: Sequence[Sequence[int]]) -> View:
        """Axes joined; those of one group lie one behind the other."""
        sizes = tuple(math.prod(self.sizes[axis] for axis in group) for group in groups)
        strides = tuple(self._stride_of(group) for group in groups)
        return replace(self, sizes=sizes, strides=strides)

    def _stride_of(self, group: Sequence[int]) -> int:
        """The innermost stride of a group whose outer axes are as far apart as the inner ones are long."""
        kept = [axis for axis in group if self.sizes[axis] != 1] or [group[-1]]
        stride = self.strides[kept[-1]]
        reach = stride
        for axis in reversed(kept):
            if self.strides[axis] != reach and self.count:
                raise Unknown(f"axes {list(group)} of sizes {self.sizes} and strides {self.strides} do not join")
            reach *= self.sizes[axis]
        return stride

    def expanded(self, groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> View:
        """Axes taken apart."""
        strides = [0] * len(sizes)
        for group, stride in zip(groups, self.strides, strict=True):
            for axis in reversed(group):
                strides[axis] = stride
                stride *= sizes[axis]
        return replace(self, sizes=tuple(sizes), strides=tuple(strides))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a shape without gaps."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def nobodys(dtype: torch.dtype) -> Tensor:
    """What stands where nobody has written: a tensor [1]."""
    return torch.full((dtype.itemsize,), POISON, dtype=torch.uint8, device="cpu").view(dtype)
