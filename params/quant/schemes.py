"""Which projections of a checkpoint are quantised, and how: decided from its description and headers, tensor by tensor.

The description is ModelSlim's file, or what compressed-tensors wrote into `config.json`.

Nothing is guessed. Only the word FLOAT means that a tensor is not quantised; what the description leaves out, names
differently for parts that belong together, or calls something unknown is a problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from params.files import StoredTensor, listed, read_config
from params.guarded import lies_at
from params.matching import Problem, by_rule_name, chosen_layouts, refuse
from params.names.rules import Ignore, Layout, Names, Part
from params.quant.description import FILE, FLOAT, Description, read_description
from params.quant.packed import CONFIG, SUFFIX, is_packed, read_packed
from params.quant.stored import (
    KINDS,
    SUFFIXES,
    Group,
    is_stacked,
    module_of,
    projections,
    quantized,
    shifted,
)
from params.quant.values import MX_BLOCK, Int4Weight, Int8Weight, MXFP4Weight, MXFP8Weight, StaticInt8Weight
from params.reading import small
from params.spec import TensorSpec
from params.tree import items, unchecked

KIND = "quantisation"
"""The kind of all problems found here."""

DRAFT = "mtp"
"""Root of the draft head's leaves."""

FOR_LINEARS = (FLOAT, *KINDS)
FOR_EXPERTS = tuple(word for word in FOR_LINEARS if word != StaticInt8Weight.scheme)
"""The schemes that are supported."""
MODELSLIM = tuple(word for word in FOR_LINEARS if word != MXFP4Weight.scheme)
"""The schemes that a description of ModelSlim's may name."""

SLICES = (1, 16)
"""Partial sums that the correction of an int4 weight may come in."""

REFUSED = (
    Ignore("**.*norm.bias", "a bias that outlier smoothing gave a norm is not supported"),
    Ignore("**.div.mul_scale", "smoothing that divides a projection's input is not supported"),
    Ignore("**.heads_rotation", "rotation while the model runs is not supported"),
    Ignore("**.kronecker_rotation_*", "rotation while the model runs is not supported"),
)
"""Tensors that change what a model computes and that no model here applies."""


class Quantized(NamedTuple):
    """A model's spec and names as a checkpoint's description changes them.

    `words`: checkpoint tensor to scheme, for every projection's weight, empty without a description. `draft`: a
    sentence on the draft head, where there is one. `file` is the one that holds the description.
    """

    spec: Any
    names: Names
    problems: tuple[Problem, ...]
    words: Mapping[str, str]
    draft: str
    file: str

    def check(self, directory: Path) -> None:
        """Raise one `CheckpointError` that lists every problem."""
        refuse(f"{directory}: {self.file} and the tensors do not fit", self.problems)


def described(directory: Path, spec: Any, names: Names, tensors: Mapping[str, StoredTensor]) -> Quantized:
    """Spec and names for a checkpoint: unchanged where nothing is quantised.

    Nothing is without a `quant_model_description.json`, unless tensors are packed as compressed-tensors does. Reads the
    config of such, the scales of statically quantised activations, and nothing else.
    """
    leaves: dict[str, TensorSpec] = dict(items(spec))
    own, _ = by_rule_name(names, tensors)
    modelslim = read_description(directory, names.canonical)
    description = read_packed(directory, own) if modelslim is None else modelslim.matched(own)
    if description is None:
        return Quantized(spec, names, (), {}, "", FILE)
    known = FOR_LINEARS if modelslim is None else MODELSLIM
    headers = {plain: tensors[name] for plain, name in own.items()}
    checkpoint = _Checkpoint(description.words, headers, known, description.group_size)
    seen = own | {f"{module_of(name)}.weight": found for name, found in own.items() if name.endswith(f".{SUFFIX}")}
    layouts = chosen_layouts(names, leaves, seen)
    nodes = {node: [f"{node}.{name}" if node else name for name in fields] for node, fields in projections(spec)}
    paths = [path for fields in nodes.values() for path in fields]
    problems = [Problem(KIND, name, text) for name, text in description.problems]
    problems += [] if modelslim is None else _entry_problems(description, names, own, layouts)
    problems += _float_problems(names, layouts, set(paths), checkpoint)
    groups: dict[str, tuple[Group, ...]] = {}
    for path in paths:
        found, wrong = _projection(path, leaves[path], layouts[path], checkpoint)
        problems += wrong
        groups |= {path: found} if found else {}
    words = {path: checkpoint.members(layouts[path]) for path in paths}
    problems += _node_problems(nodes, leaves, words)
    draft = {path: word for path, word in words.items() if path.startswith(f"{DRAFT}.")}
    problems += _draft_problems(draft)
    new_spec, new_names = quantized(spec, names, groups)
    shown = {seen[name]: word for found in words.values() for name, word in found.items() if name in seen}
    file = CONFIG if modelslim is None else FILE
    return Quantized(new_spec, new_names, tuple(problems), shown, _draft_sentence(draft), file)


def is_quantized_checkpoint(directory: Path) -> bool:
    """Whether a directory's description or config says that its weights are quantised."""
    return lies_at(directory / FILE) or is_packed(read_config(directory))


def quantized_spec(directory: Path, spec: Any, names: Names, tensors: Mapping[str, StoredTensor]) -> Any:
    """The spec of what `load` gives of a checkpoint. `CheckpointError` for a description that does not fit."""
    found = described(directory, spec, names, tensors)
    found.check(directory)
    return found.spec


@dataclass(frozen=True)
class _Checkpoint:
    """Words and headers by the names of the rules; `known` are the words that such a checkpoint may have.

    `group_size` is the description's.
    """

    words: Mapping[str, str] = field(repr=False)
    tensors: Mapping[str, StoredTensor] = field(repr=False)
    known: tuple[str, ...] = FOR_LINEARS
    group_size: int = 0

    def members(self, layout: Layout) -> dict[str, str]:
        """The words of a leaf's weights. One that is missing altogether is taken to be like its neighbours."""
        known = [self.words[part.name] for part in layout if part.name in self.words]
        return {part.name: self.words.get(part.name, known[0] if known else FLOAT) for part in layout}

    def columns(self, name: str) -> int:
        """Size of a matrix's last axis; 1 where the tensor is not there or no matrix."""
        shape = self.tensors[name].shape if name in self.tensors else ()
        return shape[-1] if len(shape) == 2 else 1

    def number(self, name: str) -> float | None:
        """The one number that a tensor holds."""
        stored = self.tensors.get(name)
        return None if stored is None or stored.shape not in ((), (1,)) else small(stored).item()


def _projection(
    path: str, leaf: TensorSpec, layout: Layout, checkpoint: _Checkpoint
) -> tuple[tuple[Group, ...], list[Problem]]:
    """The values that a projection's leaf becomes, none if it stays as it is."""
    words = checkpoint.members(layout)
    experts = len(leaf.shape) == 3
    supported = [word for word in (FOR_EXPERTS if experts else FOR_LINEARS) if word in checkpoint.known]
    if not set(words.values()) <= set(supported):
        what = "experts" if experts else "projections"
        return (), [_problem(path, words, f"supported for {what}: {', '.join(supported)}")]
    if set(words.values()) == {FLOAT}:
        return (), []
    if experts and is_stacked(layout):
        return (), [_problem(path, words, "quantised experts must be stored one by one")]
    if experts and len(set(words.values())) > 1:
        return (), [_problem(path, words, "all experts of a layer, gate and up, must have one scheme")]
    wrong = [problem for part in layout for problem in _member_problems(path, part, words[part.name], checkpoint)]
    return () if wrong else _grouped(leaf, layout, words, checkpoint), wrong


def _member_problems(path: str, part: Part, word: str, checkpoint: _Checkpoint) -> list[Problem]:
    if word == Int4Weight.scheme and part.shape[0] % 2:
        text = f"{part.name} ({path}) has {part.shape[0]} rows, and {word} packs two in a byte; expected an even number"
        return [Problem(KIND, part.name, text)]
    scale = checkpoint.number(f"{module_of(part.name)}.input_scale") if word == StaticInt8Weight.scheme else None
    if scale is not None and not 0 < scale < float("inf"):
        text = f"{module_of(part.name)}.input_scale is {scale}, expected a positive number"
        return [Problem(KIND, part.name, text)]
    grouped = f"{module_of(part.name)}.{GROUPED[word]}" if word in GROUPED else ""
    found, size, inputs = checkpoint.columns(grouped), checkpoint.group_size, part.shape[-1]
    if found > 1 and size and found * size != inputs:
        text = (
            f"{grouped} has scales for {found} groups, {FILE} says group_size {size}, and {part.name} ({path}) has "
            f"{inputs} inputs; expected {inputs} / {size} groups, and whole ones"
        )
        return [Problem(KIND, grouped, text)]
    return []


GROUPED = {Int8Weight.scheme: "weight_scale", Int4Weight.scheme: "weight_scale_second"}
"""What may have a scale for each group of inputs: a column of the tensor so called."""


def _grouped(leaf: TensorSpec, layout: Layout, words: Mapping[str, str], checkpoint: _Checkpoint) -> tuple[Group, ...]:
    """Neighbours that are quantised alike as one value each. Experts always are one."""
    if len(leaf.shape) == 3:
        word = words[layout[0].name]
        return (Group(_value(word, leaf, leaf.shape, _traits(word, layout[0], checkpoint)), layout),)

    def alike(part: Part) -> tuple[Any, ...]:
        return words[part.name], _traits(words[part.name], part, checkpoint)

    found = []
    for (word, traits), members in groupby(layout, alike):
        taken = tuple(members)
        rows = sum(member.shape[0] for member in taken)
        found.append(Group(_value(word, leaf, (rows, leaf.shape[1]), traits), shifted(taken)))
    return tuple(found)


def _traits(word: str, part: Part, checkpoint: _Checkpoint) -> tuple[Any, ...]:
    """What neighbours of one scheme must share to be one value."""
    module = module_of(part.name)
    if word == Int8Weight.scheme:
        return (checkpoint.columns(f"{module}.weight_scale"),)
    if word == Int4Weight.scheme:
        second = f"{module}.weight_scale_second"
        groups = checkpoint.columns(second) if second in checkpoint.tensors else None
        return checkpoint.columns(f"{module}.scale_bias"), groups
    if word == StaticInt8Weight.scheme:
        stored = checkpoint.tensors.get(f"{module}.deq_scale")
        whole = stored is not None and stored.dtype == torch.int64
        numbers = [checkpoint.number(f"{module}.{name}") for name in ("input_scale", "input_offset")]
        return torch.int64 if whole else torch.float32, *numbers
    return ()


def _value(word: str, leaf: TensorSpec, shape: tuple[int, ...], traits: tuple[Any, ...]) -> Any:
    """The spec of a value that stands for a float weight of this shape, a part of `leaf` or all of it."""
    *lead, outputs, inputs = shape

    def rows(columns: int, dtype: torch.dtype) -> TensorSpec:
        return TensorSpec((*lead, outputs, columns), dtype=dtype)

    def groups(count: int) -> TensorSpec:
        # Any other count is a shape that the checkpoint got wrong, and matching will say so.
        return rows(count if count and inputs % count == 0 else 1, torch.float32)

    if word == FLOAT:
        return TensorSpec(shape, leaf.init, leaf.dtype)
    if word == Int8Weight.scheme:
        return unchecked(Int8Weight, values=rows(inputs, torch.int8), scale=groups(*traits))
    if word == Int4Weight.scheme:
        slices, seconds = traits
        return unchecked(
            Int4Weight,
            packed=TensorSpec((*lead, outputs // 2, inputs), dtype=torch.int8),
            scale=groups(1),
            correction=groups(slices if slices in SLICES else 1),
            second_scale=None if seconds is None else groups(seconds),
        )
    if word in (MXFP8Weight.scheme, MXFP4Weight.scheme):
        shared: dict[str, Any] = {"scale": rows(-(-inputs // MX_BLOCK), torch.uint8), "padding": (0, 0)}
        if word == MXFP8Weight.scheme:
            return unchecked(MXFP8Weight, values=rows(inputs, torch.float8_e4m3fn), **shared)
        return unchecked(MXFP4Weight, packed=rows(inputs // 2, torch.uint8), **shared)
    one = TensorSpec((1,), dtype=torch.float32)
    return unchecked(
        StaticInt8Weight,
        values=rows(inputs, torch.int8),
        deq_scale=TensorSpec((outputs,), dtype=traits[0]),
        correction=TensorSpec((outputs,), dtype=torch.int32),
        input_scale=one,
        input_offset=one,
    )


def _entry_problems(
    description: Description, names: Names, own: Mapping[str, str], layouts: Mapping[str, Layout]
) -> list[Problem]:
    """Tensors without an entry, with one that contradicts their weight's, or that no model applies; and the reverse."""
    words = description.words
    wanted = {part.name for layout in layouts.values() for part in layout}
    found = {}
    for plain, name in own.items():
        module, _, suffix = plain.rpartition(".")
        weight = f"{module}.weight"
        beside = suffix in SUFFIXES
        refused = None if beside or plain in wanted else _refusal(plain)
        if refused:
            found[plain] = f"{name}: {refused}"
        elif plain not in words:
            found[plain] = f"{name} has no entry in {FILE}; only FLOAT says that a tensor is not quantised"
        elif beside and words[plain] != words.get(weight, words[plain]):
            found[plain] = f"{name} is {words[plain]} and its weight is {words[weight]}; they must have one scheme"
    for plain, word in words.items():
        if plain not in own and word in KINDS and plain.endswith(".weight"):
            found[plain] = f"{plain} is {word} in {FILE}, and no file holds it; finish the download"
    return [Problem(KIND, plain, text) for plain, text in found.items() if names.ignored(plain, layouts) is None]


def _refusal(name: str) -> str | None:
    return next((entry.why for entry in REFUSED if entry.matches(name)), None)


def _float_problems(
    names: Names, layouts: Mapping[str, Layout], projected: set[str], checkpoint: _Checkpoint
) -> list[Problem]:
    """Tensors that cannot be quantised and are: tables, norms, convolutions, a head that repeats the embedding."""
    others = {part.name: path for path, layout in layouts.items() if path not in projected for part in layout}
    weights = {part.name for path in projected for part in layouts[path]}
    others |= {name: f"tied to {source}" for name, source in names.tied.items() if name not in weights}
    words = {name: checkpoint.words.get(name, FLOAT) for name in others}
    return [
        Problem(KIND, name, f"{name} ({others[name]}) is {word}; only projections can be quantised, this must be FLOAT")
        for name, word in words.items()
        if word != FLOAT
    ]


def _node_problems(
    nodes: Mapping[str, list[str]], leaves: Mapping[str, TensorSpec], words: Mapping[str, Mapping[str, str]]
) -> list[Problem]:
    """Experts of which one projection is quantised and another is not."""
    found = []
    for node, paths in nodes.items():
        plain = {set(words[path].values()) == {FLOAT} for path in paths if len(leaves[path].shape) == 3}
        if len(plain) > 1:
            both = {name: word for path in paths for name, word in words[path].items()}
            found.append(_problem(node, both, "the experts' projections must all be quantised, or none"))
    return found


def _draft_problems(draft: Mapping[str, Mapping[str, str]]) -> list[Problem]:
    """A draft head that is quantised in part."""
    words = {name: word for found in draft.values() for name, word in found.items()}
    if len({word == FLOAT for word in words.values()}) < 2:
        return []
    return [_problem(DRAFT, words, "a draft head must be quantised as a whole, or FLOAT as a whole")]


def _draft_sentence(draft: Mapping[str, Mapping[str, str]]) -> str:
    kinds = sorted({word for found in draft.values() for word in found.values()})
    if not kinds:
        return ""
    return "draft head: unquantised (FLOAT)" if kinds == [FLOAT] else f"draft head: {', '.join(kinds)}"


def _problem(path: str, words: Mapping[str, str], expected: str) -> Problem:
    """Members by scheme, the rarest first, and what was expected of them."""
    by_word: dict[str, list[str]] = {}
    for name, word in words.items():
        by_word.setdefault(word, []).append(name)
    found = sorted(by_word.items(), key=lambda item: len(item[1]))
    first = found[0][1][0]
    return Problem(
        KIND, first, f"{path}: {'; '.join(f'{word} ({listed(names, 3)})' for word, names in found)}; {expected}"
    )
