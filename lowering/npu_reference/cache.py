"""Writers of key/value caches. Every write is in place; slots are global, block * block_size + offset."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import (
    need,
    need_contiguous,
    need_default,
    need_dtype,
    need_one_dtype,
    need_rank,
    need_shape,
    need_values,
    shown,
)
from .registration import operator
from .rotary import INTERLEAVED_WIDTH, need_interleaved, sorted_and_turned

_CACHED = (
    torch.float16, torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32,
    torch.uint32, torch.float8_e5m2, torch.float8_e4m3fn,
)  # fmt: skip
_NZ_BYTES = 32
"""Bytes of the innermost axis of an NZ cache."""


def _scatter_pa_like(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    compress_lens: Tensor | None,
    compress_seq_offsets: Tensor | None,
    seq_lens: Tensor | None,
    cache_mode: str | None,
) -> None:
    need_default(compress_lens=compress_lens, compress_seq_offsets=compress_seq_offsets, seq_lens=seq_lens)
    need(cache_mode in (None, "Norm", "PA_NZ"), f"cache_mode is {cache_mode!r}; expected 'Norm' or 'PA_NZ'")
    need_dtype(_CACHED, key=key)
    need_one_dtype(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    need_dtype((torch.int32, torch.int64), slot_mapping=slot_mapping)
    need_contiguous(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    need_rank(3, 3, key=key, value=value)
    need_rank(4, 4, key_cache=key_cache, value_cache=value_cache)
    need(key.shape[:2] == value.shape[:2], f"key is {shown(key)} and value {shown(value)}; tokens and heads differ")
    need_shape((key.shape[0],), "one slot a token", slot_mapping=slot_mapping)
    for name, new, cache in (("key_cache", key, key_cache), ("value_cache", value, value_cache)):
        _need_cache(name, new, cache, cache_mode)
    blocks = (0, 2) if cache_mode == "PA_NZ" else (0, 1)
    need(
        all(key_cache.shape[axis] == value_cache.shape[axis] for axis in blocks),
        f"key_cache is {shown(key_cache)} and value_cache {shown(value_cache)}; blocks or their sizes differ",
    )


def _need_cache(name: str, new: Tensor, cache: Tensor, mode: str | None) -> None:
    _, heads, width = new.shape
    if mode != "PA_NZ":
        expected = (*cache.shape[:2], heads, width)
        return need_shape(expected, "blocks, block_size, heads, width, as cache_mode 'Norm' wants", **{name: cache})
    inner = _NZ_BYTES // new.element_size()
    expected = (cache.shape[0], heads * width // inner, cache.shape[2], inner)
    need(heads * width % inner == 0, f"heads * width is {heads * width}; 'PA_NZ' needs a multiple of {inner}")
    return need_shape(
        expected, f"blocks, heads * width / {inner}, block_size, {inner}, as 'PA_NZ' wants", **{name: cache}
    )


@operator("npu_scatter_pa_kv_cache", shapes=_scatter_pa_like)
def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    compress_lens: Tensor | None,
    compress_seq_offsets: Tensor | None,
    seq_lens: Tensor | None,
    cache_mode: str | None,
) -> None:
    """Write each token's key and value at its slot. The default layout of the caches is NZ, not `Norm`.

    Slots named more than once are documented to hold nothing certain afterwards: they get NaN.
    """
    nz = cache_mode == "PA_NZ"
    slots = key_cache.shape[0] * key_cache.shape[2 if nz else 1]
    need_values(0, slots - 1, "slots; negative ones are not skipped", slot_mapping=slot_mapping)
    at, times = slot_mapping.long().unique(return_counts=True)
    repeated = at[times > 1]
    need(len(repeated) == 0 or key.is_floating_point(), "slot_mapping names a slot twice, which leaves it undefined")
    for new, cache in ((key, key_cache), (value, value_cache)):
        # An NZ cache keeps groups of channels outside the tokens of a block.
        tokens = cache.transpose(1, 2) if nz else cache
        _put(tokens, slot_mapping.long(), new.reshape(len(new), *tokens.shape[2:]))
        if len(repeated):
            _put(tokens, repeated, torch.nan)


def _put(tokens: Tensor, slots: Tensor, new: Tensor | float) -> None:
    tokens[slots // tokens.shape[1], slots % tokens.shape[1]] = new


LATENT_WIDTH = 512
"""The one width of latents that are normed and cached at once; the rope key behind them is as wide as it turns."""

Pair = tuple[Tensor, Tensor]


def _norm_rope_like(
    kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, k_cache: Tensor, ckv_cache: Tensor,
    epsilon: float, cache_mode: str, is_output_kv: bool, **rest: object,
) -> Pair:  # fmt: skip
    need_default(**rest)
    modes = ("Norm", "PA", "PA_BNSD", "PA_NZ")
    need(cache_mode in modes, f"cache_mode is {cache_mode!r}; the reference covers {', '.join(modes)}")
    need_interleaved(kv, cos, sin)
    need_one_dtype(kv=kv, gamma=gamma, k_cache=k_cache, ckv_cache=ckv_cache)
    need_dtype((torch.int64,), index=index)
    need_contiguous(gamma=gamma, index=index, k_cache=k_cache, ckv_cache=ckv_cache)
    batch, heads, steps, width = kv.shape
    need(heads == 1, f"kv is {shown(kv)}; its heads are one")
    need(
        width == LATENT_WIDTH + INTERLEAVED_WIDTH, f"kv is {width} wide; expected {LATENT_WIDTH} + {INTERLEAVED_WIDTH}"
    )
    need(kv.numel() > 0, f"kv is {shown(kv)}; the operator does not take empty tensors")
    need_shape((LATENT_WIDTH,), "the latent's width", gamma=gamma)
    need_rank(4, 4, k_cache=k_cache, ckv_cache=ckv_cache)
    _need_latent_caches(k_cache, ckv_cache, None if cache_mode != "Norm" else batch)
    need_shape((batch, steps) if cache_mode == "Norm" else (batch * steps,), "one a token", index=index)
    return kv.new_empty(batch, 1, steps, INTERLEAVED_WIDTH), kv.new_empty(batch, 1, steps, LATENT_WIDTH)


def _need_latent_caches(k_cache: Tensor, ckv_cache: Tensor, batch: int | None) -> None:
    """[batch 1 length width] without pages, [blocks block_size 1 width] with them, in NZ too."""
    lead = ckv_cache.shape[:3]
    need(lead[1 if batch is not None else 2] == 1, f"ckv_cache is {shown(ckv_cache)}; its heads are one")
    need(batch is None or lead[0] == batch, f"ckv_cache is {shown(ckv_cache)}; expected {batch} requests")
    need_shape((*lead, LATENT_WIDTH), f"{LATENT_WIDTH} wide", ckv_cache=ckv_cache)
    need_shape((*lead, INTERLEAVED_WIDTH), f"as ckv_cache, {INTERLEAVED_WIDTH} wide", k_cache=k_cache)


@operator("npu_kv_rmsnorm_rope_cache_v2", shapes=_norm_rope_like)
def npu_kv_rmsnorm_rope_cache_v2(
    kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, k_cache: Tensor, ckv_cache: Tensor,
    epsilon: float, cache_mode: str, is_output_kv: bool, **rest: object,
) -> Pair:  # fmt: skip
    """(rope keys, latents): kv's last 64 channels sorted and turned, its first 512 normed; both written to the caches.

    An index of -1 writes nothing. What is written twice, and outputs that were not asked for, hold NaN.
    """
    plain, last = kv.float().split((LATENT_WIDTH, INTERLEAVED_WIDTH), -1)
    latent = plain * torch.rsqrt(plain.square().mean(-1, keepdim=True) + epsilon) * gamma.float()
    rope = sorted_and_turned(last, cos, sin)
    slots = index.flatten()
    if cache_mode == "Norm":
        length = ckv_cache.shape[2]
        need_values(-1, length - 1, "places in a request's cache, or -1", index=index)
        first = torch.arange(len(index))[:, None] * length
        slots = torch.where(index < 0, -1, first + index).flatten()
    tokens = ckv_cache.shape[0] * ckv_cache.shape[1] * ckv_cache.shape[2]
    need_values(-1, tokens - 1, "slots, or -1", index=slots)
    at, times = slots[slots >= 0].unique(return_counts=True)
    for new, cache in ((rope, k_cache), (latent, ckv_cache)):
        pages = _by_token(cache, nz=cache_mode == "PA_NZ")
        _put(pages, slots[slots >= 0], new.flatten(0, 2)[slots >= 0].to(cache.dtype).reshape(-1, *pages.shape[2:]))
        if (times > 1).any():
            _put(pages, at[times > 1], torch.nan)
    outputs = (rope.to(kv.dtype), latent.to(kv.dtype))
    if is_output_kv and cache_mode != "Norm":
        return outputs
    return torch.full_like(outputs[0], torch.nan), torch.full_like(outputs[1], torch.nan)


def _by_token(cache: Tensor, nz: bool) -> Tensor:
    """A view whose first two axes are pages and tokens: tiled pages keep groups of channels outside the tokens."""
    if not nz:
        return cache.flatten(1, 2)
    blocks, size, _, width = cache.shape
    inner = _NZ_BYTES // cache.element_size()
    return cache.view(blocks, width // inner, size, inner).transpose(1, 2)
