"""What a checkpoint holds and where each tensor goes, as a value to print."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from params.files import read_config, resolve, tensor_names
from params.matching import match, shown, widest
from params.names.rules import Names
from params.quant.schemes import described
from params.spec import widened
from params.tree import describe, size


class Line(NamedTuple):
    """A tensor: its name in the checkpoint, `bf16[2,16]`, its file, the leaf and the region of it, and a remark.

    `file` is empty for a missing tensor, `leaf` for one that is ignored or unexpected.
    """

    name: str
    tensor: str
    file: str
    leaf: str
    part: str
    note: str


@dataclass(frozen=True)
class Inspection:
    """A checkpoint against a family's names: `str()` of it is a table. `ok` when `load` would take it.

    `load` also compares the values of tied tensors that are stored twice, of numbers that the config fixes and of
    offsets that must be zeros. `schemes`: how many projections have which scheme, empty for a checkpoint that is not
    quantised; `draft`: a sentence on its draft head.
    """

    directory: Path
    config: dict[str, Any] = field(repr=False)
    rows: tuple[Line, ...] = field(repr=False)
    problems: tuple[str, ...]
    ignored: dict[str, str] = field(repr=False)
    num_bytes: int
    schemes: dict[str, int] = field(default_factory=dict)
    draft: str = ""

    @property
    def ok(self) -> bool:
        """Whether every tensor has its place and every place its tensor."""
        return not self.problems

    def __str__(self) -> str:
        """A head line, one line a tensor, and the problems."""
        kind = self.config.get("model_type", "unnamed model")
        head = (
            f"{self.directory}: {kind}, {len(self.rows)} tensors, {size(self.num_bytes)}, {len(self.ignored)} ignored"
        )
        counts = ", ".join(f"{count} {word}" for word, count in self.schemes.items())
        told = [line for line in (f"projections: {counts}" if counts else "", self.draft) if line]
        table = [(row.name, row.tensor, f"{row.leaf} {row.part}".strip(), row.note) for row in self.rows]
        widths = [max((len(line[column]) for line in table), default=0) for column in range(3)]
        lines = ["  ".join(word.ljust(width) for word, width in zip(line, [*widths, 0], strict=True)) for line in table]
        ending = [f"{len(self.problems)} problems:", *(f"  {text}" for text in self.problems)] if self.problems else []
        return "\n".join([head, *told, *(line.rstrip() for line in lines), *ending])


def inspect(path: str | Path, spec: Any, names: Names, *, dtype: torch.dtype | None = torch.bfloat16) -> Inspection:
    """Match a checkpoint with a spec tree and say where everything goes.

    Reads the config, the headers, and a quantised checkpoint's description and scales of activations.

    `dtype` is the one `load` would be asked for.

    Tensors that do not fit are rows with a note and texts in `problems`; only a directory that cannot be read at all
    raises (`CheckpointError`, `ConfigError`).
    """
    directory = resolve(path)
    stored = tensor_names(directory)
    quantized = described(directory, widened(spec, dtype or widest(stored.values())), names, stored)
    plan = match(quantized.spec, quantized.names, stored, dtype)
    notes = {problem.name: problem for problem in plan.problems}
    placed = {placement.name: placement for placement in plan.placements}
    repeats = {name: f"same as {source}" for name, source in plan.repeats}
    repeats |= {name: "fixed by the config" for name, _ in plan.constants}
    rows = []
    for name, tensor in stored.items():
        home = placed.get(name) or notes.get(name)
        where = (home.path or "", home.part.where() if home.part else "") if home else ("", "")
        note = notes[name].kind if name in notes else repeats.get(name) or _ignored(plan.ignored.get(name))
        note = note or quantized.words.get(name, "")
        rows.append(Line(name, describe(tensor), tensor.file.name, *where, note))
    rows += [
        Line(problem.name, shown(problem.part.shape), "", problem.path or "", problem.part.where(), problem.kind)
        for problem in plan.problems
        if problem.kind == "missing" and problem.part
    ]
    # What the description says wrongly also makes tensors misfit; as in `load`, the cause is told alone.
    texts = tuple(f"{problem.kind}: {problem.text}" for problem in quantized.problems or plan.problems)
    total = sum(tensor.nbytes for tensor in stored.values())
    schemes = dict(Counter(quantized.words.values()).most_common())
    config = read_config(directory)
    return Inspection(directory, config, tuple(rows), texts, plan.ignored, total, schemes, quantized.draft)


def _ignored(reason: str | None) -> str:
    return f"ignored: {reason}" if reason else ""
