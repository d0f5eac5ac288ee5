"""Decoder layers in their usual order: a norm before each of two blocks, and one residual stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from ..output import Taps
from ..state.state import Entry
from .linear import Norm, add_normalised, normalised

Mix = Callable[[int, Any, Tensor], tuple[Tensor, Entry | None]]
"""Layer, its token mixer's node and what that reads, to the mixer's output and the layer's new entry."""
Feed = Callable[[int, Any, Tensor], Tensor]
"""Layer, its feed-forward node and what that reads, to the block's output."""


def decoder_layers(
    layers: Sequence[Any],
    norm: Norm,
    x: Float[Tensor, "tokens hidden"],
    mix: Mix,
    feed: Feed,
    taps: Taps,
    *,
    eps: float,
) -> tuple[Float[Tensor, "tokens hidden"], list[Entry | None]]:
    """The residual stream `x` through all layers and the final `norm`, and the layers' new entries.

    A layer has `input_norm`, `attn`, `post_norm` and `mlp`.
    """
    entries: list[Entry | None] = []
    normed = normalised(layers[0].input_norm, x, eps=eps)
    next_norms = [layer.input_norm for layer in layers[1:]] + [norm]
    for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
        mixed, entry = mix(index, layer.attn, normed)
        normed, x = add_normalised(layer.post_norm, mixed, x, eps=eps)
        normed, x = add_normalised(next_norm, feed(index, layer.mlp, normed), x, eps=eps)
        taps.offer(f"layers.{index}", x)
        entries.append(entry)
    return normed, entries
