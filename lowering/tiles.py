"""How much of an array a hand-written kernel may hold at a time, so that its tiles fit the buffer of a core.

A kernel whose tiles are planes, such as heads' states, works on a few planes at once. Its compiler keeps several copies
of a tile, to load one while it works on another, and all of them must fit; a kernel whose tiles do not fails at the
first request, not when it is built. Nothing here looks at a device: its buffer is a number, `Target.unified_buffer`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence


class TileWarning(UserWarning):
    """A single plane that does not fit the buffer, so that a kernel has to cut its planes too."""


def planes_at_once(buffer: int, copies: int, plane: Sequence[int], item_size: int, planes: int) -> int:
    """The largest divisor of `planes` for which a tile of so many planes fits `buffer` bytes in `copies` copies.

    `plane` are the sizes of a plane's axes, of elements of `item_size` bytes. A divisor, so that no tile is cut short
    at the end. At least 1, with a `TileWarning` where not even that fits. Raises `ValueError` for sizes below 1.
    """
    sizes = {
        "buffer": buffer,
        "copies": copies,
        "item_size": item_size,
        "planes": planes,
        "plane": min(plane, default=1),
    }
    wrong = {name: size for name, size in sizes.items() if size < 1}
    if wrong:
        given = ", ".join(f"{name}={size}" for name, size in wrong.items())
        raise ValueError(
            f"planes_at_once: {given}; every size is 1 or more. Check the shapes before the kernel is captured"
        )
    needed = copies * math.prod(plane) * item_size
    if needed > buffer:
        shape = " x ".join(map(str, plane))
        warnings.warn(
            f"{copies} copies of one plane of {shape} elements of {item_size} bytes take {needed} bytes, and the "
            f"buffer has {buffer}: cut the plane too",
            TileWarning,
            stacklevel=2,
        )
        return 1
    return max(count for count in range(1, planes + 1) if planes % count == 0 and count * needed <= buffer)
