"""Weights in the layout a kernel wants: made once from the plain tree, pure tree to tree.

A parameter node that owns weights of an op says so with a method
`lower_weights(prepare) -> node`, where `prepare(op_name, weight)` returns the prepared weight or the plain one.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch.utils._pytree as pytree
from torch import Tensor

from . import registry
from . import target as targets
from .target import Target

T = TypeVar("T")


class PreparedWeight:
    """A weight in a kernel's own layout: has a `device` and a `static_key()`, and means nothing to other kernels."""


def prepare(params: T, target: str | Target | None = None) -> T:
    """The same parameters with each weight in the layout of the first kernel that wants one on `target`.

    The result is for inference: keep the plain tree to save, cast, move, deepcopy or train. Nothing here checks for
    these: saving, casts and arithmetic on a prepared weight raise Torch's own errors (`NotImplementedError` or
    `RuntimeError` about opaque or MKL-DNN tensors). Under gradients and function transforms its op raises
    `LoweringError`. Weights too small to gain, or of a dtype that no kernel packs, stay plain.
    `target` defaults to the weight's own device.
    """
    chosen = None if target is None else targets.named(target)

    def weight(op: str, plain: Any) -> Any:
        if not isinstance(plain, Tensor):
            return plain
        machine = chosen or targets.of_device(plain.device)
        for kernel in registry.find(op).kernels.values():
            if kernel.prepare is not None and kernel.serves(machine):
                prepared = kernel.prepare(plain)
                if prepared is not None:
                    return prepared
        return plain

    def visit(node: Any) -> Any:
        return node.lower_weights(weight) if hasattr(node, "lower_weights") else node

    return pytree.tree_map(visit, params, is_leaf=lambda node: hasattr(node, "lower_weights"))
