"""What the operators' documentation demands, as checks that raise with what was given and what was expected.

Where the documentation is silent a reference takes the stricter reading, so that a kernel which passes here is legal
under the looser one too; `docs/npu-evidence.md` lists each such place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import LoweringError
from ..policy import MODE
from ..target import TARGETS, Target

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""What most operators compute on."""

ASCEND_950 = "ascend950"


class OperatorError(LoweringError):
    """A call that the documentation of an `npu` operator does not allow."""


def need(allowed: bool, otherwise: str) -> None:
    """Raise `OperatorError` with the sentence `otherwise` unless `allowed`."""
    if not allowed:
        raise OperatorError(otherwise)


def machine() -> Target:
    """The Ascend target that the call is lowered to; 910B, whose limits are the narrowest, where none is named."""
    target = MODE.get().target
    return target if target is not None and target.device == "npu" else TARGETS["ascend910b"]


def soc() -> str:
    """The name of that target."""
    return machine().name


def need_dtype(dtypes: Iterable[torch.dtype], **tensors: Tensor | None) -> None:
    """Each tensor has one of `dtypes`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in tuple(dtypes):
            raise OperatorError(f"{name} is {tensor.dtype}; the operator takes {_listed(dtypes)}")


def need_one_dtype(**tensors: Tensor | None) -> None:
    """All tensors have the first one's dtype."""
    given = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    if len(set(given.values())) > 1:
        shown = ", ".join(f"{name} {dtype}" for name, dtype in given.items())
        raise OperatorError(f"dtypes differ ({shown}); the operator takes one dtype for all of them")


def need_rank(low: int, high: int, **tensors: Tensor | None) -> None:
    """Each tensor has between `low` and `high` dimensions."""
    for name, tensor in tensors.items():
        if tensor is not None and not low <= tensor.dim() <= high:
            wanted = f"{low}" if low == high else f"{low} to {high}"
            raise OperatorError(f"{name} is {tensor.dim()}-dimensional {shown(tensor)}; expected {wanted} dimensions")


def need_shape(expected: Sequence[int], meaning: str, **tensors: Tensor | None) -> None:
    """Each tensor has the `expected` shape, whose axes `meaning` names."""
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != tuple(expected):
            raise OperatorError(f"{name} is {shown(tensor)}; expected {list(expected)} ({meaning})")


def need_contiguous(**tensors: Tensor | None) -> None:
    """No tensor is a strided view."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise OperatorError(
                f"{name} {shown(tensor)} is not contiguous (strides {list(tensor.stride())}); "
                "the operator takes contiguous tensors only, so call .contiguous() first"
            )


def need_values(low: int, high: int, meaning: str, **tensors: Tensor) -> None:
    """Each tensor of integers holds values in [low, high] only. Reads values: not for tensors without any."""
    for name, tensor in tensors.items():
        if tensor.numel() and not (low <= int(tensor.min()) and int(tensor.max()) <= high):
            raise OperatorError(
                f"{name} holds values from {int(tensor.min())} to {int(tensor.max())}; "
                f"expected {low} to {high} ({meaning})"
            )


def need_default(**options: object) -> None:
    """Options that no kernel of this package sets, so that the references leave them out."""
    given = {name: value for name, value in options.items() if value is not None}
    if given:
        raise OperatorError(f"the reference does not cover {', '.join(given)}; leave out or extend the reference")


def shown(tensor: Tensor) -> str:
    """A shape for a message."""
    return str(list(tensor.shape))


def _listed(values: Iterable[object]) -> str:
    return " or ".join(map(str, values))
