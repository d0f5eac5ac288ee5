"""A function of trees as a program: one flat graph of plain operators, and how its results are put together again.

The graph takes each tensor of the arguments once, and those of their host integers that it computes with. What it
computes for a donated argument it copies, as its last act, to where the argument's own tensors lie; every other result
is a tensor of its own.

What the host does beside it is noted on its tape while it is traced.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ..errors import CaptureError
from ..protocols import Carried, HostValued
from .tape import Recording, Tape, recording


@dataclass(frozen=True)
class Flat:
    """An argument taken apart: its tensors, each once, and all else that a program of it depends on.

    `places[i]` is the tensor that leaf i is, -1 for one of the `statics`.
    """

    tensors: list[Tensor]
    places: tuple[int, ...]
    statics: tuple[Any, ...]
    spec: pytree.TreeSpec

    def rebuilt(self, tensors: Sequence[Any]) -> Any:
        """The argument with `tensors` in the place of its own."""
        statics = iter(self.statics)
        return pytree.tree_unflatten([tensors[at] if at >= 0 else next(statics) for at in self.places], self.spec)

    @cached_property
    def requires_grad(self) -> bool:
        """Whether any of its tensors does."""
        return any(x.requires_grad for x in self.tensors)

    @property
    def structure(self) -> tuple[Any, ...]:
        """What the argument is beside its tensors. Holds no off-tree values: those would be kept alive."""
        return repr(self.spec), self.places, self.statics

    @property
    def dtypes(self) -> tuple[Any, ...]:
        """Of its tensors, and where they lie."""
        return tuple((x.dtype, x.device) for x in self.tensors)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Of its tensors, and how they lie."""
        return tuple((x.shape, x.stride()) for x in self.tensors)


def flattened(value: Any) -> Flat:
    """`value` taken apart."""
    leaves, spec = pytree.tree_flatten(value)
    first: dict[int, int] = {}
    places = [first.setdefault(id(x), len(first)) if isinstance(x, Tensor) else -1 for x in leaves]
    tensors = {at: leaf for at, leaf in zip(places, leaves, strict=True) if at >= 0}
    statics = tuple(leaf for at, leaf in zip(places, leaves, strict=True) if at < 0)
    return Flat([tensors[at] for at in range(len(first))], tuple(places), statics, spec)


@dataclass(frozen=True)
class Given:
    """A result that is input number `place` itself."""

    place: int


@dataclass(frozen=True)
class Made:
    """A result that is output number `place` of the graph."""

    place: int


@dataclass(frozen=True)
class CutOff:
    """A result made with the padding of a ragged argument, which is cut off on an axis."""

    made: Made
    argument: str
    axis: int


@dataclass(frozen=True)
class Held:
    """A carried value among the results: how many leaves it has, its structure, and the place of its ledger."""

    leaves: int
    spec: pytree.TreeSpec
    ledger: int


@dataclass(frozen=True)
class Program:
    """The graph, and the results' leaves: inputs, outputs of the graph, or values of their own.

    The graph takes the tensors of all arguments, then the host integers whose places (among all of the arguments') are
    `host`. `written` are the places of the inputs that it writes to, `homes` those that it copies a successor to.
    `nodes` are the results' parts in order, carried values in one and None for a leaf; `reads` is where the values lie
    that `tape` counts with.
    """

    graph: GraphModule
    leaves: tuple[Any, ...]
    nodes: tuple[Held | None, ...]
    spec: pytree.TreeSpec
    host: tuple[int, ...]
    written: frozenset[int]
    homes: frozenset[int]
    tape: Tape
    reads: tuple[Given | Made, ...]

    def known(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> list[Tensor | None]:
        """The values that the host counts with: before the graph has run, those that it is given."""
        return [
            inputs[x.place] if isinstance(x, Given) else None if outputs is None else outputs[x.place]
            for x in self.reads
        ]

    def results(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], ledgers: Sequence[Any], tokens: Mapping[str, int]
    ) -> Any:
        """What the function returns, from what the graph was given and gave.

        `ledgers` are the values of the tape's places, `tokens` those that each padded argument had.
        """
        leaves = (_result(x, inputs, outputs, tokens) for x in self.leaves)
        return pytree.tree_unflatten([_rebuilt(node, leaves, ledgers) for node in self.nodes], self.spec)


def _result(x: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], tokens: Mapping[str, int]) -> Any:
    """The leaf that `x` stands for."""
    if isinstance(x, Made):
        return outputs[x.place]
    if isinstance(x, Given):
        return inputs[x.place]
    if isinstance(x, CutOff):
        whole = outputs[x.made.place]
        return whole.narrow(x.axis, 0, tokens[x.argument]) if x.argument in tokens else whole
    return x


def _rebuilt(node: Held | None, leaves: Iterator[Any], ledgers: Sequence[Any]) -> Any:
    if node is None:
        return next(leaves)
    carried = pytree.tree_unflatten([next(leaves) for _ in range(node.leaves)], node.spec)
    return carried.with_ledger(ledgers[node.ledger])


def trace(
    function: Callable[[dict[str, Any]], Any],
    given: Mapping[str, Flat],
    donated: Sequence[str],
    staged: Collection[str],
    host: Mapping[str, Sequence[int]],
) -> Program:
    """Trace `function` of the arguments by name; nothing is computed and no tensor written.

    `donated` arguments are overwritten by their successors: the nodes of the result of the same type, in the order of
    the arguments. `staged` ones lie in buffers that the next call overwrites. `host` are examples of the host integers
    of the arguments that have some. Raises `CaptureError` where the function reads a value on the host, branches on a
    host integer or has no successor for a donated argument, and what the function itself raises.
    """
    # Symbols bring sympy and dynamo, twice what all else here takes to import; only a capture needs them.
    from torch.fx.experimental.proxy_tensor import make_fx

    from .symbols import HostSymbols, Tracing, place

    layout = _Layout.of(given, donated, staged, host)
    count = len(layout.tensors)
    made: list[_Results] = []

    def flat(*inputs: Any) -> list[Tensor]:
        arguments = layout.arguments(inputs[:count], inputs[count:])
        with recording(arguments) as notes:
            made[:] = [_Results(layout, inputs[:count], notes)]
            return made[0].written(arguments, function(arguments))

    symbols = HostSymbols()
    try:
        # A fake mode of our own: that of make_fx would give a value read on the host a symbol, and go on.
        with torch.no_grad(), Tracing(symbols) as fake:
            tensors = [fake.from_tensor(x, static_shapes=True) for x in layout.tensors]
            ints = [symbols.symbol(f"host_{at}", x) for at, x in enumerate(layout.ints)]
            graph = make_fx(flat)(*tensors, *ints)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CaptureError(
            f"capture: {place(traceback.extract_tb(error.__traceback__))} reads a value or a size that is only known "
            "on the device; compute it with tensors (torch.where), or pass it in as an argument"
        ) from error
    graph.graph.eliminate_dead_code()
    used = _without_unused(graph, count)
    graph.recompile()
    found = made[0]
    return Program(
        graph,
        tuple(found.leaves),
        tuple(found.nodes),
        found.spec,
        used,
        _written(graph, count),
        frozenset(found.homes),
        found.notes.tape,
        tuple(found.reads),
    )


def _without_unused(graph: GraphModule, tensors: int) -> tuple[int, ...]:
    """Take the host integers that nothing is computed from out of the graph's inputs; the places of the others."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"][tensors:]
    for node in inputs:
        if not node.users:
            graph.graph.erase_node(node)
    return tuple(at for at, node in enumerate(inputs) if node.users)


def _written(graph: GraphModule, tensors: int) -> frozenset[int]:
    """The places of the tensors that an operator writes to, of itself or of a view of it."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"][:tensors]
    changed = {_storage(value) for node in graph.graph.nodes for value in _overwritten(node)}
    return frozenset(at for at, node in enumerate(inputs) if _storage(node) in changed)


def _overwritten(node: Node) -> list[Node]:
    """The arguments that an operator's schema says it writes to."""
    found: list[Node] = []
    for at, argument in enumerate(node.target._schema.arguments if isinstance(node.target, OpOverload) else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            map_arg(node.args[at] if at < len(node.args) else node.kwargs.get(argument.name), found.append)
    return found


def _storage(node: Node) -> int:
    # Fake tensors have no addresses; views of one tensor share its storage as real ones do.
    return node.meta["val"].untyped_storage()._cdata


@dataclass(frozen=True)
class _Layout:
    """Where the tensors of each argument stand among the inputs of the graph, and the host integers after them."""

    given: Mapping[str, Flat]
    starts: dict[str, int]
    tensors: list[Tensor]
    donated: Sequence[str]
    staged: Collection[str]
    host: Mapping[str, Sequence[int]]

    @staticmethod
    def of(
        given: Mapping[str, Flat],
        donated: Sequence[str],
        staged: Collection[str],
        host: Mapping[str, Sequence[int]],
    ) -> _Layout:
        starts: dict[str, int] = {}
        tensors: list[Tensor] = []
        for name, flat in given.items():
            starts[name] = len(tensors)
            tensors += flat.tensors
        return _Layout(given, starts, tensors, donated, staged, host)

    @property
    def ints(self) -> list[int]:
        return [x for values in self.host.values() for x in values]

    def arguments(self, tensors: Sequence[Any], ints: Sequence[Any]) -> dict[str, Any]:
        found = {name: flat.rebuilt(tensors[self.starts[name] :]) for name, flat in self.given.items()}
        rest = iter(ints)
        for name, values in self.host.items():
            found[name] = found[name].with_host_ints(tuple(next(rest) for _ in values))
        return found

    def inputs_of(self, names: Collection[str]) -> set[int]:
        return {self.starts[name] + at for name in names for at in range(len(self.given[name].tensors))}


@dataclass
class _Results:
    """The results of one trace on their way to outputs of the graph."""

    layout: _Layout
    inputs: Sequence[Tensor]
    notes: Recording
    leaves: list[Any] = field(default_factory=list)
    nodes: list[Held | None] = field(default_factory=list)
    reads: list[Any] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    homes: list[int] = field(default_factory=list)
    spec: Any = None

    def __post_init__(self) -> None:
        self._made: dict[int, Made] = {}

    def written(self, arguments: dict[str, Any], result: Any) -> list[Tensor]:
        """Overwrite what was donated; the tensors that the graph has to give out."""
        parts, self.spec = pytree.tree_flatten(bare(result), is_leaf=lambda x: isinstance(x, Carried))
        found = self._found(arguments, parts)
        donated = self.layout.inputs_of(self.layout.donated)
        places = {id(x): place for place, x in enumerate(self.inputs)}
        changed = {leaf.home for leaf in found if leaf.home is not None and places.get(id(leaf.value)) != leaf.home}
        # All copies are made before the first input is overwritten: one may be read from another.
        writes = [(leaf.home, self._apart(leaf.value, donated)) for leaf in found if leaf.home in changed]
        for leaf in found:
            self.leaves.append(self._cut(leaf.value, self._source(leaf, places, changed, donated)))
        for read in self.notes.reads:
            place = places.get(id(read))
            self.reads.append(self._given_out(read) if place is None else Given(place))
        for home, value in writes:
            self.homes.append(home)
            self.inputs[home].copy_(value)
        return self.outputs

    def _found(self, arguments: dict[str, Any], parts: Sequence[Any]) -> list[_Leaf]:
        """The leaves of the result."""
        waiting = [(name, value) for name, value in arguments.items() if name in self.layout.donated]
        found: list[_Leaf] = []
        for part in parts:
            if not isinstance(part, Carried):
                self.nodes.append(None)
                found.append(_Leaf(part))
                continue
            place, part = self.notes.place(part.ledger), part.with_ledger(None)
            leaves, spec = pytree.tree_flatten(part)
            self.nodes.append(Held(len(leaves), spec, place))
            match = next((pair for pair in waiting if type(pair[1]) is type(part)), None)
            if match is None:
                found += map(_Leaf, leaves)
            else:
                waiting.remove(match)
                found += self._succeeding(*match, part)
        if waiting:
            raise CaptureError(
                f"jit: {waiting[0][0]!r} is donated, and the function returns no new {type(waiting[0][1]).__name__} in "
                "its place; return it, or leave it out of donate"
            )
        return found

    def _succeeding(self, name: str, old: Any, new: Any) -> Iterator[_Leaf]:
        """The leaves of `new`, which takes the place of the donated argument `old`."""
        start, flat = self.layout.starts[name], self.layout.given[name]
        paths = [path for path, _ in pytree.tree_flatten_with_path(old)[0]]
        homes = {path: start + at for path, at in zip(paths, flat.places, strict=True) if at >= 0}
        free = set(homes.values())
        for path, value in pytree.tree_flatten_with_path(new)[0]:
            home = homes.get(path)
            if home in free and isinstance(value, Tensor) and _alike(value, self.inputs[home]):
                free.remove(home)
                yield _Leaf(value, home, inside=True)
            else:
                yield _Leaf(value, inside=True)

    def _source(self, leaf: _Leaf, places: dict[int, int], changed: set[int], donated: set[int]) -> Any:
        """Where a replay finds the leaf: an input, an output of the graph, or the value itself."""
        if isinstance(leaf.value, torch.SymInt):
            raise CaptureError("capture: the function returns a row length of the host; return tensors")
        if not isinstance(leaf.value, Tensor):
            return leaf.value
        if leaf.home is not None:
            return Given(leaf.home)
        place = places.get(id(leaf.value))
        kept = place not in self._lent or (leaf.inside and place in donated)
        return Given(place) if kept and place is not None and place not in changed else self._given_out(leaf.value)

    @cached_property
    def _lent(self) -> set[int]:
        """The inputs whose memory is overwritten after a replay."""
        return self.layout.inputs_of((*self.layout.staged, *self.layout.donated))

    def _given_out(self, x: Tensor) -> Made:
        """`x` as an output of the graph, once however often it is asked for."""
        if id(x) not in self._made:
            self.outputs.append(self._apart(x, self._lent))
            self._made[id(x)] = Made(len(self.outputs) - 1)
        return self._made[id(x)]

    def _cut(self, x: Any, source: Any) -> Any:
        """Where a replay finds `x`, without the padding of a ragged argument that it has an entry a token of."""
        _, argument, axis = self.notes.lengthwise.get(id(x), (x, "", 0))
        return CutOff(source, argument, axis) if argument and isinstance(source, Made) else source

    def _apart(self, x: Tensor, places: set[int]) -> Tensor:
        """`x`, or a copy where it shares memory with one of these inputs."""
        storage = x.untyped_storage()._cdata
        return x.clone() if any(self.inputs[at].untyped_storage()._cdata == storage for at in places) else x


@dataclass(frozen=True)
class _Leaf:
    """A leaf of the result; `home` is the donated input whose place it takes, `inside` one that succeeds such."""

    value: Any
    home: int | None = None
    inside: bool = False


def _alike(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype


def bare(value: Any) -> Any:
    """The tree without host integers, carried values aside: a program is replayed long after these have changed."""

    def visit(node: Any) -> Any:
        return node.with_host_ints(()) if isinstance(node, HostValued) and not isinstance(node, Carried) else node

    return pytree.tree_map(visit, value, is_leaf=lambda node: isinstance(node, HostValued))
