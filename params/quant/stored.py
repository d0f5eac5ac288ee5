"""The spec and the checkpoint names of a model with quantised projections, made from those of the float model.

A projection's leaf becomes a node of several: `layers.0.attn.out.weight` a `values` and a `scale`. Where these stand
follows from where the weight stood: beside the tensor `X.weight` is an `X.weight_scale` with as many rows. So matching,
loading, saving and inspecting need to know nothing of quantisation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from params.errors import CheckpointError
from params.files import listed
from params.names.rules import Layout, Names, OneByOne, Part
from params.quant.description import FLOAT
from params.quant.values import (
    Int4Weight,
    Int8Weight,
    MXFP4Weight,
    MXFP8Weight,
    MXWeight,
    QuantizedWeight,
    SplitWeight,
    StaticInt8Weight,
)
from params.spec import TensorSpec
from params.tree import dotted, items, put, tree_map, unchecked


class Stored(NamedTuple):
    """How a field is stored: what follows the module's name, and the outputs a row holds; 0 where all share one."""

    suffix: str
    outputs: int = 1

    def part(self, member: Part, shape: tuple[int, ...]) -> Part:
        """The tensor beside the weight `member`, in the field's leaf of this shape."""
        name = f"{module_of(member.name)}.{self.suffix}"
        if not (self.outputs and member.region):
            return Part(name, shape)
        region = tuple(self._packed(item) if isinstance(item, slice) else item for item in member.region)
        return Part(name, (member.shape[0] // self.outputs, *shape[len(region) :]), region)

    def _packed(self, rows: slice) -> slice:
        return slice(rows.start // self.outputs, rows.stop // self.outputs)


STORED: dict[type[QuantizedWeight], dict[str, Stored]] = {
    Int8Weight: {"values": Stored("weight"), "scale": Stored("weight_scale")},
    StaticInt8Weight: {
        "values": Stored("weight"),
        "deq_scale": Stored("deq_scale"),
        "correction": Stored("quant_bias"),
        "input_scale": Stored("input_scale", 0),
        "input_offset": Stored("input_offset", 0),
    },
    Int4Weight: {
        "packed": Stored("weight", 2),
        "scale": Stored("weight_scale"),
        "correction": Stored("scale_bias"),
        "second_scale": Stored("weight_scale_second"),
    },
    MXFP8Weight: {"values": Stored("weight"), "scale": Stored("weight_scale")},
    MXFP4Weight: {"packed": Stored("weight_packed"), "scale": Stored("weight_scale")},
}
"""The fields of each kind of weight in a checkpoint: the last of compressed-tensors, the others of ModelSlim."""

KINDS = {kind.scheme: kind for kind in STORED}

ZEROS = "offset of symmetric integers, which must be zeros"
"""The reason for passing over a tensor whose values `load` checks."""

UNREAD = {
    (StaticInt8Weight.scheme, "bias"): "part of quant_bias",
    (StaticInt8Weight.scheme, "weight_scale"): "part of deq_scale",
    (StaticInt8Weight.scheme, "weight_offset"): ZEROS,
    (Int8Weight.scheme, "weight_offset"): ZEROS,
    (Int4Weight.scheme, "weight_offset"): ZEROS,
    (Int4Weight.scheme, "weight_offset_second"): ZEROS,
}
"""Scheme and suffix of tensors beside a weight that no leaf takes, and why."""

SUFFIXES = {stored.suffix for fields in STORED.values() for stored in fields.values()} | {
    suffix for _, suffix in UNREAD if suffix != "bias"
}
"""What stands in a description with its weight's scheme."""


class Group(NamedTuple):
    """Checkpoint weights that make up one value: its spec, and they as if the value were a plain leaf."""

    value: Any
    members: Layout

    @property
    def scheme(self) -> str:
        """The description's word for them."""
        return getattr(self.value, "scheme", FLOAT)


@dataclass(frozen=True)
class QuantizedNames(Names):
    """The names of a family whose projections are partly quantised.

    `plain`: the names of the float model, `paths`: its leaves. `stored`: each leaf that stands for a projection, or a
    part of one: the weights it belongs to, and how it is stored. `schemes`: module, as the rules spell it, to the
    description's word.
    """

    plain: Names = field(default_factory=lambda: Names("", {}), repr=False)
    paths: frozenset[str] = field(default=frozenset(), repr=False)
    stored: Mapping[str, tuple[Layout, Stored]] = field(default_factory=dict, repr=False)
    schemes: Mapping[str, str] = field(default_factory=dict, repr=False)

    def layouts(self, path: str, leaf: TensorSpec, paths: Collection[str]) -> tuple[Layout, ...]:
        """Every way a checkpoint may store the leaf; experts one by one first, as ModelSlim writes them."""
        if path in self.stored:
            members, stored = self.stored[path]
            return (tuple(stored.part(member, leaf.shape) for member in members),)
        found = sorted(self.plain.layouts(path, leaf, self.paths), key=is_stacked)
        return tuple(layout if isinstance(layout, OneByOne) else self._unfolded(layout) for layout in found)

    def _unfolded(self, layout: Layout) -> Layout:
        return tuple(part for part in layout if not self.is_folded(part.name))

    def ignored(self, name: str, paths: Collection[str]) -> str | None:
        """Why a tensor nobody asked for may be passed over, or `None`: then it is an error."""
        module, _, suffix = name.rpartition(".")
        why = UNREAD.get((self.schemes.get(module, FLOAT), suffix))
        return why or self.plain.ignored(name, self.paths)

    @property
    def is_packed(self) -> bool:
        """Whether the checkpoint is one of compressed-tensors, else it is ModelSlim's."""
        return MXFP4Weight.scheme in self.schemes.values()

    def is_folded(self, name: str) -> bool:
        """Whether the tensor is a bias that its module's `quant_bias` already holds."""
        return name.endswith(".bias") and self.schemes.get(module_of(name)) == StaticInt8Weight.scheme

    def word(self, name: str) -> str:
        """What a description says of a tensor, here by the name in the rules."""
        module, _, suffix = name.rpartition(".")
        return self.schemes.get(module, FLOAT) if suffix in SUFFIXES else FLOAT

    def words(self, names: Iterable[str]) -> dict[str, str]:
        """A description of tensors."""
        return {name: self.word(name) for name in names}


def module_of(name: str) -> str:
    """The name of a tensor without its last word."""
    return name.rpartition(".")[0]


def is_stacked(layout: Layout) -> bool:
    """Whether one tensor holds all experts. ModelSlim never writes such."""
    return len(layout) == 1 and len(layout[0].shape) == 3 and not layout[0].name.endswith(".weight")


def projections(tree: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The paths of nodes that hold weights which may be quantised, and the fields that are such.

    A node's class lists them as `projections`.
    """
    for path, node in pytree.tree_flatten_with_path(tree, is_leaf=has_projections)[0]:
        if has_projections(node):
            yield dotted(path), tuple(name for name in node.projections if getattr(node, name) is not None)


def has_projections(node: Any) -> bool:
    """Whether a node holds weights which may be quantised."""
    return hasattr(node, "projections")


def quantized(spec: Any, names: Names, groups: Mapping[str, tuple[Group, ...]]) -> tuple[Any, QuantizedNames]:
    """Spec and names with the leaves at the paths of `groups` made of these."""
    paths = frozenset(path for path, _ in items(spec))
    stored: dict[str, tuple[Layout, Stored]] = {}
    schemes: dict[str, str] = {}
    for path, parts in groups.items():
        whole = len(parts) == 1
        value = parts[0].value if whole else unchecked(SplitWeight, parts=tuple(group.value for group in parts))
        spec = put(spec, path, value)
        for index, group in enumerate(parts):
            stored |= _leaves(path if whole else f"{path}.parts.{index}", group)
            schemes |= {module_of(member.name): group.scheme for member in group.members}
    same = {known.name: getattr(names, known.name) for known in fields(Names)}
    return spec, QuantizedNames(**same, plain=names, paths=paths, stored=stored, schemes=schemes)


def of_tree(tree: Any, spec: Any, names: Names) -> tuple[Any, Names]:
    """Spec and names that fit a tree of which some weights are quantised.

    `CheckpointError` for a weight that a checkpoint cannot hold: of another shape, with parts that end inside a
    checkpoint's tensor, a slice of another weight.
    """
    leaves: dict[str, TensorSpec] = dict(items(spec))
    weights = {path: node for path, node in items(tree, is_quantized) if is_quantized(node)}
    wrong = [
        f"{path} is a {type(node).__name__} {list(node.shape)}, the spec has "
        + (str(list(leaves[path].shape)) if path in leaves else "nothing there")
        for path, node in weights.items()
        if path not in leaves or tuple(node.shape) != leaves[path].shape
    ]
    if wrong:
        raise CheckpointError("the tree does not fit its spec:\n  " + "\n  ".join(wrong))
    if not weights:
        return spec, names
    apart = {path: sorted(names.layouts(path, leaves[path], leaves), key=is_stacked)[0] for path in weights}
    new, found = quantized(spec, names, {path: _groups(path, node, apart[path]) for path, node in weights.items()})
    _refuse_biases(tree, {path: names.layouts(path, leaf, leaves)[0] for path, leaf in leaves.items()}, found)
    _refuse_two_formats(found)
    return new, found


def zero_offsets(names: Names, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The offsets that ModelSlim writes beside the scales among the tensors: zeros."""
    if not isinstance(names, QuantizedNames):
        return {}
    found = {}
    for name, scale in tensors.items():
        module, _, suffix = name.rpartition(".")
        offset = suffix.replace("scale", "offset")
        if UNREAD.get((names.word(name), offset)) == ZEROS:
            found[f"{module}.{offset}"] = torch.zeros_like(scale)
    return found


def group_sizes(tree: Any) -> set[int]:
    """How many inputs share a scale, of the tree's weights whose outputs have several."""
    weights = [node for _, node in items(tree, _is_grouped) if _is_grouped(node)]
    scales = [node.second_scale if isinstance(node, Int4Weight) else node.scale for node in weights]
    counts = [1 if scale is None else scale.shape[-1] for scale in scales]
    return {node.shape[-1] // count for node, count in zip(weights, counts, strict=True) if count > 1}


def _is_grouped(node: Any) -> bool:
    return isinstance(node, (Int8Weight, Int4Weight))


def is_quantized(node: Any) -> bool:
    """Whether a node is a quantised weight."""
    return isinstance(node, QuantizedWeight)


def shifted(members: Layout) -> Layout:
    """Neighbours in a leaf as if the leaf began with the first of them."""
    found, start = [], 0
    for member in members:
        rows = slice(start, start + member.shape[0])
        found.append(member._replace(region=(rows,)) if len(member.region) == 1 else member)
        start = rows.stop
    return tuple(found)


def _leaves(path: str, group: Group) -> dict[str, tuple[Layout, Stored]]:
    if isinstance(group.value, TensorSpec):
        return {path: (group.members, Stored("weight"))}
    return {f"{path}.{name}": (group.members, stored) for name, stored in STORED[type(group.value)].items()}


def _groups(path: str, node: QuantizedWeight, layout: Layout) -> tuple[Group, ...]:
    """The members of each part of a weight."""
    if not isinstance(node, SplitWeight):
        return (Group(_spec_of(path, node, layout), layout),)
    left, groups = layout, []
    for part in node.parts:
        ends = [sum(member.shape[0] for member in left[: count + 1]) for count in range(len(left))]
        if part.shape[0] not in ends:
            raise CheckpointError(
                f"{path}: a part has {part.shape[0]} rows, and the checkpoint's tensors there end at {ends}; a part "
                "must hold whole tensors"
            )
        count = ends.index(part.shape[0]) + 1
        groups.append(Group(_spec_of(path, part, left[:count]), shifted(left[:count])))
        left = left[count:]
    return tuple(groups)


def _spec_of(path: str, value: Any, members: Layout) -> Any:
    """The spec of a value that is saved in these members."""
    if isinstance(value, Tensor):
        return TensorSpec(tuple(value.shape))
    if isinstance(value, MXWeight) and any(value.padding):
        raise CheckpointError(f"{path} is a slice that begins or ends inside a block of 32; save the whole weight")
    odd = [member.name for member in members if member.shape[-2] % 2]
    if isinstance(value, Int4Weight) and odd:
        raise CheckpointError(f"{path}: {listed(odd)} would have an odd number of rows, and int4 packs two in a byte")
    return tree_map(lambda leaf: TensorSpec(tuple(leaf.shape), dtype=leaf.dtype), value)


def _refuse_two_formats(names: QuantizedNames) -> None:
    """Schemes of which no one format of checkpoints has both."""
    words = sorted(set(names.schemes.values()) - {FLOAT})
    if names.is_packed and len(words) > 1:
        raise CheckpointError(
            f"no checkpoint holds {MXFP4Weight.scheme}, which is compressed-tensors', beside ModelSlim's: the tree has "
            f"{', '.join(words)}; dequantise what is of the one kind or the other"
        )


def _refuse_biases(tree: Any, layouts: Mapping[str, Layout], names: QuantizedNames) -> None:
    """Biases that would be lost, because a module that is quantised statically has its bias inside the weight."""
    folded = [(path, part) for path, layout in layouts.items() for part in layout if names.is_folded(part.name)]
    leaves = dict(items(tree))
    lost = [part.name for path, part in folded if path in leaves and part.of(leaves[path]).any()]
    if lost:
        raise CheckpointError(
            f"{', '.join(lost)}: a {StaticInt8Weight.scheme} projection has its bias in its weight's correction, and "
            "the tree has another that no file would hold; add it to the correction and make it zeros"
        )
