"""Arithmetic on single numbers: integers that wrap at their width, and floats that are rounded to theirs."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from .errors import Unknown
from .memory import DTYPES
from .parse import Operation, matched

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
_TWO = r"(%[\w#-]+), (%[\w#-]+)(?: overflow<[\w, ]+>| fastmath<\w+>)?\s+: (\w+)$"
Maker = Callable[[Operation], Value]
"""From an operation to its value. `Unknown` for a type, or a form, that is not known."""


def _of(kind: str, known: Collection[str], operation: Operation) -> str:
    if kind not in known:
        raise Unknown(f"line {operation.line}: {operation.name} of {kind} is not known")
    return kind


def _integers(name: str) -> Maker:
    def made(operation: Operation) -> Value:
        x, y, kind = matched(_TWO, operation).groups()
        _of(kind, WIDTHS, operation)
        return lambda core: wrapped(INTEGER[name](core[x], core[y]), kind)

    return made


def _floats(name: str) -> Maker:
    def made(operation: Operation) -> Value:
        x, y, kind = matched(_TWO, operation).groups()
        _of(kind, FLOATS, operation)
        return lambda core: rounded(FLOAT[name](core[x], core[y]), kind)

    return made


def _root(operation: Operation) -> Value:
    x, kind = matched(r"(%[\w#-]+)(?: fastmath<\w+>)? : (\w+)$", operation).groups()
    _of(kind, FLOATS, operation)
    return lambda core: rounded(core[x] ** 0.5 if core[x] >= 0 else math.nan, kind)


def _compared(operation: Operation) -> Value:
    """`slt`, `ult` or `eq` of integers: with a sign, without, or all the same."""
    how, x, y, kind = matched(r"(\w+), (%[\w#-]+), (%[\w#-]+) : (\w+)$", operation).groups()
    order = ORDERS[_of(how[-2:], ORDERS, operation)]
    _of(kind, WIDTHS, operation)
    if how[0] == "u":
        return lambda core: int(order(unsigned(core[x], kind), unsigned(core[y], kind)))
    return lambda core: int(order(core[x], core[y]))


def _selected(operation: Operation) -> Value:
    condition, x, y = matched(r"(%[\w#-]+), (%[\w#-]+), (%[\w#-]+) : ", operation).groups()
    return lambda core: core[x] if core[condition] else core[y]


def _constant(operation: Operation) -> Value:
    """A number by its digits, or a float by its bits."""
    if operation.text in ("true", "false"):
        truth = int(operation.text == "true")
        return lambda core: truth
    word, kind = matched(r"(\S+) : (\w+)$", operation).groups()
    value = _number(word, _of(kind, {**WIDTHS, **FLOATS}, operation))
    return lambda core: value


def _number(word: str, kind: str) -> Any:
    if kind in WIDTHS:
        return int(word)
    return FLOATS[kind](int(word, 16)) if word.startswith("0x") else float(word)


FLOATS: dict[str, Callable[[int], float]] = {
    "f32": lambda bits: struct.unpack("<f", struct.pack("<I", bits))[0],
    "bf16": lambda bits: struct.unpack("<f", struct.pack("<I", bits << 16))[0],
    "f16": lambda bits: struct.unpack("<e", struct.pack("<H", bits))[0],
}
"""Types of floats, and the number that has these bits."""


def _converted(change: Callable[[Any, str, str], Any]) -> Maker:
    def made(operation: Operation) -> Value:
        x, before, after = matched(r"(%[\w#-]+)(?: \S+)? : (\w+) to (\w+)$", operation).groups()
        for kind in (before, after):
            _of(kind, {**WIDTHS, **FLOATS}, operation)
        return lambda core: change(core[x], before, after)

    return made


def _extended(value: int, before: str, after: str) -> int:
    """By its sign: a truth value's only bit is one."""
    return -value if before == "i1" else value


ARITHMETIC: dict[str, Maker] = {
    **{name: _integers(name) for name in INTEGER},
    **{name: _floats(name) for name in FLOAT},
    "cmpi": _compared,
    "constant": _constant,
    "extf": _converted(lambda value, before, after: value),
    "extsi": _converted(_extended),
    "extui": _converted(lambda value, before, after: unsigned(value, before)),
    "index_castui": _converted(lambda value, before, after: wrapped(unsigned(value, before), after)),
    "index_cast": _converted(lambda value, before, after: wrapped(value, after)),
    "select": _selected,
    "sqrt": _root,
    "sitofp": _converted(lambda value, before, after: rounded(float(value), after)),
    "truncf": _converted(lambda value, before, after: rounded(value, after)),
    "trunci": _converted(lambda value, before, after: wrapped(value, after)),
}
"""Operations of `arith` and `math` by name."""


# The same in the dialect of LLVM, which Ascend 950's programs use


def _wide_constant(operation: Operation) -> Value:
    word, kind = matched(r"\((\S+?)(?: : (\w+))?\) : \w+$", operation).groups()
    if word in ("true", "false"):
        return lambda core: int(word == "true")
    value = _number(word, _of(kind, {**WIDTHS, **FLOATS}, operation))
    return lambda core: value


def _wide_compared(operation: Operation) -> Value:
    how, rest = matched(r'"(\w+)" (.*)', operation).groups()
    return _compared(replace(operation, text=f"{how}, {rest}"))


def _of_two(name: str) -> Maker:
    """Written as a call: `(%a, %b) : (i64, i64) -> i64`."""

    def made(operation: Operation) -> Value:
        x, y, kind = matched(r"\((%[\w#-]+), (%[\w#-]+)\)\s+: \(\w+, \w+\) -> (\w+)$", operation).groups()
        return lambda core: wrapped(INTEGER[name](core[x], core[y]), kind)

    return made


def _without_sign(operation: Operation) -> Value:
    x, y, kind = matched(_TWO, operation).groups()
    return lambda core: wrapped(unsigned(core[x], kind) // unsigned(core[y], kind), kind)


LLVM: dict[str, Maker] = {
    "add": _integers("addi"),
    "sub": _integers("subi"),
    "mul": _integers("muli"),
    "sdiv": _integers("divsi"),
    "srem": _integers("remsi"),
    "udiv": _without_sign,
    "and": _integers("andi"),
    "or": _integers("ori"),
    "xor": _integers("xori"),
    "sext": _converted(_extended),
    "zext": _converted(lambda value, before, after: unsigned(value, before)),
    "trunc": _converted(lambda value, before, after: wrapped(value, after)),
    "select": _selected,
    "icmp": _wide_compared,
    "mlir.constant": _wide_constant,
    "intr.smin": _of_two("minsi"),
    "intr.smax": _of_two("maxsi"),
}
"""Operations of `llvm` on scalars, by name."""
