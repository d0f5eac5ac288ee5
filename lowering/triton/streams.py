"""Launches of hyper-connections and attention residuals."""

from __future__ import annotations

import torch
from torch import Tensor

from ..target import Target
from .launch import Launch, Product
from .norm import grouped_rms_norm
from .tiles import Footprint, planned

RESIDUAL = Footprint(copies=4.5, copies_950=3.0, streams=1)
NARROWED = Footprint(copies=3.0, copies_950=2.0, streams=2)
MIXED = Footprint(copies=4.0, copies_950=3.0, streams=3)
INJECTED = Footprint(copies=3.0, copies_950=2.0, streams=3)


def attention_residual(
    bank: Tensor, prefix: Tensor, norm: Tensor, proj: Tensor, *, eps: float, target: Target
) -> tuple[Launch, Tensor]:
    """The op of this name, and the result that the launch fills."""
    (tokens, snapshots, hidden), out = bank.shape, torch.empty_like(prefix)
    tile = 1 << (hidden - 1).bit_length()
    planned(target, RESIDUAL, size=prefix.element_size(), most=1, width=tile)
    arguments = {"bank": bank, "prefix": prefix, "norm": norm, "proj": proj, "out": out, "tokens": tokens, "eps": eps}
    constants = {"SNAPSHOTS": snapshots, "HIDDEN": hidden, "TILE": tile}
    pools = ("bank", "prefix", "out")
    return Launch("streams", "attention_residual", arguments, constants, tokens, pools, ("out",)), out


def hyper_mix(
    x: Tensor, norm: Tensor, down: Tensor, up: Tensor, *, eps: float, target: Target
) -> tuple[tuple[Launch | Product, ...], tuple[Tensor, Tensor | None]]:
    """The op of this name in three launches and, between them, its two products; and the result that they fill."""
    (tokens, streams, _), rank, outputs = x.shape, up.shape[1], down.shape[0]
    rstd = x.new_empty(tokens, streams, dtype=torch.float32)
    norming, normed = grouped_rms_norm(x.flatten(1), norm, groups=streams, eps=eps, target=target, rstd=rstd)
    low, gates = x.new_empty(tokens, outputs), x.new_empty(tokens, up.shape[0])
    narrowing, opened, weights = _narrowed(low, streams, rank, target)
    mixing, mixed = _mixed(x, norm, rstd, gates, target)
    steps = (norming, Product(normed, down, low), narrowing, Product(opened, up, gates), mixing)
    return steps, (mixed, None if outputs == rank else weights)


def _narrowed(low: Tensor, streams: int, rank: int, target: Target) -> tuple[Launch, Tensor, Tensor]:
    tokens, outputs = low.shape
    opened, weights = low.new_empty(tokens, rank), low.new_empty(tokens, streams, dtype=torch.float32)
    tile = 1 << (rank - 1).bit_length()
    planned(target, NARROWED, size=low.element_size(), most=1, width=tile)
    arguments = {"low": low, "gates": opened, "weights": weights, "tokens": tokens}
    constants = {"STREAMS": streams, "RANK": rank, "OUTPUTS": outputs, "TILE": tile}
    pools, fills = ("low", "gates", "weights"), ("gates", "weights")
    return Launch("streams", "narrowed", arguments, constants, tokens, pools, fills), opened, weights


def _mixed(x: Tensor, norm: Tensor, rstd: Tensor, gates: Tensor, target: Target) -> tuple[Launch, Tensor]:
    (tokens, streams, hidden), out = x.shape, x.new_empty(x.shape[0], x.shape[2])
    tile = planned(target, MIXED, size=x.element_size(), most=hidden)
    arguments = {"x": x, "norm": norm, "rstd": rstd, "gates": gates, "out": out, "tokens": tokens}
    constants = {"STREAMS": streams, "HIDDEN": hidden, "TILE": tile}
    jobs, pools = tokens * -(-hidden // tile), ("x", "rstd", "gates", "out")
    return Launch("streams", "mixed", arguments, constants, jobs, pools, ("out",)), out


def hyper_inject(x: Tensor, y: Tensor, weights: Tensor, *, target: Target) -> tuple[Launch, Tensor]:
    """The op of this name, and the result that the launch fills."""
    (tokens, streams, hidden), out = x.shape, torch.empty_like(x)
    tile = planned(target, INJECTED, size=x.element_size(), most=hidden)
    arguments = {"x": x, "y": y, "weights": weights, "out": out, "tokens": tokens}
    constants = {"STREAMS": streams, "HIDDEN": hidden, "TILE": tile}
    jobs, pools = tokens * -(-hidden // tile), ("x", "y", "weights", "out")
    return Launch("streams", "injected", arguments, constants, jobs, pools, ("out",)), out
