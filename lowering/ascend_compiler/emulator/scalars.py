"""Arithmetic on single numbers: integers that wrap at their width, and floats that are rounded to theirs."""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable
from typing import Any

import torch

from .memory import DTYPES

WIDTHS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "index": 64}
Value = Callable[[Any], Any]
"""From a core to the value of an operation there."""


def wrapped(value: int, kind: str) -> int:
    """An integer in the range of its type: two's complement; truth values are 0 and 1."""
    bits = WIDTHS[kind]
    value &= (1 << bits) - 1
    return value - (1 << bits) if bits > 1 and value >> (bits - 1) else value


def unsigned(value: int, kind: str) -> int:
    """The number without a sign that has these bits."""
    return value & ((1 << WIDTHS[kind]) - 1)


def rounded(value: float, kind: str) -> float:
    """A float as its type holds it."""
    return torch.tensor(value, dtype=torch.float64, device="cpu").to(DTYPES[kind]).item()


def _divided(x: int, y: int) -> int:
    """Towards 0."""
    quotient = abs(x) // abs(y)
    return quotient if (x < 0) == (y < 0) else -quotient


INTEGER: dict[str, Callable[[int, int], int]] = {
    "addi": operator.add,
    "subi": operator.sub,
    "muli": operator.mul,
    "divsi": _divided,
    "remsi": lambda x, y: x - y * _divided(x, y),
    "floordivsi": operator.floordiv,
    "ceildivsi": lambda x, y: -(-x // y),
    "andi": operator.and_,
    "ori": operator.or_,
    "xori": operator.xor,
    "shli": operator.lshift,
    "shrsi": operator.rshift,
    "minsi": min,
    "maxsi": max,
}
FLOAT: dict[str, Callable[[float, float], float]] = {
    "addf": operator.add,
    "subf": operator.sub,
    "mulf": operator.mul,
    "divf": operator.truediv,
    "maximumf": max,
    "minimumf": min,
}
ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_TWO = re.compile(r"(%[\w#-]+), (%[\w#-]+)(?: overflow<\w+>| fastmath<\w+>)? : (\w+)")


def _integers(name: str) -> Callable[[str], Value]:
    def made(text: str) -> Value:
        x, y, kind = _TWO.match(text).groups()  # type: ignore[union-attr]
        return lambda core: wrapped(INTEGER[name](core[x], core[y]), kind)

    return made


def _floats(name: str) -> Callable[[str], Value]:
    def made(text: str) -> Value:
        x, y, kind = _TWO.match(text).groups()  # type: ignore[union-attr]
        return lambda core: rounded(FLOAT[name](core[x], core[y]), kind)

    return made


def _compared(text: str) -> Value:
    """`slt`, `ult` or `eq` of integers: with a sign, without, or all the same."""
    how, x, y, kind = re.match(r"(\w+), (%[\w#-]+), (%[\w#-]+) : (\w+)", text).groups()  # type: ignore[union-attr]
    order = ORDERS[how[-2:]]
    if how[0] == "u":
        return lambda core: int(order(unsigned(core[x], kind), unsigned(core[y], kind)))
    return lambda core: int(order(core[x], core[y]))


def _selected(text: str) -> Value:
    condition, x, y = re.findall(r"%[\w#-]+", text.partition(" : ")[0])
    return lambda core: core[x] if core[condition] else core[y]


def _constant(text: str) -> Value:
    """A number by its digits, or a float by its bits."""
    word, _, kind = text.partition(" : ")
    if word in ("true", "false"):
        return lambda core: int(word == "true")
    value = _number(word, kind)
    return lambda core: value


def _number(word: str, kind: str) -> Any:
    if kind in WIDTHS:
        return int(word)
    if not word.startswith("0x"):
        return float(word)
    bits = int(word, 16)
    return {
        "f32": lambda: struct.unpack("<f", struct.pack("<I", bits))[0],
        "bf16": lambda: struct.unpack("<f", struct.pack("<I", bits << 16))[0],
        "f16": lambda: struct.unpack("<e", struct.pack("<H", bits))[0],
    }[kind]()


def _converted(change: Callable[[Any, str, str], Any]) -> Callable[[str], Value]:
    def made(text: str) -> Value:
        x, before, after = re.match(r"(%[\w#-]+)(?: \S+)? : (\w+) to (\w+)", text).groups()  # type: ignore[union-attr]
        return lambda core: change(core[x], before, after)

    return made


def _extended(value: int, before: str, after: str) -> int:
    """By its sign: a truth value's only bit is one."""
    return -value if before == "i1" else value


ARITHMETIC: dict[str, Callable[[str], Value]] = {
    **{name: _integers(name) for name in INTEGER},
    **{name: _floats(name) for name in FLOAT},
    "cmpi": _compared,
    "constant": _constant,
    "extf": _converted(lambda value, before, after: value),
    "extsi": _converted(_extended),
    "extui": _converted(lambda value, before, after: unsigned(value, before)),
    "index_cast": _converted(lambda value, before, after: wrapped(value, after)),
    "select": _selected,
    "sitofp": _converted(lambda value, before, after: rounded(float(value), after)),
    "truncf": _converted(lambda value, before, after: rounded(value, after)),
    "trunci": _converted(lambda value, before, after: wrapped(value, after)),
}
"""Operations of `arith` by name: from their text to their value."""
