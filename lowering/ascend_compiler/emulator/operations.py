"""Operations of a program as actions: each becomes a function of the core once, and is called as often as it runs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .core import START, Action, Core, Jump, LabelledPart, Running, Waiting, run, run_parts
from .cube import CUBE
from .errors import Unknown
from .library import TABLE, Work
from .memory import DTYPES, Memory, MemrefType, View, nobodys, row_major
from .parse import Function, Operation, ParsedProgram, matched
from .pipes import MTE3, PIPES, Access, CoreName, S
from .registers import Intrinsic, Pointer, intrinsic
from .scalars import ARITHMETIC, LLVM


def action_of(operation: Operation, program: ParsedProgram) -> Action:
    """The action of an operation. `Unknown` for one that is not in the tables."""
    kind = operation.name.rpartition(".")[2] if operation.name.startswith(("arith.", "math.")) else None
    if kind is not None and kind in ARITHMETIC:
        return _assigned(operation, ARITHMETIC[kind](operation))
    if operation.name.startswith("llvm.") and (kind := operation.name.removeprefix("llvm.")) in LLVM:
        return _assigned(operation, LLVM[kind](operation))
    if operation.name.startswith(INSTRUCTION):
        return _instruction(operation)
    if operation.name not in ACTIONS:
        raise Unknown(f"line {operation.line}: the operation {operation.name} is not known")
    return ACTIONS[operation.name](operation, program)


def parts_of(function: Function, program: ParsedProgram) -> dict[str, LabelledPart]:
    """A function's parts by label."""
    label, names, actions = START, [], []
    parts = {label: LabelledPart(names, actions)}
    for operation in function.body:
        if operation.name.startswith("^"):
            label, names, actions = operation.name, re.findall(r"(%\w+): ", operation.text.partition("//")[0]), []
            parts[label] = LabelledPart(names, actions)
        else:
            actions.append(action_of(operation, program))
    return parts


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

    def action(core: Core) -> Generator[Waiting, None, None]:
        first, last, step = core.all(ends)
        values = core.all([start for _, start in carried])
        for at in range(first, last, step):
            core.values[counter] = at
            core.values.update(zip((name for name, _ in carried), values, strict=True))
            values = yield from run(body, core)
        _put(core, operation, values)

    return action


def _if(operation: Operation, program: ParsedProgram) -> Action:
    condition = operation.text.split()[0]
    branches = [[action_of(inner, program) for inner in region] for region in operation.regions]

    def action(core: Core) -> Generator[Waiting, None, None]:
        taken = branches[0] if core[condition] else branches[1] if len(branches) > 1 else []
        _put(core, operation, (yield from run(taken, core)))

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


def _jump(text: str) -> Callable[[Core], Jump]:
    label, names = text.partition("(")[0].strip(), re.findall(r"%[\w#-]+", text.partition(" : ")[0])
    return lambda core: Jump(label, core.all(names))


def _branch(operation: Operation, program: ParsedProgram) -> Action:
    return _jump(operation.text)


def _either(operation: Operation, program: ParsedProgram) -> Action:
    form = r"(%[\w#-]+), (\^\w+(?:\([^()]*\))?), (\^\w+(?:\([^()]*\))?)$"
    condition, yes, no = matched(form, operation).groups()
    taken, other = _jump(yes), _jump(no)
    return lambda core: taken(core) if core[condition] else other(core)


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

    def value(core: Core) -> View:
        place = core[address] * 8 if kind.dtype == torch.bool else core[address] // kind.dtype.itemsize
        return View(core.memory(kind.space, operation.line), kind.dtype, place, shape, row_major(shape), base=place)

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

    names = [part for result in operation.results for part in _parts(result)]

    def action(core: Core) -> None:
        view: View = core[source]
        found = (view.reinterpreted(0, (), ()), view.offset - view.base, *view.sizes, *view.strides)
        core.values.update(zip(names, found, strict=True))

    return action


def _alloca(operation: Operation, program: ParsedProgram) -> Action:
    """A scalar of the core's own."""
    kind = _types(operation)[-1]

    def value(core: Core) -> View:
        return View(Memory("a scalar", nobodys(kind.dtype)), kind.dtype, 0, (), ())

    return _assigned(operation, value)


def _extract(operation: Operation, program: ParsedProgram) -> Action:
    """Of a buffer: where it begins (1), and how far from there its first element is (2). Of some values: one."""
    source, place = matched(r"(%[\w#-]+)\[(\d+)\]", operation).groups()
    at = int(place)

    def value(core: Core) -> Any:
        given = core[source]
        if not isinstance(given, View):
            return given[at]
        return (Pointer(given, 0), Pointer(given, 0), given.offset - given.base)[at]

    return _assigned(operation, value)


def _element(operation: Operation, program: ParsedProgram) -> Action:
    source, place, kind = matched(r"(%[\w#-]+)\[(%[\w#-]+|\d+)\] : .*, (\w+)$", operation).groups()

    def value(core: Core) -> Pointer:
        pointer: Pointer = core[source]
        if pointer.view.dtype != DTYPES.get(kind):
            raise Unknown(f"line {operation.line}: a place counted in {kind} of {pointer.view.dtype} is not known")
        return replace(pointer, at=pointer.at + core[place])

    return _assigned(operation, value)


def _register_as(operation: Operation, program: ParsedProgram) -> Action:
    """The same bits as lanes of another type."""
    source, kind = matched(r"(%[\w#-]+) : vector<\w+> to vector<\d+x(\w+)>", operation).groups()
    return _assigned(operation, lambda core: core[source].view(DTYPES[kind]))


def _undefined(operation: Operation, program: ParsedProgram) -> Action:
    return _assigned(operation, lambda core: None)


INSTRUCTION = "hivm_regbaseintrins.intr.hivm."


def _instruction(operation: Operation) -> Action:
    """Work of the vector pipe on registers."""
    operands, result = matched(r"\((.*?)\)[^:]*(?:\{.*?\})? : .* -> (.*)$", operation).groups()
    means = intrinsic(f"{operation.name.removeprefix(INSTRUCTION)} {result}", operation.line)
    names = re.findall(r"%[\w#-]+", operands)

    def action(core: Core) -> None:
        found = means(Intrinsic(core.all(names), core, operation.line))
        if operation.results:
            core.values[operation.results[0]] = found

    return action


def _subview(operation: Operation, program: ParsedProgram) -> Action:
    form = r"(%[\w#-]+)\s*\[(.*?)\] \[(.*?)\] \[(.*?)\]"
    source, *lists = matched(form, operation).groups()
    offsets, sizes, steps = map(_listed, lists)
    rank = len(_types(operation)[-1].shape)

    def value(core: Core) -> View:
        return core[source].subview(core.all(offsets), core.all(sizes), core.all(steps), rank)

    return _assigned(operation, value)


def _view(operation: Operation, program: ParsedProgram) -> Action:
    """A buffer at a byte of the workspace."""
    source, place, sizes = matched(r"(%[\w#-]+)\[(.*?)\]\[(.*?)\]", operation).groups()
    kind, given = _types(operation)[-1], _listed(sizes)

    def value(core: Core) -> View:
        rest = iter(core.all(given))
        shape = tuple(next(rest) if size is None else size for size in kind.shape)
        first = core[place] // kind.dtype.itemsize
        return View(core[source].memory, kind.dtype, first, shape, row_major(shape), base=first)

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


def _bitcast(operation: Operation, program: ParsedProgram) -> Action:
    """The same bits in another type of the same size."""
    source, (given, made) = operation.text.split()[0], _types(operation)
    if given.dtype.itemsize != made.dtype.itemsize:
        raise Unknown(f"line {operation.line}: a bitcast of {given.dtype} to {made.dtype}, of another size")
    return _assigned(operation, lambda core: replace(core[source], dtype=made.dtype))


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
        core.order.access(Access((core.name, S), operation.line, [view], []))
        return view.read().item()

    return _assigned(operation, value)


def _store(operation: Operation, program: ParsedProgram) -> Action:
    value, (target, places) = operation.text.split(",")[0], _place(operation)

    def action(core: Core) -> None:
        view = _one(core[target], core.all(places))
        view.check(operation.line, "writes")
        core.order.access(Access((core.name, S), operation.line, [], [view]))
        view.write(torch.tensor(core[value], dtype=view.dtype, device="cpu"))

    return action


def _call(operation: Operation, program: ParsedProgram) -> Action:
    name, operands = matched(r"@(\w+)\((.*?)\)", operation).groups()
    if name in program.functions:
        return _called(program.functions[name], re.findall(r"%[\w#-]+", operands), program)
    means, names = _meaning(name, operation.line), re.findall(r"%[\w#-]+", operands)

    def action(core: Core) -> None:
        work = means(core.all(names))
        for step in (work,) if isinstance(work, Work) else work:
            _done(step, operation.line, core)

    return action


def _called(function: Function, names: Sequence[str], program: ParsedProgram) -> Action:
    """A vector function: its names are its own."""
    parts = parts_of(function, program)

    def action(core: Core) -> Running:
        given = zip((argument for argument, _ in function.arguments), core.all(names), strict=True)
        inner = replace(core, values=dict(given), operations=0)
        yield from run_parts(parts, inner)
        core.operations += inner.operations

    return action


def _meaning(name: str, line: int) -> Callable[[Sequence[Any]], Work | Sequence[Work]]:
    """What a call of this name does; some are more than one step. `Unknown` for a name that is in no table."""
    for pattern, made in {**TABLE, **CUBE}.items():
        found = re.fullmatch(pattern, name)
        if found is not None:
            return functools.partial(made, found)
    raise Unknown(f"line {line}: the library call {name} is not known")


def _done(work: Work, line: int, core: Core) -> None:
    for view in work.reads:
        view.check(line, "reads")
    for view in (*work.writes, *work.scratch):
        view.check(line, "writes")
    for by, to, event in work.waits:
        core.order.wait(core.name, by, to, event, line)
    values = work.values()
    twin = _twin(work, values, core)
    core.order.access(Access((core.name, work.pipe), line, work.reads, work.writes, work.scratch, twin))
    for view in work.scratch:
        view.poison()
    for view, value in zip(work.writes, values, strict=True):
        view.write(value)
    for by, to, event in work.sets:
        core.order.set(core.name, by, to, event, line)


def _twin(work: Work, values: Sequence[Tensor], core: Core) -> CoreName | None:
    """The block's other vector core, where it may have stored these values: what both compute, both store."""
    stored = work.pipe == MTE3 and all(map(View.holds, work.writes, values))
    return core.twin if stored else None


# Flags


def _flag(operation: Operation) -> tuple[str, str, str]:
    by, to, event = operation.text.strip("[]").split(", ")
    return by.strip("<>"), to.strip("<>"), event.strip("<>").removeprefix("EVENT_ID")


def _set(operation: Operation, program: ParsedProgram) -> Action:
    by, to, event = _flag(operation)
    _known_pipes(operation, by, to)
    return lambda core: core.order.set(core.name, by, to, core[event], operation.line)


def _wait(operation: Operation, program: ParsedProgram) -> Action:
    by, to, event = _flag(operation)
    _known_pipes(operation, by, to)
    return lambda core: core.order.wait(core.name, by, to, core[event], operation.line)


def _barrier(operation: Operation, program: ParsedProgram) -> Action:
    pipe = operation.text.strip("[]<>")
    return lambda core: core.order.barrier(core.name, pipe)


_BLOCK_FLAG = r"\[<(CUBE|VECTOR)>, <(\w+)>, <(\w+)>\] flag = (%[\w#-]+|\d+)"


def _send(operation: Operation, program: ParsedProgram) -> Action:
    """Tell the other cores of the block that what a pipe has begun has ended."""
    _, by, to, flag = matched(_BLOCK_FLAG, operation).groups()
    _known_pipes(operation, by, to)
    return lambda core: core.order.send(core.name, core.others, by, core[flag], operation.line)


def _receive(operation: Operation, program: ParsedProgram) -> Action:
    """Wait until each of the other cores has told so: a cube core for both vector cores, each of these for it."""
    _, by, to, flag = matched(_BLOCK_FLAG, operation).groups()
    _known_pipes(operation, by, to)

    def action(core: Core) -> Generator[Waiting, None, None]:
        while not core.order.sent(core.name, core.others, core[flag]):
            yield operation.line, core[flag]
        core.order.receive(core.name, core.others, to, core[flag])

    return action


def _known_pipes(operation: Operation, *pipes: str) -> None:
    strange = [pipe for pipe in pipes if pipe not in PIPES]
    if strange:
        raise Unknown(f"line {operation.line}: the pipe {strange[0]} is not known")


def _block(operation: Operation, program: ParsedProgram) -> Action:
    return _assigned(operation, lambda core: core.name.block)


def _sub_block(operation: Operation, program: ParsedProgram) -> Action:
    return _assigned(operation, lambda core: core.name.vector or 0)


ACTIONS: dict[str, Callable[[Operation, ParsedProgram], Action]] = {
    "affine.apply": _affine(lambda values: values[0]),
    "affine.max": _affine(max),
    "affine.min": _affine(min),
    "builtin.unrealized_conversion_cast": _renamed,
    "call": _call,
    "cf.br": _branch,
    "cf.cond_br": _either,
    "func.call": _call,
    "hivm.hir.bitcast": _bitcast,
    "hivm.hir.get_block_idx": _block,
    "hivm.hir.get_sub_block_idx": _sub_block,
    "hivm.hir.pipe_barrier": _barrier,
    "hivm.hir.pointer_cast": _pointer_cast,
    "hivm.hir.set_ctrl": _nothing,
    "hivm.hir.set_ffts_base_addr": _nothing,
    "hivm.hir.set_flag": _set,
    "hivm.hir.set_mask_norm": _nothing,
    "hivm.hir.sync_block_set": _send,
    "hivm.hir.sync_block_wait": _receive,
    "hivm.hir.wait_flag": _wait,
    "llvm.bitcast": _register_as,
    "llvm.extractvalue": _extract,
    "llvm.getelementptr": _element,
    "llvm.mlir.undef": _undefined,
    "memref.alloca": _alloca,
    "memref.cast": _renamed,
    "memref.collapse_shape": _collapse,
    "memref.expand_shape": _expand,
    "memref.extract_strided_metadata": _metadata,
    "memref.load": _load,
    "memref.reinterpret_cast": _reinterpret,
    "memref.store": _store,
    "memref.subview": _subview,
    "memref.view": _view,
    "return": _nothing,
    "scf.for": _for,
    "scf.if": _if,
    "scf.yield": _yield,
}
"""Operations but for arithmetic, which is in `scalars`."""
