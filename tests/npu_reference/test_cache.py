"""Cache writes against a plain loop over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import Draw
from tests.npu_reference.calls import as_fake, call, refused

SCATTER = "npu_scatter_pa_kv_cache"
BLOCKS, BLOCK, HEADS, K_WIDTH, V_WIDTH = 5, 16, 3, 32, 16


def valid(dtype: torch.dtype = torch.bfloat16, nz: bool = False) -> dict[str, Any]:
    draw = Draw(dtype, seed=1)
    arguments: dict[str, Any] = {"key": draw.normal(4, HEADS, K_WIDTH), "value": draw.normal(4, HEADS, V_WIDTH)}
    for name, width in (("key_cache", K_WIDTH), ("value_cache", V_WIDTH)):
        inner = 32 // torch.empty(0, dtype=dtype).element_size()
        shape = (BLOCKS, HEADS * width // inner, BLOCK, inner) if nz else (BLOCKS, BLOCK, HEADS, width)
        arguments[name] = draw.normal(*shape)
    # The last cell of a block, the first of the next, and the last of all.
    arguments["slot_mapping"] = torch.tensor([15, 16, 3, BLOCKS * BLOCK - 1], dtype=torch.int32)
    return arguments | ({} if nz else {"cache_mode": "Norm"})


def logical(cache: Tensor, nz: bool) -> Tensor:
    """[slots, channels]: channel c of an NZ cache lies in group c // inner, at c % inner."""
    if not nz:
        return cache.flatten(0, 1).flatten(1).clone()
    blocks, groups, size, inner = cache.shape
    flat = torch.empty(blocks * size, groups * inner, dtype=cache.dtype)
    for slot in range(len(flat)):
        for channel in range(groups * inner):
            flat[slot, channel] = cache[slot // size, channel // inner, slot % size, channel % inner]
    return flat


@pytest.mark.parametrize("nz", [False, True], ids=["Norm", "PA_NZ"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tokens_land_at_their_slots(dtype: torch.dtype, nz: bool) -> None:
    arguments = valid(dtype, nz)
    caches = [(arguments[name], logical(arguments[f"{name}_cache"], nz)) for name in ("key", "value")]
    for new, expected in caches:
        for token, slot in enumerate(arguments["slot_mapping"].tolist()):
            expected[slot] = new[token].flatten()
    assert as_fake(SCATTER, arguments) is None
    assert call(SCATTER, arguments) is None
    for name, (_, expected) in zip(("key_cache", "value_cache"), caches, strict=True):
        assert torch.equal(logical(arguments[name], nz), expected)


def test_a_slot_named_twice_is_undefined() -> None:
    arguments = valid() | {"slot_mapping": torch.tensor([7, 40, 7, 41])}
    call(SCATTER, arguments)
    flat = logical(arguments["key_cache"], nz=False)
    assert flat[7].isnan().all() and int(flat.isnan().any(1).sum()) == 1
    assert torch.equal(flat[41], arguments["key"][3].flatten())


def test_no_token_writes_nothing() -> None:
    arguments = valid()
    before = arguments["key_cache"].clone()
    call(SCATTER, arguments | {name: arguments[name][:0] for name in ("key", "value", "slot_mapping")})
    assert torch.equal(arguments["key_cache"], before)


def test_limits() -> None:
    good = valid()
    key, cache, slots = good["key"], good["key_cache"], good["slot_mapping"]
    refused(SCATTER, good | {"cache_mode": "PA_NZ"}, "as 'PA_NZ' wants")
    refused(SCATTER, {name: value for name, value in good.items() if name != "cache_mode"}, "as 'PA_NZ' wants")
    refused(SCATTER, good | {"cache_mode": "PA"}, "cache_mode is 'PA'")
    refused(SCATTER, good | {"key": key.float()}, "dtypes differ")
    refused(SCATTER, good | {"key": key.double()}, "float64")
    refused(SCATTER, good | {"key": key.transpose(1, 2)}, "not contiguous")
    refused(SCATTER, good | {"key_cache": cache.transpose(1, 2)}, "not contiguous")
    refused(SCATTER, good | {"key": key[None]}, "4-dimensional")
    refused(SCATTER, good | {"key_cache": cache.flatten(2)}, "3-dimensional")
    refused(SCATTER, good | {"key": key[:3]}, "tokens and heads differ")
    refused(SCATTER, good | {"key_cache": cache[..., :16].contiguous()}, "as cache_mode 'Norm' wants")
    refused(SCATTER, good | {"key_cache": cache[:4]}, "blocks or their sizes differ")
    refused(SCATTER, good | {"slot_mapping": slots[:3]}, "one slot a token")
    refused(SCATTER, good | {"slot_mapping": slots.short()}, "int16")
    refused(SCATTER, good | {"slot_mapping": slots - 4}, "negative ones are not skipped")
    refused(SCATTER, good | {"slot_mapping": slots + 1}, "holds values from 4 to 80")
    refused(SCATTER, good | {"seq_lens": slots}, "seq_lens")
    odd = valid(nz=True)
    refused(SCATTER, odd | {"key": odd["key"][..., :5].contiguous()}, "multiple of 16")
