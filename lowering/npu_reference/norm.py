"""Root-mean-square norms: float32 inside, one rounding at the end. rstd is float32, its normed axes of size one."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import FLOATS, need, need_contiguous, need_dtype, need_one_dtype, need_rank, shown
from .registration import operator


def _need_trailing(x: Tensor, gamma: Tensor) -> None:
    need(
        0 < gamma.dim() <= x.dim() and x.shape[x.dim() - gamma.dim() :] == gamma.shape,
        f"gamma is {shown(gamma)}; expected the trailing axes of the input {shown(x)}",
    )


def _rstd_like(x: Tensor, gamma: Tensor) -> Tensor:
    kept = x.shape[: x.dim() - gamma.dim()]
    return x.new_empty((*kept, *(1,) * gamma.dim()), dtype=torch.float32)


def _unit(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    axes = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(x.float().square().mean(axes, keepdim=True) + epsilon)
    return x.float() * rstd, rstd


def _rms_norm_like(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    need_dtype(FLOATS, input=input)
    need_dtype((input.dtype, torch.float32), gamma=gamma)
    need_rank(2, 8, input=input)
    _need_trailing(input, gamma)
    return torch.empty_like(input), _rstd_like(input, gamma)


@operator("npu_rms_norm", shapes=_rms_norm_like)
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(input * rstd * gamma, rstd). Rounded once, where models that round before the weight round twice."""
    unit, rstd = _unit(input, gamma, epsilon)
    return (unit * gamma.float()).to(input.dtype), rstd


def _gemma_like(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    need_dtype(FLOATS, input=input)
    need_one_dtype(input=input, gamma=gamma)
    need_rank(1, 8, input=input)
    _need_trailing(input, gamma)
    need(gamma.dim() < input.dim(), f"gamma {shown(gamma)} covers every axis of the input {shown(input)}")
    need(input.numel() > 0, f"input is {shown(input)}; the operator does not take empty tensors")
    need_contiguous(input=input, gamma=gamma)
    return torch.empty_like(input), _rstd_like(input, gamma)


@operator("npu_gemma_rms_norm", shapes=_gemma_like)
def npu_gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(input * rstd * (1 + gamma), rstd)."""
    unit, rstd = _unit(input, gamma, epsilon)
    return (unit * (1 + gamma.float())).to(input.dtype), rstd


def _add_like(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    need_dtype(FLOATS, x1=x1)
    need_one_dtype(x1=x1, x2=x2, gamma=gamma)
    need_rank(1, 8, x1=x1)
    need(x1.shape == x2.shape, f"x1 is {shown(x1)} and x2 {shown(x2)}; the operator takes equal shapes")
    _need_trailing(x1, gamma)
    return torch.empty_like(x1), _rstd_like(x1, gamma), torch.empty_like(x1)


@operator("npu_add_rms_norm", shapes=_add_like)
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """(norm of the rounded sum, rstd, the rounded sum). The sum is the third output."""
    total = x1 + x2
    unit, rstd = _unit(total, gamma, epsilon)
    return (unit * gamma.float()).to(x1.dtype), rstd, total
