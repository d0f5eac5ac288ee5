"""One linear module of a checkpoint, by itself."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from params.checkpoint import load
from params.errors import CheckpointError
from params.files import resolve, tensor_names
from params.names.rules import Names, Plain
from params.quant.description import FLOAT, read_description
from params.quant.packed import SUFFIX
from params.quant.values import Int4Weight, QuantizedWeight, StaticInt8Weight
from params.spec import TensorSpec
from params.tree import tree, unchecked


@tree
class _Projection:
    projections: ClassVar[tuple[str, ...]] = ("weight",)

    weight: Any
    bias: Any


class _ModuleNames(Names):
    """Names of one module, to which the rest of a checkpoint is nothing."""

    def ignored(self, name: str, paths: Collection[str]) -> str | None:
        """Why a tensor may be passed over: it is of another module."""
        return None if name.startswith(f"{self.family}.") else "of another module"


def load_projection(path: str | Path, module: str) -> tuple[Tensor | QuantizedWeight, Tensor | None]:
    """Weight and bias of a linear module, as stored; `module` as the checkpoint spells it.

    `load_projection(directory, "model.visual.blocks.0.mlp.linear_fc2")`. The bias is None where there is none, or where
    the weight's own correction holds it. `CheckpointError` for what `load` refuses too.
    """
    directory = resolve(path)
    stored = tensor_names(directory)
    packed = f"{module}.{SUFFIX}" in stored
    name = f"{module}.{SUFFIX if packed else 'weight'}"
    if name not in stored or len(stored[name].shape) != 2:
        weights = [other for other in stored if other.endswith((".weight", f".{SUFFIX}"))]
        near = difflib.get_close_matches(name, weights, n=1)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise CheckpointError(f"{directory} has no matrix {name}{hint}")
    description = read_description(directory, lambda given: given)
    word = FLOAT if description is None else description.words.get(name, FLOAT)
    rows, inputs = stored[name].shape
    outputs, inputs = 2 * rows if word == Int4Weight.scheme else rows, 2 * inputs if packed else inputs
    biased = f"{module}.bias" in stored and word != StaticInt8Weight.scheme
    spec = unchecked(_Projection, weight=TensorSpec((outputs, inputs)), bias=TensorSpec((outputs,)) if biased else None)
    rules = {"weight": Plain(f"{module}.weight"), "bias": Plain(f"{module}.bias")}
    found = load(directory, spec, _ModuleNames(module, rules), dtype=None, progress=False, tensors=stored)
    return found.weight, found.bias
