"""The writing of latents on Ascend: what its kernels refuse, and that both layouts hold the same vectors afterwards.

That the kernels write what their ops say is shown case by case in `test_kernels`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowering
from lowering import OPS, LoweringError, Policy, npu_reference
from lowering.layouts import NdPages, NzPages, Pages

from .test_refusals import Change, arguments, but, shaped, to, why

WRITE, NORMED = "write_latents", "latent_norm_rope_write"
SCATTER, FUSED, COMPOSED = "npu_scatter_pa_kv_cache", "npu_kv_rmsnorm_rope_cache_v2", "npu_rms_norm_rope_scatter"
PLAIN, TILED, SMALL = "512_64_nd_128", "512_64_nz_128", "12_5_nd_3"
F16, F32 = torch.float16, torch.float32


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    npu_reference.load()


def tiled(part: str) -> Change:
    """With one of the pools in tiles."""
    empty, width = NzPages.empty, {"latent": 512, "rope": 64}[part]
    return but(**{f"pages__{part}": empty(4, 128, width, torch.bfloat16, torch.device("meta"))})


def paged(size: int) -> Change:
    """With pages of another size."""
    made = (NdPages.empty(4, size, width, torch.bfloat16, torch.device("meta")) for width in (512, 64))
    return but(**dict(zip(("pages__latent", "pages__rope"), made, strict=True)))


LAYOUT = "takes latents and rope keys in one layout"
REFUSALS: list[tuple[str, str, str, Change, str]] = [
    (WRITE, SCATTER, PLAIN, but(pages__rope=None, new__rope=None),
     "writes two caches at once; this call has latents alone"),
    (WRITE, SCATTER, PLAIN, tiled("latent"), LAYOUT),
    (WRITE, SCATTER, TILED, to(F32, "pages.latent.values", "pages.rope.values"),
     "takes float16, bfloat16; latent_pages is float32"),
    (WRITE, SCATTER, PLAIN, to(F16, "pages.rope.values"),
     "takes one dtype; found latent_pages bfloat16, rope_pages float16"),
    (WRITE, SCATTER, PLAIN, to(F32, "pages.latent.values", "pages.rope.values"),
     "takes float16, bfloat16; latent_pages is float32"),
    (WRITE, SCATTER, PLAIN, shaped(slots=(513,)), "takes at most 512 tokens; this call has 513"),
    (NORMED, FUSED, PLAIN, paged(24), "takes pages in multiples of 16 tokens; found 24"),
    (WRITE, SCATTER, PLAIN, shaped(new__latent=(0, 512)), "takes no empty tensor; latent is [0, 512]"),
    (NORMED, FUSED, PLAIN, but(pages__rope=None), "turns a rope key and writes it; this call has none to turn"),
    (NORMED, FUSED, PLAIN, but(cos=None, sin=None), "turns a rope key and writes it; this call has none to turn"),
    (NORMED, FUSED, PLAIN, shaped(weight=(500,)),
     "takes latents of 512 and rope keys of 64; this call has 500 and 76"),
    (NORMED, FUSED, PLAIN, shaped(cos=(6, 30)), "turns whole rope keys of 64 channels; this call turns 60"),
    (NORMED, FUSED, PLAIN, to(F16, "weight"),
     "takes one dtype; found kv bfloat16, weight float16, latent_pages bfloat16, rope_pages bfloat16"),
    (NORMED, FUSED, PLAIN, tiled("rope"), LAYOUT),
    (NORMED, FUSED, PLAIN, shaped(kv=(0, 576)), "takes no empty tensor; kv is [0, 576]"),
    (NORMED, COMPOSED, PLAIN, to(torch.float64, "kv"), "takes float16, bfloat16, float32; kv is float64"),
    (NORMED, COMPOSED, PLAIN, shaped(kv=(0, 576)), "takes no empty tensor; kv is [0, 576]"),
    (NORMED, COMPOSED, PLAIN, but(pages__rope=None), "writes two caches at once; this call has latents alone"),
    (NORMED, COMPOSED, PLAIN, tiled("rope"), LAYOUT),
    ("rotary_interleaved", "npu_interleave_rope", "full",
     lambda given: given, "turns whole heads of 64 channels; this call turns 16 of 16"),
    ("rotary_interleaved", "npu_interleave_rope", "latent", to(F32, "x"), "takes float16, bfloat16; x is float32"),
    ("rotary_interleaved", "npu_interleave_rope", "latent", shaped(x=(0, 16, 64)),
     "takes no empty tensor; x is [0, 16, 64]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "kernel", "case", "change", "sentence"), REFUSALS, ids=[f"{one[1]}-{one[4][:50]}" for one in REFUSALS]
)
def test_refusals(op: str, kernel: str, case: str, change: Change, sentence: str) -> None:
    assert why(op, kernel, change(arguments(op, case))) == sentence


def test_ascend_950_takes_float32_caches_and_pages_of_any_size() -> None:
    whole = to(F32, "pages.latent.values", "pages.rope.values")(arguments(WRITE, PLAIN))
    assert why(WRITE, SCATTER, whole, "ascend950") is None
    assert why(NORMED, FUSED, paged(24)(arguments(NORMED, PLAIN)), "ascend950") is None


def test_what_does_not_fit_the_fused_operator_is_composed() -> None:
    for case, kernel in ((PLAIN, FUSED), (TILED, FUSED), ("32_16_nz_3", COMPOSED)):
        given = arguments(NORMED, case)
        eps = given.pop("eps")
        assert OPS[NORMED].explain(*given.values(), eps=eps, target="ascend910b").kernel.name == kernel


@pytest.mark.parametrize("kernel", [FUSED, COMPOSED])
def test_both_layouts_hold_the_same_bits(kernel: str) -> None:
    held: list[list[Tensor]] = []
    for case in (PLAIN, TILED):
        given = arguments(NORMED, PLAIN) | {"pages": arguments(NORMED, case)["pages"]}
        with lowering.use(Policy({NORMED: kernel}), target="ascend910b"):
            pages, new = run(NORMED, given)
        held.append([*(pool.read(given["slots"]) for pool in (pages.latent, pages.rope)), new.latent, new.rope])
    assert all(torch.equal(one, other) for one, other in zip(*held, strict=True))
    assert torch.equal(held[0][0], held[0][2]) and torch.equal(held[0][1], held[0][3])


def run(op: str, given: dict[str, Any]) -> Any:
    eps = {"eps": given.pop("eps")} if "eps" in given else {}
    return OPS[op](*given.values(), **eps)


@pytest.mark.parametrize(("op", "kernel"), [(WRITE, SCATTER), (NORMED, FUSED), (NORMED, COMPOSED)])
def test_a_strided_pool_is_an_error(op: str, kernel: str) -> None:
    """A write to a copy of it would be lost."""
    given = arguments(op, PLAIN)
    given = but(pages__latent=every_second(given["pages"].latent))(given)
    with lowering.use(Policy({op: kernel}), target="ascend910b"), pytest.raises(LoweringError, match="be lost"):
        run(op, given)


def every_second(pages: Pages) -> Pages:
    wide = pages.values.repeat_interleave(2, -1)[..., ::2]
    assert not wide.is_contiguous()
    return NdPages(wide)
