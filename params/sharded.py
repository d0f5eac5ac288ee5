"""A rank's part of a model: of its spec, of its checkpoint's names, and of a tree of values.

Each leaf is cut as its `TensorSpec.shard` says. What then needs an exchange between ranks stands in a value of
`params.shards`; the names tell which slice of each stored tensor the rank reads, so that it reads nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from params.errors import CheckpointError, ConfigError
from params.names.rules import Layout, Names, Part, Source
from params.quant.values import MX_BLOCK, Int4Weight, MXWeight, QuantizedWeight, SplitWeight, StaticInt8Weight
from params.sharding import Cut, Inputs, OfExperts, Ranks, Vocabulary
from params.shards import AddendWeight, SomeExperts, VocabularyWeight
from params.spec import TensorSpec
from params.tree import dotted, items, unchecked

T = TypeVar("T")
Take = Callable[[Any, "Cut | None"], Any]
"""What makes a rank's leaf of a whole one."""


def shard(tree: T, spec: Any, ranks: Ranks) -> T:
    """The rank's part of a tree of whole parameters, quantised or not, as `load` would have read it.

    `spec` is the whole model's. `ConfigError` for weights that cannot be shared out among so many ranks.
    """

    def take(leaf: Tensor, cut: Cut | None) -> Tensor:
        if cut is None:
            return leaf
        held = [leaf.narrow(cut.axis, part.start, len(part)) for part in cut.ranges]
        shape = (*leaf.shape[: cut.axis], cut.padding, *leaf.shape[cut.axis + 1 :])
        return torch.cat((*held, leaf.new_zeros(shape)), cut.axis)

    return _over_weights(tree, dict(items(spec)), ranks, take)


def sharded(spec: T, names: Names, wholes: Mapping[str, TensorSpec], ranks: Ranks) -> tuple[T, RankNames]:
    """The rank's part of a spec, which may have quantised weights, and names that read it.

    `wholes` are the leaves of the spec without these. `ConfigError` for weights that cannot be shared out.
    """
    cuts: dict[int, tuple[TensorSpec, Cut | None]] = {}

    def take(leaf: TensorSpec, cut: Cut | None) -> TensorSpec:
        made = replace(leaf, parts=None, shard=None) if cut is None else _cut_spec(leaf, cut)
        cuts[id(made)] = leaf, cut
        return made

    # Equal specs may be one object, and each needs to know where it stands.
    distinct = pytree.tree_map(lambda leaf: None if leaf is None else replace(leaf), spec)
    paths = {id(leaf): path for path, leaf in items(distinct)}
    local = _over_weights(distinct, wholes, ranks, take)
    homes = {path: Origin(paths[id(cuts[id(leaf)][0])], *cuts[id(leaf)]) for path, leaf in items(local)}
    same = {known.name: getattr(names, known.name) for known in fields(Names)}
    return local, RankNames(**same, plain=names, homes=homes, wholes=dict(items(distinct)))


class Origin(NamedTuple):
    """Where a rank's leaf comes from: the whole leaf's path and spec, and how it was cut, None for all of it."""

    path: str
    whole: TensorSpec
    cut: Cut | None


@dataclass(frozen=True)
class RankNames(Names):
    """The names of a family of which a rank reads slices. `homes`: the rank's leaf to what it is a part of."""

    plain: Names = field(default_factory=lambda: Names("", {}), repr=False)
    homes: Mapping[str, Origin] = field(default_factory=dict, repr=False)
    wholes: Mapping[str, TensorSpec] = field(default_factory=dict, repr=False)

    def layouts(self, path: str, leaf: TensorSpec, paths: Collection[str]) -> tuple[Layout, ...]:
        """Every way a checkpoint may store the rank's leaf, as slices of its tensors."""
        home = self.homes[path]
        found = self.plain.layouts(home.path, home.whole, self.wholes)
        if home.cut is None:
            return found
        return tuple(tuple(piece for part in layout for piece in _pieces(part, home)) for layout in found)

    def ignored(self, name: str, paths: Collection[str]) -> str | None:
        """Why a tensor nobody asked for may be passed over, or `None`: then it is an error."""
        return "another rank's" if name in self._every_part else self.plain.ignored(name, self.wholes)

    @cached_property
    def _every_part(self) -> frozenset[str]:
        every = (self.plain.layouts(path, whole, self.wholes) for path, whole in self.wholes.items())
        return frozenset(part.name for layouts in every for layout in layouts for part in layout)


def _over_weights(tree: Any, wholes: Mapping[str, TensorSpec], ranks: Ranks, take: Take) -> Any:
    def weight(path: Any, node: Any) -> Any:
        if node is None:
            return None
        whole = wholes[dotted(path)]
        if whole.shard is None:
            return pytree.tree_map(lambda leaf: None if leaf is None else take(leaf, None), node)
        try:
            cut = whole.shard.cut(whole.shape, ranks)
            return _wrapped(_of_value(node, whole.shape, cut, take, ranks), whole, cut, ranks)
        except ConfigError as error:
            raise ConfigError(f"{dotted(path)}: {error}") from None

    return pytree.tree_map_with_path(weight, tree, is_leaf=lambda node: isinstance(node, QuantizedWeight))


def _wrapped(held: Any, whole: TensorSpec, cut: Cut, ranks: Ranks) -> Any:
    """The rank's part, in the value that says what must be exchanged."""
    if isinstance(whole.shard, Vocabulary):
        first = ranks.rank * cut.length
        return unchecked(
            VocabularyWeight, weight=held, first=first, vocab=whole.shape[0], ranks=ranks.size, group=ranks.group
        )
    if isinstance(whole.shard, OfExperts) and ranks.whole_experts:
        first, count = cut.ranges[0].start, whole.shape[0]
        return unchecked(SomeExperts, weight=held, first=first, experts=count, group=ranks.group)
    if isinstance(whole.shard, (OfExperts, Inputs)):
        return unchecked(AddendWeight, weight=held, group=ranks.group)
    return held


def _of_value(value: Any, shape: tuple[int, ...], cut: Cut, take: Take, ranks: Ranks) -> Any:
    """The rank's part of a weight of this shape: of each tensor that it is made of, what belongs to the cut."""
    if isinstance(value, SplitWeight):
        return _of_parts(value, shape, cut, take, ranks)
    if not isinstance(value, QuantizedWeight):
        return take(value, cut)
    inner, padding = _whole_blocks(cut, shape) if isinstance(value, MXWeight) else (cut, (0, 0))
    kept: dict[str, Any] = {"padding": padding} if isinstance(value, MXWeight) else {}
    for name, leaf in _tensors(value):
        kept[name] = None if leaf is None else take(leaf, _inside(value, name, leaf, shape, inner, ranks))
    return unchecked(type(value), **kept)


def _tensors(value: QuantizedWeight) -> Iterator[tuple[str, Any]]:
    return ((known.name, getattr(value, known.name)) for known in fields(value) if known.name != "padding")  # type: ignore[arg-type]


def _of_parts(value: SplitWeight, shape: tuple[int, ...], cut: Cut, take: Take, ranks: Ranks) -> SplitWeight:
    """Parts are blocks of rows."""
    found, start = [], 0
    for part in value.parts:
        rows = range(start, start + part.shape[0])
        own = tuple(_shifted(both, start) for both in (_common(held, rows) for held in cut.ranges) if both)
        of_part = Cut(0, own) if cut.axis == 0 else cut
        found.append(_of_value(part, (len(rows), *shape[1:]), of_part, take, ranks))
        start = rows.stop
    return unchecked(SplitWeight, parts=tuple(found))


def _inside(value: QuantizedWeight, name: str, leaf: Any, shape: tuple[int, ...], cut: Cut, ranks: Ranks) -> Cut | None:
    """How a tensor of a quantised weight is cut where the weight is."""
    if cut.axis == len(shape) - 1:
        return _by_inputs(value, name, leaf, shape, cut, ranks)
    if len(leaf.shape) == 1 and leaf.shape[0] == 1:
        return None  # one number for all outputs
    return _scaled(cut, shape[cut.axis], leaf.shape[cut.axis], f"{type(value).__name__}.{name}")


def _by_inputs(
    value: QuantizedWeight, name: str, leaf: Any, shape: tuple[int, ...], cut: Cut, ranks: Ranks
) -> Cut | None:
    if isinstance(value, StaticInt8Weight) and name == "correction":
        # It holds for all inputs, so that one rank must bring it and no other.
        return None if ranks.rank == 0 else Cut(0, (), leaf.shape[0])
    if len(leaf.shape) < len(shape) or (leaf.shape[-1] == 1 and not _is_sum(value, name)):
        return None  # one number for all inputs
    if isinstance(value, MXWeight) and name == "scale":
        held = cut.ranges[0]
        return Cut(cut.axis, (range(held.start // MX_BLOCK, -(-held.stop // MX_BLOCK)),))
    return _scaled(cut, shape[-1], leaf.shape[-1], f"{type(value).__name__}.{name}")


def _is_sum(value: QuantizedWeight, name: str) -> bool:
    """Whether the numbers are sums over inputs."""
    return isinstance(value, Int4Weight) and name == "correction"


def _whole_blocks(cut: Cut, shape: tuple[int, ...]) -> tuple[Cut, tuple[int, int]]:
    """A cut of inputs widened to blocks of one exponent, and the inputs at both ends that are not the rank's."""
    if cut.axis != len(shape) - 1:
        return cut, (0, 0)
    (held,) = cut.ranges
    start = held.start // MX_BLOCK * MX_BLOCK
    stop = min(-(-held.stop // MX_BLOCK) * MX_BLOCK, shape[-1])
    return Cut(cut.axis, (range(start, stop),)), (held.start - start, stop - held.stop)


def _scaled(cut: Cut, length: int, own: int, what: str) -> Cut:
    """The cut of an axis of `length` carried over to one of `own`. `ConfigError` where it ends inside an element."""
    ends = [end for held in cut.ranges for end in (held.start, held.stop)]
    if any(end * own % length for end in (*ends, cut.padding)):
        raise ConfigError(
            f"{what} has {own} for {length} of the weight, and the ranks' shares {ends} end between them; take fewer "
            "ranks"
        )
    ranges = tuple(range(held.start * own // length, held.stop * own // length) for held in cut.ranges)
    return Cut(cut.axis, ranges, cut.padding * own // length)


def _cut_spec(leaf: TensorSpec, cut: Cut) -> TensorSpec:
    shape = (*leaf.shape[: cut.axis], cut.length, *leaf.shape[cut.axis + 1 :])
    return replace(leaf, shape=shape, parts=None, shard=None)


def _pieces(part: Part, home: Origin) -> Iterator[Part]:
    """What a rank reads of a stored tensor, and where in its own leaf that goes."""
    assert home.cut is not None
    axis, place = home.cut.axis, 0
    stands = part.region[axis] if axis < len(part.region) else slice(0, home.whole.shape[axis])
    for held in home.cut.ranges:
        if isinstance(stands, int):
            if stands in held:
                yield part._replace(region=_put(part.region, axis, place + stands - held.start))
        else:
            both = _common(held, range(stands.start, stands.stop))
            if both:
                yield _slice_of(part, home, both, stands.start, place + both.start - held.start)
        place += len(held)


def _slice_of(part: Part, home: Origin, taken: range, stands: int, place: int) -> Part:
    """The piece of a stored tensor that is `taken` of the whole leaf, where it stands from `stands` on."""
    assert home.cut is not None
    axis = home.cut.axis
    stored = _stored_axis(part, home.whole.shape, axis)
    source = Source(part.shape, stored, taken.start - stands, taken.stop - stands)
    shape = (*part.shape[:stored], len(taken), *part.shape[stored + 1 :])
    whole = len(taken) == home.cut.length and axis >= len(part.region)
    region = part.region if whole else _put(part.region, axis, slice(place, place + len(taken)))
    return Part(part.name, shape, region, source, part.padded)


def _stored_axis(part: Part, leaf: tuple[int, ...], axis: int) -> int:
    """The axis of a stored tensor, which may have more axes of length 1, that is `axis` of the leaf."""
    numbers = sum(isinstance(item, int) for item in part.region[:axis])
    wanted = axis - numbers
    rank = len(leaf) - sum(isinstance(item, int) for item in part.region)
    if rank == len(part.shape):
        return wanted
    longer = [index for index, size in enumerate(part.shape) if size != 1]
    if len(longer) != rank:
        raise CheckpointError(f"{part.name} {list(part.shape)} cannot be read in slices: its axes are ambiguous")
    return longer[wanted]


def _put(region: tuple[int | slice, ...], axis: int, item: int | slice) -> tuple[int | slice, ...]:
    padded = region + (slice(None),) * (axis + 1 - len(region))
    return (*padded[:axis], item, *padded[axis + 1 :])


def _common(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))


def _shifted(held: range, start: int) -> range:
    return range(held.start - start, held.stop - start)
