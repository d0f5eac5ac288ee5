"""What all kernels of this folder share: how they are registered, and the limits that many operators have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from params.quant.values import QuantizedWeight

from .. import detect
from ..kernel import Refusal
from ..op import OPS, Op
from ..policy import MODE
from ..target import ASCEND, CHOSEN_FOR, TARGETS, Target
from .evidence import doubt, serves, speaks_for
from .features import loaded, missing

F = TypeVar("F", bound=Callable[..., Any])

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)


def fused(
    op: Op,
    name: str,
    *operators: str,
    refuse: Refusal,
    only: tuple[str, ...] = ASCEND,
    prepare: Callable[[Any], Any] | None = None,
    weights: tuple[type[QuantizedWeight] | type[Tensor], ...] = (),
    only_by_name: bool = False,
) -> Callable[[F], F]:
    """Register an inference kernel of `op`, for those of `only` that some evidence names for each of its operators."""
    targets = tuple(target for target in only if all(target in serves(operator) for operator in operators))
    return op.kernel(
        name, targets=targets, operators=operators, refuse=refuse, prepare=prepare, weights=weights,
        batches=False, differentiable=False, only_by_name=only_by_name, available=partial(_available, operators),
        evidence=partial(speaks_for, operators), loaded=partial(loaded, operators),
    )  # fmt: skip


def _available(operators: tuple[str, ...], target: Target, wanted: str) -> str | None:
    return missing(operators, target) or doubt(operators, target, wanted)


def machine(x: Tensor) -> Target:
    """The Ascend target that a call is being chosen for, or runs on: what limits by SoC and CANN depend on."""
    found = CHOSEN_FOR.get() or MODE.get().target or detect.of_device(x.device)
    return found if found.device == "npu" else TARGETS[ASCEND[0]]


def say_gaps() -> None:
    """Give every op, for each Ascend target that no kernel of it serves, the operator that is missing there.

    Kernels for quantised weights do not count: plain ones have a reason of their own.
    """
    for op in OPS.values():
        for target in ASCEND:
            plain = (k for k in op.serving(target) if not k.weights or Tensor in k.weights)
            if target in op.lacking or any(k.operators for k in plain):
                continue
            called = (operator for kernel in op.kernels.values() for operator in kernel.operators)
            missing = next((operator for operator in called if target not in serves(operator)), None)
            if missing is not None:
                op.without((target,), f"{missing} is neither documented for {target} nor in use there, nor stated")


def wrong_dtype(allowed: tuple[torch.dtype, ...], **tensors: Tensor | None) -> str | None:
    """A sentence about the first tensor of another dtype, or the first that differs from those before it."""
    given = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    for name, dtype in given.items():
        if dtype not in allowed:
            return f"takes {_short(allowed)}; {name} is {_short((dtype,))}"
    if len(set(given.values())) > 1:
        return f"takes one dtype; found {', '.join(f'{name} {_short((dtype,))}' for name, dtype in given.items())}"
    return None


def _short(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def empty(**tensors: Tensor) -> str | None:
    """A sentence about the first tensor without elements."""
    for name, tensor in tensors.items():
        if not tensor.numel():
            return f"takes no empty tensor; {name} is {list(tensor.shape)}"
    return None


def above(limit: int, **sizes: int) -> str | None:
    """A sentence about the first size that is more than `limit`."""
    for name, size in sizes.items():
        if size > limit:
            return f"takes at most {limit} {name}; this call has {size}"
    return None
