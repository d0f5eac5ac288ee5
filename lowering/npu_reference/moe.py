"""Mixture of experts: gating, routing of tokens to rows grouped by expert, and the weighted sum of their results.

Rows are token-major here: flat row i * choices + j is choice j of token i.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import (
    FLOATS,
    need,
    need_default,
    need_dtype,
    need_one_dtype,
    need_rank,
    need_shape,
    need_values,
    shown,
)
from .quant import by_token
from .registration import operator

MOST_CHOICES = 512
"""Most experts of one token that the sum takes."""


def _gating_like(
    x: Tensor, k: int, finished: Tensor | None, renorm: int, output_softmax: bool
) -> tuple[Tensor, Tensor, Tensor]:
    need_default(finished=finished)
    need_dtype(FLOATS, x=x)
    need_rank(2, 3, x=x)
    need(0 < k <= min(x.shape[-1], 1024), f"k is {k} for {x.shape[-1]} experts; expected 1 to their number, up to 1024")
    need(renorm in (0, 1), f"renorm is {renorm}; expected 0 (softmax, then top-k) or 1 (top-k, then softmax)")
    chosen = (*x.shape[:-1], k)
    every = x.shape if renorm == 0 and output_softmax else (0,)
    return (
        x.new_empty(chosen),
        x.new_empty(chosen, dtype=torch.int32),
        x.new_empty(every, dtype=torch.float32),
    )


@operator("npu_moe_gating_top_k_softmax_v2", shapes=_gating_like)
def npu_moe_gating_top_k_softmax_v2(
    x: Tensor, k: int, finished: Tensor | None, renorm: int, output_softmax: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, expert ids, softmax over all experts or an empty tensor). The lower id wins among equals."""
    order = x.float().sort(dim=-1, descending=True, stable=True)
    ids = order.indices[..., :k]
    every = x.float().softmax(-1)
    weights = order.values[..., :k].softmax(-1) if renorm else every.gather(-1, ids)
    third = every if renorm == 0 and output_softmax else every.new_empty(0)
    return weights.to(x.dtype), ids.int(), third


def _grouped_like(
    x: Tensor, k: int, bias: Tensor | None, k_group: int, group_count: int, group_select_mode: int, renorm: int,
    norm_type: int, out_flag: bool, routed_scaling_factor: float, eps: float, **rest: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    need_default(**rest)
    need_dtype(FLOATS, x=x)
    need_rank(2, 2, x=x)
    experts = x.shape[1]
    need_one_dtype(x=x, bias=bias)
    need_shape((experts,), "one an expert", bias=bias)
    need(renorm == 0, f"renorm is {renorm}; the reference covers 0")
    need(norm_type in (0, 1), f"norm_type is {norm_type}; expected 0 (softmax) or 1 (sigmoid)")
    modes = "0 (a group's best expert) or 1 (its two best)"
    need(group_select_mode in (0, 1), f"group_select_mode is {group_select_mode}; expected {modes}")
    need(group_count > 0 and experts % group_count == 0, f"{experts} experts make no {group_count} groups")
    each = experts // group_count
    need(1 <= k_group <= group_count, f"k_group is {k_group}; expected 1 to {group_count}")
    need(1 <= k <= k_group * each, f"k is {k}; expected 1 to {k_group * each}, the experts of the groups kept")
    need(x.numel() > 0, f"x is {shown(x)}; what the operator does without tokens is not documented")
    return x.new_empty(len(x), k), x.new_empty(len(x), k, dtype=torch.int32), x.new_empty(x.shape, dtype=torch.float32)


@operator("npu_moe_gating_top_k", shapes=_grouped_like)
def npu_moe_gating_top_k(
    x: Tensor, k: int, bias: Tensor | None, k_group: int, group_count: int, group_select_mode: int, renorm: int,
    norm_type: int, out_flag: bool, routed_scaling_factor: float, eps: float, **rest: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(weights, expert ids, scores of all experts: NaN without out_flag). The lower id wins among equals.

    Scores are a softmax over all experts or sigmoids; with the bias added they choose. Weights are the scores of those
    chosen, renormalised where they are sigmoids, times the factor.
    """
    every = x.float().sigmoid() if norm_type else x.float().softmax(-1)
    choice = every if bias is None else every + bias.float()
    grouped = choice.unflatten(-1, (group_count, -1))
    order = grouped.topk(1 + group_select_mode).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
    dropped = torch.ones(len(x), group_count, dtype=torch.bool).scatter_(1, order[:, :k_group], False)
    kept = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)
    ids = kept.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = every.gather(-1, ids)
    weights = (weights / (weights.sum(-1, keepdim=True) + eps) if norm_type else weights) * routed_scaling_factor
    return weights.to(x.dtype), ids.int(), every if out_flag else torch.full_like(every, torch.nan)


def _routing_like(
    x: Tensor, expert_idx: Tensor, scale: Tensor | None, offset: Tensor | None, active_num: int, expert_capacity: int,
    expert_num: int, drop_pad_mode: int, expert_tokens_num_type: int, expert_tokens_num_flag: bool, quant_mode: int,
    active_expert_range: list[int], row_idx_type: int, x_dtype: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    need_default(scale=scale, offset=offset, x_dtype=x_dtype)
    need_dtype((*FLOATS, torch.int8), x=x)
    need_dtype((torch.int32,), expert_idx=expert_idx)
    need_rank(2, 2, x=x, expert_idx=expert_idx)
    need(x.shape[0] == expert_idx.shape[0], f"x is {shown(x)} and expert_idx {shown(expert_idx)}; tokens differ")
    need(x.numel() > 0, f"x is {shown(x)}; what the operator does without tokens is not documented")
    need(0 < expert_num <= 10240, f"expert_num is {expert_num}; expected 1 to 10240")
    need(drop_pad_mode == 0, f"drop_pad_mode is {drop_pad_mode}; the operator takes 0 only")
    need(expert_tokens_num_flag, "expert_tokens_num_flag is False; the operator takes True only")
    need(expert_tokens_num_type == 1, f"expert_tokens_num_type is {expert_tokens_num_type}; the reference covers 1")
    need(quant_mode in (-1, 1), f"quant_mode is {quant_mode}; the operator takes -1 (none) and 1 (by token)")
    need(quant_mode == -1 or x.dtype != torch.int8, "x is int8 already; quant_mode 1 leaves its outputs undefined")
    need(row_idx_type in (0, 1), f"row_idx_type is {row_idx_type}; expected 0 (gather) or 1 (scatter)")
    rows = expert_idx.numel()
    need(active_num in (-1, 0, rows), f"active_num is {active_num}; the reference covers -1, 0 and all rows ({rows})")
    _need_range(active_expert_range, expert_num)
    experts = active_expert_range[1] - active_expert_range[0]
    return (
        x.new_empty(rows, x.shape[1], dtype=torch.int8 if quant_mode == 1 else x.dtype),
        x.new_empty(rows, dtype=torch.int32),
        x.new_empty(experts, dtype=torch.int64),
        x.new_empty(rows, dtype=torch.float32),
    )


def _need_range(active: list[int], experts: int) -> None:
    need(len(active) == 2, f"active_expert_range is {active}; name both ends, for which no default is documented")
    need(
        0 <= active[0] < active[1] <= experts,
        f"active_expert_range is {active}; expected 0 <= start < end <= expert_num ({experts})",
    )


@operator("npu_moe_init_routing_v2", shapes=_routing_like)
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    expert_num: int,
    active_expert_range: list[int],
    row_idx_type: int,
    quant_mode: int,
    **rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows of x grouped by expert, where they are, rows of each expert, scales of the rows).

    With quant_mode 1 rows are int8 by token, else scales are undefined. Places are, for row_idx_type 0, the row of each
    flat choice, or -1 outside the active experts; for 1, the flat choice of each row. Rows past the active ones are
    undefined.
    """
    need_values(0, expert_num - 1, "expert ids", expert_idx=expert_idx)
    start, end = active_expert_range
    flat = expert_idx.flatten().long()
    active = (flat >= start) & (flat < end)
    order = torch.where(active, flat, expert_num).argsort(stable=True)[: int(active.sum())]
    own, scale = by_token(x) if quant_mode == 1 else (x, torch.full((len(x),), torch.nan))
    rows = own.new_full((len(flat), x.shape[1]), torch.nan if own.is_floating_point() else -1)
    scales = torch.full((len(flat),), torch.nan)
    rows[: len(order)], scales[: len(order)] = (y[order // expert_idx.shape[1]] for y in (own, scale))
    places = torch.full((len(flat),), -1, dtype=torch.int32)
    if row_idx_type == 0:
        places[order] = torch.arange(len(order), dtype=torch.int32)
    else:
        places[: len(order)] = order.int()
    counts = torch.bincount(flat[active] - start, minlength=end - start)
    return rows, places, counts, scales


def _unpermute_like(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None,
    padded_mode: bool,
    restore_shape: list[int] | None,
) -> Tensor:
    need_default(restore_shape=restore_shape)
    need(not padded_mode, "padded_mode is True; the operator takes False only")
    need_dtype(FLOATS, permuted_tokens=permuted_tokens)
    need_one_dtype(permuted_tokens=permuted_tokens, probs=probs)
    need_dtype((torch.int32,), sorted_indices=sorted_indices)
    need_rank(2, 2, permuted_tokens=permuted_tokens, probs=probs)
    rows = permuted_tokens.shape[0]
    need_shape((rows,), "one place a row", sorted_indices=sorted_indices)
    choices = 1 if probs is None else probs.shape[1]
    need(0 < choices <= MOST_CHOICES, f"probs has {choices} choices a token; expected 1 to {MOST_CHOICES}")
    need_shape((rows // choices, choices), "tokens, choices: together the rows", probs=probs)
    need(rows % choices == 0, f"permuted_tokens has {rows} rows, not a multiple of the {choices} choices")
    return permuted_tokens.new_empty(rows // choices, permuted_tokens.shape[1])


@operator("npu_moe_token_unpermute", shapes=_unpermute_like)
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None,
    padded_mode: bool,
    restore_shape: list[int] | None,
) -> Tensor:
    """Sum over each token's choices of probability times row, in float32, rounded once."""
    need_values(0, len(sorted_indices) - 1, "rows", sorted_indices=sorted_indices)
    need(len(sorted_indices.unique()) == len(sorted_indices), "sorted_indices names a row twice")
    choices = 1 if probs is None else probs.shape[1]
    rows = permuted_tokens[sorted_indices.long()].float().unflatten(0, (-1, choices))
    weighted = rows if probs is None else rows * probs.float()[..., None]
    return weighted.sum(1).to(permuted_tokens.dtype)
