"""Routed experts, each run once over the tokens that chose it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..ops.mlp import swiglu
from ..ops.moe import experts


@experts.kernel("torch_grouped", targets=("cpu",), host_reads=True)
def _grouped(x, weights, ids, gate_up, down):
    choices = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    token = order // choices
    counts = torch.bincount(ids.flatten(), minlength=gate_up.shape[0]).tolist()
    parts = []
    for expert, rows in enumerate(x[token].split(counts)):
        if rows.shape[0]:
            parts.append(F.linear(swiglu.body(F.linear(rows, gate_up[expert])), down[expert]))
    if not parts:
        return torch.zeros_like(x)
    y = torch.cat(parts) * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, token, y)
