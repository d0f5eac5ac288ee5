"""Routed experts: each run once over the tokens that chose it, or each token's own weights gathered for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..host import certainly
from ..ops.mlp import swiglu
from ..ops.moe import experts
from ..target import EVERY

LARGE = 2**20
"""Elements of all choices' results from which they are added up expert by expert, and never lie side by side."""


def _refuse_added(x, weights, ids, gate_up, down, *, caps=None) -> str | None:
    size = ids.numel() * x.shape[1]
    return None if size >= LARGE else f"pays from {LARGE} elements of choices' results on; this call has {size}"


@experts.kernel("torch_added", targets=("cpu",), refuse=_refuse_added, host_reads=True, eager=True)
def _added(x, weights, ids, gate_up, down, *, caps=None):
    choices = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=gate_up.shape[0]).tolist()
    out = torch.zeros_like(x)
    for expert, chosen in enumerate(order.split(counts)):
        if chosen.shape[0]:
            token = chosen // choices
            y = F.linear(swiglu.body(F.linear(x[token], gate_up[expert]), caps=caps), down[expert])
            out.index_add_(0, token, y.mul_(weights.flatten()[chosen, None]))
    return out


@experts.kernel("torch_grouped", targets=("cpu",), host_reads=True)
def _grouped(x, weights, ids, gate_up, down, *, caps=None):
    choices = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    token = order // choices
    counts = torch.bincount(ids.flatten(), minlength=gate_up.shape[0]).tolist()
    parts = []
    for expert, rows in enumerate(x[token].split(counts)):
        if rows.shape[0]:
            parts.append(F.linear(swiglu.body(F.linear(rows, gate_up[expert]), caps=caps), down[expert]))
    if not parts:
        return torch.zeros_like(x)
    y = torch.cat(parts) * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, token, y)


def _refuse_gathered(x, weights, ids, gate_up, down, *, caps=None) -> str | None:
    wanted, held = ids.numel(), gate_up.shape[0]
    if certainly(wanted <= held):
        return None
    return f"reads an expert for each choice, which pays up to as many as there are experts; {wanted} choices of {held}"


@experts.kernel("torch_gathered", targets=EVERY, refuse=_refuse_gathered)
def _gathered(x, weights, ids, gate_up, down, *, caps=None):
    """For few tokens: nothing is read on the host, and of the weights only what was chosen."""
    chosen = ids.flatten()
    tokens = x.repeat_interleave(ids.shape[1], 0)[:, :, None]
    y = swiglu.body((gate_up[chosen] @ tokens).mT, caps=caps).mT
    y = (down[chosen] @ y).unflatten(0, ids.shape)[..., 0]
    return (y * weights[..., None]).sum(1).to(x.dtype)
