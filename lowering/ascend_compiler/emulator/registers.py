"""Vector functions of Ascend 950: loads into registers, work on their lanes under a mask, and stores.

A register has 256 bytes: 64 lanes of 32 bits or 128 of 16. A mask has 256 bits, and a lane heeds the first of its own.
What stands in lanes that a mask leaves out nobody may rely on, where the name ends in x, and is 0, where it ends in z.
A load takes a whole register, past its buffer's end too: what lies there counts as nobody's, and as not read. Loads and
stores of one function, and of one after the other, are in order: no program of the compiler has a barrier between them.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .core import Core
from .errors import Unknown
from .memory import DTYPES, View, nobodys
from .pipes import Access, V

BITS, BYTES = 256, 256
ALL_LANES, NO_LANES = 0, 15
FIRST_LANES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 8, 6: 16, 7: 32, 8: 64, 9: 128}
"""How many lanes a mask has by the number of its pattern."""
WHOLE, REPEATED, SPREAD = (0,), (2, 3), (14,)
"""How a load fills lanes: one by one, all with the first, or every second one of 16 bits, for a conversion to 32."""
STORED, PACKED, FIRST = (1, 2), (7,), (4, 5)
"""How a store takes them: one by one, every second one of 16 bits, or the first alone."""


@dataclass(frozen=True)
class Pointer:
    """A place in a buffer, in elements from where the buffer begins."""

    view: View
    at: int

    def part(self, count: int, line: int, does: str) -> View:
        """So many elements from here on, or those up to the buffer's end."""
        first, dtype = self.view.base + self.at, self.view.dtype
        size = min(count, max(self.view.last + 1 - first, 0)) if does == "reads" else count
        found = replace(self.view, dtype=dtype, offset=first, sizes=(size,), strides=(1,))
        found.check(line, does)
        return found


@dataclass(frozen=True)
class Intrinsic:
    """One instruction: its operands, the core that runs it, and its line."""

    args: Sequence[Any]
    core: Core
    line: int


def intrinsic(name: str, line: int) -> Callable[[Intrinsic], Any]:
    """What an instruction of this name does. `Unknown` for one that is not in the table."""
    for pattern, made in INTRINSICS.items():
        found = re.fullmatch(pattern, name)
        if found is not None:
            return lambda call: made(found, call)
    raise Unknown(f"line {line}: the instruction {name} is not known")


def _lanes(mask: Tensor, count: int) -> Tensor:
    return mask[:: BITS // count]


def _masked(values: Tensor, mask: Tensor, rest: Tensor) -> Tensor:
    return torch.where(_lanes(mask, values.numel()), values, rest.to(values.dtype))


def _bits(lanes: Tensor) -> Tensor:
    """A mask of lanes: the first bit of each."""
    mask = torch.zeros(BITS, dtype=torch.bool, device="cpu")
    mask[:: BITS // lanes.numel()] = lanes
    return mask


# Masks


def _pattern(found: re.Match[str], call: Intrinsic) -> Tensor:
    count, number = 8 * BYTES // int(found[1]), call.args[0]
    known = {ALL_LANES: count, NO_LANES: 0, **FIRST_LANES}
    if number not in known:
        raise Unknown(f"line {call.line}: the pattern {number} of a mask is not known")
    first = known[number]
    return _bits(torch.arange(count, device="cpu") < first)


def _compared(found: re.Match[str], call: Intrinsic) -> Tensor:
    x, y, mask = call.args
    return _bits(ORDERS[found[1]](x, y) & _lanes(mask, x.numel()))


ORDERS = {"eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}


def _both(found: re.Match[str], call: Intrinsic) -> Tensor:
    x, y, mask = call.args
    return x & y & mask


def _load_mask(found: re.Match[str], call: Intrinsic) -> Tensor:
    """Bits of a buffer of truth values."""
    pointer, *how = call.args
    _only(call, 0, "loads a mask", *how)
    bits = _read(pointer.part(BITS, call.line, "reads"), call)
    return torch.cat((bits, torch.zeros(BITS - bits.numel(), dtype=torch.bool, device="cpu")))


def _widened(found: re.Match[str], call: Intrinsic) -> tuple[Tensor, Tensor]:
    """Bits of two masks in turns: the first half, and the second."""
    both = torch.stack(tuple(call.args), -1).flatten()
    return both[:BITS], both[BITS:]


# Transfers


def _read(view: View, call: Intrinsic) -> Tensor:
    call.core.order.access(Access((call.core.name, V), call.line, [view], []))
    return view.read()


def _load(found: re.Match[str], call: Intrinsic) -> Tensor:
    pointer, _, how, _ = call.args
    count = int(found[1])
    if how in REPEATED:
        return _read(pointer.part(1, call.line, "reads"), call).expand(count)
    if how not in (*WHOLE, *SPREAD):
        raise Unknown(f"line {call.line}: a load in the way {how} is not known")
    return _whole(pointer, count, 2 if how in SPREAD else 1, call)


def _whole(pointer: Pointer, count: int, step: int, call: Intrinsic) -> Tensor:
    """A register whose every `step`-th lane is loaded."""
    given = _read(pointer.part(count // step, call.line, "reads"), call)
    lanes = nobodys(pointer.view.dtype).repeat(count)
    lanes[: step * given.numel() : step] = given
    return lanes


def _store(found: re.Match[str], call: Intrinsic) -> None:
    values, pointer, _, how, _, mask = call.args
    if how not in (*STORED, *PACKED, *FIRST):
        raise Unknown(f"line {call.line}: a store in the way {how} is not known")
    values = values[::2] if how in PACKED else values
    taken = _lanes(mask, values.numel()).nonzero().flatten().tolist()
    taken = taken[:1] if how in FIRST else taken
    if taken != list(range(len(taken))):
        raise Unknown(f"line {call.line}: a store under a mask with gaps is not known")
    _write(pointer, values[: len(taken)], call)


def _write(pointer: Pointer, values: Tensor, call: Intrinsic) -> None:
    view = pointer.part(values.numel(), call.line, "writes")
    call.core.order.access(Access((call.core.name, V), call.line, [], [view]))
    view.write(values)


def _store_some(found: re.Match[str], call: Intrinsic) -> tuple[Any, Pointer]:
    """The first lanes, by bytes; the pointer goes on behind them. What would wait for a whole burst is written now."""
    values, pointer, size, kept = call.args
    count = size // values.element_size()
    _write(pointer, values[:count], call)
    return kept, replace(pointer, at=pointer.at + count)


def _load_anywhere(found: re.Match[str], call: Intrinsic) -> tuple[Tensor, Any, Pointer]:
    """A register from a place that is no burst's beginning; the pointer goes on by bytes."""
    pointer, kept, size = call.args
    dtype = pointer.view.dtype
    return (
        _whole(pointer, BYTES // dtype.itemsize, 1, call),
        kept,
        replace(pointer, at=pointer.at + size // dtype.itemsize),
    )


# Arrangement


def _in_turns(found: re.Match[str], call: Intrinsic) -> tuple[Tensor, Tensor]:
    """Lanes of two registers in turns: the first half, and the second."""
    first, second = torch.stack(tuple(call.args), -1).flatten().chunk(2)
    return first, second


def _apart(found: re.Match[str], call: Intrinsic) -> tuple[Tensor, Tensor]:
    """Every second lane of two registers: from the first on, and from the next."""
    both = torch.cat(tuple(call.args))
    return both[::2], both[1::2]


def _ramp(found: re.Match[str], call: Intrinsic) -> Tensor:
    first, order = call.args
    _only(call, 0, "counts", order)
    dtype = DTYPES[found[1]]
    return torch.arange(BYTES // dtype.itemsize, dtype=dtype, device="cpu") + first


# Arithmetic

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": torch.maximum,
    "min": torch.minimum,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
WITH_NUMBER: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "adds": operator.add,
    "muls": operator.mul,
    "maxs": lambda x, y: x.clamp_min(y),
    "mins": lambda x, y: x.clamp_max(y),
    "shls": lambda x, y: x << y,
    "shrs": lambda x, y: (x.long() & (1 << 8 * x.element_size()) - 1) >> y,
}
UNARY = {"exp": torch.exp, "ln": torch.log, "sqrt": torch.sqrt, "abs": torch.abs, "neg": torch.neg}


def _binary(found: re.Match[str], call: Intrinsic) -> Tensor:
    x, y, mask = call.args
    return _masked(BINARY[found[1]](x, y), mask, nobodys(x.dtype))


def _with_number(found: re.Match[str], call: Intrinsic) -> Tensor:
    x, number, mask = call.args
    return _masked(WITH_NUMBER[found[1]](x, number).to(x.dtype), mask, nobodys(x.dtype))


def _unary(found: re.Match[str], call: Intrinsic) -> Tensor:
    x, mask = call.args
    return _masked(UNARY[found[1]](x), mask, nobodys(x.dtype))


def _exp_of_difference(found: re.Match[str], call: Intrinsic) -> Tensor:
    x, y, mask, part = call.args
    _only(call, 0, "takes part", part)
    return _masked((x - y).exp(), mask, nobodys(x.dtype))


REDUCED = {"add": torch.sum, "max": torch.amax, "min": torch.amin}


def _reduced(found: re.Match[str], call: Intrinsic) -> Tensor:
    """Of the lanes of the mask, in the first lane."""
    x, mask = call.args
    result = nobodys(x.dtype).repeat(x.numel())
    result[0] = REDUCED[found[1]](x[_lanes(mask, x.numel())], 0)
    return result


def _repeated(found: re.Match[str], call: Intrinsic) -> Tensor:
    """A number, or a register's first lane, in all lanes of the mask."""
    given, mask, how = call.args
    _only(call, 1, "repeats", how)
    first = given[:1] if isinstance(given, Tensor) else torch.tensor([given], dtype=DTYPES[found[1]], device="cpu")
    return _masked(first.expand(BYTES // first.element_size()), mask, torch.zeros(1, device="cpu"))


def _broadcast(found: re.Match[str], call: Intrinsic) -> Tensor:
    return torch.full((BYTES // DTYPES[found[1]].itemsize,), call.args[0], dtype=DTYPES[found[1]], device="cpu")


def _selected(found: re.Match[str], call: Intrinsic) -> Tensor:
    x, y, mask = call.args
    return torch.where(_lanes(mask, x.numel()), x, y)


def _to_float32(found: re.Match[str], call: Intrinsic) -> Tensor:
    """Every second lane of 16 bits, the first of each pair."""
    x, mask, part = call.args
    _only(call, 0, "takes part", part)
    return _masked(x[::2].float(), mask, nobodys(torch.float32))


def _of_float32(found: re.Match[str], call: Intrinsic) -> Tensor:
    """To the nearest, ties to even, in every second lane."""
    x, mask, *how = call.args
    _only(call, 0, "rounds", *how)
    dtype = DTYPES[found[1]]
    result = torch.zeros(2 * x.numel(), dtype=dtype, device="cpu")
    result[::2] = _masked(x.to(dtype), mask, nobodys(dtype))
    return result


def _of_integer(found: re.Match[str], call: Intrinsic) -> Tensor:
    x, mask, how = call.args
    _only(call, 0, "rounds", how)
    return _masked(x.float(), mask, nobodys(torch.float32))


def _only(call: Intrinsic, known: Any, what: str, *given: Any) -> None:
    strange = [value for value in given if value != known]
    if strange:
        raise Unknown(f"line {call.line}: an instruction {what} in a way ({strange[0]}) that is not known")


def _nothing(found: re.Match[str], call: Intrinsic) -> None:
    return None


INTRINSICS: dict[str, Callable[[re.Match[str], Intrinsic], Any]] = {
    r"pge\.b(8|16|32) .*": _pattern,
    r"pand\.z .*": _both,
    r"plds\.b8 .*": _load_mask,
    r"pintlv\.b8 .*": _widened,
    r"vldsx1\.v(64|128)\w+ .*": _load,
    r"vstsx1\.v(64|128)\w+ .*": _store,
    r"vstus\.post\.\w+ .*": _store_some,
    r"vldus\.post\.\w+ .*": _load_anywhere,
    r"vintlv .*": _in_turns,
    r"vdintlv .*": _apart,
    r"vci vector<\d+x(\w+)>": _ramp,
    r"(?:vldas|vstas|init\.vector\.align\.data) .*": _nothing,
    r"v(add|sub|mul|div|max|min|and|or|xor)(?:\.s)?\.x .*": _binary,
    r"v(adds|muls|maxs|mins|shls|shrs)\.[su]\.x .*": _with_number,
    r"v(exp|ln|sqrt|abs|neg)\.x .*": _unary,
    r"vexpdif .*": _exp_of_difference,
    r"vc(add|max|min)\.s\.x .*": _reduced,
    r"vcmp\.(\w\w)\.s\.z .*": _compared,
    r"vdups?\.z vector<\d+x(\w+)>": _repeated,
    r"vbr vector<\d+x(\w+)>": _broadcast,
    r"vsel .*": _selected,
    r"vcvtff\.(?:bf|f)162f32\.x .*": _to_float32,
    r"vcvtff\.f322(bf16|f16)\.x .*": _of_float32,
    r"vcvtif\.s322f32\.x .*": _of_integer,
}
"""Instructions by name and the type of what they give."""
