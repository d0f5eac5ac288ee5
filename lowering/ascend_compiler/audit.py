"""What a compiled kernel does beside what its source says: reads and writes that its masks forbid, scalar loops, wraps.

The compiler takes nearly all of the language and says nothing where it finds no good form of it. Each rule reads the
texts of one `Compiled`; facts behind them are in docs/npu-evidence.md.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .outcome import Compiled


@dataclass(frozen=True)
class Finding:
    """One thing that the program does and its author hardly meant. `line` is that of the source, where it is known."""

    rule: str
    words: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.rule}{f' at line {self.line}' if self.line else ''}: {self.words}"


def audit(compiled: Compiled, pools: Collection[str] = ()) -> tuple[Finding, ...]:
    """All findings. `pools` are the arguments that may have more than 2^31 elements."""
    return (
        *_whole_tiles(compiled.linalg),
        *_scalar_loops(compiled.program),
        *_dropped_buffers(compiled),
        *_wrapping_addresses(compiled, pools),
    )


_COPY = re.compile(r"memref\.copy (%\w+), (%\w+) : .* loc\((#?\w+)\)")
_TENSOR = re.compile(r"(%\w+) = bufferization\.to_tensor (%\w+) ")
_SELECT = re.compile(r"(%\w+) = arith\.select %\w+, (%\w+), (%\w+) : .* loc\((#?\w+)\)")
_STORE = re.compile(r"bufferization\.materialize_in_destination (%\w+) in writable (%\w+) ")


def _whole_tiles(linalg: str) -> Iterator[Finding]:
    """Masked accesses of a whole tile: it is copied from its place in memory, and the mask selects afterwards.

    The select of a masked load stands at the place of the copy in the source; that of a masked store takes what was
    copied where the mask is off, and all goes back to where it came from.
    """
    copied = {into: (source, loc) for source, into, loc in _COPY.findall(linalg)}
    read = {tensor: copied[memory] for tensor, memory in _TENSOR.findall(linalg) if memory in copied}
    stored, lines = dict(_STORE.findall(linalg)), _lines(linalg)
    for made, taken, other, loc in _SELECT.findall(linalg):
        if read.get(taken, ("", ""))[1] == loc and "subview" not in read[taken][0]:
            yield Finding("whole tile read", "the mask is no range, so masked cells are read too", lines.get(loc))
        if made in stored and read.get(other, ("", ""))[0] == stored[made]:
            words = "the mask is no range, so masked cells are read and written back, over what others write there"
            yield Finding("read-modify-write", words, lines.get(loc))


def _lines(linalg: str) -> dict[str, int]:
    """Lines of the source by the names of locations; a call's is that where it is called."""
    told = dict(re.findall(r'^(#\w+) = loc\("[^"]*":(\d+):', linalg, re.MULTILINE))
    called = re.findall(r"^(#\w+) = loc\(callsite\(#\w+ at (#\w+)\)\)", linalg, re.MULTILINE)
    return {name: int(told[place]) for name, place in [*((name, name) for name in told), *called] if place in told}


_ELEMENT_STORED = re.compile(r"memref\.store [^:]* : memref<((?:\d+x)+)\w+, #hivm\.address_space<ub>>")


def _scalar_loops(program: str) -> Iterator[Finding]:
    """Single elements that are stored into a tile: where a vector was meant, a loop goes over them."""
    tiles = [sizes for sizes in _ELEMENT_STORED.findall(program) if set(sizes.split("x")) - {"1", ""}]
    if tiles:
        shapes = ", ".join(sorted({sizes.removesuffix("x") for sizes in tiles}))
        yield Finding("scalar loop", f"elements of a tile ({shapes}) are made one by one, where a vector was meant")


_TWO_BUFFERS = re.compile(r"arith\.select .* : memref<[^>]*#hivm\.address_space<(?:ub|cbuf)>>")


def _dropped_buffers(compiled: Compiled) -> Iterator[Finding]:
    """A loop that loads, and none of the second buffers that were asked for: they are left out where they do not fit.

    So it is on 910; on 950 the compiler reports an overflow instead. Products have theirs where their operands lie,
    in the buffer of the cube cores.
    """
    if compiled.multi_buffer and _loads_in_a_loop(compiled.program) and not _TWO_BUFFERS.search(compiled.program):
        words = "second buffers do not fit, so that transfers wait for work and work for them; take a smaller tile"
        yield Finding("dropped double buffering", words)


def _loads_in_a_loop(program: str) -> bool:
    loops: list[int] = []
    for line in program.splitlines():
        depth = len(line) - len(line.lstrip())
        loops = [loop for loop in loops if loop < depth]
        if "load_gm_to_" in line and loops:
            return True
        if re.search(r"\bscf\.(for|while)\b", line):
            loops.append(depth)
    return False


_VALUE = re.compile(r"^\s*(%\w+)(?::\d+)? = \"?([\w.]+)\"?(.*?)(?: loc\((#?\w+)\))?$", re.MULTILINE)
_NAME = re.compile(r"%\w+")
_PRODUCT = re.compile(r": (tensor<[\dx]+x)?i32>?$")
_INSIDE = {"arith.constant", "tt.make_range", "arith.remsi"}
"""Values that count within a tile or a slot: a remainder is a part's number among the parts of one."""
_PLAIN = ("arith.addi", "arith.subi", "arith.muli", "arith.ext", "tt.splat", "tt.broadcast", "tt.expand")
"""Beginnings of operations whose result counts within a tile or a slot if all that they take does."""


def _wrapping_addresses(compiled: Compiled, pools: Collection[str]) -> Iterator[Finding]:
    """Products of 32 bits in the addresses of a pool that may be larger: what multiplies a row or a slot by a width."""
    values, lines = _Values(compiled.ttir), _lines(compiled.ttir)
    roots = {f"%arg{at}": name for at, name in enumerate(compiled.arguments) if name in pools}
    for pointer, offset in values.addresses():
        for pool in sorted(values.behind(pointer) & roots.keys()):
            for loc in values.products(offset):
                words = f"an offset into {roots[pool]} is multiplied in 32 bits; convert with .to(tl.int64) before"
                yield Finding("32-bit address", words, lines.get(loc))


class _Values:
    """The values of Triton's IR: the operation that makes each, the rest of its line, and its location."""

    def __init__(self, ttir: str) -> None:
        self.made = {name: (op, rest.strip(), loc) for name, op, rest, loc in _VALUE.findall(ttir)}

    def addresses(self) -> Iterator[tuple[str, str]]:
        """Pairs of a pointer and what is added to it."""
        for op, rest, _ in self.made.values():
            if op == "tt.addptr":
                pointer, offset = _NAME.findall(rest)[:2]
                yield pointer, offset

    def behind(self, name: str) -> set[str]:
        """All values that one is made of, not going behind what is read from memory or is a quotient or remainder."""
        found: set[str] = set()
        ahead = [name]
        while ahead:
            name = ahead.pop()
            op, rest, _ = self.made.get(name, ("", "", ""))
            if name not in found and op not in ("tt.load", "arith.remsi", "arith.divsi"):
                ahead += _NAME.findall(rest)
            found.add(name)
        return found

    def products(self, offset: str) -> Iterator[str]:
        """Locations of products in 32 bits that an offset is made of and that may leave a slot."""
        for name in sorted(self.behind(offset)):
            op, rest, loc = self.made.get(name, ("", "", ""))
            if op == "arith.muli" and _PRODUCT.search(rest) and not all(map(self.inside, _NAME.findall(rest))):
                yield loc

    def inside(self, name: str) -> bool:
        """Whether a value counts within a tile or a slot."""
        op, rest, _ = self.made.get(name, ("", "", ""))
        return op in _INSIDE or (op.startswith(_PLAIN) and all(map(self.inside, _NAME.findall(rest))))
