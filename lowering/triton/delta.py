"""Launches of the gated delta rule, its gates, and standing after some of the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.delta import DeltaStates
from ..rows import Rows
from ..target import Target
from .launch import Launch
from .tiles import Footprint, dividing, planned

RECURRENT = Footprint(copies=3.6, copies_950=3.0, streams=0)
"""Cells of the state."""
GATES = Footprint(copies=3.5, copies_950=2.0, streams=1)
COPY = Footprint(copies=0.0, copies_950=0.0, streams=1)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    rows: Rows,
    *,
    keep_steps: bool,
    target: Target,
) -> tuple[Launch, tuple[Tensor, Tensor, DeltaStates | None]]:
    """The op of this name, for rows of few tokens that continue a state, and the result that the launch fills.

    With `keep_steps` the trail holds the state after each token.
    """
    (_, k_heads, k_dim), (_, v_heads, v_dim) = q.shape, v.shape
    count, steps = rows.count, rows.max_query
    after = state.new_empty(count, steps, *state.shape[1:]) if keep_steps else with_scratch_of(state, count)
    tile = planned(target, RECURRENT, size=state.element_size(), most=v_dim, width=k_dim)
    tile, out = dividing(tile, v_dim), torch.zeros_like(v)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "decay": decay,
        "beta": beta,
        "state": state,
        "query_start": rows.query_start,
        "out": out,
        "after": after,
        "rows": count,
        "k_heads": k_heads,
        "v_heads": v_heads,
        "steps": steps,
    }
    constants = {"K_DIM": k_dim, "V_DIM": v_dim, "TILE": tile, "CHANNELS": decay.ndim == k.ndim, "STEPS": keep_steps}
    jobs, flops = count * v_heads * (v_dim // tile), 6 * v.shape[0] * v_heads * v_dim * k_dim
    launch = Launch("delta", "recurrent", arguments, constants, jobs, ("state", "after"), ("out", "after"), flops)
    return launch, (out, state, DeltaStates(state, after)) if keep_steps else (out, after, None)


def with_scratch_of(state: Tensor, rows: int) -> Tensor:
    """Slots like those of a state, to be filled for its rows; what is behind them is copied."""
    after = torch.empty_like(state, memory_format=torch.contiguous_format)
    after[rows:] = state[rows:]
    return after


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, target: Target
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """The op of this name, and the result that the launch fills."""
    tokens, heads = a.shape
    out = torch.empty_like(a, dtype=torch.float32), torch.empty_like(b, dtype=torch.float32)
    block = 1 << (heads - 1).bit_length()
    tile = planned(target, GATES, size=a.element_size(), most=tokens, width=block)
    arguments = {"a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias, "decay": out[0], "beta": out[1]}
    sizes = {"tokens": tokens, "heads": heads}
    constants = {"TILE": tile, "HEADS": block}
    jobs, fills = -(-tokens // tile), ("decay", "beta")
    return Launch("delta", "delta_gates", arguments | sizes, constants, jobs, ("a", "b"), fills), out


def channel_gates(
    f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None = None, target: Target
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """The op of this name, and the result that the launch fills."""
    tokens, heads, k_dim = f.shape
    out = torch.empty_like(f, dtype=torch.float32), torch.empty_like(b, dtype=torch.float32)
    tile = planned(target, GATES, size=f.element_size(), most=heads, width=k_dim)
    arguments = {"f": f, "b": b, "a_log": a_log, "dt_bias": dt_bias, "decay": out[0], "beta": out[1]}
    sizes = {"tokens": tokens, "heads": heads, "lower_bound": float(lower_bound or 0.0)}
    constants = {"K_DIM": k_dim, "TILE": tile, "BOUNDED": lower_bound is not None}
    jobs, fills = tokens * -(-heads // tile), ("decay", "beta")
    return Launch("delta", "channel_gates", arguments | sizes, constants, jobs, ("f", "decay"), fills), out


def commit(trail: DeltaStates, accepted: Tensor, *, target: Target) -> tuple[Launch, Tensor]:
    """`DeltaStates.at`, and the states that the launch fills."""
    rows, steps = trail.after.shape[:2]
    out, width = trail.before.clone(), trail.before[0].numel()
    tile = planned(target, COPY, size=out.element_size(), most=width)
    arguments = {"before": trail.before, "after": trail.after, "accepted": accepted, "out": out}
    sizes = {"rows": rows, "steps": steps, "width": width}
    jobs, pools = rows * -(-width // tile), ("before", "after", "out")
    return Launch("delta", "commit", arguments | sizes, {"TILE": tile}, jobs, pools, ("out",)), out


def scatter(source: Tensor, slots: Tensor, out: Tensor, *, target: Target) -> Launch:
    """Rows of `source` into the slots of `out` that are named, -1 for none, as a selection of rows moves states."""
    rows, width = source.shape[0], source[0].numel()
    tile = planned(target, COPY, size=out.element_size(), most=width)
    arguments = {"source": source, "slots": slots, "out": out, "rows": rows, "width": width}
    jobs, pools = rows * -(-width // tile), ("source", "out")
    return Launch("delta", "scatter", arguments, {"TILE": tile}, jobs, pools, ("out",))
