"""The writers of key/value caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .check import ASCEND_910, ASCEND_950, OP, OT, HostCheck, enter

SCATTER = "attention/scatter_pa_kv_cache/op_host/op_api/aclnn_scatter_pa_kv_cache.cpp"
FUSED = "posembedding/kv_rms_norm_rope_cache/op_host"
HALVES = (torch.float16, torch.bfloat16)
NZ_BYTES = 32
"""Bytes of the last axis of a tiled cache."""


def _tiled(c: Any) -> bool:
    return c.cache_mode == "PA_NZ"


def _written(c: Any) -> tuple[tuple[Tensor, Tensor], ...]:
    return (c.key, c.key_cache), (c.value, c.value_cache)


def _slots(cache: Tensor, tiled: bool) -> int:
    return cache.shape[0] * cache.shape[-2 if tiled else 1]


enter(
    "npu_scatter_pa_kv_cache",
    HostCheck(
        "float16, bfloat16 or int8 keys and values",
        lambda c: {c.key.dtype, c.value.dtype} <= {*HALVES, torch.int8},
        f"{OT} v8.5.0 operator definition of scatter_pa_kv_cache, v9.1.0.pre {SCATTER} CheckDtypeValid",
        targets=ASCEND_910,
    ),
    HostCheck(
        "caches of the dtypes of what is written",
        lambda c: all(new.dtype == cache.dtype for new, cache in _written(c)),
        f"{OT} v8.5.0 {SCATTER} CheckDtypeValid",
    ),
    HostCheck(
        "keys and values of one dtype, but for mode PA_NZ",
        lambda c: _tiled(c) or c.key.dtype == c.value.dtype,
        f"{OT} v8.5.0 {SCATTER} CheckDtypeValid",
    ),
    HostCheck(
        "int32 or int64 slots",
        lambda c: c.slot_mapping.dtype in (torch.int32, torch.int64),
        f"{OT} v8.5.0 {SCATTER} CheckDtypeValid",
    ),
    HostCheck(
        "keys of three or four axes",
        lambda c: c.key.ndim in (3, 4),
        f"{OT} v8.5.0 {SCATTER}",
    ),
    HostCheck(
        "caches of [blocks, page, heads, width] in mode Norm",
        lambda c: _tiled(c) or all(cache.ndim == 4 and cache.shape[2:] == new.shape[-2:] for new, cache in _written(c)),
        f"{OT} v8.5.0 {SCATTER}",
    ),
    HostCheck(
        "no more tokens than the cache has slots",
        lambda c: _slots(c.key_cache, _tiled(c)) >= c.slot_mapping.numel(),
        f"{OT} v8.5.0 {SCATTER}",
    ),
    HostCheck(
        "tiles of 32 bytes, heads of whole tiles and pages of up to 65535 tokens in mode PA_NZ",
        lambda c: (
            not _tiled(c)
            or all(
                cache.shape[-1] * cache.element_size() == NZ_BYTES
                and new.shape[-1] * new.element_size() % NZ_BYTES == 0
                and cache.shape[-2] <= 65535
                for new, cache in _written(c)
            )
        ),
        f"{OT} v8.5.0 {SCATTER}",
    ),
)

MODES = ("Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")


def _needs_16(c: Any) -> bool:
    """Whether a page of the caches holds 16 tokens, or 32 of int8."""
    return c.cache_mode == "Norm" or c.ckv_cache.shape[1] % (32 if c.ckv_cache.dtype == torch.int8 else 16) == 0


def _is_scale(x: Tensor | None) -> bool:
    return x is not None and x.dtype == torch.float32


enter(
    "npu_kv_rmsnorm_rope_cache_v2",
    HostCheck(
        "kv of four axes, one head, without an empty axis",
        lambda c: c.kv.ndim == 4 and c.kv.numel() > 0 and c.kv.shape[1] in ((1,) if c.v is None else (1, 2, 4, 8)),
        f"{OP} KvRmsNormRopeCacheNpuOpApi.cpp; {OT} v8.5.0 {FUSED}",
    ),
    HostCheck(
        "gamma of one axis",
        lambda c: c.gamma.ndim == 1,
        f"{OT} v8.5.0 {FUSED}",
    ),
    HostCheck(
        "cosines of [rows, heads or 1, steps or 1, rope channels]",
        lambda c: c.cos.ndim == 4 and c.cos.shape[0] == c.kv.shape[0] and c.cos.shape[2] in (1, c.kv.shape[2]),
        f"{OT} v8.5.0 {FUSED}",
    ),
    HostCheck(
        "int64 places, one a token in the modes of pages",
        lambda c: (
            c.index.dtype == torch.int64
            and (c.cache_mode == "Norm" or "BLK" in c.cache_mode or c.index.numel() == c.kv.shape[0] * c.kv.shape[2])
        ),
        f"{OT} v8.5.0 {FUSED}",
    ),
    HostCheck(
        "one of its six cache modes: it reads another word as Norm",
        lambda c: c.cache_mode in MODES,
        f"{OP} KvRmsNormRopeCacheNpuOpApi.cpp",
    ),
    HostCheck(
        "rope keys of 64 and latents of 512",
        lambda c: c.v is not None or (c.cos.shape[-1], c.gamma.shape[0], c.kv.shape[-1]) == (64, 512, 576),
        f"{OT} v8.5.0 {FUSED}, ds tiling",
        targets=ASCEND_910,
    ),
    HostCheck(
        "pages in multiples of 16 tokens, of 32 for int8",
        _needs_16,
        f"{OT} v8.5.0 {FUSED}, ds tiling",
        targets=ASCEND_910,
    ),
    HostCheck(
        "an even number of rope channels, and a 16-bit kv whose dtype gamma, cosines and sines have",
        lambda c: (
            c.cos.shape[-1] % 2 == 0
            and c.kv.dtype in HALVES
            and {c.gamma.dtype, c.cos.dtype, c.sin.dtype} == {c.kv.dtype}
        ),
        f"{OT} v8.5.0 {FUSED}, regbase tiling",
        targets=ASCEND_950,
    ),
    HostCheck(
        "caches of kv's dtype, or of one byte with float32 scales",
        lambda c: all(
            cache.dtype == c.kv.dtype or (cache.element_size() == 1 and _is_scale(scale))
            for cache, scale in ((c.k_cache, c.k_rope_scale), (c.ckv_cache, c.c_kv_scale))
        ),
        f"{OT} v8.5.0 {FUSED}, regbase tiling",
        targets=ASCEND_950,
    ),
)
