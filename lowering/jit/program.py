"""A function of trees as a program: one flat graph of plain operators, and how its results are put together again.

The graph takes each tensor of the arguments once, and those of their host integers that it computes with. What it
computes for a donated argument it copies, as its last act, to where the argument's own tensors lie; every other result
is a tensor of its own.

An argument with integers on the host that change between replays offers `host_ints()`, `with_host_ints(values)`, which
is the argument with others in their place, and `host_facts()`: booleans, true where more is known, which a program may
depend on.
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
class Program:
    """The graph, and the results' leaves: inputs, outputs of the graph, or values of their own.

    The graph takes the tensors of all arguments, then the host integers whose places (among all of the arguments') are
    `host`. `written` are the places of the inputs that it writes to, `homes` those that it copies a successor to.
    """

    graph: GraphModule
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    host: tuple[int, ...]
    written: frozenset[int]
    homes: frozenset[int]

    def results(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
        """What the function returns, from what the graph was given and gave."""
        leaves = [
            inputs[x.place] if isinstance(x, Given) else outputs[x.place] if isinstance(x, Made) else x
            for x in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.spec)


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
        made[:] = [_Results(layout, inputs[:count])]
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
    return Program(graph, tuple(made[0].leaves), made[0].spec, used, _written(graph, count), frozenset(made[0].homes))


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
    leaves: list[Any] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    homes: list[int] = field(default_factory=list)
    spec: Any = None

    def written(self, arguments: dict[str, Any], result: Any) -> list[Tensor]:
        """Overwrite what was donated; the tensors that the graph has to give out."""
        result = bare(result)
        self.spec = pytree.tree_structure(result)
        found = self._found(arguments, result)
        donated = self.layout.inputs_of(self.layout.donated)
        places = {id(x): place for place, x in enumerate(self.inputs)}
        changed = {leaf.home for leaf in found if leaf.home is not None and places.get(id(leaf.value)) != leaf.home}
        # All copies are made before the first input is overwritten: one may be read from another.
        writes = [(leaf.home, self._apart(leaf.value, donated)) for leaf in found if leaf.home in changed]
        for leaf in found:
            self.leaves.append(self._source(leaf, places, changed, donated))
        for home, value in writes:
            self.homes.append(home)
            self.inputs[home].copy_(value)
        return self.outputs

    def _found(self, arguments: dict[str, Any], result: Any) -> list[_Leaf]:
        """The leaves of the result."""
        waiting = [(name, value) for name, value in arguments.items() if name in self.layout.donated]
        kinds = tuple(type(value) for _, value in waiting)
        found: list[_Leaf] = []
        for node in pytree.tree_leaves(result, is_leaf=lambda x: type(x) in kinds):
            match = next((pair for pair in waiting if type(pair[1]) is type(node)), None)
            if match is None:
                found += [_Leaf(value) for value in pytree.tree_leaves(node)]
            else:
                waiting.remove(match)
                found += self._succeeding(*match, node)
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
        lent = self.layout.inputs_of(self.layout.staged) | donated
        place = places.get(id(leaf.value))
        if place is not None and place not in changed and (place not in lent or (leaf.inside and place in donated)):
            return Given(place)
        self.outputs.append(self._apart(leaf.value, lent))
        return Made(len(self.outputs) - 1)

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
    """The tree without the host values of nodes that have some: a program is replayed long after these have changed."""

    def visit(node: Any) -> Any:
        return node.without_host() if hasattr(node, "without_host") else node

    return pytree.tree_map(visit, value, is_leaf=lambda node: hasattr(node, "without_host"))
