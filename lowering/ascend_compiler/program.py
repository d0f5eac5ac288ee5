"""What the text of a compiled program says: memory that it plans, and calls of the device library."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

BITS = {"i1": 1, "i8": 8, "i16": 16, "f16": 16, "bf16": 16, "i32": 32, "f32": 32, "i64": 64, "f64": 64}
UNITS = {
    "load": r"load_gm_to_|nd2nz_",
    "store": r"store_\w+_to_gm|fixpipe_",
    "cube": r"mma_|set_l1_|matmul",
    "other": r"sync_block_|set_ffts|print",
}
"""The unit that runs a library call, by how its name begins; every other one is vector work."""

_CONSTANT = re.compile(r"(%[\w]+) = arith\.constant (-?\d+) : i64")
_PLACED = re.compile(r"hivm\.hir\.pointer_cast\(([^)]*)\) : memref<((?:\d+x)*)(\w+), #hivm\.address_space<ub>>")
_CALLED = re.compile(r"\bcall @(\w+)")


def buffer_bits(program: str) -> int:
    """Bits of the machine's unified buffer."""
    return memory_bits(program, "UB_SIZE")


def memory_bits(program: str, size: str) -> int:
    """Bits of a memory of the machine, by the name in the program: `UB_SIZE`, `L1_SIZE` or `L0C_SIZE`."""
    found = re.search(rf'"{size}", (\d+)', program)
    assert found is not None
    return int(found[1])


@dataclass(frozen=True)
class BufferPlace:
    """A buffer where the program has put it in the unified buffer; others may lie there at other times."""

    line: int
    address: int
    sizes: tuple[int, ...]
    element: str

    @property
    def bits(self) -> int:
        """What it takes."""
        return math.prod(self.sizes) * BITS[self.element]


def buffers(program: str) -> list[BufferPlace]:
    """Every buffer that the program places in the unified buffer, in its order. Addresses are bytes."""
    constants = {name: int(value) for name, value in _CONSTANT.findall(program)}
    found = []
    for line, text in enumerate(program.splitlines(), 1):
        for places, sizes, element in _PLACED.findall(text):
            shape = tuple(map(int, sizes.split("x")[:-1]))
            found += [BufferPlace(line, constants[place.strip()], shape, element) for place in places.split(",")]
    return found


def planned_bits(program: str) -> int:
    """The end of the last buffer that is placed in the unified buffer."""
    return max((8 * placed.address + placed.bits for placed in buffers(program)), default=0)


def library_calls(program: str) -> dict[str, dict[str, int]]:
    """How often each library function stands in the program, by the unit that runs it."""
    found: dict[str, dict[str, int]] = {"load": {}, "store": {}, "vector": {}, "cube": {}, "other": {}}
    for name, count in sorted(Counter(_CALLED.findall(program)).items()):
        unit = next((unit for unit, names in UNITS.items() if re.match(names, name)), "vector")
        found[unit][name] = count
    return {unit: names for unit, names in found.items() if names}
