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
from params.tree import tree

from ..layouts import NdPages, NzPages
from ..op import op
from ..rows import Rows
from ..weights import PreparedWeight, plain
from .norm import rms_norm
from .rotary import rotary_interleaved
from .widen import wide_dtype


@tree
class LatentQueries:
    """The two parts of every head's query; `rope` is None for attention without rope."""

    nope: Float[Tensor, "tokens heads nope_dim"]
    rope: Float[Tensor, "tokens heads rope_dim"] | None

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.nope.device

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return _shapes(self.nope, self.rope)


@tree
class Latents:
    """What tokens leave: latents, and rope keys that all heads share or None, in one order of channels, any."""

    latent: Float[Tensor, "tokens latent_dim"]
    rope: Float[Tensor, "tokens rope_dim"] | None

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return _shapes(self.latent, self.rope)


@tree
class LatentPools:
    """The pages of latents, and those of rope keys or None."""

    latent: NdPages | NzPages
    rope: NdPages | NzPages | None

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""
        return self.latent.device

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return self.latent.static_key(), self.rope and self.rope.static_key()


def _shapes(*tensors: Tensor | None) -> tuple[object, ...]:
    return tuple(None if x is None else (x.shape, x.dtype) for x in tensors)


@op
def mla_prefix_attention(
    q: LatentQueries,
    new: Latents,
    pages: LatentPools,
    up: Float[Tensor, "up_rows latent_dim"] | QuantizedWeight | PreparedWeight,
    rows: Rows,
    *,
    scale: float,
    v_dim: int,
) -> Float[Tensor, "tokens heads v_dim"]:
    """Attention of each row's newest tokens over all its tokens: decode, verify, prefill and prefix prefill.

    The `new` tokens' latents lie in the pages already and are handed over as well, so that a kernel reads them where it
    likes. A quantised `up` stands for the float weight: nothing else is quantised. Slots at or past a row's length may
    hold anything, NaN included. Padding tokens get zeros; rows without new tokens, or without a prefix, are inert. The
    rope of queries, new tokens and pages is in one order of channels; all three are None for attention without rope.
    The reference gathers every page of every row and expands all of it.
    """
    dtype, (lengths, table) = wide_dtype(q.nope), rows.paged
    at = torch.arange(table.shape[1] * pages.latent.page_size, device=q.device)
    held = (at < lengths[:, None])[..., None]
    k, v = expanded(torch.where(held, pages.latent.gather(table), 0), up, q.nope.shape[1], v_dim, dtype)
    scores = torch.einsum("rqhd,rkhd->rhqk", rows.rectangle(q.nope).to(dtype), k)
    if q.rope is not None and pages.rope is not None:
        shared = torch.where(held, pages.rope.gather(table), 0).to(dtype)
        scores = scores + torch.einsum("rqhd,rkd->rhqk", rows.rectangle(q.rope).to(dtype), shared)
    visible = (rows.inside[..., None] & held.mT & (at <= rows.places[..., None]))[:, None]
    scores = (scores * scale).masked_fill(~visible, -torch.inf)
    # A cell behind a row's tokens sees nothing; its weights are zeros, not NaN.
    weights = torch.where(visible, scores.softmax(-1), 0)
    return rows.flat(torch.einsum("rhqk,rkhd->rqhd", weights, v).to(q.nope.dtype), q.nope.shape[0])


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
def write_latents(pages: LatentPools, new: Latents, slots: Int[Tensor, " tokens"]) -> LatentPools:
    """Store each token's latent and rope key at its slot (page * page_size + offset), in place.

    The pages are the caller's own: slots are past every held length, so no older state can see the write.
    """
    pages.latent.write(new.latent, slots)
    if new.rope is not None and pages.rope is not None:
        pages.rope.write(new.rope, slots)
    return pages


@op(contains=("rms_norm", "rotary_interleaved", "write_latents"))
def latent_norm_rope_write(
    pages: LatentPools,
    kv: Float[Tensor, "tokens latent_and_rope"],
    weight: Float[Tensor, " latent_dim"],
    cos: Float[Tensor, "tokens half"] | None,
    sin: Float[Tensor, "tokens half"] | None,
    slots: Int[Tensor, " tokens"],
    *,
    eps: float,
) -> tuple[LatentPools, Latents]:
    """The pages with what `kv` leaves of each token at its slot, written in place; and the latents and rope keys.

    `kv` rows are a latent, which is normalised (`rms_norm`), then a rope key, which is turned (`rotary_interleaved`,
    whose order of channels the pages then have) or, without cosines, left as it is. Without rope pages `kv` is the
    latent alone.
    """
    latent, rope = kv.split((weight.shape[0], kv.shape[1] - weight.shape[0]), -1)
    latent = rms_norm.body(latent, weight, eps=eps)
    if cos is not None and sin is not None:
        rope = rotary_interleaved.body(rope[:, None], cos, sin)[:, 0]
    new = Latents(latent, None if pages.rope is None else rope)
    return write_latents.body(pages, new, slots), new
