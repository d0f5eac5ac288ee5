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

_CACHED = (
    torch.float16, torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32,
    torch.uint32, torch.float8_e5m2, torch.float8_e4m3fn,
)  # fmt: skip
_NZ_BYTES = 32
"""Bytes of the innermost axis of an NZ cache."""


def _scatter_pa_like(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    compress_lens: Tensor | None, compress_seq_offsets: Tensor | None, seq_lens: Tensor | None, cache_mode: str | None,
) -> None:  # fmt: skip
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
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    compress_lens: Tensor | None, compress_seq_offsets: Tensor | None, seq_lens: Tensor | None, cache_mode: str | None,
) -> None:  # fmt: skip
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
