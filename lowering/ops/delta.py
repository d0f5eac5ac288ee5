"""The gated delta rule: linear attention whose state forgets by a gate and is corrected by a delta.

Per value head, with S [v_dim k_dim] (value-major), log decay g <= 0 and write strength beta:
    S <- S diag(exp(g));   u = beta (v - S k);   S <- S + u k^T;   o = S q
There is one g a head, or one a channel of its keys. Queries and keys come normalised and scaled (`l2_norm`). Value head
h uses key head h // (v_heads / k_heads).
Source: Gated Delta Networks (arXiv 2412.06464), as in the Qwen3.5 linear-attention layers; with a decay a channel Kimi
Delta Attention (arXiv 2510.26692).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from params.tree import tree

from .. import detect
from ..op import op
from ..policy import MODE
from ..rows import Rows
from ..signature import OpCall
from ..target import Target
from .widen import wide, wide_dtype

PIECE = 128
"""Tokens, and channels, of the calls by which a state's default dtype is chosen."""


@op
def l2_norm(x: Float[Tensor, "*lead dim"], *, scale: float = 1.0, eps: float = 1e-6) -> Float[Tensor, "*lead dim"]:
    """scale * x * rsqrt(sum of squares + eps), in float32 or wider, rounded once."""
    x_wide = wide(x)
    return (x_wide * (scale * torch.rsqrt(x_wide.square().sum(-1, keepdim=True) + eps))).to(x.dtype)


@op
def delta_gates(
    a: Float[Tensor, "tokens v_heads"],
    b: Float[Tensor, "tokens v_heads"],
    a_log: Float[Tensor, " v_heads"],
    dt_bias: Float[Tensor, " v_heads"],
) -> tuple[Float[Tensor, "tokens v_heads"], Float[Tensor, "tokens v_heads"]]:
    """Log decay -exp(a_log) * softplus(a + dt_bias) and write strength sigmoid(b), both float32 or wider."""
    decay = -wide(a_log).exp() * F.softplus(wide(a) + wide(dt_bias))
    return decay, wide(b.sigmoid())


@op
def channel_gates(
    f: Float[Tensor, "tokens v_heads k_dim"],
    b: Float[Tensor, "tokens v_heads"],
    a_log: Float[Tensor, " v_heads"],
    dt_bias: Float[Tensor, "v_heads k_dim"],
    *,
    lower_bound: float | None = None,
) -> tuple[Float[Tensor, "tokens v_heads k_dim"], Float[Tensor, "tokens v_heads"]]:
    """Log decay of every key channel and write strength sigmoid(b), both in float32 or wider (Kimi).

    The decay is -exp(a_log) * softplus(f + dt_bias); with a `lower_bound`, which is negative, it lies between that and
    0: lower_bound * sigmoid(exp(a_log) * (f + dt_bias)).
    """
    rate, x = wide(a_log).exp()[:, None], wide(f) + wide(dt_bias)
    decay = -rate * F.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
    return decay, wide(b).sigmoid()


@tree
class DeltaTrail:
    """Enough to stand after any of the newest tokens: the state before them and what each wrote."""

    before: Float[Tensor, "slots v_heads v_dim k_dim"]
    keys: Float[Tensor, "rows steps v_heads k_dim"]
    updates: Float[Tensor, "rows steps v_heads v_dim"]
    decay: Float[Tensor, "rows steps v_heads"] | Float[Tensor, "rows steps v_heads k_dim"]

    def at(self, accepted: Int[Tensor, " rows"]) -> Float[Tensor, "slots v_heads v_dim k_dim"]:
        """The state after the first `accepted` of each row's new tokens: one short replay."""
        return replay_delta(self.before, self.keys, self.updates, self.decay, accepted)


@tree
class DeltaStates:
    """Enough to stand after any of the newest tokens: the state before them and the one after each."""

    before: Float[Tensor, "slots v_heads v_dim k_dim"]
    after: Float[Tensor, "rows steps v_heads v_dim k_dim"]

    def at(self, accepted: Int[Tensor, " rows"]) -> Float[Tensor, "slots v_heads v_dim k_dim"]:
        """The state after the first `accepted` of each row's new tokens: one gather."""
        rows = self.after.shape[0]
        last = self.after[torch.arange(rows, device=accepted.device), accepted.clamp(min=1) - 1]
        now = torch.where((accepted > 0)[:, None, None, None], last, self.before[:rows])
        return torch.cat((now, self.before[rows:]))


@op
def replay_delta(
    before: Float[Tensor, "slots v_heads v_dim k_dim"],
    keys: Float[Tensor, "rows steps v_heads k_dim"],
    updates: Float[Tensor, "rows steps v_heads v_dim"],
    decay: Float[Tensor, "rows steps v_heads"] | Float[Tensor, "rows steps v_heads k_dim"],
    accepted: Int[Tensor, " rows"],
) -> Float[Tensor, "slots v_heads v_dim k_dim"]:
    """Apply the first `accepted` recorded updates of each row to the state before them."""
    step = torch.arange(keys.shape[1], device=keys.device)
    taken = (step < accepted[:, None])[..., None, None]
    # Summed from the end: a difference of sums would be lost in rounding after a step that forgets nearly all.
    behind = torch.where(taken, of_channels(decay, keys), 0).flip(1).cumsum(1).flip(1)
    # What an update has left at the end: the decay of the accepted steps after it.
    left = F.pad(behind[:, 1:], (0, 0, 0, 0, 0, 1)).exp()
    after = wide(before[: keys.shape[0]]) * behind[:, 0].exp()[:, :, None]
    # Chosen, not multiplied by 0: what was not accepted may be NaN, and leaves the row as it was all the same.
    updates, keys = (torch.where(taken, x, 0) for x in (updates, keys * left))
    after = after + torch.einsum("rshv,rshk->rhvk", updates, keys)
    return torch.cat((after.to(before.dtype), before[keys.shape[0] :]))


def of_channels(decay: Tensor, keys: Tensor) -> Tensor:
    """[... v_heads] as [... v_heads 1]; a decay of every channel of the keys stays as it is."""
    return decay[..., None] if decay.ndim < keys.ndim else decay


@op
def gated_delta_rule(
    q: Float[Tensor, "tokens k_heads k_dim"],
    k: Float[Tensor, "tokens k_heads k_dim"],
    v: Float[Tensor, "tokens v_heads v_dim"],
    decay: Float[Tensor, "tokens v_heads"] | Float[Tensor, "tokens v_heads k_dim"],
    beta: Float[Tensor, "tokens v_heads"],
    state: Float[Tensor, "slots v_heads v_dim k_dim"] | None,
    rows: Rows,
    *,
    keep_steps: bool,
) -> tuple[
    Float[Tensor, "tokens v_heads v_dim"],
    Float[Tensor, "slots v_heads v_dim k_dim"] | None,
    DeltaTrail | DeltaStates | None,
]:
    """Outputs of every token, and the state after each row's last one (the recurrence, token by token).

    Slots are rows plus one scratch slot, the last. With `keep_steps` the old state and a trail are returned instead.
    `state=None` starts from zeros and keeps nothing. The state is carried in float32, or in float64
    where any argument is, and stored in its own dtype.
    """
    dtype = wide_dtype(q, k, v, decay, beta, state)
    q3, k3, v3, g, b = (rows.rectangle(x.to(dtype)) for x in (q, k, v, decay, beta))
    shared = v.shape[1] // k.shape[1]
    q3, k3 = q3.repeat_interleave(shared, 2), k3.repeat_interleave(shared, 2)
    count, left = q3.shape[0], of_channels(g, k3).exp()
    before = q3.new_zeros(count, v.shape[1], v.shape[2], k.shape[2]) if state is None else state[:count].to(dtype)
    outputs, updates, now = [], [], before
    for step in range(rows.max_query):
        now = now * left[:, step, :, None]
        update = b[:, step, :, None] * (v3[:, step] - torch.einsum("rhvk,rhk->rhv", now, k3[:, step]))
        now = now + update[..., None] * k3[:, step, :, None]
        outputs.append(torch.einsum("rhvk,rhk->rhv", now, q3[:, step]))
        updates.append(update)
    out = rows.flat(torch.stack(outputs, 1), q.shape[0]).to(v.dtype)
    if state is None:
        return out, None, None
    if keep_steps:
        return out, state, DeltaTrail(state, k3, torch.stack(updates, 1), g)
    return out, torch.cat((now.to(state.dtype), state[count:])), None


def kept_in(dtype: torch.dtype, device: torch.device, *, of_channels: bool) -> torch.dtype:
    """The dtype that a state has by default beside activations of `dtype`, on the target in force or of the device.

    float32, which loses least; bfloat16 where the target's fused kernels take more calls with that, as their own
    refusals say: of a step and of a longer piece, with a decay a head or `of_channels`.
    """
    return _kept_on(MODE.get().target or detect.of_device(device), dtype, of_channels)


def _kept_on(target: Target, dtype: torch.dtype, of_channels: bool) -> torch.dtype:
    if dtype != torch.bfloat16 or not any(kernel.operators for kernel in gated_delta_rule.serving(target)):
        return torch.float32
    return max((torch.float32, torch.bfloat16), key=lambda kind: _fused_calls(kind, target, of_channels))


def _fused_calls(kind: torch.dtype, target: Target, of_channels: bool) -> int:
    """How many of two calls with a state of this dtype the target has a fused kernel for, be they the smallest."""
    found = 0
    for tokens in (1, PIECE):
        x = torch.empty(tokens, 1, PIECE, dtype=torch.bfloat16, device="meta")
        gate = x.float() if of_channels else x.float()[..., 0]
        rows = Rows(torch.empty(2, dtype=torch.int32, device="meta"), max_query=tokens, uniform=True)
        state = torch.empty(2, 1, PIECE, PIECE, dtype=kind, device="meta")
        call = OpCall((x, x, x, gate, x[..., 0], state, rows), {"keep_steps": False})
        tried = gated_delta_rule.candidates(MODE.get().policy, target, call)
        found += not next((not kernel.operators for kernel, refusal in tried if refusal is None), True)
    return found


def _says_dtype(target: Target, *args: Any, **kwargs: Any) -> str | None:
    """What `explain` says of a state in a dtype that `kept_in` chooses beside float32."""
    given = gated_delta_rule.signature.bind(*args, **kwargs).arguments
    state, q = given["state"], given["q"]
    chosen = _kept_on(target, q.dtype, given["decay"].ndim == q.ndim)
    if state is None or state.dtype != chosen or chosen == torch.float32:
        return None
    return "a bfloat16 state is the default here; recurrent_dtype of init_state sets it"


gated_delta_rule.remark = _says_dtype
