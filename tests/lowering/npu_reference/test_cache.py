"""Cache writes against a plain loop over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowering
from tests.cases import Draw
from tests.lowering.npu_reference.calls import as_fake, assert_like, assert_rounded_once, call, refused

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
    with lowering.use(target="ascend950" if dtype == torch.float32 else "ascend910b"):
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


NORM_ROPE = "npu_kv_rmsnorm_rope_cache_v2"
MODES = ("Norm", "PA", "PA_BNSD", "PA_NZ")


def normed(mode: str = "PA_BNSD", dtype: torch.dtype = torch.bfloat16, steps: int = 2, **more: Any) -> dict[str, Any]:
    """3 requests of `steps` tokens into caches that hold something already; the second token is skipped."""
    draw = Draw(dtype, seed=3)
    turn = draw.uniform(-3, 3, 3, 1, steps, 32).repeat(1, 1, 1, 2)
    lead = (3, 1, 40) if mode == "Norm" else (BLOCKS, BLOCK, 1)
    slots = torch.tensor([15, -1, 16, 3, BLOCKS * BLOCK - 1, 0])[: 3 * steps]
    index = torch.tensor([[39, -1], [0, 7], [5, 39]])[:, :steps].contiguous() if mode == "Norm" else slots
    return {
        "kv": draw.normal(3, 1, steps, 576), "gamma": draw.normal(512), "cos": turn.cos().to(dtype),
        "sin": turn.sin().to(dtype), "index": index, "k_cache": draw.normal(*lead, 64),
        "ckv_cache": draw.normal(*lead, 512), "epsilon": 0.3, "cache_mode": mode, "is_output_kv": True, **more,
    }  # fmt: skip


def by_hand(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(rope keys, latents) in float64: pairs as complex numbers, their first members before the second ones."""
    kv, cos, sin = (arguments[name].double() for name in ("kv", "cos", "sin"))
    latent = kv[..., :512] / (kv[..., :512].square().mean(-1, keepdim=True) + 0.3).sqrt()
    z = torch.complex(kv[..., 512::2], kv[..., 513::2]) * torch.complex(cos[..., :32], sin[..., :32])
    return torch.cat((z.real, z.imag), -1), latent * arguments["gamma"].double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_latents_are_normed_and_rope_keys_turned(mode: str, dtype: torch.dtype) -> None:
    arguments = normed(mode, dtype)
    caches = [arguments[name] for name in ("k_cache", "ckv_cache")]
    widths = [(cache.shape[-1] // 16, BLOCK, 16) for cache in caches]
    tiled = [cache.view(BLOCKS, *tiles) for cache, tiles in zip(caches, widths, strict=True)] if mode == "PA_NZ" else []
    before = [logical(cache, nz=mode == "PA_NZ") for cache in tiled or caches]
    assert_like(NORM_ROPE, normed(mode, dtype))
    outputs = call(NORM_ROPE, arguments)
    slots = arguments["index"].clone()
    if mode == "Norm":
        slots = torch.where(slots < 0, -1, slots + 40 * torch.arange(3)[:, None])
    for found, cache, old, exact in zip(outputs, tiled or caches, before, by_hand(arguments), strict=True):
        after = logical(cache, nz=mode == "PA_NZ") if mode != "Norm" else cache.flatten(0, 2).clone()
        old = old if mode != "Norm" else old.reshape(after.shape)
        written = [slot for slot in slots.flatten().tolist() if slot >= 0]
        tokens = [at for at, slot in enumerate(slots.flatten().tolist()) if slot >= 0]
        assert_rounded_once(after[written], exact.flatten(0, 2)[tokens])
        untouched = [slot for slot in range(len(after)) if slot not in written]
        assert torch.equal(after[untouched], old[untouched])
        if mode == "Norm":
            assert found.isnan().all()
        else:
            assert_rounded_once(found, exact)


def test_outputs_nobody_asked_for_are_undefined() -> None:
    assert all(x.isnan().all() for x in call(NORM_ROPE, normed(is_output_kv=False)))


def test_a_place_named_twice_is_undefined() -> None:
    arguments = normed(index=torch.tensor([7, 40, 7, -1, -1, 41]))
    call(NORM_ROPE, arguments)
    for name in ("k_cache", "ckv_cache"):
        flat = logical(arguments[name], nz=False)
        assert flat[7].isnan().all() and int(flat.isnan().any(1).sum()) == 1


def test_one_cosine_serves_all_steps() -> None:
    once = normed()
    once |= {name: once[name][:, :, :1].contiguous() for name in ("cos", "sin")}
    repeated = normed() | {name: once[name].expand(3, 1, 2, 64).contiguous() for name in ("cos", "sin")}
    assert all(torch.equal(x, y) for x, y in zip(call(NORM_ROPE, once), call(NORM_ROPE, repeated), strict=True))


def test_limits_of_the_fused_write() -> None:
    good = normed()
    call(NORM_ROPE, normed())
    refused(NORM_ROPE, good | {"cache_mode": "PA_BLK_NZ"}, "cache_mode is 'PA_BLK_NZ'")
    refused(NORM_ROPE, good | {"kv": good["kv"].float()}, "x is torch.float32|kv")
    refused(NORM_ROPE, good | {"gamma": good["gamma"].float()}, "dtypes differ")
    refused(NORM_ROPE, good | {"ckv_cache": good["ckv_cache"].half()}, "dtypes differ")
    refused(NORM_ROPE, good | {"index": good["index"].int()}, "index is torch.int32")
    refused(NORM_ROPE, good | {"index": good["index"][:5]}, "one a token")
    refused(NORM_ROPE, good | {"index": good["index"] + 1}, "slots, or -1")
    refused(NORM_ROPE, good | {"index": good["index"] - 4}, "slots, or -1")
    refused(NORM_ROPE, good | {"index": good["index"].repeat(2)[::2]}, "not contiguous")
    refused(NORM_ROPE, normed("Norm") | {"index": normed("Norm")["index"] + 1}, "places in a request's cache")
    refused(NORM_ROPE, good | {"kv": good["kv"].transpose(0, 2)}, "not contiguous")
    refused(NORM_ROPE, good | {"kv": good["kv"][..., :575].contiguous()}, "575 wide; expected 512 [+] 64")
    refused(NORM_ROPE, good | {"kv": good["kv"].repeat(1, 2, 1, 1)}, "its heads are one")
    refused(NORM_ROPE, good | {"gamma": good["gamma"][:256]}, "the latent's width")
    refused(NORM_ROPE, good | {"cos": good["cos"][..., :32].contiguous()}, "equal shapes")
    refused(NORM_ROPE, good | {"k_cache": good["k_cache"][:4]}, "as ckv_cache, 64 wide")
    refused(NORM_ROPE, good | {"k_cache": good["ckv_cache"], "ckv_cache": good["k_cache"]}, "512 wide")
    refused(NORM_ROPE, good | {"ckv_cache": good["ckv_cache"].repeat(1, 1, 1, 2)[..., ::2]}, "not contiguous")
    refused(NORM_ROPE, normed("Norm") | {"cache_mode": "PA"}, "its heads are one")
    refused(NORM_ROPE, good | {"cache_mode": "Norm"}, "its heads are one")
    wide = {name: cache[:2] for name, cache in normed("Norm").items() if name.endswith("cache")}
    refused(NORM_ROPE, normed("Norm") | wide, "expected 3 requests")
    refused(NORM_ROPE, good | {"k_rope_scale": torch.ones(64)}, "k_rope_scale")
    empty = {name: good[name][:0] for name in ("kv", "cos", "sin", "index")}
    refused(NORM_ROPE, good | empty, "does not take empty tensors")
    with lowering.use(target="ascend950"):
        call(NORM_ROPE, normed())
