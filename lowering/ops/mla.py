"""Multi-head latent attention: keys and values of every head from one latent vector a token, kept in pages.

A token leaves a latent [latent_dim] and a rope key [rope_dim] that all heads share. `up` [heads * (nope_dim + v_dim)
latent_dim] makes of a latent each head's key, by the first nope_dim rows of the head, and its value, by the v_dim rows
after them; a score is q_nope . key + q_rope . rope. There are two ways to the same values: *expanded*, where keys and
values of all tokens are made first, and *absorbed*, where `up` is moved over to queries and outputs, so that latents
are read as they lie.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from params.quant.values import QuantizedWeight

from ..host import HostLengths
from ..layouts import NdPages, NzPages
from ..op import op
from ..weights import PreparedWeight, plain
from .norm import rms_norm
from .ragged import in_row, to_flat, to_rectangle
from .rotary import rotary_interleaved
from .widen import wide_dtype


@op
def mla_prefix_attention(
    q_nope: Float[Tensor, "tokens heads nope_dim"],
    q_rope: Float[Tensor, "tokens heads rope_dim"] | None,
    latent: Float[Tensor, "tokens latent_dim"],
    rope: Float[Tensor, "tokens rope_dim"] | None,
    latent_pages: NdPages | NzPages,
    rope_pages: NdPages | NzPages | None,
    up: Float[Tensor, "up_rows latent_dim"] | QuantizedWeight | PreparedWeight,
    page_table: Int[Tensor, "rows max_pages"],
    lengths: Int[Tensor, " rows"],
    query_start: Int[Tensor, " ends"],
    host: HostLengths,
    *,
    max_query: int,
    uniform: bool,
    scale: float,
    v_dim: int,
) -> Float[Tensor, "tokens heads v_dim"]:
    """Attention of each row's newest tokens over all its `lengths` tokens: decode, verify, prefill and prefix prefill.

    `lengths` counts the new tokens. Their latents lie in the pages already and are handed over as well, so that a
    kernel reads them where it likes. A quantised `up` stands for the float weight: nothing else is quantised. Slots at
    or past a row's length may hold anything, NaN included. Padding tokens get zeros; rows without new tokens, or
    without a prefix, are inert. Channels of `q_rope`, `rope` and `rope_pages` are in one order, any; all three are None
    for attention without rope. The reference gathers every page of every row and expands all of it.
    """
    dtype = wide_dtype(q_nope)
    at = torch.arange(page_table.shape[1] * latent_pages.page_size, device=q_nope.device)
    held = (at < lengths[:, None])[..., None]
    k, v = expanded(torch.where(held, latent_pages.gather(page_table), 0), up, q_nope.shape[1], v_dim, dtype)
    q3 = to_rectangle(q_nope, query_start, max_query, uniform).to(dtype)
    scores = torch.einsum("rqhd,rkhd->rhqk", q3, k)
    if q_rope is not None and rope_pages is not None:
        shared = torch.where(held, rope_pages.gather(page_table), 0).to(dtype)
        turned = to_rectangle(q_rope, query_start, max_query, uniform).to(dtype)
        scores = scores + torch.einsum("rqhd,rkd->rhqk", turned, shared)
    first = lengths - query_start.diff()
    query_at = first[:, None] + torch.arange(max_query, device=q_nope.device)
    visible = (in_row(query_start, max_query)[..., None] & held.mT & (at <= query_at[..., None]))[:, None]
    scores = (scores * scale).masked_fill(~visible, -torch.inf)
    # A cell behind a row's tokens sees nothing; its weights are zeros, not NaN.
    weights = torch.where(visible, scores.softmax(-1), 0)
    y = torch.einsum("rhqk,rkhd->rqhd", weights, v).to(q_nope.dtype)
    return to_flat(y, query_start, q_nope.shape[0], uniform)


def dequantized_once(up: Tensor | QuantizedWeight) -> Tensor | None:
    """The float32 weight that a quantised one stands for, for kernels to prepare; None for one that is float already.

    Its scales do not say in which dtype the model runs.
    """
    return up.dequantized() if isinstance(up, QuantizedWeight) else None


ANY_WEIGHT: dict[str, Any] = {"weights": (Tensor, QuantizedWeight), "prepare": dequantized_once}
"""For a kernel that reads `up` quantised or not, by `plain`."""


def expanded(
    latents: Float[Tensor, "*lead latent_dim"],
    up: Tensor | QuantizedWeight | PreparedWeight,
    heads: int,
    v_dim: int,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "*lead heads nope_dim"], Float[Tensor, "*lead heads v_dim"]]:
    """Every head's keys and values of these latents, in `dtype`."""
    both = (latents.to(dtype) @ plain(up).to(dtype).mT).unflatten(-1, (heads, -1))
    return both[..., :-v_dim], both[..., -v_dim:]


@op
def write_latents(
    latent_pages: NdPages | NzPages,
    rope_pages: NdPages | NzPages | None,
    latent: Float[Tensor, "tokens latent_dim"],
    rope: Float[Tensor, "tokens rope_dim"] | None,
    slots: Int[Tensor, " tokens"],
) -> tuple[NdPages | NzPages, NdPages | NzPages | None]:
    """Store each token's latent and rope key at its slot (page * page_size + offset), in place.

    The pages are the caller's own: slots are past every held length, so no older state can see the write.
    """
    latent_pages.write(latent, slots)
    if rope is not None and rope_pages is not None:
        rope_pages.write(rope, slots)
    return latent_pages, rope_pages


@op(contains=("rms_norm", "rotary_interleaved", "write_latents"))
def latent_norm_rope_write(
    latent_pages: NdPages | NzPages,
    rope_pages: NdPages | NzPages | None,
    kv: Float[Tensor, "tokens latent_and_rope"],
    weight: Float[Tensor, " latent_dim"],
    cos: Float[Tensor, "tokens half"] | None,
    sin: Float[Tensor, "tokens half"] | None,
    slots: Int[Tensor, " tokens"],
    *,
    eps: float,
) -> tuple[
    NdPages | NzPages,
    NdPages | NzPages | None,
    Float[Tensor, "tokens latent_dim"],
    Float[Tensor, "tokens rope_dim"] | None,
]:
    """The pages with what `kv` leaves of each token at its slot, written in place; and the latents and rope keys.

    `kv` rows are a latent, which is normalised (`rms_norm`), then a rope key, which is turned (`rotary_interleaved`,
    whose order of channels the pages then have) or, without cosines, left as it is. Without rope pages `kv` is the
    latent alone.
    """
    latent, rope = kv.split((weight.shape[0], kv.shape[1] - weight.shape[0]), -1)
    latent = rms_norm.body(latent, weight, eps=eps)
    if cos is not None and sin is not None:
        rope = rotary_interleaved.body(rope[:, None], cos, sin)[:, 0]
    rope = None if rope_pages is None else rope
    return *write_latents.body(latent_pages, rope_pages, latent, rope, slots), latent, rope
