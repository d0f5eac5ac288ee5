"""How one leaf of a parameter tree is spelled in a checkpoint.

A name table (one file a family, strings only) gives each leaf path a rule. A rule answers one question: which
checkpoint tensors, of which shapes, make up which region of the leaf. Loading, saving and inspecting all read the
same answer, so what is saved is what loads.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, overload, runtime_checkable

from torch import Tensor

from params.spec import TensorSpec


class Source(NamedTuple):
    """A slice `start` to `stop` along one axis of a checkpoint tensor of this shape."""

    shape: tuple[int, ...]
    axis: int
    start: int
    stop: int


class Part(NamedTuple):
    """A checkpoint tensor and the region of a leaf it fills: `leaf[region]`, seen in the checkpoint's `shape`.

    With a `source` it is a slice of the tensor that fills the region, and has this shape. A `padded` vector may be
    stored with more numbers than are read, behind them, and with axes of one element.
    """

    name: str
    shape: tuple[int, ...]
    region: tuple[int | slice, ...] = ()
    source: Source | None = None
    padded: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the whole checkpoint tensor."""
        return self.shape if self.source is None else self.source.shape

    def fitted(self, stored: tuple[int, ...]) -> Part:
        """The same of a tensor of the shape `stored`, which where the part is `padded` may be longer, or have axes."""
        own, count = self.stored_shape, math.prod(stored)
        if not self.padded or stored == own or count not in stored or count < own[0]:
            return self
        source = self.source or Source(own, 0, 0, own[0])
        return self._replace(source=source._replace(shape=stored, axis=stored.index(count)))

    def read(self, tensor: Tensor) -> Tensor:
        """What a checkpoint tensor in memory gives."""
        if self.source is not None:
            tensor = tensor.narrow(self.source.axis, self.source.start, self.source.stop - self.source.start)
        return tensor.reshape(self.shape)

    def of(self, leaf: Any) -> Tensor:
        """The region of `leaf`, a tensor or `MappedRows`, as the checkpoint shapes it; a view when it is contiguous."""
        return leaf[self.region].reshape(self.shape)

    def where(self) -> str:
        """The region in words: `rows 0:128`, `expert 3, rows 0:16`, or nothing for a whole leaf."""
        words = [
            f"expert {item}" if isinstance(item, int) else f"rows {item.start}:{item.stop}" for item in self.region
        ]
        return ", ".join(words)


Layout = Sequence[Part]
"""Checkpoint tensors that together make up a leaf."""


@runtime_checkable
class Rule(Protocol):
    """What a name table maps a leaf path to. `{i}` in a name stands for the layer number."""

    def layouts(self, leaf: TensorSpec, layer: int | None) -> tuple[Layout, ...]:
        """Every way a checkpoint may store the leaf; the first is the one that is written."""
        ...


@dataclass(frozen=True)
class Plain:
    """The leaf is one checkpoint tensor of the same shape."""

    name: str

    def layouts(self, leaf: TensorSpec, layer: int | None) -> tuple[Layout, ...]:
        """One tensor, the whole leaf."""
        return ((Part(self.name.format(i=layer), leaf.shape),),)


@dataclass(frozen=True)
class Squeeze:
    """A depthwise convolution: `[channels, 1, width]` in the checkpoint, `[channels, width]` in the tree."""

    name: str

    def layouts(self, leaf: TensorSpec, layer: int | None) -> tuple[Layout, ...]:
        """One tensor, the whole leaf with the input-channel axis put back."""
        channels, width = leaf.shape
        return ((Part(self.name.format(i=layer), (channels, 1, width)),),)


@dataclass(frozen=True)
class Rows:
    """Checkpoint tensors that stand below one another in the leaf; `TensorSpec.parts` says how many rows each has."""

    members: tuple[str, ...]

    def layouts(self, leaf: TensorSpec, layer: int | None) -> tuple[Layout, ...]:
        """One tensor a member, in order. `ValueError` when the spec's parts do not number the members."""
        parts = leaf.parts or ()
        if len(parts) != len(self.members):
            raise ValueError(f"the rule merges {len(self.members)} tensors {self.members}, the spec has parts {parts}")
        found, start = [], 0
        for name, rows in zip(self.members, parts, strict=True):
            found.append(Part(name.format(i=layer), (rows, *leaf.shape[1:]), (slice(start, start + rows),)))
            start += rows
        return (tuple(found),)


@dataclass(frozen=True)
class Convolutions:
    """Depthwise convolutions `[channels, 1, width]` that stand below one another in the leaf, as `Rows` do."""

    members: tuple[str, ...]

    def layouts(self, leaf: TensorSpec, layer: int | None) -> tuple[Layout, ...]:
        """One tensor a member, in order, with the input-channel axis put back."""
        (rows,) = Rows(self.members).layouts(leaf, layer)
        return (tuple(part._replace(shape=(part.shape[0], 1, part.shape[1])) for part in rows),)


@dataclass(frozen=True)
class Shards:
    """A table cut into checkpoint tensors of some rows each, `{s}` counting them from 0; or `whole`, as one tensor.

    `TensorSpec.parts` says how many rows each has.
    """

    name: str
    whole: str

    def layouts(self, leaf: TensorSpec, layer: int | None) -> tuple[Layout, ...]:
        """One tensor a shard, in order; then the whole."""
        counts = leaf.parts or (leaf.shape[0],)
        names = tuple(self.name.format(i=layer, s=shard) for shard in range(len(counts)))
        return (*Rows(names).layouts(replace(leaf, parts=counts), None), *Plain(self.whole).layouts(leaf, layer))


@dataclass(frozen=True)
class Experts:
    """Expert weights `[experts, rows, columns]`: one stacked tensor, or `each` (with `{e}`) for every expert.

    Several names in `each` share the rows equally, in order: gate, then up. Where these are called `gate_proj`,
    `up_proj` and `down_proj` a checkpoint may say `w1`, `w3` and `w2`, and the other way round.
    """

    stacked: str
    each: tuple[str, ...]

    def layouts(self, leaf: TensorSpec, layer: int | None) -> tuple[Layout, ...]:
        """The stacked tensor first, then one tensor an expert and member, by either convention."""
        other = tuple(".".join(_OTHER_WORDS.get(word, word) for word in name.split(".")) for name in self.each)
        apart = tuple(OneByOne(leaf.shape, layer, names) for names in (self.each, other))
        return (Part(self.stacked.format(i=layer), leaf.shape),), *apart


@dataclass(frozen=True)
class ExpertsApart(Experts):
    """`Experts`, of which one tensor an expert and member is written."""

    def layouts(self, leaf: TensorSpec, layer: int | None) -> tuple[Layout, ...]:
        """One tensor an expert and member first, then the stacked tensor."""
        stacked, *apart = super().layouts(leaf, layer)
        return (*apart, stacked)


_WORDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_OTHER_WORDS = _WORDS | {short: long for long, short in _WORDS.items()}


@dataclass(frozen=True)
class OneByOne(Sequence[Part]):
    """The tensors of single experts, each made when it is asked for: a config can ask for any number of experts."""

    shape: tuple[int, ...]
    layer: int | None
    names: tuple[str, ...]

    def __len__(self) -> int:
        return self.shape[0] * len(self.names)

    @overload
    def __getitem__(self, at: int) -> Part: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Part, ...]: ...
    def __getitem__(self, at: int | slice) -> Part | tuple[Part, ...]:
        if isinstance(at, slice):
            return tuple(self[place] for place in range(len(self))[at])
        expert, index = divmod(range(len(self))[at], len(self.names))
        _, rows, columns = self.shape
        step = rows // len(self.names)
        region = (expert, slice(index * step, (index + 1) * step))
        return Part(self.names[index].format(i=self.layer, e=expert), (step, columns), region)


@dataclass(frozen=True)
class AnyOf:
    """A leaf that checkpoints spell in several ways."""

    rules: tuple[Rule, ...]

    def layouts(self, leaf: TensorSpec, layer: int | None) -> tuple[Layout, ...]:
        """The layouts of each rule; what is written is the first one's."""
        return tuple(layout for rule in self.rules for layout in rule.layouts(leaf, layer))


@dataclass(frozen=True)
class Beside:
    """One leaf path, two spellings: `then` where the tree also has the leaf `sibling`, `otherwise` elsewhere."""

    sibling: str
    then: Rule
    otherwise: Rule


@dataclass(frozen=True)
class Ignore:
    """Checkpoint tensors that are passed over, and why.

    `pattern` is compared component by component from the first to the last: `*` is any one component or part of one,
    `**` any number of them. With `unless`, the tensors are only passed over when the tree has nothing under that path.
    """

    pattern: str
    why: str
    unless: str | None = None

    def matches(self, name: str) -> bool:
        """Whether the whole name fits the pattern."""
        return _compiled(self.pattern).fullmatch(f"{name}.") is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern of components as one of text in which a dot follows each."""
    words = (re.escape(word).replace(r"\*", "[^.]*") + r"\." for word in pattern.split("."))
    return re.compile("".join(r"(?:[^.]*\.)*" if word == r"[^.]*[^.]*\." else word for word in words))


INSIDE_A_WRAPPER = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
)
"""How names begin where a text model is part of one that sees images too, and how they begin in the text model."""


def of_base_class(*parts: str) -> tuple[tuple[str, str], ...]:
    """How names begin where the model was saved without its head, as `AutoModel` does: its `parts` are at the top."""
    return tuple((f"{part}.", f"model.{part}.") for part in ("embed_tokens", "layers", "norm", *parts))


@dataclass(frozen=True)
class Names:
    """A family's spelling of its parameters.

    `rules`: leaf path, `{i}` for the layer number, to rule. `constants`: the same for numbers that the config fixes, to
    checkpoint name. `prefixes`: (what wrappers and base classes write, what the rules say), the first that fits is
    applied. `tied`: checkpoint tensor to another: when the tree has no leaf for the first, either may be left out, or
    the first must repeat the second exactly. `nested` and `nested_head`: what `model.` and `lm_head.` become when
    saving beside a config whose text part is nested.
    """

    family: str
    rules: Mapping[str, Rule | Beside] = field(repr=False)
    prefixes: tuple[tuple[str, str], ...] = ()
    ignore: tuple[Ignore, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)
    nested: str = "model."
    nested_head: str = "lm_head."

    def canonical(self, name: str) -> str:
        """A checkpoint's tensor name as the rules spell it, wrappers taken off."""
        for wrapper, plain in self.prefixes:
            if name.startswith(wrapper):
                return plain + name[len(wrapper) :]
        return name

    def wrapped(self, name: str) -> str:
        """A tensor's name beside a config whose text part is nested."""
        for plain, nested in (("model.", self.nested), ("lm_head.", self.nested_head)):
            if name.startswith(plain):
                return nested + name.removeprefix(plain)
        return name

    def rule(self, path: str, paths: Collection[str]) -> tuple[Rule, int | None]:
        """The rule of a leaf and its layer number, in a tree with the leaf `paths`. `KeyError` for an unnamed leaf."""
        words = path.split(".")
        layer = next((int(word) for word in words if word.isdigit()), None)
        pattern = ".".join("{i}" if word.isdigit() else word for word in words)
        if pattern not in self.rules:
            raise KeyError(f"{self.family}: no checkpoint name for the leaf {path}")
        rule = self.rules[pattern]
        if isinstance(rule, Beside):
            rule = rule.then if rule.sibling.format(i=layer) in paths else rule.otherwise
        return rule, layer

    def constant(self, path: str) -> str:
        """The checkpoint name of the constant at `path`. `KeyError` for one without a name."""
        layer = next((int(word) for word in path.split(".") if word.isdigit()), None)
        return self.constants[".".join("{i}" if word.isdigit() else word for word in path.split("."))].format(i=layer)

    def layouts(self, path: str, leaf: TensorSpec, paths: Collection[str]) -> tuple[Layout, ...]:
        """Every way a checkpoint may store the leaf at `path`."""
        rule, layer = self.rule(path, paths)
        return rule.layouts(leaf, layer)

    def ignored(self, name: str, paths: Collection[str]) -> str | None:
        """Why a tensor nobody asked for may be passed over, or `None`: then it is an error."""
        for entry in self.ignore:
            if entry.matches(name) and not (
                entry.unless is not None and any(path.startswith(f"{entry.unless}.") for path in paths)
            ):
                return entry.why
        return None
