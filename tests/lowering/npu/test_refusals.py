"""What the Ascend kernels refuse, sentence by sentence, from shapes, dtypes and the target alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import funcmodels as fm
import lowering
from lowering import OPS, LoweringError, Policy, npu_reference, ops
from lowering.kernel import FUSED, REFERENCE
from lowering.npu.features import missing
from lowering.target import ASCEND, Target, named
from params import tree
from params.tree import tree_map
from tests import tiny
from tests.cases import CASES, Case, cases_of
from tests.each import each

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Change = Callable[[dict[str, Any]], dict[str, Any]]


def arguments(op: str, case: str, dtype: torch.dtype = BF16) -> dict[str, Any]:
    """The arguments of a case by name."""
    (found,) = [one for one in cases_of(op) if one.name == case]
    args, kwargs = found.arguments(dtype)
    return dict(zip(OPS[op].signature.parameters, args, strict=False)) | kwargs


def why(op: str, kernel: str, given: dict[str, Any], target: str | Target = "ascend910b") -> str | None:
    """The reason for which a kernel asked for by name refuses a call; None when it takes it. Nothing is computed."""
    args, kwargs = split(op, given)
    with lowering.use(Policy({op: kernel})):
        try:
            OPS[op].explain(*args, target=target, **kwargs)
        except LoweringError as error:
            return str(error).splitlines()[1].strip().removeprefix(f"{kernel}: ")
    return None


def split(op: str, given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments."""
    parameters = OPS[op].signature.parameters
    named = {k for k in given if parameters[k].kind is parameters[k].KEYWORD_ONLY}
    return [v for k, v in given.items() if k not in named], {k: v for k, v in given.items() if k in named}


def to(dtype: torch.dtype, *paths: str) -> Change:
    return lambda given: reduce(lambda now, path: tree.put(now, path, tree.at(now, path).to(dtype)), paths, given)


def shaped(**shapes: tuple[int, ...]) -> Change:
    """With arguments, or their parts, of other shapes, of their own dtypes; `rows__lengths` are the rows' lengths."""

    def change(given: dict[str, Any]) -> dict[str, Any]:
        old = {name: tree.at(given, name.replace("__", ".")) for name in shapes}
        return but(**{k: torch.empty(shapes[k], dtype=x.dtype, device="meta") for k, x in old.items()})(given)

    return change


def but(**values: Any) -> Change:
    """With other arguments, or parts of them."""

    def change(given: dict[str, Any]) -> dict[str, Any]:
        for name, value in values.items():
            path = name.replace("__", ".")
            given = given | {path: value} if "." not in path else tree.put(given, path, value)
        return given

    return change


def upper_bounds(given: dict[str, Any]) -> dict[str, Any]:
    return but(rows__host=replace(given["rows"].host, exact=False))(given)


def pool(pages: int, page_size: int = 128, kv_heads: int = 2, dim: int = 256) -> Change:
    shape = (pages, page_size, kv_heads, dim)
    return shaped(k_pages=shape, v_pages=shape)


RAGGED, SEVERAL = "ragged_pages_of_128_256", "ragged_pages_of_128_128"
PAGED, FIA, TND = "paged_attention", "npu_fia_bsnd", "npu_fia_tnd"
BLOCK = "block_attention"
RULE, STEPS, CHUNK = "gated_delta_rule", "npu_recurrent_gated_delta_rule", "npu_chunk_gated_delta_rule"
CONV, POST, TOP = "npu_fused_causal_conv1d", "npu_mhc_post", "npu_top_k_top_p"
SHORT, LONG = "verify_2_4_128_bf16_window", "ragged_2_4_128_bf16_window"
LONGER = "two_chunks_and_tail_2_4_128_bf16_window"
MOE = "npu_grouped_experts"

TOPK, INDEX = "index_scores_topk", "ragged_4x128"
REFUSALS: list[tuple[str, str, str, Change, str]] = [
    ("rms_norm", "npu_rms_norm", "hidden", to(F64, "x", "weight"), "takes float16, bfloat16, float32; x is float64"),
    ("rms_norm", "npu_rms_norm", "hidden", to(F32, "weight"), "takes one dtype; found x bfloat16, weight float32"),
    ("rms_norm", "npu_rms_norm", "hidden", shaped(x=(1024,)), "takes 2 to 8 axes; x has 1"),
    ("rms_norm", "npu_rms_norm", "hidden", shaped(x=(1,) * 8 + (1024,)), "takes 2 to 8 axes; x has 9"),
    ("rms_norm", "npu_rms_norm", "hidden", shaped(x=(0, 1024)), "takes no empty tensor; x is [0, 1024]"),
    ("rms_norm_rstd", "npu_rms_norm", "hidden", to(F32, "x"), "takes one dtype; found x float32, weight bfloat16"),
    ("add_rms_norm", "npu_add_rms_norm", "hidden", to(F32, "residual"),
     "takes one dtype; found x bfloat16, residual float32, weight bfloat16"),
    ("gemma_rms_norm", "npu_gemma_rms_norm", "hidden", shaped(x=(0, 1024)), "takes no empty tensor; x is [0, 1024]"),
    ("gemma_rms_norm_rstd", "npu_gemma_rms_norm", "hidden", to(F32, "weight"),
     "takes one dtype; found x bfloat16, weight float32"),
    ("gemma_rms_norm", "npu_rms_norm_1p", "hidden", to(F64, "x"), "takes float16, bfloat16, float32; x is float64"),
    ("gemma_rms_norm_rstd", "npu_rms_norm_1p", "hidden", shaped(x=(1024,)), "takes 2 to 8 axes; x has 1"),
    ("add_gemma_rms_norm", "npu_add_gemma_rms_norm", "hidden", to(F32, "weight"),
     "takes one dtype; found x bfloat16, residual bfloat16, weight float32"),
    ("add_gemma_rms_norm", "npu_add_rms_norm_1p", "hidden", to(F16, "residual"),
     "takes one dtype; found x bfloat16, residual float16"),
    ("gated_rms_norm", "npu_rms_norm_gated", "heads_silu", to(F64, "gate"),
     "takes float16, bfloat16, float32; gate is float64"),
    ("gated_rms_norm_fp32", "npu_rms_norm_gated_fp32", "heads_silu", to(F64, "x"),
     "takes float16, bfloat16, float32; x is float64"),
    ("l2_norm", "npu_rms_norm_l2", "heads", shaped(x=(128,)), "takes 2 to 8 axes; x has 1"),
    ("swiglu", "npu_swiglu", "mlp", shaped(gate_up=(1,) * 8 + (4,)), "takes 1 to 8 axes; gate_up has 9"),
    ("swiglu", "npu_swiglu", "mlp", shaped(gate_up=(4, 7)), "halves the last axis; gate_up has 7"),
    ("swiglu", "npu_swiglu", "mlp", shaped(gate_up=(0, 8)), "takes no empty tensor; gate_up is [0, 8]"),
    ("geglu", "npu_geglu", "mlp", shaped(gate_up=(4, 7)), "halves the last axis; gate_up has 7"),
    ("geglu", "npu_geglu", "mlp", to(F64, "gate_up"), "takes float16, bfloat16, float32; gate_up is float64"),
    ("rotary", "npu_rotary_mul", "full", to(F32, "k"), "takes one dtype; found q bfloat16, k float32"),
    ("rotary", "npu_rotary_mul", "full", shaped(q=(3, 1000, 16)), "takes at most 999 heads; this call has 1000"),
    ("rotary", "npu_rotary_mul", "full", shaped(q=(3, 4, 900), k=(3, 4, 900), cos=(3, 449), sin=(3, 449)),
     "takes at most 896 channels; this call has 898"),
    ("rotary_interleaved", "npu_rotary_mul", "full", shaped(x=(3, 0, 16)), "takes no empty tensor; x is [3, 0, 16]"),
    ("route_grouped", "npu_moe_gating_top_k", "v2", but(top_k=61),
     "takes as many choices as the kept groups have experts at most; this call has 61"),
    ("route_grouped", "npu_moe_gating_top_k", "v2", shaped(logits=(7, 2080)),
     "takes at most 2048 experts, groups filled up to multiples of 32; this call has 2080"),
    ("route_grouped", "npu_moe_gating_top_k", "lite", to(F64, "logits"),
     "takes float16, bfloat16, float32; logits is float64"),
    ("route_grouped", "npu_moe_gating_top_k", "lite", shaped(logits=(0, 64)),
     "takes no empty tensor; logits is [0, 64]"),
    ("route_sigmoid", "npu_moe_gating_top_k", "groups", but(renormalise=False),
     "renormalises over those chosen; this call does not"),
    ("route_sigmoid", "npu_moe_gating_top_k", "groups", to(F32, "bias"),
     "takes one dtype; found logits bfloat16, bias float32"),
    ("route_sigmoid", "npu_moe_gating_top_k", "groups", but(groups=40),
     "takes groups of 2 experts or more; this call has 1"),
    ("route_softmax", "npu_moe_gating_top_k", "wide", shaped(logits=(5, 2049)),
     "takes at most 2048 experts; this call has 2049"),
    (RULE, CHUNK, LONG, shaped(decay=(21, 4, 128)), "takes one decay a head; this call has one a channel"),
    (PAGED, TND, "decode_pages_of_128_128", lambda given: upper_bounds(but(window=384)(given)),
     "needs exact row lengths on the host, and only an upper bound is known: read the accepted counts first"),
    (PAGED, FIA, RAGGED, upper_bounds,
     "needs exact row lengths on the host, and only an upper bound is known: read the accepted counts first"),
    (PAGED, FIA, RAGGED, shaped(v_pages=(9, 128, 2, 128)),
     "takes keys and values of one size; this call has 256 and 128"),
    (PAGED, FIA, RAGGED, pool(9, kv_heads=3),
     "takes query heads in multiples of kv_heads, up to 64 times; this call has 4 and 3"),
    (PAGED, FIA, RAGGED, lambda given: pool(9, kv_heads=1)(shaped(q=(21, 65, 256))(given)),
     "takes query heads in multiples of kv_heads, up to 64 times; this call has 65 and 1"),
    (PAGED, FIA, RAGGED, lambda given: pool(9, dim=24)(shaped(q=(21, 4, 24))(given)),
     "takes a head_dim in multiples of 16; this call has 24"),
    (PAGED, FIA, RAGGED, lambda given: pool(9, dim=528)(shaped(q=(21, 4, 528))(given)),
     "takes at most 512 head_dim; this call has 528"),
    (PAGED, FIA, RAGGED, lambda given: pool(9, kv_heads=64)(shaped(q=(21, 256, 256))(given)),
     "takes heads * head_dim below 65535; this call has 65536"),
    (PAGED, FIA, RAGGED, lambda given: pool(9, kv_heads=257, dim=16)(shaped(q=(21, 257, 16))(given)),
     "takes at most 256 heads; this call has 257"),
    (PAGED, FIA, RAGGED, pool(9, page_size=24), "takes pages of 16 to 1024 tokens in steps of 16; found 24"),
    (PAGED, TND, RAGGED, pool(9, page_size=640), "takes pages of 16 to 512 tokens in steps of 16; found 640"),
    (PAGED, FIA, RAGGED, pool(2**15),
     "takes pools of fewer than 2**31 elements; this one has 2147483648: make fewer pages"),
    (PAGED, FIA, RAGGED, to(F32, "q", "k_pages", "v_pages"), "takes float16, bfloat16; q is float32"),
    (PAGED, FIA, RAGGED, to(F16, "q"), "takes one dtype; found q float16, k_pages bfloat16, v_pages bfloat16"),
    (PAGED, TND, SEVERAL, shaped(rows__query_start=(4097,)), "takes at most 4095 rows; this call has 4096"),
    (PAGED, TND, RAGGED, lambda given: pool(9, dim=272)(shaped(q=(21, 4, 272))(given)),
     "layout TND takes keys and values of one width up to 256, in 16s; this call has 272 and 272"),
    (PAGED, TND, SEVERAL, upper_bounds,
     "needs exact row lengths on the host, and only an upper bound is known: read the accepted counts first"),
    (PAGED, TND, SEVERAL, shaped(q=(2**20 + 1, 4, 128)), "takes at most 1048576 tokens; this call has 1048577"),
    ("attention", "npu_fia_dense", "ragged_8_2_256", lambda given: given,
     "needs each row's length on the host, and without a state only a uniform batch tells it"),
    ("attention", "npu_fia_dense", "uniform_8_2_256", to(F32, "q", "k", "v"), "takes float16, bfloat16; q is float32"),
    ("attention", "npu_fia_dense", "uniform_3_1_24_16", lambda given: given,
     "takes keys and values of one size; this call has 24 and 16"),
    ("write_pages", "npu_scatter_pa_kv_cache", "scattered", to(F32, "k_pages", "v_pages"),
     "takes float16, bfloat16; k_pages is float32"),
    ("write_pages", "npu_scatter_pa_kv_cache", "scattered", shaped(slots=(13,)),
     "takes at most 12 tokens; this call has 13"),
    ("write_pages", "npu_scatter_pa_kv_cache", "scattered", shaped(k=(0, 2, 8), v=(0, 2, 5), slots=(0,)),
     "takes no empty tensor; k is [0, 2, 8]"),
    (RULE, STEPS, SHORT, but(state=None), "continues a state; this call has none"),
    (RULE, STEPS, LONGER, lambda given: given,
     "takes at most 16 tokens a row; this call has 130"),
    (RULE, STEPS, SHORT, to(F32, "state"),
     "takes a bfloat16 state, and this one is float32: init_state(recurrent_dtype=torch.bfloat16) makes one"),
    (RULE, STEPS, SHORT, to(F16, "q", "k", "v"), "takes bfloat16; q is float16"),
    (RULE, STEPS, SHORT, shaped(q=(12, 2, 520), k=(12, 2, 520), state=(4, 4, 128, 520)),
     "takes at most 512 k_dim; this call has 520"),
    (RULE, STEPS, SHORT, shaped(v=(12, 258, 128), decay=(12, 258), beta=(12, 258), state=(4, 258, 128, 128)),
     "takes at most 256 v_heads; this call has 258"),
    (RULE, CHUNK, LONG, but(keep_steps=True), "keeps no steps"),
    (RULE, CHUNK, LONG, shaped(v=(21, 4, 144), state=(5, 4, 144, 128)),
     "takes at most 128 v_dim; this call has 144"),
    (RULE, CHUNK, LONG, shaped(v=(21, 3, 128), decay=(21, 3), beta=(21, 3), state=(5, 3, 128, 128)),
     "takes v_heads in multiples of k_heads; this call has 3 and 2"),
    (RULE, CHUNK, LONG, shaped(v=(21, 66, 128), decay=(21, 66), beta=(21, 66), state=(5, 66, 128, 128)),
     "takes at most 64 v_heads; this call has 66"),
    (RULE, CHUNK, LONG, to(F32, "state"),
     "takes a bfloat16 state, and this one is float32: init_state(recurrent_dtype=torch.bfloat16) makes one"),
    ("hyper_inject", POST, "four", lambda given: given,
     "takes widths in multiples of 128 below 100000; this call has 24"),
    ("keep_top", TOP, "p", lambda given: given,
     "takes a k wherever there is a p; this call has rows with p alone"),
    ("keep_top", TOP, "k", but(largest_k=1025), "takes at most 1024 k; this call has 1025"),
    ("draw", TOP, "k", to(F64, "logits"), "takes float16, bfloat16, float32; logits is float64"),
    ("route_softmax", "npu_moe_gating_top_k_softmax_v2", "wide", shaped(logits=(0, 128)),
     "takes no empty tensor; logits is [0, 128]"),
    ("route_softmax", "npu_moe_gating_top_k_softmax_v2", "wide",
     lambda given: shaped(logits=(5, 2048))(given) | {"top_k": 1025}, "takes at most 1024 top_k; this call has 1025"),
    ("experts", MOE, "tiny", to(F32, "weights"),
     "takes one dtype; found x bfloat16, weights float32, gate_up bfloat16, down bfloat16"),
    ("experts", MOE, "empty", lambda given: given, "takes no empty tensor; x is [0, 24]"),
    ("experts", MOE, "tiny", shaped(gate_up=(1, 32, 32), down=(1, 32, 16)),
     "takes 2 to 1024 experts; this call has 1"),
    ("experts", MOE, "tiny", shaped(gate_up=(8, 65536, 32), down=(8, 32, 32768)),
     "takes at most 65535 twice_inner; this call has 65536"),
    ("experts", MOE, "tiny", shaped(ids=(6, 513), weights=(6, 513)), "takes at most 512 choices; this call has 513"),
    (TOPK, "npu_lightning_indexer", "ragged_3x8", lambda given: given, "takes an index_dim of 128; this call has 8"),
    (TOPK, "npu_lightning_indexer", INDEX, shaped(index_pages=(9, 8, 128)),
     "takes pages of block keys in multiples of 16, up to 1024; this call has 8 a page: "
     "make page_size a multiple of 64"),
    (TOPK, "npu_lightning_indexer", INDEX, but(top_k=2049),
     "takes a top_k of 1 to 2048, or up to 8192 in steps of 1024; this call has 2049"),
    (TOPK, "npu_lightning_indexer", INDEX, shaped(q=(21, 65, 128)), "takes at most 64 index_heads; this call has 65"),
    (TOPK, "npu_lightning_indexer", INDEX, to(F32, "q", "index_pages"), "takes float16, bfloat16; q is float32"),
    (TOPK, "npu_lightning_indexer", INDEX, to(F16, "q"), "takes one dtype; found q float16, index_pages bfloat16"),
    (BLOCK, "npu_fia_block", "block_256", upper_bounds,
     "needs exact row lengths on the host, and only an upper bound is known: read the accepted counts first"),
    (BLOCK, "npu_fia_block", "block_256", pool(9, 24),
     "takes pages of 16 to 1024 tokens in steps of 16; found 24"),
    (BLOCK, "npu_fia_block", "decode_256", lambda given: given | {"window": 4},
     "for one query a row the operator is documented to ignore a window"),
    ("sparse_attention", "npu_gather_fia", "ragged_6_2_16", to(F32, "q", "k_pages", "v_pages"),
     "takes float16, bfloat16; q is float32"),
    ("sparse_attention", "npu_gather_fia", "ragged_4_1_8_12", lambda given: given,
     "takes keys and values of one size; this call has 8 and 12"),
    ("sparse_attention", "npu_gather_fia", "ragged_6_2_16", shaped(selected=(21, 0)),
     "takes no empty tensor; selected is [21, 0]"),
]  # fmt: skip

IGNORED = "for one query a row the operator is documented to ignore a window, and layout TND takes no other mask"
BEFORE_9: list[tuple[str, str, str, Change, str]] = [
    (PAGED, TND, "decode_pages_of_128_128", but(window=3), IGNORED),
    (PAGED, FIA, RAGGED, pool(9, page_size=64), "takes pages of 128 to 512 tokens in steps of 128; found 64"),
    (PAGED, FIA, "decode_pages_of_128_256", pool(9, page_size=640),
     "takes pages of 16 to 512 tokens in steps of 16; found 640"),
    (PAGED, TND, RAGGED, lambda given: given,
     "layout TND takes keys and values of 64 or 128 before CANN 9.0.0; this call has 256 and 256"),
    (PAGED, TND, SEVERAL, to(F16, "q", "k_pages", "v_pages"),
     "layout TND takes bfloat16 before CANN 9.0.0; q is float16"),
    (TOPK, "npu_lightning_indexer", INDEX, but(top_k=3072),
     "takes a top_k of 1 to 2048 before CANN 9.0.0; this call has 3072"),
]  # fmt: skip

ON_950: list[tuple[str, str, str, Change, str]] = [
    ("rotary", "npu_rotary_mul", "full", shaped(q=(3, 4, 1026), k=(3, 4, 1026), cos=(3, 513), sin=(3, 513)),
     "takes at most 1024 channels; this call has 1026"),
    ("rotary", "npu_apply_rotary_pos_emb", "awkward", lambda given: given, "takes an even head_dim; this call has 13"),
    ("rotary", "npu_apply_rotary_pos_emb", "full", shaped(q=(3, 4, 1026), k=(3, 4, 1026)),
     "takes at most 1024 head_dim; this call has 1026"),
    ("rotary_interleaved", "npu_apply_rotary_pos_emb", "full", to(F64, "x"),
     "takes float16, bfloat16, float32; x is float64"),
    ("short_conv", CONV, "uniform_16x2", lambda given: given, "takes 3 taps; this weight has 2"),
    ("short_conv", CONV, "uniform_128x3", but(window=None), "continues a window; this call has none"),
    ("short_conv", CONV, "ragged_128x3", lambda given: given,
     "takes rows of one length without padding; this batch is ragged or padded"),
    ("short_conv", CONV, "uniform_128x3", shaped(x=(18, 72), weight=(72, 3), window=(3, 2, 72)),
     "takes 64 to 16384 channels in multiples of 16; this call has 72"),
    ("short_conv", CONV, "uniform_128x3", to(F32, "window"),
     "takes float16, bfloat16; window is float32"),
    ("hyper_inject", POST, "tiny", lambda given: given, "takes 4, 6 or 8 streams; this call has 3"),
    ("hyper_inject", POST, "four", to(F32, "x", "y"), "takes float16, bfloat16; x is float32"),
    ("hyper_inject", POST, "four", to(F16, "y"), "takes one dtype; found x bfloat16, y float16"),
    ("hyper_inject", POST, "four", to(BF16, "weights"), "takes float32; weights is bfloat16"),
    ("hyper_inject", POST, "four", shaped(x=(0, 4, 24), y=(0, 24), weights=(0, 4)),
     "takes no empty tensor; x is [0, 4, 24]"),
    (PAGED, TND, "decode_pages_of_128_128", but(window=3), IGNORED),
    (PAGED, FIA, RAGGED, pool(9, page_size=64), "takes pages of 128 to 1024 tokens in steps of 128; found 64"),
    (PAGED, TND, RAGGED, lambda given: pool(9, dim=528)(shaped(q=(21, 4, 528))(given)),
     "takes at most 512 head_dim; this call has 528"),
    ("write_pages", "npu_scatter_pa_kv_cache", "scattered", to(F64, "k_pages", "v_pages"),
     "takes float16, bfloat16, float32; k_pages is float64"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "kernel", "case", "change", "sentence", "target"),
    [(*row, "ascend910b") for row in REFUSALS]
    + [(*row, named("ascend910b", cann="8.5.0")) for row in BEFORE_9]
    + [(*row, "ascend950") for row in ON_950],
    ids=[f"{row[1]}-{index}" for index, row in enumerate(REFUSALS + BEFORE_9 + ON_950)],
)
def test_a_limit_is_refused_in_words(
    op: str, kernel: str, case: str, change: Change, sentence: str, target: str | Target
) -> None:
    """One change of one case, and the one sentence that a user reads for it."""
    assert why(op, kernel, change(arguments(op, case)), target) == sentence


def test_every_kernel_has_a_refusal_that_is_tested() -> None:
    """Each kernel with a limit of its own appears above, or where its family is tested."""
    from . import test_mla, test_mla_writes, test_quant_experts, test_quant_linear

    tested = {(row[0], row[1]) for row in REFUSALS + ON_950 + test_mla_writes.REFUSALS}
    tested |= {(test_mla.OP.name, row[0]) for row in test_mla.REFUSALS}
    tested |= {("linear", row[0]) for row in test_quant_linear.REFUSALS}
    tested |= {("experts", row[0]) for row in test_quant_experts.REFUSALS}
    assert tested == {
        (name, kernel.name) for name, op in OPS.items() for kernel in op.kernels.values() if kernel.operators
    }


def test_the_preference_of_a_kernel_for_other_machines_is_an_error_with_advice() -> None:
    """It names the targets that the kernel needs, and the kernel that would run."""
    asked = lowering.use(rotary_interleaved="npu_interleave_rope", target="ascend950")
    with asked, pytest.raises(LoweringError) as error:
        ops.rotary_interleaved(torch.zeros(3, 2, 64), torch.zeros(3, 32), torch.zeros(3, 32))
    assert str(error.value) == (
        "rotary_interleaved: kernel 'npu_interleave_rope' needs ascend910b or ascend910_93, target is ascend950; "
        "use 'npu_apply_rotary_pos_emb' or drop the preference"
    )
    with lowering.use(swiglu="npu_swiglu"), pytest.raises(LoweringError) as error:
        ops.swiglu(torch.zeros(3, 8))
    needed = "needs ascend910b, ascend910_93 or ascend950, target is cpu; use 'torch' or drop the preference"
    assert str(error.value) == f"swiglu: kernel 'npu_swiglu' {needed}"


@each(product(CASES, (F32, BF16)), by=lambda case, dtype: str(dtype).removeprefix("torch."))
def test_every_torch_fallback_has_its_reason(case: Case, dtype: torch.dtype) -> None:
    """Of the operator that is missing, or of each fused kernel's own limit; and no kernel runs outside its targets."""
    args, kwargs = case.arguments(dtype)
    for target in ASCEND:
        choice = OPS[case.op].explain(*args, target=target, **kwargs)
        assert choice.kernel.serves(named(target))
        if not choice.kernel.operators:
            fused = [kernel.name for kernel in OPS[case.op].serving(target) if kernel.operators]
            assert FUSED in choice.refused or fused, case
            assert all(choice.refused[name] for name in fused)
        assert REFERENCE not in choice.refused


def test_an_operator_that_a_version_lacks_is_named_with_the_first_that_has_it() -> None:
    """The kernel is refused there; asking for it by name is an error that says the same."""
    sentence = (
        "operator npu_chunk_gated_delta_rule is not in torch_npu 2.8.0.post5; "
        "the first version that has it is 2.10.0.post6"
    )
    given = arguments(RULE, LONGER)
    old = named("ascend910b", torch_npu="2.8.0")
    args, kwargs = split(RULE, given)
    choice = ops.gated_delta_rule.explain(*args, target=old, **kwargs)
    assert choice.refused[CHUNK] == sentence and not choice.kernel.operators
    assert ops.gated_delta_rule.explain(*args, target="ascend910b", **kwargs).kernel.name == CHUNK
    with lowering.use(gated_delta_rule=CHUNK, target=old), pytest.raises(LoweringError, match=sentence):
        ops.gated_delta_rule(*args, **kwargs)


def test_what_a_cann_does_not_have_is_refused_with_the_first_that_has_it() -> None:
    """An operator as a whole, a SoC's build of it, or an argument."""
    args, kwargs = split("hyper_inject", arguments("hyper_inject", "four"))
    old, new = (named("ascend950", cann=version) for version in ("9.0.0", "9.1.0"))
    choice = ops.hyper_inject.explain(*args, target=old, **kwargs)
    assert choice.refused[POST] == ("npu_mhc_post is built for ascend950 from CANN 9.1.0.pre on; the target has 9.0.0")
    assert ops.hyper_inject.explain(*args, target=new, **kwargs).kernel.name == POST
    given = shaped(decay=(12, 4, 128))(arguments(RULE, SHORT))
    args, kwargs = split(RULE, given)
    old, new = (named("ascend910b", cann=version) for version in ("8.5.0", "9.0.0"))
    choice = ops.gated_delta_rule.explain(*args, target=old, **kwargs)
    assert choice.refused[STEPS] == (
        "takes a decay a channel, as this call has, from CANN 9.0.0 on; the target has 8.5.0"
    )
    assert ops.gated_delta_rule.explain(*args, target=new, **kwargs).kernel.name == STEPS


def test_an_argument_that_a_version_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema without an argument that we pass is as good as none."""
    from lowering.npu import features

    schemas = {version: dict(known) for version, known in features.recorded().items()}
    for version in ("2.8.0.post5", "2.10.0.post6"):
        schemas[version]["npu_swiglu"] = "npu_swiglu(Tensor input) -> Tensor"
    monkeypatch.setattr(features, "recorded", lambda: schemas)
    old, new = (named("ascend910b", torch_npu=version) for version in ("2.10.0", "2.13.0"))
    assert missing(("npu_rms_norm", "npu_swiglu"), old) == (
        "argument dim of operator npu_swiglu is not in torch_npu 2.10.0.post6; the first version that has it is 2.13.0"
    )
    assert missing(("npu_rms_norm", "npu_swiglu"), new) is None


def test_an_operator_of_a_kernel_of_ones_own_is_looked_up_too() -> None:
    """Where nothing is known of it, the sentence says how to change that."""
    assert missing(("npu_rms_norm", "npu_of_mine"), named("ascend910b")) == (
        "operator npu_of_mine is in none of the recorded schemas; docs/record_npu_schemas.py adds it"
    )


def test_the_dispatcher_answers_where_torch_npu_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """For targets of its series, whatever is recorded of it; others go by the schemas."""
    npu_reference.load()
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(__version__="2.8.1"))  # Beside operators of 2.13.
    old, unknown = (named("ascend910b", torch_npu=version) for version in ("2.8.0.post5", "2.10.0"))
    assert missing(("npu_rms_norm", "npu_chunk_gated_delta_rule"), old) is None
    assert missing(("npu_of_mine",), old) == (
        "operator npu_of_mine is not in the torch_npu that is loaded; no recorded version has it"
    )
    assert "is in none of the recorded schemas" in str(missing(("npu_of_mine",), unknown))


def test_a_version_without_recorded_schemas_is_an_error() -> None:
    with pytest.raises(LoweringError, match=r"no schemas are recorded for torch_npu '2.9.0'; recorded are 2.8.0.post5"):
        ops.swiglu.explain(torch.zeros(2, 4), target=named("ascend910b", torch_npu="2.9.0"))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_gradients_and_transforms_leave_the_fused_kernels_out() -> None:
    """Each with its reason."""
    x = torch.randn(3, 8, requires_grad=True)
    reasons = []
    with lowering.use(target="ascend910b"):
        reasons.append(ops.swiglu.explain(x).refused["npu_swiglu"])

        def within(x: Tensor) -> Tensor:
            reasons.append(ops.swiglu.explain(x).refused["npu_swiglu"])
            return ops.swiglu(x)

        torch.func.vmap(within)(x.detach())
        torch.func.jvp(within, (x.detach(),), (x.detach(),))
    assert [reason.partition(",")[0] for reason in reasons] == [
        "has no derivative", "has no batching rule", "has no derivative",
    ]  # fmt: skip


@pytest.mark.parametrize("kernel", [TND, FIA])
def test_rows_that_share_more_pages_than_the_pool_has_are_refused(kernel: str) -> None:
    """The operator counts shared pages once a row and rejects a smaller pool: forks of a long row come to that."""
    given = arguments(PAGED, SEVERAL)
    given = but(rows__host=replace(given["rows"].host, fits=False))(given)
    args, kwargs = split(PAGED, given)
    shown = "counts pages that rows share once a row, and the pool has fewer"
    with lowering.use(paged_attention=kernel, target="ascend910b"), pytest.raises(LoweringError, match=shown):
        ops.paged_attention(*args, **kwargs)


@torch.no_grad()
def test_forks_in_a_small_pool_run_in_torch_there() -> None:
    npu_reference.load()
    config = {**tiny.SIZES, "model_type": "qwen3_5_text", "head_dim": 128}
    model = fm.build({**config, "rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": 0.0625}})
    params = model.init_params(dtype=torch.bfloat16)
    state = model.init_state(1, 64, dtype=torch.bfloat16, page_size=16, pages=8)
    _, state = model.forward(params, state, fm.Batch.from_lists([[1] * 40], state))
    four = fm.fork(state, [0] * 4)
    with lowering.use(target="ascend910b"), lowering.record() as report:
        model.forward(params, four, fm.Batch.from_lists([[2]] * 4, four))
    (found,) = [row for row in report.rows if row.op == "paged_attention"]
    assert found.kernel == "torch" and "the pool has fewer" in found.refused[FIA]


def test_a_kernel_whose_operators_are_not_loaded_says_so() -> None:
    """Named on a machine without torch_npu, a target can be explained and not run; it does not fall back."""
    code = """
import torch
import lowering
from lowering import ops
with lowering.use(target="ascend910b"):
    assert ops.swiglu.explain(torch.zeros(2, 4)).kernel.name == "npu_swiglu"
    try:
        ops.swiglu(torch.zeros(2, 4))
    except lowering.LoweringError as error:
        print(error)
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.startswith("operator npu::npu_swiglu is not loaded, so this kernel cannot run here"), done.stderr


def test_refusals_do_not_read_values() -> None:
    """Every kernel's refusal of every case is the same for tensors without any."""
    for case in CASES:
        given = arguments(case.op, case.name)
        meta = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, given)
        for kernel in OPS[case.op].kernels.values():
            if kernel.operators and kernel.refuse:
                (args, kwargs), (empty, _) = split(case.op, given), split(case.op, meta)
                assert kernel.refuse(*args, **kwargs) == kernel.refuse(*empty, **kwargs)
