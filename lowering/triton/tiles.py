"""Tiles: how much of a tensor a program takes at a time, from what the unified buffer holds."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import LoweringError
from ..target import ASCEND, Target


@dataclass(frozen=True)
class Footprint:
    """What one cell of a kernel's tile takes of the unified buffer.

    `copies` are the float32 values a cell that live at one time, on 910 and on 950, whose fused vector functions keep
    fewer; `streams` the values a cell in the tensors' own dtype that have a place beside them, twice where transfers
    overlap with work. They are read off what the compiler needs near the limit, and held to it by the tests: the tile
    that they give compiles with its second buffers, and the next one does not, or not without sharing more places.
    """

    copies: float
    copies_950: float
    streams: int

    def bits(self, target: Target, size: int) -> float:
        """Bits a cell for elements of `size` bytes. Second buffers are asked for on 910, as triton-ascend does it."""
        if target.name == "ascend950":
            return 32 * self.copies_950 + 8 * size * self.streams
        return 32 * self.copies + 8 * size * self.streams * 2


def planned(target: Target, footprint: Footprint, *, size: int, most: int, width: int = 1) -> int:
    """The largest power of two of rows, `width` cells each, that is sure to fit, and no more than `most` needs.

    `size` is that of the tensors' elements in bytes. Raises `LoweringError` where one row does not fit, and for a
    target whose unified buffer is not known.
    """
    if target.unified_buffer is None:
        raise LoweringError(f"tiles are planned for {', '.join(ASCEND)}; target is {target.name}")
    room = int(8 * target.unified_buffer // (footprint.bits(target, size) * width))
    if not room:
        raise LoweringError(f"a row of {width} cells does not fit the {target.unified_buffer} bytes of {target.name}")
    return 1 << min(room.bit_length() - 1, max(most - 1, 0).bit_length())


def dividing(tile: int, whole: int) -> int:
    """The largest power of two that divides `whole` and is no more than `tile`, itself one."""
    return min(tile, whole & -whole)
