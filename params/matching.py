"""Which checkpoint tensor goes where, decided from names, shapes and dtypes before any value is read.

`match` does not raise for what is in a checkpoint: it returns a `Plan` with everything that fits and everything that
does not. Loading refuses a plan with problems; inspecting shows it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from params.constants import Constant, constants
from params.errors import CheckpointError
from params.names.rules import Layout, Names, Part
from params.spec import CASTABLE, TensorSpec, check_dtype
from params.tree import items

LISTED = 200
"""Problems of one kind that a message spells out."""
MISSING = 10_000
"""Tensors that may be missing of the smallest checkpoint for all of them to be looked at."""
SAMPLE = 64
"""Parts of a layout that are looked for in a checkpoint."""
HINTED, NEAR = 40, 100
"""Missing names that get a hint, and names that each is compared with: comparing takes long."""


@runtime_checkable
class Shaped(Protocol):
    """A tensor, or a description of one."""

    @property
    def shape(self) -> Any:
        """Sizes of its axes."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of its elements."""
        ...


class Placement(NamedTuple):
    """The checkpoint tensor `name` (as the checkpoint spells it) fills `part` of the leaf at `path`."""

    name: str
    path: str
    part: Part


class Problem(NamedTuple):
    """One thing that keeps a checkpoint from being loaded: its kind, the tensor, and a sentence."""

    kind: str
    name: str
    text: str
    path: str | None = None
    part: Part | None = None


@dataclass(frozen=True)
class Plan:
    """What `match` found.

    `dtypes`: leaf path to the dtype it is to have. `repeats`: pairs of checkpoint tensors that must be equal, because
    the second is stored once more as the first. `constants`: checkpoint tensors and the numbers they must hold.
    `ignored`: checkpoint tensor to reason. `hollow`: leaves of which no tensor fills some region, which is zeros.
    """

    placements: tuple[Placement, ...]
    dtypes: dict[str, torch.dtype]
    repeats: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...]
    ignored: dict[str, str]
    problems: tuple[Problem, ...]
    hollow: frozenset[str]

    def check(self, where: str | Path) -> None:
        """Raise one `CheckpointError` that lists every problem, by kind."""
        bad = len({problem.name for problem in self.problems})
        refuse(f"{where}: {bad} of {len(self.placements) + bad} tensors do not fit", self.problems)


def refuse(headline: str, problems: Sequence[Problem]) -> None:
    """Raise one `CheckpointError` that lists the problems by kind, if there are any."""
    if not problems:
        return
    lines = [headline]
    for kind in dict.fromkeys(problem.kind for problem in problems):
        texts = [problem.text for problem in problems if problem.kind == kind]
        lines.append(f"{kind} ({len(texts)}):")
        lines += [f"  {text}" for text in texts[:LISTED]]
        if len(texts) > LISTED:
            lines.append(f"  and {len(texts) - LISTED} more")
    raise CheckpointError("\n".join(lines))


def match(spec: Any, names: Names, tensors: Mapping[str, Shaped], dtype: torch.dtype | None) -> Plan:
    """Match a checkpoint's tensors with the leaves of a spec tree.

    `dtype` is what floating-point leaves without a pinned dtype get; `None` keeps the checkpoint's. `CheckpointError`
    for another dtype, and for a spec of far more tensors than there are.
    """
    check_dtype(dtype)
    leaves: dict[str, TensorSpec] = dict(items(spec))
    present, problems = by_rule_name(names, tensors)
    placements: list[Placement] = []
    missing: list[Problem] = []
    layouts = chosen_layouts(names, leaves, present)
    present = _either_of_tied(names, present, {part.name for layout in layouts.values() for part in layout})
    for path, layout in layouts.items():
        for part in layout:
            if part.name in present:
                own = present[part.name]
                placements.append(Placement(own, path, part.fitted(tuple(tensors[own].shape))))
            else:
                text = f"{part.name}, for {path}{_UNTIED if part.name in names.tied else ''}"
                missing.append(Problem("missing", part.name, text, path, part))
    used = {placement.name for placement in placements}
    left = {plain: own for plain, own in present.items() if own not in used}
    repeats = _repeats(names, left, placements)
    fixed = _constants(spec, names, left)
    left = {plain: own for plain, own in left.items() if own not in repeats and own not in fixed}
    ignored, unexpected = _leftovers(names, left, leaves)
    problems += _hinted(missing, list(unexpected), list(tensors)) + [
        Problem("unexpected", own, f"{own}, {_describe(tensors[own])}") for own in unexpected
    ]
    dtypes, unfit = _dtypes(leaves, placements, tensors, dtype)
    problems += _misshapen(placements, tensors) + unfit + _unequal(repeats, tensors) + _miscounted(fixed, tensors)
    bad = {problem.name for problem in problems}
    kept = tuple(placement for placement in placements if placement.name not in bad)
    hollow = frozenset(path for path, leaf in leaves.items() if _filled(layouts[path]) < leaf.numel)
    return Plan(kept, dtypes, tuple(repeats.items()), tuple(fixed.items()), ignored, tuple(problems), hollow)


def _filled(layout: Layout) -> int:
    return sum(math.prod(part.shape) for part in layout)


def by_rule_name(names: Names, tensors: Mapping[str, Shaped]) -> tuple[dict[str, str], list[Problem]]:
    """The tensors' own names by those the rules use; a second tensor with one such name is a problem."""
    present: dict[str, str] = {}
    problems = []
    for own in tensors:
        first = present.setdefault(names.canonical(own), own)
        if first != own:
            problems.append(Problem("duplicate", own, f"{own} means the same tensor as {first}"))
    return present, problems


_UNTIED = "; where it is to repeat the embedding, set tie_word_embeddings to true"


def _either_of_tied(names: Names, present: Mapping[str, str], wanted: Collection[str]) -> dict[str, str]:
    """Where of two tied tensors only the repetition is stored it stands for the other, as transformers ties them."""
    found = dict(present)
    for repetition, name in names.tied.items():
        if repetition not in wanted and name in wanted and name not in found and repetition in found:
            found[name] = found.pop(repetition)
    return found


def chosen_layouts(
    names: Names, leaves: Mapping[str, TensorSpec], present: Mapping[str, str]
) -> dict[str, tuple[Part, ...]]:
    """How a checkpoint with the tensors `present` stores each leaf, as far as can be told.

    `CheckpointError` where that would take tensors beyond all that could be missing: then work and memory would follow
    a number in the config, and not what the files hold.
    """
    found: dict[str, tuple[Part, ...]] = {}
    room = 4 * len(present) + MISSING
    for path, leaf in leaves.items():
        layout = closest(names.layouts(path, leaf, leaves), present)
        room -= len(layout)
        if room < 0:
            count = sum(map(len, found.values())) + len(layout)
            raise CheckpointError(
                f"the config asks for far more tensors than the {len(present)} that the files have: up to {path} "
                f"{shown(leaf.shape)} already {count}; check its numbers of layers and of experts"
            )
        found[path] = tuple(layout)
    return found


def closest(layouts: Sequence[Layout], present: Mapping[str, str]) -> Layout:
    """The layout of which the largest share is there, the first one when none is."""
    return max(layouts, key=lambda layout: _share(layout, present))


def _share(layout: Layout, present: Mapping[str, str]) -> float:
    """Of a long layout some parts stand for all."""
    some = layout[:: -(-len(layout) // SAMPLE) or 1]
    return sum(part.name in present for part in some) / max(len(some), 1)


def _repeats(names: Names, left: Mapping[str, str], placements: list[Placement]) -> dict[str, str]:
    """Tied tensors that are stored all the same, each with the tensor it must repeat."""
    sources = {placement.part.name: placement.name for placement in placements}
    pairs = {plain: source for plain, source in names.tied.items() if plain in left and source in sources}
    return {left[plain]: sources[source] for plain, source in pairs.items()}


def _constants(spec: Any, names: Names, left: Mapping[str, str]) -> dict[str, Constant]:
    """Stored numbers that the config fixes."""
    by_name = {names.constant(path): constant for path, constant in constants(spec).items()}
    return {left[plain]: constant for plain, constant in by_name.items() if plain in left}


def _leftovers(
    names: Names, left: Mapping[str, str], leaves: Mapping[str, TensorSpec]
) -> tuple[dict[str, str], list[str]]:
    reasons = {own: names.ignored(plain, leaves) for plain, own in left.items()}
    ignored = {own: reason for own, reason in reasons.items() if reason is not None}
    return ignored, [own for own, reason in reasons.items() if reason is None]


def _hinted(missing: list[Problem], unexpected: list[str], everything: list[str]) -> list[Problem]:
    """Missing tensors with the nearest name of the same layer and expert, from the unexpected ones if there are any."""
    spare, present = _by_numbers(unexpected), _by_numbers(everything)
    found = []
    for problem in missing[:HINTED]:
        numbers = _numbers(problem.name)
        names = spare.get(numbers) or present.get(numbers, [])
        near = difflib.get_close_matches(problem.name, names[:NEAR], n=1)
        hint = f"; the nearest name is {near[0]}" if near else ""
        found.append(problem._replace(text=problem.text + hint))
    return found + missing[HINTED:]


def _by_numbers(names: list[str]) -> dict[tuple[str, ...], list[str]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        groups.setdefault(_numbers(name), []).append(name)
    return groups


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(word for word in name.split(".") if word.isdigit())


def _misshapen(placements: list[Placement], tensors: Mapping[str, Shaped]) -> list[Problem]:
    """Shapes that differ. A scalar stands for one element."""
    return [
        Problem(
            "misshapen",
            name,
            f"{name} is {_describe(tensors[name])}, expected {shown(part.stored_shape)} for {path}",
            path,
            part,
        )
        for name, path, part in placements
        if (tuple(tensors[name].shape) or (1,)) != (tuple(part.stored_shape) or (1,))
    ]


def _dtypes(
    leaves: Mapping[str, TensorSpec],
    placements: list[Placement],
    tensors: Mapping[str, Shaped],
    dtype: torch.dtype | None,
) -> tuple[dict[str, torch.dtype], list[Problem]]:
    """The dtype of every leaf, and the tensors that may not become it."""
    chosen: dict[str, torch.dtype] = {}
    problems = []
    for name, path, part in placements:
        stored = tensors[name].dtype
        wanted = chosen.setdefault(path, leaves[path].dtype or dtype or stored)
        kept = leaves[path].dtype is None and dtype is None
        reason = _unfit(stored, wanted, kept)
        if reason:
            problems.append(
                Problem("wrong dtype", name, f"{name} is {_short(stored)}, {reason} for {path}", path, part)
            )
    model = dtype or next((kind for path, kind in chosen.items() if leaves[path].dtype is None), torch.float32)
    # A leaf without any tensor is one of zeros, in the model's dtype.
    return {path: leaf.dtype or model for path, leaf in leaves.items()} | chosen, problems


def widest(tensors: Iterable[Shaped]) -> torch.dtype | None:
    """The dtype that pins give way to where leaves keep their own: float64 if anything is stored so."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else None


def _unfit(stored: torch.dtype, wanted: torch.dtype, kept: bool) -> str | None:
    """Why a tensor of dtype `stored` may not fill a leaf of dtype `wanted`."""
    if wanted in CASTABLE or kept:
        if stored not in CASTABLE:
            return "expected floating point"
        if kept and stored != wanted:
            return f"the parts before it are {_short(wanted)}; load with a dtype"
        return None
    return None if stored == wanted else f"expected {_short(wanted)}"


def _unequal(repeats: Mapping[str, str], tensors: Mapping[str, Shaped]) -> list[Problem]:
    """Tied tensors that cannot be equal."""
    return [
        Problem("not tied", name, f"{name} is {_describe(tensors[name])}, {source} is {_describe(tensors[source])}")
        for name, source in repeats.items()
        if tensors[name].dtype != tensors[source].dtype or tuple(tensors[name].shape) != tuple(tensors[source].shape)
    ]


def _miscounted(fixed: Mapping[str, Constant], tensors: Mapping[str, Shaped]) -> list[Problem]:
    """Constants of which there are more or fewer than the config fixes."""
    return [
        Problem("misshapen", name, f"{name} is {_describe(tensors[name])}, expected {len(constant.values)} numbers")
        for name, constant in fixed.items()
        if math.prod(tensors[name].shape) != len(constant.values)
    ]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shown(shape: Iterable[int]) -> str:
    """A shape in a message: `[4,16]`."""
    return f"[{','.join(str(size) for size in shape)}]"


def _describe(tensor: Shaped) -> str:
    return _short(tensor.dtype) + shown(tensor.shape)
