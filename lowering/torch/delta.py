"""The gated delta rule in chunks for prompts, and as one update for decoding.

The chunked form solves, per chunk of 64 tokens, for what each token writes, and carries the state from chunk to chunk:
with c the running sum of log decays, L_ij = exp(c_i - c_j) for j <= i and A = strict lower triangle of beta k k^T L,
    (I + A) U = beta v,   (I + A) W = beta exp(c) k,   D = U - W S^T,
    o = exp(c) q S^T + (q k^T L) D,   S <- exp(c_last) S + D^T (exp(c_last - c) k)
Source: the chunkwise algorithm of Gated Delta Networks (arXiv 2412.06464), section 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.delta import gated_delta_rule
from ..ops.ragged import to_flat, to_rectangle
from ..target import EVERY

CHUNK = 64
SMALLEST_EXPONENT = -80.0
"""Decays below exp(-80) are taken as zero: they are below float32 rounding, and denormal numbers cost tenfold time."""


def _exp(x: Tensor) -> Tensor:
    return torch.where(x > SMALLEST_EXPONENT, x, -torch.inf).exp()


def _refuse_step(q, k, v, decay, beta, state, query_start, *, max_query, uniform, keep_steps) -> str | None:
    if state is None:
        return "continues a state; this call has none"
    if keep_steps:
        return "keeps no steps"
    return None if max_query == 1 and uniform else f"takes one token in every row; this call has up to {max_query}"


@gated_delta_rule.kernel("torch_step", targets=EVERY, refuse=_refuse_step)
def _step(q, k, v, decay, beta, state, query_start, *, max_query, uniform, keep_steps):
    rows, v_heads, v_dim = v.shape
    shared = v_heads // k.shape[1]
    q, k = (x.float().repeat_interleave(shared, 1).flatten(0, 1)[..., None] for x in (q, k))
    now = (state[:rows].float() * _exp(decay)[..., None, None]).flatten(0, 1)
    update = beta.float().reshape(-1, 1, 1) * (v.float().reshape(-1, v_dim, 1) - now @ k)
    now = torch.baddbmm(now, update, k.mT)
    out = (now @ q).view(v.shape).to(v.dtype)
    return out, _stored(now.view(rows, *state.shape[1:]), state), None


def _stored(now: Tensor, state: Tensor) -> Tensor:
    """Rows in the state's dtype, with its scratch slot behind them."""
    return torch.cat((now.to(state.dtype), state[now.shape[0] :]))


def _refuse_chunked(q, k, v, decay, beta, state, query_start, *, max_query, uniform, keep_steps) -> str | None:
    if keep_steps:
        return "keeps no steps"
    return None if max_query >= 8 else f"pays from 8 tokens a row on; this call has at most {max_query}"


@gated_delta_rule.kernel("torch_chunked", targets=EVERY, refuse=_refuse_chunked)
def _chunked(q, k, v, decay, beta, state, query_start, *, max_query, uniform, keep_steps):
    q3, k3, v3, g, b = (
        _heads_first(to_rectangle(x, query_start, max_query, uniform), k.shape[1]) for x in (q, k, v, decay, beta)
    )
    rows = q3.shape[0]
    shape = (rows, *v3.shape[1:3], v.shape[2], k.shape[2])
    before = v3.new_zeros(shape) if state is None else state[:rows].float().view(shape)
    out, after = _chunks(q3, k3, v3, g[..., 0], b[..., 0], before)
    out = out.flatten(3, 4)[:, :, :, :max_query].permute(0, 3, 1, 2, 4).flatten(2, 3)
    out = to_flat(out, query_start, v.shape[0], uniform).to(v.dtype)
    return out, None if state is None else _stored(after.view(rows, *state.shape[1:]), state), None


def _heads_first(x: Tensor, k_heads: int) -> Tensor:
    """[rows queries heads ...] to float32 [rows k_heads shared chunks CHUNK dim], zeros behind each row's end."""
    x = x if x.ndim == 4 else x[..., None]
    x = F.pad(x.float(), (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(2, (k_heads, -1)).unflatten(1, (-1, CHUNK)).permute(0, 3, 4, 1, 2, 5)


def _chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """q, k [rows k_heads 1 chunks n dim]; v, g, b with `shared` value heads in place of 1; state [... v_dim k_dim]."""
    c = g.cumsum(-1)
    ones = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device)
    # The diagonal is a constant 0: its gradient would cancel, but only after swamping gradients of strong decays.
    above = torch.zeros(CHUNK, CHUNK, device=q.device).masked_fill(ones.triu(1), -torch.inf)
    spread = _exp(torch.where(ones.tril(-1), c[..., :, None] - c[..., None, :], above))
    chained = torch.where(ones.tril(-1), b[..., None] * (k @ k.mT) * spread, 0)
    wanted = torch.cat((b[..., None] * v, (b * _exp(c))[..., None] * k), -1)
    solved = torch.linalg.solve_triangular(chained, wanted, upper=False, unitriangular=True)
    own, past = solved.split((v.shape[-1], k.shape[-1]), -1)
    near = (q @ k.mT) * spread
    far = q * _exp(c)[..., None]
    left = k * _exp(c[..., -1:] - c)[..., None]
    whole = _exp(c[..., -1])
    outputs = []
    for n in range(q.shape[3]):
        writes = own[..., n, :, :] - past[..., n, :, :] @ state.mT
        outputs.append(far[..., n, :, :] @ state.mT + near[..., n, :, :] @ writes)
        state = whole[..., n, None, None] * state + writes.mT @ left[..., n, :, :]
    return torch.stack(outputs, 3), state
