"""Norms through `F.rms_norm`, which makes fewer passes over memory than the formula written out."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..ops.norm import activate, add_gemma_rms_norm, gated_rms_norm, gemma_rms_norm
from ..target import EVERY


@gemma_rms_norm.kernel("torch_fused", targets=EVERY)
def _gemma(x, weight, *, eps):
    return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)


@add_gemma_rms_norm.kernel("torch_fused", targets=EVERY)
def _add_gemma(x, residual, weight, *, eps):
    total = x + residual
    return _gemma(total, weight, eps=eps), total


@gated_rms_norm.kernel("torch_fused", targets=EVERY)
def _gated(x, gate, weight, *, eps, activation):
    unit: Tensor = F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)
    return ((unit * weight).float() * activate(gate.float(), activation)).to(x.dtype)
