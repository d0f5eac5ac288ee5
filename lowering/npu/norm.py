"""Norms through npu_rms_norm, npu_gemma_rms_norm and npu_add_rms_norm.

The operators compute in float32 and round once. `rms_norm` rounds before it multiplies with the weight, so the fused
result may differ from its reference in the last bit of x's dtype; the Gemma norms, which round once, do not differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from params.tree import tree

from ..ops.delta import l2_norm
from ..ops.norm import (
    activate,
    add_gemma_rms_norm,
    add_rms_norm,
    gated_rms_norm,
    gated_rms_norm_fp32,
    gemma_rms_norm,
    gemma_rms_norm_rstd,
    grouped_gemma_rms_norm,
    rms_norm,
    rms_norm_rstd,
)
from ..target import ASCEND
from ..weights import PreparedWeight, plain
from .features import npu
from .kernel import FLOATS, empty, fused, wrong_dtype

grouped_gemma_rms_norm.without(ASCEND, "no fused operator takes a mean of squares for each part of the weight's axis")


@tree
class OnePlusWeight(PreparedWeight):
    """A Gemma norm's weight, and one plus it in float32: in bfloat16 the sum would lose the weight's low bits."""

    kernels = ("npu_rms_norm_1p", "npu_add_rms_norm_1p")

    weight: Tensor
    one_plus: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""
        return self.weight.shape

    def plain(self) -> Tensor:
        """The weight as it was."""
        return self.weight


def _prepare(weight: Tensor) -> OnePlusWeight:
    return OnePlusWeight(weight, 1 + weight.detach().float())


def _one_plus(weight: Tensor | PreparedWeight) -> Tensor:
    return weight.one_plus if isinstance(weight, OnePlusWeight) else 1 + plain(weight).float()


def _refuse(x, weight, *, eps) -> str | None:
    return wrong_dtype(FLOATS, x=x, weight=weight) or _wrong_shape(x)


def _refuse_widened(x, weight, *, eps) -> str | None:
    return wrong_dtype(FLOATS, x=x) or _wrong_shape(x)


def _refuse_sum(x, residual, weight, *, eps) -> str | None:
    return wrong_dtype(FLOATS, x=x, residual=residual, weight=weight) or _wrong_shape(x)


def _refuse_widened_sum(x, residual, weight, *, eps) -> str | None:
    return wrong_dtype(FLOATS, x=x, residual=residual) or _wrong_shape(x)


def _refuse_gated(x, gate, weight, *, eps, activation) -> str | None:
    return wrong_dtype(FLOATS, x=x, weight=weight) or wrong_dtype(FLOATS, gate=gate) or _wrong_shape(x)


def _refuse_gated_fp32(x, gate, weight, *, eps, activation) -> str | None:
    each = (wrong_dtype(FLOATS, x=x), wrong_dtype(FLOATS, gate=gate), wrong_dtype(FLOATS, weight=weight))
    return next(filter(None, each), None) or _wrong_shape(x)


def _refuse_l2(x, *, scale=1.0, eps=1e-6) -> str | None:
    return wrong_dtype(FLOATS, x=x) or _wrong_shape(x)


def _wrong_shape(x: Tensor) -> str | None:
    if not 2 <= x.ndim <= 8:
        return f"takes 2 to 8 axes; x has {x.ndim}"
    return empty(x=x)


def _unit(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm and each row's reciprocal deviation."""
    return npu.npu_rms_norm(x.contiguous(), weight.contiguous(), epsilon=eps)


def _gemma(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm times one plus the weight, and each row's reciprocal deviation."""
    return npu.npu_gemma_rms_norm(x.contiguous(), weight.contiguous(), epsilon=eps)


def _sum(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of the sum, and the sum, which the operator gives last."""
    y, _, total = npu.npu_add_rms_norm(x.contiguous(), residual.contiguous(), weight.contiguous(), epsilon=eps)
    return y, total


@fused(rms_norm, "npu_rms_norm", "npu_rms_norm", refuse=_refuse)
def _rms_norm(x, weight, *, eps):
    return _unit(x, weight, eps)[0]


@fused(rms_norm_rstd, "npu_rms_norm", "npu_rms_norm", refuse=_refuse)
def _rms_norm_rstd(x, weight, *, eps):
    return _unit(x, weight, eps)


@fused(add_rms_norm, "npu_add_rms_norm", "npu_add_rms_norm", refuse=_refuse_sum)
def _add_rms_norm(x, residual, weight, *, eps):
    # A device may take the norm of the sum before it is rounded: one bit of difference in bfloat16.
    return _sum(x, residual, weight, eps)


@fused(gemma_rms_norm, "npu_gemma_rms_norm", "npu_gemma_rms_norm", refuse=_refuse)
def _gemma_rms_norm(x, weight, *, eps):
    return _gemma(x, weight, eps)[0]


@fused(gemma_rms_norm_rstd, "npu_gemma_rms_norm", "npu_gemma_rms_norm", refuse=_refuse)
def _gemma_rms_norm_rstd(x, weight, *, eps):
    y, rstd = _gemma(x, weight, eps)
    return y, rstd.float()


@fused(gemma_rms_norm, "npu_rms_norm_1p", "npu_rms_norm", refuse=_refuse_widened, prepare=_prepare)
def _rms_norm_1p(x, weight, *, eps):
    # In float32 inside; the weight alone is, where x is not.
    return _unit(x, _one_plus(weight), eps)[0]


@fused(gemma_rms_norm_rstd, "npu_rms_norm_1p", "npu_rms_norm", refuse=_refuse_widened, prepare=_prepare)
def _rms_norm_1p_rstd(x, weight, *, eps):
    return _unit(x, _one_plus(weight), eps)


@fused(add_gemma_rms_norm, "npu_add_gemma_rms_norm", "npu_gemma_rms_norm", refuse=_refuse_sum)
def _add_gemma_rms_norm(x, residual, weight, *, eps):
    total = x + residual
    return _gemma(total, weight, eps)[0], total


@fused(add_gemma_rms_norm, "npu_add_rms_norm_1p", "npu_add_rms_norm", refuse=_refuse_widened_sum, prepare=_prepare)
def _add_rms_norm_1p(x, residual, weight, *, eps):
    """In float32, where the norm is that of the sum before it is rounded to x's dtype; the sum returned is rounded."""
    y, total = _sum(x.float(), residual.float(), _one_plus(weight), eps)
    return y.to(x.dtype), total.to(x.dtype)


@fused(gated_rms_norm, "npu_rms_norm_gated", "npu_rms_norm", refuse=_refuse_gated)
def _gated(x, gate, weight, *, eps, activation):
    normed = _unit(x, weight, eps)[0]
    return (normed.float() * activate(gate.float(), activation)).to(x.dtype)


@fused(gated_rms_norm_fp32, "npu_rms_norm_gated_fp32", "npu_rms_norm", refuse=_refuse_gated_fp32)
def _gated_fp32(x, gate, weight, *, eps, activation):
    normed = _unit(x.float(), weight.float(), eps)[0]
    return (normed * activate(gate.float(), activation)).to(x.dtype)


@fused(l2_norm, "npu_rms_norm_l2", "npu_rms_norm", refuse=_refuse_l2)
def _l2(x, *, scale=1.0, eps=1e-6):
    # x / sqrt(sum + eps) is x / sqrt(mean + eps / dim) / sqrt(dim): the factor rides along as the weight, in float32.
    dim = x.shape[-1]
    factor = torch.full((dim,), scale * dim**-0.5, dtype=torch.float32, device=x.device)
    return _unit(x, factor, eps / dim)[0]
