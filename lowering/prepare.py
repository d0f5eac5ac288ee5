"""`prepare`: parameters with their weights in the layouts that kernels want, made once, pure tree to tree.

A parameter node that owns weights of an op says so with a method
`lower_weights(prepare) -> node`, where `prepare(op_name, weight)` returns the prepared weight or the plain one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch.utils._pytree as pytree
from torch import Tensor

from params.modes import lasting
from params.quant.values import QuantizedWeight, SplitWeight
from params.shards import AddendWeight, SomeExperts, VocabularyWeight

from . import detect
from . import target as targets
from .kernel import there
from .op import Op, find
from .policy import MODE, Policy
from .target import Target

T = TypeVar("T")


@lasting
def prepare(params: T, target: str | Target | None = None) -> T:
    """The same parameters with each weight in the layout of the kernel that will read it on `target`.

    That is the first candidate of its op, under the policy in force, that reads weights of the kind; if that one wants
    no layout of its own the weight stays plain. So it does where a rule orders the kernels by the shapes of a call,
    which nobody knows yet: a plain weight is one that all of them read.
    The result is for inference: keep the plain tree to save, cast, move, deepcopy or train. Nothing here checks for
    these: saving, casts and arithmetic on a prepared weight raise Torch's own errors (`NotImplementedError` or
    `RuntimeError` about opaque or MKL-DNN tensors). Under gradients and function transforms its op raises
    `LoweringError`. Weights too small to gain, or of a dtype that no kernel packs, stay plain.
    `target` defaults to the one in force (see `use`), then to the weight's own device.
    """
    policy = MODE.get().policy
    chosen = MODE.get().target if target is None else targets.named(target)

    def weight(op: str, plain: Any) -> Any:
        if isinstance(plain, SplitWeight):
            return SplitWeight(tuple(weight(op, part) for part in plain.parts))
        if isinstance(plain, (AddendWeight, SomeExperts, VocabularyWeight)):
            prepared = weight(op, plain.weight)
            return plain if prepared is plain.weight else replace(plain, weight=prepared)
        if not isinstance(plain, (Tensor, QuantizedWeight)):
            return plain
        return _laid_out(find(op), plain, policy, chosen or detect.of_device(plain.device))

    def visit(node: Any) -> Any:
        return node.lower_weights(weight) if hasattr(node, "lower_weights") else node

    return pytree.tree_map(visit, params, is_leaf=lambda node: hasattr(node, "lower_weights"))


def _laid_out(op: Op, weight: Tensor | QuantizedWeight, policy: Policy, target: Target) -> Any:
    if target.name in op.orders and op.asked(policy) is None:
        return weight
    takers = (kernel for kernel, refusal in op.candidates(policy, target) if refusal is None and kernel.reads(weight))
    kernel = next(takers, None)
    made = None if kernel is None or kernel.prepare is None else there(target, kernel.prepare, weight)
    return weight if made is None else made
