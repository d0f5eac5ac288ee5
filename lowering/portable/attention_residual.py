"""Attention residuals some tokens at a time, whose rows stay in cache while they are scored and added up."""

from __future__ import annotations

import torch
from torch import Tensor

from ..host import symbolic
from ..ops.attention_residual import attention_residual
from ..ops.widen import wide

BLOCK = 2**20
"""Elements that are worked on at a time.

Source: one core of an AMD EPYC, 9 rows a token of 7168 in bfloat16, milliseconds by the reference / in blocks: 0.09 /
0.08 for 1 token, 0.56 / 0.30 for 8, 7.7 / 4.4 for 64, 258 / 26 for 512. `tests/bench/bench_kernels.py` measures them
again.
"""


def _refuse(bank, prefix, norm, proj, *, eps) -> str | None:
    return "goes over tokens block by block, and their number is a symbol here" if symbolic(bank.shape[:1]) else None


@attention_residual.kernel("torch_blocked", targets=("cpu",), refuse=_refuse)
def _blocked(bank, prefix, norm, proj, *, eps):
    # No more than there are: Torch 2.10 does not trace a split of nothing into more.
    step = min(max(1, BLOCK // max((bank.shape[1] + 1) * bank.shape[2], 1)), bank.shape[0])
    query = wide(norm) * wide(proj)
    blocks = zip(bank.split(step), prefix.split(step), strict=True)
    return torch.cat([_mean(torch.cat((held, last[:, None]), 1), query, eps) for held, last in blocks])


def _mean(rows: Tensor, query: Tensor, eps: float) -> Tensor:
    """Of rows [tokens rows hidden], by scores whose norm is taken last."""
    dtype, rows = rows.dtype, wide(rows)
    rstd = torch.rsqrt(torch.linalg.vecdot(rows, rows) / rows.shape[-1] + eps)
    return ((rows @ query * rstd).softmax(-1)[:, None] @ rows)[:, 0].to(dtype)
