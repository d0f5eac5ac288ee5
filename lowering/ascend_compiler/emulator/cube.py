"""The device library of the cube core: what comes into L1, products of what lies there, and their way out of L0C.

A matrix lies in L1 and L0C in fractals, as [columns / c, rows / 16, 16, c]: blocks of 16 rows and c columns, one below
the other, then those to the right. c is what fits 32 bytes in L1, and 16 in L0C. A product's operands go on to memories
of their own, L0A and L0B, which show in no program: the call fills them and waits for them itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import Unknown
from .library import Arguments, Flag, Work
from .memory import View, nobodys
from .pipes import FIX, MTE1, MTE2, M

LOADED: Flag = (MTE1, M, -1)
"""The call's own flag, between the operands' loads and the product."""
NONE = -1
"""In the place of an event: there is none."""


def matrix(fractals: Tensor) -> Tensor:
    """[columns / c, rows / 16, 16, c] as [rows, columns]."""
    across, down, rows, columns = fractals.shape
    return fractals.permute(1, 2, 0, 3).reshape(down * rows, across * columns)


def fractals(values: Tensor, like: View) -> Tensor:
    """[rows, columns] as [columns / c, rows / 16, 16, c]."""
    across, down, rows, columns = like.sizes
    return values.reshape(down, rows, across, columns).permute(2, 0, 1, 3)


def _into_l1(found: re.Match[str], args: Arguments) -> Sequence[Work]:
    """A matrix that may end within the last blocks. There, its last rows are filled up with 0, and other rows stay."""
    source, out = args
    rows, columns = source.sizes

    def values() -> list[Tensor]:
        whole = matrix(out.read())
        whole[:rows] = 0
        whole[:rows, :columns] = source.read()
        return [fractals(whole, out)]

    return (Work(MTE2, [source], [out], values),) if source.count else ()


def _fill(found: re.Match[str], args: Arguments) -> Sequence[Work]:
    value, out = args
    return (Work(MTE2, [], [out], lambda: [torch.full(out.sizes, value, dtype=out.dtype, device="cpu")]),)


def _product(found: re.Match[str], args: Arguments) -> Sequence[Work]:
    """Of m x k and k x n: operands are loaded, then multiplied, and added to what is there unless it begins.

    The call waits for the transfers of both operands, and says when they may be overwritten, unless an event is -1.
    Where it begins, nobody may rely on what lies in L0C beside the product: it is what was there before.
    """
    a, b, begins, m, k, n, out, *events, _, first, second, unit = args
    _only(found[0], NONE, "an event between M and MTE1", first, second)
    _only(found[0], 0, "a unit flag", unit)
    a_is_there, b_is_there, a_is_free, b_is_free = events
    free = [*_flags(MTE1, MTE2, a_is_free), *_flags(MTE1, MTE2, b_is_free)]

    def values() -> list[Tensor]:
        left, right = _operand(a, found[1] == "_ta"), _operand(b, found[1] == "_tb")
        all_of_it = matrix(out.read())
        product = left[:m, :k].to(out.dtype) @ right[:k, :n].to(out.dtype)
        before = 0 if begins else all_of_it[:m, :n]
        if begins:
            all_of_it = nobodys(out.dtype).expand(all_of_it.shape).clone()
        all_of_it[:m, :n] = before + product
        return [fractals(all_of_it, out)]

    return (
        Work(MTE1, [a], [], list, waits=_flags(MTE2, MTE1, a_is_there)),
        Work(MTE1, [b], [], list, waits=_flags(MTE2, MTE1, b_is_there), sets=[*free, LOADED]),
        Work(M, [], [out], values, waits=[LOADED]),
    )


def _operand(view: View, is_transposed: bool) -> Tensor:
    found = matrix(view.read())
    return found.T if is_transposed else found


def _flags(by: str, to: str, event: int) -> list[Flag]:
    return [] if event == NONE else [(by, to, event)]


def _only(call: str, known: Any, what: str, *given: Any) -> None:
    strange = [value for value in given if value != known]
    if strange:
        raise Unknown(f"{call} is called with {what} ({strange[0]}), which is not known")


ROUNDINGS = {torch.float32: 0, torch.int32: 0, torch.float16: 1, torch.bfloat16: 16}
"""How results are rounded on their way out, by the dtype that they get: 0 not at all, to the nearest else."""


def _out_of_l0c(found: re.Match[str], args: Arguments) -> Sequence[Work]:
    """As many rows and columns as the place has, rounded to its dtype."""
    source, out, rounding, activation, splits, unit = args
    _only(found[0], ROUNDINGS[out.dtype], "a rounding", rounding)
    _only(found[0], 0, "an activation, a split or a unit flag", activation, int(splits), unit)
    rows, columns = out.sizes
    return (Work(FIX, [source], [out], lambda: [matrix(source.read())[:rows, :columns].to(out.dtype)]),)


CUBE: dict[str, Callable[[re.Match[str], Arguments], Sequence[Work]]] = {
    r"nd2nz_\w+": _into_l1,
    r"set_l1_\dd_\w+": _fill,
    r"mma_tile_(?:float|half|bfloat16_t|int8_t)_to_(?:float|int32_t)(_ta|_tb|)": _product,
    r"fixpipe_nz2nd_\w+_4d_to_2d": _out_of_l0c,
}
"""Library calls of the cube core by name."""
