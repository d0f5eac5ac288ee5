"""The gated delta rule: npu_recurrent_gated_delta_rule for a few tokens a row, npu_chunk_gated_delta_rule for many.

Both take bfloat16 queries, keys, values and write strengths, and float32 log decays: the recurrent operator one a head
or, from CANN 9.0.0 on, one a channel (gk), the chunked one a head alone. States are bfloat16; the recurrent operator of
CANN's development branch takes float32 too. The state is value-major, as ours. Lengths are each row's own, on the
device. Queries come scaled, so `scale` is 1.

Neither operator is documented for a row without tokens, nor to skip padding. A token with no write strength and no
decay leaves the state as it is, so such tokens fill the gaps: to a rectangle where rows are short, one more behind each
row where they are long. The state that is given is never written: the recurrent operator is called in the form that
returns a new one. It has a slot for every token, as CANN 9.1 demands, and so gives the state after each of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.delta import DeltaStates, channel_gates, delta_gates, gated_delta_rule, replay_delta
from ..rows import Rows
from ..target import ASCEND, UNRELEASED
from .features import npu
from .kernel import above, empty, fused, machine, wrong_dtype

A_CALL = 8
"""Tokens a row that the recurrent operator takes."""
MOST_STEPS = 16
"""Tokens a row for which it is called, as often as that takes: the window of a DFlash block, at its default size."""
CHUNKED_DIM = 128
"""Channels of keys and of values that the chunked operator takes at most."""

delta_gates.without(ASCEND, "no fused operator makes the gates of the delta rule")
channel_gates.without(ASCEND, "no fused operator makes the gates of the delta rule")
replay_delta.without(ASCEND, "no fused operator replays updates; our kernels keep the state after each token")

BF16 = (torch.bfloat16,)


def _wrong(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, *kinds: torch.dtype) -> str | None:
    """A sentence about the first tensor of a dtype that the operator does not take, `kinds` being those of states."""
    if state is not None and state.dtype not in kinds:
        kind = str(state.dtype).removeprefix("torch.")
        return f"takes a bfloat16 state, and this one is {kind}: init_state(recurrent_dtype=torch.bfloat16) makes one"
    return wrong_dtype(BF16, q=q, k=k, v=v) or empty(q=q, v=v)


def _refuse_recurrent(q, k, v, decay, beta, state, rows, *, keep_steps) -> str | None:
    if state is None:
        return "continues a state; this call has none"
    here = machine(q)
    if decay.ndim == k.ndim and not here.has_cann("9.0.0"):
        return f"takes a decay a channel, as this call has, from CANN 9.0.0 on; the target has {here.cann}"
    if v.shape[1] % k.shape[1]:
        return f"takes v_heads in multiples of k_heads; this call has {v.shape[1]} and {k.shape[1]}"
    return (
        above(MOST_STEPS, **{"tokens a row": rows.max_query})
        or _wrong(q, k, v, state, *BF16, *((torch.float32,) if here.has_cann(UNRELEASED) else ()))
        or above(256, k_heads=k.shape[1], v_heads=v.shape[1])
        or above(512, k_dim=k.shape[2], v_dim=v.shape[2])
    )


@fused(
    gated_delta_rule,
    "npu_recurrent_gated_delta_rule",
    "npu_recurrent_gated_delta_rule_functional",
    refuse=_refuse_recurrent,
)
def _recurrent(q, k, v, decay, beta, state, rows, *, keep_steps):
    gates = decay.float(), beta.to(q.dtype)
    inputs = [rows.rectangle(x) for x in (q, k, v, *gates)]
    count = inputs[0].shape[0]
    outputs, states, now = [], [], state[:count]
    for pieces in zip(*(x.split(A_CALL, 1) for x in inputs), strict=True):
        out, after = _steps(pieces, now)
        outputs.append(out)
        states.append(after)
        now = after[:, -1]
    out = rows.flat(_joined(outputs), q.shape[0])
    if keep_steps:
        return out, state, DeltaStates(state, _joined(states))
    return out, torch.cat((now, state[count:])), None


def _joined(pieces: list[Tensor]) -> Tensor:
    return torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0]


def _steps(inputs: tuple[Tensor, ...], before: Tensor) -> tuple[Tensor, Tensor]:
    """One call: outputs [rows steps v_heads v_dim], and the state after each token [rows steps v_heads v_dim k_dim].

    A row starts from the slot of its first token; the other slots are written before anything reads them.
    """
    q, k, v, g, b = (x.flatten(0, 1).contiguous() for x in inputs)
    rows, steps = inputs[0].shape[:2]
    pool = before.contiguous()
    if steps > 1:
        pool = before.new_empty(rows, steps, *before.shape[1:])
        pool[:, 0] = before
        pool = pool.flatten(0, 1)
    out, after = npu.npu_recurrent_gated_delta_rule_functional(
        q,
        k,
        v,
        pool,
        scale=1.0,
        beta=b,
        actual_seq_lengths=torch.full((rows,), steps, dtype=torch.int32, device=q.device),
        ssm_state_indices=torch.arange(rows * steps, dtype=torch.int32, device=q.device),
        **{"gk" if g.ndim == k.ndim else "g": g},
    )
    return out.unflatten(0, (rows, steps)), after.unflatten(0, (rows, steps))


def _refuse_chunked(q, k, v, decay, beta, state, rows, *, keep_steps) -> str | None:
    if keep_steps:
        return "keeps no steps"
    if decay.ndim == k.ndim:
        return "takes one decay a head; this call has one a channel"
    if v.shape[1] % k.shape[1]:
        return f"takes v_heads in multiples of k_heads; this call has {v.shape[1]} and {k.shape[1]}"
    return (
        _wrong(q, k, v, state, *BF16)
        or above(64, k_heads=k.shape[1], v_heads=v.shape[1])
        or above(CHUNKED_DIM, k_dim=k.shape[2], v_dim=v.shape[2])
    )


@fused(gated_delta_rule, "npu_chunk_gated_delta_rule", "npu_chunk_gated_delta_rule", refuse=_refuse_chunked)
def _chunked(q, k, v, decay, beta, state, rows, *, keep_steps):
    count, tokens = rows.count, q.shape[0]
    inputs = (q, k, v, decay.float(), beta.to(q.dtype))
    if rows.uniform:
        lengths, place = rows.new.int(), None
        before = state[:count] if state is not None else None
    else:
        lengths, place = _spaced(rows, tokens)
        inputs = tuple(x.new_zeros(tokens + count + 1, *x.shape[1:]).index_copy(0, place, x) for x in inputs)
        before = state
    out, after = _run_chunked(inputs, before, lengths)
    if place is not None:
        live = rows.of_tokens(tokens) < count
        out = torch.where(live[:, None, None], out[place], 0)
    return out, None if state is None else torch.cat((after[:count], state[count:])), None


def _spaced(rows: Rows, tokens: int) -> tuple[Tensor, Tensor]:
    """Each row's length with one more token behind it, padding being one more row, and the place of each token."""
    ends = torch.nn.functional.pad(rows.query_start[1:], (0, 1), value=tokens)
    lengths = ends.diff(prepend=rows.query_start[:1]) + 1
    return lengths.int(), torch.arange(tokens, device=ends.device) + rows.of_tokens(tokens)


def _run_chunked(inputs: tuple[Tensor, ...], before: Tensor | None, lengths: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, decay, beta = (x.contiguous() for x in inputs)
    if before is None:
        before = q.new_zeros(lengths.shape[0], v.shape[1], v.shape[2], k.shape[2])
    return npu.npu_chunk_gated_delta_rule(
        q, k, v, beta=beta, initial_state=before.contiguous(), actual_seq_lengths=lengths, scale=1.0, g=decay
    )
