"""The device library by meaning: which pipe runs a call, what it reads and writes, and what it writes there.

Operands come as a program gives them: views, numbers, and at the end often a view to work in (temporary), of no
elements where there is none. What is left in it nobody may rely on. In calls of rank 2 an axis of size 1 is repeated.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .errors import Unknown
from .memory import BURST, View
from .pipes import MTE2, MTE3, V


@dataclass(frozen=True)
class Work:
    """One call: its pipe, the views it reads and writes, and the values for the latter, computed of copies.

    `scratch` is written with what nobody may rely on.
    """

    pipe: str
    reads: Sequence[View]
    writes: Sequence[View]
    values: Callable[[], Sequence[Tensor]]
    scratch: Sequence[View] = ()


Arguments = Sequence[Any]


def meaning(name: str, line: int) -> Callable[[Arguments], Work]:
    """What a call of this name does. `Unknown` for a name that is not in the table."""
    for pattern, made in TABLE.items():
        found = re.fullmatch(pattern, name)
        if found is not None:
            return lambda args: made(found, args)
    raise Unknown(f"line {line}: the library call {name} is not known")


def _vector(reads: Sequence[Any], out: View, values: Callable[..., Tensor], *temporaries: View) -> Work:
    """Work of the vector pipe on operands, views or numbers."""
    views = [each for each in reads if isinstance(each, View)]
    return Work(V, views, [out], lambda: [values(*map(_value, reads)).to(out.dtype)], temporaries)


def _value(operand: Any) -> Any:
    return operand.read() if isinstance(operand, View) else operand


# Transfers

NO_PADDING, WITH_VALUE = 0, 2


def _load(found: re.Match[str], args: Arguments) -> Work:
    """Equal sizes; a row is filled up to a whole burst, and `left` elements before it, with the value."""
    source, out, mode, value, left = args
    if mode not in (NO_PADDING, WITH_VALUE):
        raise Unknown(f"{found[0]} pads in mode {mode}, which is not known")
    value = value if mode == WITH_VALUE else 0
    around = [_before(out, left), _behind(out)]
    filled = [view for view in around if view.count]

    def values() -> list[Tensor]:
        return [source.read(), *(torch.full(view.sizes, value, dtype=view.dtype, device="cpu") for view in filled)]

    return Work(MTE2, [source], [out, *filled], values)


def _before(view: View, left: int) -> View:
    return replace(view, offset=view.offset - left, sizes=(*view.sizes[:-1], left if view.count else 0))


def _behind(view: View) -> View:
    """What of the last burst of each row lies behind it."""
    used = view.sizes[-1] * view.dtype.itemsize
    rest = -used % BURST // view.dtype.itemsize if view.count and view.strides[-1] == 1 else 0
    behind = replace(view, offset=view.offset + view.sizes[-1], sizes=(*view.sizes[:-1], rest))
    room = view.memory.data.numel() // view.dtype.itemsize
    return behind if behind.last < room else replace(behind, sizes=(*view.sizes[:-1], 0))


ATOMIC: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    0: lambda old, new: new,
    1: torch.add,
    2: torch.maximum,
    3: torch.minimum,
}


def _store(found: re.Match[str], args: Arguments) -> Work:
    source, out, atomic = args
    reads = [source] if atomic == 0 else [source, out]
    return Work(MTE3, reads, [out], lambda: [ATOMIC[atomic](out.read(), source.read())])


def _copy(found: re.Match[str], args: Arguments) -> Work:
    return _vector(args[:1], args[1], lambda x: x)


def _fill(found: re.Match[str], args: Arguments) -> Work:
    value, out = args
    return Work(V, [], [out], lambda: [torch.full(out.sizes, value, dtype=out.dtype, device="cpu")])


# Arithmetic

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": lambda x, y: torch.maximum(x, torch.as_tensor(y, dtype=x.dtype, device="cpu")),
    "min": lambda x, y: torch.minimum(x, torch.as_tensor(y, dtype=x.dtype, device="cpu")),
    "and": operator.and_,
    "or": operator.or_,
}
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "ln": torch.log,
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "not": torch.bitwise_not,
}
COMPARE = {"eq": torch.eq, "lt": torch.lt, "gt": torch.gt, "le": torch.le, "ge": torch.ge, "ne": torch.ne}


def _binary(found: re.Match[str], args: Arguments) -> Work:
    """Of two views, or of a view and a number."""
    x, y, out, *temporaries = args
    return _vector([x, y], out, BINARY[found[1]], *temporaries)


def _unary(found: re.Match[str], args: Arguments) -> Work:
    x, out, *temporaries = args
    return _vector([x], out, UNARY[found[1]], *temporaries)


def _compare(found: re.Match[str], args: Arguments) -> Work:
    x, y, out, *temporaries = args
    return _vector([x, y], out, COMPARE[found[1]], *temporaries)


def _select(found: re.Match[str], args: Arguments) -> Work:
    """The first where the bit is 1."""
    bits, x, y, out, *temporaries = args
    dtype = out.dtype

    def values(taken: Tensor, one: Any, other: Any) -> Tensor:
        one, other = (torch.as_tensor(x, dtype=dtype, device="cpu") for x in (one, other))
        return torch.where(taken, one, other)

    return _vector([bits, x, y], out, values, *temporaries)


REDUCED = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


def _reduce(found: re.Match[str], args: Arguments) -> Work:
    """Over the only axis (r), the last of two (ar) or the first (ra). A number to begin with is that of no elements."""
    x, out, temporary, _ = args
    axis = 0 if found[2] == "ra" else -1
    return _vector([x], out, lambda values: REDUCED[found[1]](values, axis, keepdim=True), temporary)


def _spread(found: re.Match[str], args: Arguments) -> Work:
    x, out, *temporaries = args
    return _vector([x], out, lambda values: values.expand(out.sizes), *temporaries)


def _take_apart(found: re.Match[str], args: Arguments) -> Work:
    """Every second element, from the first or the second on."""
    x, out = args
    return _vector([x], out, lambda values: values[int(found[1]) :: 2])


NEAREST_EVEN = 0
ROUNDED: dict[int, Callable[[Tensor], Tensor]] = {
    1: lambda x: torch.where(x < 0, (x - 0.5).ceil(), (x + 0.5).floor()),
    2: torch.floor,
    3: torch.ceil,
    4: torch.trunc,
}
"""To a whole number: ties away from 0, down, up, towards 0."""


def _cast(found: re.Match[str], args: Arguments) -> Work:
    """To the nearest number of the other type, ties to even (0); or first to a whole number."""
    x, out, *temporaries, mode = args
    whole = not out.dtype.is_floating_point or out.dtype == x.dtype
    if mode != NEAREST_EVEN and (mode not in ROUNDED or not (whole or x.dtype == torch.bool)):
        raise Unknown(f"{found[0]} rounds in mode {mode}, which is not known")

    def values(given: Tensor) -> Tensor:
        if not whole or not given.is_floating_point():
            return given
        return given.round() if mode == NEAREST_EVEN else ROUNDED[mode](given)

    return _vector([x], out, values, *temporaries)


TABLE: dict[str, Callable[[re.Match[str], Arguments], Work]] = {
    r"load_gm_to_ubuf_\dd_\w+": _load,
    r"store_ubuf_to_gm_\dd_\w+": _store,
    r"copy_ubuf_to_ubuf_\dd_\w+": _copy,
    r"broadcast_scalar_\w+_to_\dd": _fill,
    r"v(add|sub|mul|div|max|min|and|or)_\dd_\w+": _binary,
    r"v(add|sub|mul|div|max|min)s?_vs_\dd_\w+": _binary,
    r"v(exp|ln|sqrt|abs|not)_\dd_\w+": _unary,
    r"vcmps?_(eq|lt|gt|le|ge|ne)_\w+": _compare,
    r"vsel_(?:vv|vs|sv|ss)_\dd_\w+": _select,
    r"vcast_\w+_\dd_with_(?:mode|temp)": _cast,
    r"(?:enablevc_)?reduce_(sum|max|min)_(r|ar|ra)_\w+": _reduce,
    r"deinterleave_channel_([01])_from_2_channels_1d_\w+": _take_apart,
    r"broadcast_(?:first|last)_axis_align_2d\w*": _spread,
}
"""Library calls by name."""
