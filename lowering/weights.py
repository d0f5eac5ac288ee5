"""Weights in the layout a kernel wants: made once from the plain tree, pure tree to tree.

A parameter node that owns weights of an op says so with a method
`lower_weights(prepare) -> node`, where `prepare(op_name, weight)` returns the prepared weight or the plain one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch.utils._pytree as pytree
from torch import Tensor

from params.modes import lasting
from params.quant.values import QuantizedWeight, SplitWeight
from params.shards import AddendWeight, SomeExperts, VocabularyWeight

from . import registry
from . import target as targets
from .errors import LoweringError
from .policy import MODE
from .target import Target

T = TypeVar("T")


class PreparedWeight:
    """A weight in a kernel's own layout: has a `device` and a `static_key()`, and means nothing to other kernels.

    `kernels` are the names of those that read it, `shape` is that of the plain weight. A class whose plain values can
    be had back also has `plain`.
    """

    kernels: ClassVar[tuple[str, ...]]
    shape: tuple[int, ...]

    def plain(self) -> Tensor:
        """The weight as the op's reference reads it. `LoweringError` where only its kernel knows the layout."""
        raise LoweringError(
            f"a {type(self).__name__} can only be read by {', '.join(self.kernels)}, and that kernel is refused here; "
            "use the plain parameters"
        )


def plain(weight: Tensor | PreparedWeight | QuantizedWeight) -> Tensor:
    """A weight as a tensor: a prepared one's plain values, a quantised one's in float32."""
    if isinstance(weight, QuantizedWeight):
        return weight.dequantized()
    return weight.plain() if isinstance(weight, PreparedWeight) else weight


def restored(weight: Any) -> Any:
    """The weight that a prepared one was made of, quantised or not, where its class can give it back."""
    readable = isinstance(weight, PreparedWeight) and type(weight).plain is not PreparedWeight.plain
    return weight.plain() if readable else weight


@lasting
def prepare(params: T, target: str | Target | None = None) -> T:
    """The same parameters with each weight in the layout of the kernel that will read it on `target`.

    That is the first kernel of its op that serves the target and has the operators it needs; if that one wants no
    layout of its own the weight stays plain.
    The result is for inference: keep the plain tree to save, cast, move, deepcopy or train. Nothing here checks for
    these: saving, casts and arithmetic on a prepared weight raise Torch's own errors (`NotImplementedError` or
    `RuntimeError` about opaque or MKL-DNN tensors). Under gradients and function transforms its op raises
    `LoweringError`. Weights too small to gain, or of a dtype that no kernel packs, stay plain.
    `target` defaults to the one in force (see `use`), then to the weight's own device.
    """
    from .npu.features import missing

    chosen = MODE.get().target if target is None else targets.named(target)

    def weight(op: str, plain: Any) -> Any:
        if isinstance(plain, SplitWeight):
            return SplitWeight(tuple(weight(op, part) for part in plain.parts))
        if isinstance(plain, (AddendWeight, SomeExperts, VocabularyWeight)):
            prepared = weight(op, plain.weight)
            return plain if prepared is plain.weight else replace(plain, weight=prepared)
        if not isinstance(plain, (Tensor, QuantizedWeight)):
            return plain
        machine = chosen or targets.of_device(plain.device)
        for kernel in registry.find(op).kernels.values():
            if kernel.only_by_name or not kernel.reads(plain):
                continue
            if kernel.serves(machine) and not (kernel.operators and missing(kernel.operators, machine)):
                prepared = None if kernel.prepare is None else kernel.prepare(plain)
                return plain if prepared is None else prepared
        return plain

    def visit(node: Any) -> Any:
        return node.lower_weights(weight) if hasattr(node, "lower_weights") else node

    return pytree.tree_map(visit, params, is_leaf=lambda node: hasattr(node, "lower_weights"))
