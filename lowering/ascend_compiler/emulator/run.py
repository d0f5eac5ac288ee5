"""A program run block by block. A block is a vector core, a cube core, or one cube core with two vector cores."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..outcome import Compiled
from ..program import memory_bits
from .core import Core, LabelledPart, Running, run_parts
from .errors import EmulationError, Hang, Unknown
from .memory import POISON, Memory, View
from .operations import parts_of
from .parse import Function, ParsedProgram, parse
from .pipes import CoreName, M, Order, S, V

CUBE, VECTOR = "AIC", "AIV"
MEMORIES = {CUBE: {"cbuf": "L1", "cc": "L0C"}, VECTOR: {"ub": "the unified buffer"}}
"""Memories of a kind of core that a program names, by space."""
WIDE = "Ascend950"
IN_TURN = {False: (S, M), True: (S, M, V)}
"""Pipes whose work ends before the next begins: scalars, products, which a loop sums, and the vectors of Ascend 950."""
SIZES = {"cbuf": "L1_SIZE", "cc": "L0C_SIZE", "ub": "UB_SIZE"}


@dataclass(frozen=True)
class Emulation:
    """A run that did nothing wrong: how many operations its blocks took."""

    blocks: int
    operations: int


def emulate(
    compiled: Compiled, arguments: Mapping[str, Tensor | int | float], programs: int, *, seed: int = 0
) -> Emulation:
    """Run what the compiler made of a kernel, on contiguous CPU tensors by the names of its arguments, in place.

    `programs` is the grid's size; blocks are run in an order drawn by `seed`, each on cores of its own, and so are the
    cores of a block where several can go on. Raises `OutOfBounds`, `Race`, `Hang` and `Unknown`, which name lines of
    `compiled.program`; `EmulationError` for arguments that the program does not have, or not so.
    """
    grid = _Grid(compiled, arguments, programs)
    draw, found = random.Random(seed), 0
    blocks = list(range(programs))
    draw.shuffle(blocks)
    for block in blocks:
        found += grid.run(block, draw)
    return Emulation(programs, found)


class _Grid:
    """What all blocks of a run share: actions of each entry, arguments, workspace and order."""

    def __init__(self, compiled: Compiled, arguments: Mapping[str, Any], programs: int) -> None:
        program = parse(compiled.program)
        self.entries = [(entry, _parts(entry, program)) for entry in program.entries.values()]
        self.order, self.text = Order(in_turn=IN_TURN[compiled.chip.startswith(WIDE)]), compiled.program
        space = _poisoned("the workspace", programs * program.workspace)
        workspace = View(space, torch.int8, 0, (space.data.numel(),), (1,))
        self.given = [0, None, workspace, *_bound(compiled, arguments), programs, 1, 1]

    def run(self, block: int, draw: random.Random) -> int:
        """The operations that a block took, after it is done."""
        cores = [(self.core(name, entry), parts) for entry, parts in self.entries for name in self.names(block, entry)]
        _together([(core, run_parts(parts, core)) for core, parts in cores], draw)
        for core, _ in cores:
            self.order.end(core.name)
            for memory in core.memories.values():
                self.order.forget(memory)
        return sum(core.operations for core, _ in cores)

    def names(self, block: int, entry: Function) -> list[CoreName]:
        """The cores of a block that run an entry."""
        if len(self.entries) == 1:
            return [CoreName(block)]
        return [CoreName(block, "cube")] if entry.unit == CUBE else [CoreName(block, "vector", at) for at in range(2)]

    def core(self, name: CoreName, entry: Function) -> Core:
        """A core before its first operation, with nothing in its memories."""
        memories = {
            space: _poisoned(called, memory_bits(self.text, SIZES[space]) // 8)
            for space, called in MEMORIES[entry.unit].items()
        }
        others = [other for one, _ in self.entries if one is not entry for other in self.names(name.block, one)]
        values = dict(zip((argument for argument, _ in entry.arguments), self.given, strict=True))
        return Core(name, memories, others, self.order, values)


def _parts(entry: Function, program: ParsedProgram) -> Mapping[str, LabelledPart]:
    if entry.unit not in MEMORIES:
        raise Unknown(f"{entry.name} is for {entry.unit}, which is no kind of core that is known")
    return parts_of(entry, program)


def _poisoned(name: str, size: int) -> Memory:
    return Memory(name, torch.full((size,), POISON, dtype=torch.uint8, device="cpu"))


def _together(cores: Sequence[tuple[Core, Running]], draw: random.Random) -> None:
    """Run the cores of a block, each until it waits, in an order drawn anew each time. `Hang` if all of them wait."""
    left = list(cores)
    while left:
        done = sum(core.operations for core, _ in cores)
        draw.shuffle(left)
        waiting = [(core, running, next(running, None)) for core, running in left]
        left = [(core, running) for core, running, where in waiting if where is not None]
        if left and done == sum(core.operations for core, _ in cores):
            raise Hang(_all_wait((core, *where) for core, _, where in waiting if where is not None))


def _all_wait(waiting: Iterable[tuple[Core, int, int]]) -> str:
    words = [f"line {line} on {core.name} for block flag {flag}" for core, line, flag in waiting]
    return f"the cores wait for each other: {', '.join(words)}"


def _bound(compiled: Compiled, arguments: Mapping[str, Tensor | int | float]) -> list[Any]:
    """The kernel's own arguments as the program has them. It has none that are constant for the compiler."""
    missing = [name for name in compiled.arguments if name not in arguments]
    if missing:
        raise EmulationError(f"the program takes {', '.join(compiled.arguments)}; {', '.join(missing)} is not given")
    return [_argument(name, arguments[name]) for name in compiled.arguments]


def _argument(name: str, value: Tensor | int | float) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not value.is_contiguous() or value.device.type != "cpu":
        raise EmulationError(f"{name} must be a contiguous tensor on the CPU; make it one with .cpu().contiguous()")
    return View(Memory(name, value.view(-1)), value.dtype, 0, (value.numel(),), (1,))
