"""Projections with weights packed once into oneDNN's blocked layout.

A plain row-major weight is re-blocked by oneDNN inside every product; packed, decoding reads it once, as it lies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from params.tree import static, tree

from ..host import tracing
from ..ops.linear import linear
from ..weights import PreparedWeight

SMALLEST = {torch.float32: 2**19, torch.bfloat16: 2**15}
"""Elements from which on a packed weight is faster than a plain one, at any number of rows."""


@tree
class PackedWeight(PreparedWeight):
    """A weight [outputs inputs] in oneDNN's layout for small row counts. Its bytes mean nothing outside the kernel."""

    kernels = ("onednn_packed",)

    packed: Tensor
    shape: tuple[int, int] = static()
    dtype: torch.dtype = static()

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return PackedWeight, self.shape, self.dtype


def _smallest(dtype: torch.dtype) -> int | None:
    """Elements from which on a weight of this dtype is packed; None for one that oneDNN does not pack here."""
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return SMALLEST.get(dtype)


def _pack(weight: Tensor) -> PackedWeight | None:
    """The packed weight; None for one that is small or of a dtype that oneDNN does not pack here."""
    smallest = _smallest(weight.dtype)
    if smallest is None or weight.numel() < smallest:
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)
    return PackedWeight(packed, (weight.shape[0], weight.shape[1]), weight.dtype)


def _refuse(x, weight) -> str | None:
    if isinstance(weight, PackedWeight):
        return None if x.dtype == weight.dtype else f"x is {x.dtype} and the weight was packed as {weight.dtype}"
    smallest = _smallest(x.dtype)
    if smallest is None:
        return f"takes a packed weight; lowering.prepare(params) packs none of {x.dtype} on this machine"
    return f"takes a packed weight; lowering.prepare(params) packs those of {smallest} {x.dtype} elements or more"


@torch.library.custom_op(
    "funcmodels::packed_linear", mutates_args=(), schema="(Tensor x, Tensor packed, int outputs) -> Tensor"
)
def _product(x: Tensor, packed: Tensor, outputs: int) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


@_product.register_fake
def _product_of_shapes(x: Tensor, packed: Tensor, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


@linear.kernel("onednn_packed", targets=("cpu",), refuse=_refuse, batches=False, differentiable=False, prepare=_pack)
def _packed(x, weight):
    if tracing():
        # Inductor compiles the operator itself with weights that are constants only.
        return _product(x, weight.packed, weight.shape[0])
    return torch.ops.mkldnn._linear_pointwise(x, weight.packed, None, "none", [], "")
