"""A program run block by block: each operation becomes an action once, and a core goes through the actions in order."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..outcome import Compiled
from ..program import buffer_bits
from .errors import EmulationError, Unknown
from .library import Work, meaning
from .memory import Memory, MemrefType, View, row_major
from .parse import Function, Operation, ParsedProgram, matched, parse
from .pipes import PIPES, Order, S
from .scalars import ARITHMETIC

POISON = 255
"""What memory holds that nobody has written: no number, in every float type."""


@dataclass(frozen=True)
class Emulation:
    """A run that did nothing wrong: how many operations its blocks took."""

    blocks: int
    operations: int


def emulate(
    compiled: Compiled, arguments: Mapping[str, Tensor | int | float], programs: int, *, seed: int = 0
) -> Emulation:
    """Run what the compiler made of a kernel, on contiguous CPU tensors by the names of its arguments, in place.

    `programs` is the grid's size; blocks are run in an order drawn by `seed`, each on a core of its own. Raises
    `OutOfBounds`, `Race`, `Hang` and `Unknown`, which name lines of `compiled.program`; `EmulationError` for arguments
    that the program does not have, or not so.
    """
    program = parse(compiled.program)
    if compiled.mix or len(program.entries) != 1:
        raise Unknown("programs of cube and vector cores together are not known; only those of vector cores alone are")
    (entry,) = program.entries.values()
    given = _bound(compiled, arguments)
    actions = [action_of(operation, program) for operation in entry.body]
    order, found, size = Order(), 0, buffer_bits(compiled.program) // 8
    blocks = list(range(programs))
    random.Random(seed).shuffle(blocks)
    for block in blocks:
        buffer = Memory("the unified buffer", torch.full((size,), POISON, dtype=torch.uint8, device="cpu"))
        core = Core(
            block, buffer, order, dict(zip(_names(entry), (0, None, None, *given, programs, 1, 1), strict=True))
        )
        run(actions, core)
        order.end(block)
        order.forget(buffer)
        found += core.operations
    return Emulation(programs, found)


def _names(entry: Function) -> list[str]:
    return [name for name, _ in entry.arguments]


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


@dataclass
class Core:
    """What one block has while it runs: its number, its buffer, and the values of its names."""

    block: int
    buffer: Memory
    order: Order
    values: dict[str, Any]
    operations: int = field(default=0)

    def __getitem__(self, name: str) -> Any:
        """The value of `%name`, or of a number written out."""
        return self.values[name] if name.startswith("%") else int(name)

    def all(self, names: Sequence[str]) -> list[Any]:
        """The values of several."""
        return [self[name] for name in names]


Action = Callable[[Core], Any]
"""What an operation does; only `scf.yield` gives something back."""


def run(actions: Sequence[Action], core: Core) -> Any:
    """Do one after the other, until one yields values."""
    for action in actions:
        core.operations += 1
        yielded = action(core)
        if yielded is not None:
            return yielded
    return ()


def action_of(operation: Operation, program: ParsedProgram) -> Action:
    """The action of an operation. `Unknown` for one that is not in the tables."""
    kind = operation.name.rpartition(".")[2] if operation.name.startswith(("arith.", "math.")) else None
    if kind is not None and kind in ARITHMETIC:
        return _assigned(operation, ARITHMETIC[kind](operation))
    if operation.name not in ACTIONS:
        raise Unknown(f"line {operation.line}: the operation {operation.name} is not known")
    return ACTIONS[operation.name](operation, program)


def _assigned(operation: Operation, value: Callable[[Core], Any]) -> Action:
    (name,) = operation.results

    def action(core: Core) -> None:
        core.values[name] = value(core)

    return action


def _listed(text: str) -> list[str]:
    """Names and numbers of a list."""
    return re.findall(r"%[\w#-]+|-?\d+", text)


def _nothing(operation: Operation, program: ParsedProgram) -> Action:
    return lambda core: None


# Control


def _for(operation: Operation, program: ParsedProgram) -> Action:
    head = matched(r"(%\w+) = (\S+) to (\S+) step (\S+)(?:\s+iter_args\((.*?)\) ->)?", operation)
    counter, *ends = head.groups()[:4]
    carried = re.findall(r"(%\w+) = (%[\w#-]+)", head[5] or "")
    body = [action_of(inner, program) for inner in operation.regions[0]]

    def action(core: Core) -> None:
        first, last, step = core.all(ends)
        values = core.all([start for _, start in carried])
        for at in range(first, last, step):
            core.values[counter] = at
            core.values.update(zip((name for name, _ in carried), values, strict=True))
            values = run(body, core)
        _put(core, operation, values)

    return action


def _if(operation: Operation, program: ParsedProgram) -> Action:
    condition = operation.text.split()[0]
    branches = [[action_of(inner, program) for inner in region] for region in operation.regions]

    def action(core: Core) -> None:
        taken = branches[0] if core[condition] else branches[1] if len(branches) > 1 else []
        _put(core, operation, run(taken, core))

    return action


def _put(core: Core, operation: Operation, values: Sequence[Any]) -> None:
    """Results of a region: `%1`, or `%1:2` whose parts are `%1#0` and `%1#1`."""
    names = [part for result in operation.results for part in _parts(result)]
    core.values.update(zip(names, values, strict=True) if names else ())


def _parts(result: str) -> list[str]:
    name, _, count = result.partition(":")
    return [f"{name}#{index}" for index in range(int(count))] if count else [name]


def _yield(operation: Operation, program: ParsedProgram) -> Action:
    names = re.findall(r"%[\w#-]+", operation.text.partition(" : ")[0])
    return lambda core: tuple(core.all(names))


def _affine(choose: Callable[[Sequence[int]], int]) -> Callable[[Operation, ParsedProgram], Action]:
    def made(operation: Operation, program: ParsedProgram) -> Action:
        name, rest = matched(r"(#map\d*)(.*)", operation).groups()
        function, names = program.maps[name], re.findall(r"%[\w#-]+", rest)
        return _assigned(operation, lambda core: choose(function(*core.all(names))))

    return made


# Views


def _types(operation: Operation) -> list[MemrefType]:
    """The types after the colon: of what is given, of what is made."""
    return [MemrefType.of(text) for text in re.findall(r"memref<(?:[^<>]|<[^<>]*>)*>", _after_colon(operation))]


def _after_colon(operation: Operation) -> str:
    return operation.text[operation.text.index(" : memref<") :]


def _pointer_cast(operation: Operation, program: ParsedProgram) -> Action:
    """A buffer at a byte address of the core's memory."""
    address, kind = matched(r"\((%[\w#-]+)\) : ", operation)[1], _types(operation)[-1]
    shape = tuple(size or 0 for size in kind.shape)
    if kind.space != "ub":
        raise Unknown(f"line {operation.line}: memory {kind.space} is not known")

    def value(core: Core) -> View:
        place = core[address] * 8 if kind.dtype == torch.bool else core[address] // kind.dtype.itemsize
        return View(core.buffer, kind.dtype, place, shape, row_major(shape), base=place)

    return _assigned(operation, value)


def _reinterpret(operation: Operation, program: ParsedProgram) -> Action:
    form = r"(%[\w#-]+) to offset: \[(.*?)\], sizes: \[(.*?)\], strides: \[(.*?)\]"
    source, *lists = matched(form, operation).groups()
    offset, sizes, strides = map(_listed, lists)

    def value(core: Core) -> View:
        return core[source].reinterpreted(core[offset[0]], core.all(sizes), core.all(strides))

    return _assigned(operation, value)


def _metadata(operation: Operation, program: ParsedProgram) -> Action:
    """A view's memref from its beginning, then its offset in it, its sizes and its strides."""
    source = operation.text.split()[0]

    def action(core: Core) -> None:
        view: View = core[source]
        parts = (view.reinterpreted(0, (), ()), view.offset - view.base, *view.sizes, *view.strides)
        core.values.update(zip(operation.results, parts, strict=True))

    return action


def _subview(operation: Operation, program: ParsedProgram) -> Action:
    form = r"(%[\w#-]+)\s*\[(.*?)\] \[(.*?)\] \[(.*?)\]"
    source, *lists = matched(form, operation).groups()
    offsets, sizes, steps = map(_listed, lists)
    rank = len(_types(operation)[-1].shape)

    def value(core: Core) -> View:
        return core[source].subview(core.all(offsets), core.all(sizes), core.all(steps), rank)

    return _assigned(operation, value)


def _groups(text: str) -> list[list[int]]:
    return [[int(axis) for axis in group.split(",")] for group in re.findall(r"\[([\d, ]+)\]", text)]


def _collapse(operation: Operation, program: ParsedProgram) -> Action:
    source, groups = operation.text.split()[0], _groups(operation.text.partition(" : ")[0])
    return _assigned(operation, lambda core: core[source].collapsed(groups))


def _expand(operation: Operation, program: ParsedProgram) -> Action:
    form = r"(%[\w#-]+) (\[\[.*?\]\]) output_shape \[(.*?)\]"
    source, groups, sizes = matched(form, operation).groups()
    axes, names = _groups(groups), _listed(sizes)
    return _assigned(operation, lambda core: core[source].expanded(axes, core.all(names)))


def _renamed(operation: Operation, program: ParsedProgram) -> Action:
    source = operation.text.split()[0]
    return _assigned(operation, lambda core: core[source])


# Work


def _place(operation: Operation) -> tuple[str, list[str]]:
    source, places = matched(r"(?:.*, )?(%[\w#-]+)\[(.*?)\]", operation).groups()
    return source, _listed(places)


def _one(view: View, places: Sequence[int]) -> View:
    return view.subview(places, [1] * len(places), [1] * len(places), 0)


def _load(operation: Operation, program: ParsedProgram) -> Action:
    """A scalar of an argument or of the buffer."""
    source, places = _place(operation)

    def value(core: Core) -> Any:
        view = _one(core[source], core.all(places))
        view.check(operation.line, "reads")
        core.order.access(core.block, S, operation.line, [view], [])
        return view.read().item()

    return _assigned(operation, value)


def _store(operation: Operation, program: ParsedProgram) -> Action:
    value, (target, places) = operation.text.split(",")[0], _place(operation)

    def action(core: Core) -> None:
        view = _one(core[target], core.all(places))
        view.check(operation.line, "writes")
        core.order.access(core.block, S, operation.line, [], [view])
        view.write(torch.tensor(core[value], dtype=view.dtype, device="cpu"))

    return action


def _call(operation: Operation, program: ParsedProgram) -> Action:
    name, operands = matched(r"@(\w+)\((.*?)\)", operation).groups()
    means, names = meaning(name, operation.line), re.findall(r"%[\w#-]+", operands)

    def action(core: Core) -> None:
        _done(means(core.all(names)), operation.line, core)

    return action


def _done(work: Work, line: int, core: Core) -> None:
    for view in work.reads:
        view.check(line, "reads")
    for view in (*work.writes, *work.scratch):
        view.check(line, "writes")
    core.order.access(core.block, work.pipe, line, work.reads, (*work.writes, *work.scratch))
    values = work.values()
    for view in work.scratch:
        view.poison()
    for view, value in zip(work.writes, values, strict=True):
        view.write(value)


# Flags


def _flag(operation: Operation) -> tuple[str, str, str]:
    by, to, event = operation.text.strip("[]").split(", ")
    return by.strip("<>"), to.strip("<>"), event.strip("<>").removeprefix("EVENT_ID")


def _set(operation: Operation, program: ParsedProgram) -> Action:
    by, to, event = _flag(operation)
    _known_pipes(operation, by, to)
    return lambda core: core.order.set(core.block, by, to, core[event], operation.line)


def _wait(operation: Operation, program: ParsedProgram) -> Action:
    by, to, event = _flag(operation)
    _known_pipes(operation, by, to)
    return lambda core: core.order.wait(core.block, by, to, core[event], operation.line)


def _barrier(operation: Operation, program: ParsedProgram) -> Action:
    pipe = operation.text.strip("[]<>")
    return lambda core: core.order.barrier(core.block, pipe)


def _known_pipes(operation: Operation, *pipes: str) -> None:
    strange = [pipe for pipe in pipes if pipe not in PIPES]
    if strange:
        raise Unknown(f"line {operation.line}: the pipe {strange[0]} is not known")


def _block(operation: Operation, program: ParsedProgram) -> Action:
    return _assigned(operation, lambda core: core.block)


ACTIONS: dict[str, Callable[[Operation, ParsedProgram], Action]] = {
    "affine.apply": _affine(lambda values: values[0]),
    "affine.max": _affine(max),
    "affine.min": _affine(min),
    "call": _call,
    "func.call": _call,
    "hivm.hir.get_block_idx": _block,
    "hivm.hir.pipe_barrier": _barrier,
    "hivm.hir.pointer_cast": _pointer_cast,
    "hivm.hir.set_flag": _set,
    "hivm.hir.set_mask_norm": _nothing,
    "hivm.hir.wait_flag": _wait,
    "memref.cast": _renamed,
    "memref.collapse_shape": _collapse,
    "memref.expand_shape": _expand,
    "memref.extract_strided_metadata": _metadata,
    "memref.load": _load,
    "memref.reinterpret_cast": _reinterpret,
    "memref.store": _store,
    "memref.subview": _subview,
    "return": _nothing,
    "scf.for": _for,
    "scf.if": _if,
    "scf.yield": _yield,
}
"""Operations but for arithmetic, which is in `scalars`."""
