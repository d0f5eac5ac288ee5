"""Conventions that the Ascend kernels rest on, each flipped on the way to its operator: some case must then fail.

A flip changes the arguments of one operator, or its results, as a kernel would that had got the convention wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from lowering import LoweringError, npu_reference
from lowering.npu import (
    attention,
    delta,
    features,
    hyper_connection,
    mla,
    mlp,
    moe,
    norm,
    quant_experts,
    quant_linear,
    rotary,
    sampling,
    short_conv,
    sparse,
)
from tests.cases import CASES

from .agreement import MACHINES, check, refusal, served

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

MODULES = (
    attention, delta, hyper_connection, mla, mlp, moe, norm, quant_experts, quant_linear, rotary, sampling, short_conv,
    sparse,
)  # fmt: skip
FIA = "npu_fused_infer_attention_score_v2"
FAR = attention.FAR
MLA, RING, BY_HEAD = "mla_prefix_attention", "atb.npu_ring_mla", "npu_transpose_batchmatmul"
OTHER_MODE = {"PA_NZ": "PA_BNSD", "PA_BNSD": "PA_NZ"}
INDEXER, SPARSE = "npu_lightning_indexer", "sparse_attention"
STEPS, CHUNK = "npu_recurrent_gated_delta_rule_functional", "npu_chunk_gated_delta_rule"
SWIGLU_QUANT, GROUPED_SWIGLU = "npu_dequant_swiglu_quant", "npu_grouped_matmul_swiglu_quant_v2"
PRODUCT = "npu_quant_matmul"
PACKED, PADDED = {"input_layout": "TND"}, {"input_layout": "BSND"}


@dataclass(frozen=True)
class Flip:
    """A convention of an operator, and the call that breaks it; `where` are keyword values of the calls it is for."""

    operator: str
    convention: str
    change: Callable[[tuple[Any, ...], dict[str, Any]], Arguments] | None = None
    where: dict[str, Any] | None = None
    result: Callable[[Any], Any] | None = None
    only: str | None = None

    def __str__(self) -> str:
        return f"{self.operator}: {self.convention}"


def but(**changes: Callable[[Any], Any]) -> Callable[..., Arguments]:
    """With keyword arguments changed where they are passed."""
    return lambda args, kwargs: (args, kwargs | {k: f(kwargs[k]) for k, f in changes.items() if k in kwargs})


def without(*names: str) -> Callable[..., Arguments]:
    """With keyword arguments left to their defaults."""
    return lambda args, kwargs: (args, {k: v for k, v in kwargs.items() if k not in names})


def at(index: int, change: Callable[[Any], Any]) -> Callable[..., Arguments]:
    """With one positional argument changed."""
    return lambda args, kwargs: ((*args[:index], change(args[index]), *args[index + 1 :]), kwargs)


def swapped(one: int, two: int) -> Callable[..., Arguments]:
    """With two positional arguments in each other's place."""

    def change(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        places = list(args)
        places[one], places[two] = places[two], places[one]
        return tuple(places), kwargs

    return change


def rows_of(ends: list[int]) -> list[int]:
    return [end - start for start, end in pairwise([0, *ends])]


def summed(lengths: list[int]) -> list[int]:
    return list(accumulate(lengths))


def past_alone(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Key lengths without the new tokens."""
    new = kwargs.get("actual_seq_qlen") or [1] * len(kwargs["actual_seq_kvlen"])
    held = [max(keys - count, 0) for keys, count in zip(kwargs["actual_seq_kvlen"], new, strict=True)]
    return args, kwargs | {"actual_seq_kvlen": held}


def unmasked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Without the triangle."""
    left_out = ("atten_mask", "pre_tokens", "next_tokens")
    return args, {k: v for k, v in kwargs.items() if k not in left_out} | {"sparse_mode": 0}


def weighted(lses: list[torch.Tensor]) -> list[torch.Tensor]:
    """With the lse of an empty part as if it held one key of score 0."""
    return [torch.where(lse.isinf(), 0, lse) for lse in lses]


def second_alone(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """A ring that begins anew."""
    kept = {k: v for k, v in kwargs.items() if k not in ("pre_out", "prev_lse")}
    return args, kept | {"calc_type": "calc_type_first_ring"}


def by_choice(places: torch.Tensor) -> torch.Tensor:
    """Places listed choice by choice instead of token by token: the cases of 6 tokens have 2 choices."""
    return places.view(-1, 2).T.flatten() if places.numel() == 12 else places


def halves_swapped(x: torch.Tensor) -> torch.Tensor:
    return x.roll(x.shape[-1] // 2, -1)


def other_way(mode: str) -> str:
    return {"half": "interleave", "interleave": "half"}[mode]


FLIPS = [
    Flip(FIA, "mask polarity", but(atten_mask=torch.logical_not)),
    Flip(FIA, "which triangle is masked", but(atten_mask=lambda mask: mask.T.contiguous())),
    Flip(FIA, "the scale is not 1", without("softmax_scale")),
    Flip(FIA, "fewer key heads than query heads", without("num_key_value_heads")),
    Flip(FIA, "packed query lengths are cumulative", but(actual_seq_qlen=rows_of), PACKED),
    Flip(FIA, "key lengths over pages are each row's own (packed)", but(actual_seq_kvlen=summed), PACKED),
    Flip(FIA, "key lengths over pages are each row's own (padded)", but(actual_seq_kvlen=summed), PADDED),
    Flip(FIA, "padded query lengths are each row's own", but(actual_seq_qlen=summed), PADDED),
    Flip(FIA, "key lengths include the new tokens", past_alone, PADDED, only="paged_attention"),
    Flip(FIA, "queries end where keys end", but(sparse_mode=lambda _: 2), {"sparse_mode": 3}, only="paged_attention"),
    Flip(FIA, "the band ends at the query", but(next_tokens=lambda _: 1), PACKED),
    Flip(FIA, "the band reaches back to the first key", but(pre_tokens=lambda _: 2), PACKED),
    Flip(FIA, "a window holds the query itself (packed)", but(pre_tokens=lambda n: n + (n < FAR)), PACKED),
    Flip(FIA, "a window holds the query itself (padded)", but(pre_tokens=lambda n: n + 1), PADDED),
    Flip(FIA, "where one query's window begins", but(atten_mask=lambda mask: mask.roll(-1, -1)), {"sparse_mode": 0}),
    Flip(FIA, "pages in the order of the table", but(block_table=lambda table: table.flip(1).contiguous())),
    Flip(FIA, "keys before values", swapped(1, 2)),
    Flip(FIA, "a mask is True where a key is hidden", but(atten_mask=lambda mask: ~mask), only=SPARSE),
    Flip(FIA, "the scale is that of the call", without("softmax_scale"), only=SPARSE),
    Flip(INDEXER, "weights of one", at(2, lambda ones: ones.cumsum(-1) - 1)),
    Flip(INDEXER, "keys are counted in blocks", but(actual_seq_lengths_key=lambda n: (n - 1).clamp(min=1))),
    Flip(INDEXER, "pages in the order of the table", but(block_table=lambda table: table.flip(1).contiguous())),
    Flip(INDEXER, "pages, not rows, of keys", without("layout_key")),
    Flip(INDEXER, "as many blocks as are wanted", but(sparse_count=lambda count: max(count - 1, 1))),
    Flip(INDEXER, "valid ones come first", result=lambda r: (r[0].flip(-1), r[1])),
    Flip(FIA, "rope channels are added to the score (queries)", but(query_rope=torch.zeros_like)),
    Flip(FIA, "rope channels are added to the score (keys)", but(key_rope=torch.zeros_like)),
    Flip(FIA, "packed key lengths are cumulative", but(actual_seq_kvlen=rows_of), PACKED, only=MLA),
    Flip(FIA, "the last query of a shared latent sees the last key", but(sparse_mode=lambda _: 0), PADDED, only=MLA),
    Flip(FIA, "new tokens do not see later ones", unmasked, PACKED, only=MLA),
    Flip(FIA, "lse is token-major", result=lambda r: (r[0], r[1].transpose(0, 1).reshape(r[1].shape)), only=MLA),
    Flip("npu_attention_update", "lse in the order of the outputs", at(0, lambda lses: lses[::-1])),
    Flip("npu_attention_update", "rows without a prefix have no weight", at(0, weighted)),
    Flip("npu_attention_update", "lse is a logarithm", at(0, lambda lses: [lse.exp() for lse in lses])),
    Flip("npu_attention_update", "lse is token-major", at(0, lambda lses: [lses[0], lses[1].flip(0)])),
    Flip(FIA, "heads come out first", but(input_layout=lambda _: "BSND"), {"input_layout": "BSND_NBSD"}),
    Flip(BY_HEAD, "heads lie behind tokens, or before", without("perm_x1")),
    Flip(BY_HEAD, "a head has its own weight", at(1, lambda weight: weight.flip(0))),
    Flip(RING, "later tokens are masked", but(mask_type=lambda _: "no_mask"), {"mask_type": "mask_type_triu"}),
    Flip(RING, "the scale is not 1", without("qk_scale")),
    Flip(RING, "the second ring merges the first", second_alone),
    Flip(RING, "lengths are each row's own", at(6, lambda n: n.cumsum(-1).int())),
    Flip(RING, "queries before keys", at(6, lambda n: n.flip(0)), {"calc_type": "calc_type_default"}),
    Flip("npu_interleave_rope", "cosine before sine", swapped(1, 2)),
    Flip("npu_interleave_rope", "neighbours, not halves", at(0, lambda x: x.unflatten(-1, (2, -1)).mT.flatten(-2))),
    Flip("npu_kv_rmsnorm_rope_cache_v2", "the rope cache comes first", swapped(5, 6)),
    Flip("npu_kv_rmsnorm_rope_cache_v2", "cosine before sine", swapped(2, 3)),
    Flip("npu_kv_rmsnorm_rope_cache_v2", "epsilon is the caller's", without("epsilon")),
    Flip("npu_kv_rmsnorm_rope_cache_v2", "rope keys are returned first", result=lambda r: (r[1], r[0])),
    Flip("npu_kv_rmsnorm_rope_cache_v2", "tiled or plain", but(cache_mode=lambda mode: OTHER_MODE[mode])),
    Flip("npu_kv_rmsnorm_rope_cache_v2", "slots count tokens", at(4, lambda slots: slots - 1)),
    Flip("npu_scatter_pa_kv_cache", "plain pages, not NZ", without("cache_mode")),
    Flip("npu_scatter_pa_kv_cache", "slots count tokens from 0", at(4, lambda slots: slots - 1)),
    Flip("npu_scatter_pa_kv_cache", "keys before values", lambda a, k: ((a[1], a[0], a[3], a[2], a[4].roll(1)), k)),
    Flip("npu_top_k_top_p", "as many as k", but(k=lambda k: (k + 1).clamp(max=90))),
    Flip("npu_top_k_top_p", "the share p", but(p=lambda p: p / 2)),
    Flip("npu_rms_norm", "epsilon is the caller's", without("epsilon")),
    Flip("npu_gemma_rms_norm", "epsilon is the caller's", without("epsilon")),
    Flip("npu_add_rms_norm", "epsilon is the caller's", without("epsilon")),
    Flip("npu_rms_norm", "epsilon is divided by the width", but(epsilon=lambda e: 12 * e), only="l2_norm"),
    Flip("npu_rms_norm", "one plus the weight", at(1, lambda weight: weight - 1), only="gemma_rms_norm"),
    Flip("npu_rms_norm", "the weight alone", at(1, lambda weight: weight + 1), only="gated_rms_norm"),
    Flip("npu_gemma_rms_norm", "the operator adds one", at(1, lambda weight: weight + 1)),
    Flip("npu_gemma_rms_norm", "the sum is normalised", at(0, lambda x: x / 2 + 1), only="add_gemma_rms_norm"),
    Flip("npu_add_rms_norm", "the sum is the third result", result=lambda r: (r[2], r[1], r[0])),
    Flip("npu_add_rms_norm", "one plus the weight", at(2, lambda weight: weight - 1), only="add_gemma_rms_norm"),
    Flip("npu_rotary_mul", "halves or neighbours", but(rotary_mode=other_way)),
    Flip("npu_rotary_mul", "cosine before sine", swapped(1, 2)),
    Flip("npu_rotary_mul", "the sense of the turn", at(2, torch.neg)),
    Flip("npu_apply_rotary_pos_emb", "halves or neighbours", but(rotary_mode=other_way)),
    Flip("npu_apply_rotary_pos_emb", "cosine before sine", swapped(2, 3)),
    Flip("npu_apply_rotary_pos_emb", "packed tokens", without("layout")),
    Flip("npu_swiglu", "the first half is activated", at(0, halves_swapped)),
    Flip("npu_geglu", "the first half is activated", without("activate_left")),
    Flip("npu_geglu", "the product comes first", result=lambda r: (r[1], r[0])),
    Flip(STEPS, "the state is value-major", at(3, lambda state: state.mT.contiguous())),
    Flip(STEPS, "queries come scaled", but(scale=lambda _: 128**-0.5)),
    Flip(STEPS, "lengths are each row's own", but(actual_seq_lengths=lambda n: n.cumsum(0).int())),
    Flip(STEPS, "a row keeps its slot", but(ssm_state_indices=lambda slots: slots.roll(1))),
    Flip(STEPS, "decay is a logarithm", but(g=lambda g: g.exp())),
    Flip(STEPS, "write strength is not one", but(beta=torch.ones_like)),
    Flip(STEPS, "queries before keys", swapped(0, 1)),
    Flip(CHUNK, "the state is value-major", but(initial_state=lambda state: state.mT.contiguous())),
    Flip(CHUNK, "the state is the row's", but(initial_state=lambda state: state.roll(1, 0))),
    Flip(CHUNK, "queries come scaled", but(scale=lambda _: 128**-0.5)),
    Flip(CHUNK, "lengths are each row's own", but(actual_seq_lengths=lambda n: n.cumsum(0).int())),
    Flip(CHUNK, "decay is a logarithm", but(g=lambda g: g.exp())),
    Flip(CHUNK, "write strength is not one", but(beta=torch.ones_like)),
    Flip(CHUNK, "the state comes out value-major", result=lambda r: (r[0], r[1].mT.contiguous())),
    Flip("npu_moe_gating_top_k", "weights are scaled", without("routed_scaling_factor")),
    Flip("npu_moe_gating_top_k", "experts lie in groups", but(group_count=lambda _: 1, k_group=lambda _: 1)),
    Flip("npu_moe_gating_top_k", "the bias chooses", without("bias"), only="route_sigmoid"),
    Flip("npu_moe_gating_top_k", "a group's two best", but(group_select_mode=lambda _: 0), only="route_sigmoid"),
    Flip("npu_moe_gating_top_k", "scores are sigmoids", but(norm_type=lambda _: 0), only="route_sigmoid"),
    Flip("npu_moe_gating_top_k", "weights come first", result=lambda r: (r[1].float(), r[0].long(), r[2])),
    Flip("npu_moe_gating_top_k_softmax_v2", "weights add up to one", but(renorm=lambda _: 0)),
    Flip("npu_moe_gating_top_k_softmax_v2", "weights come first", result=lambda r: (r[1].float(), r[0].long(), r[2])),
    Flip("npu_moe_init_routing_v2", "rows by token, not by place", but(row_idx_type=lambda _: 1)),
    Flip("npu_moe_init_routing_v2", "all experts are active", but(active_expert_range=lambda r: [0, r[1] - 1])),
    Flip("npu_grouped_matmul", "group sizes are counts", but(group_list=lambda sizes: sizes.cumsum(0))),
    Flip("npu_grouped_matmul", "group sizes are said to be counts", without("group_list_type")),
    Flip("npu_grouped_matmul", "weights by inputs", at(1, lambda weights: [weights[0].mT])),
    Flip("npu_grouped_matmul", "a row has its own scale", but(per_token_scale=lambda s: [s[0].flip(0)])),
    Flip("npu_grouped_matmul", "an expert has its own scales", but(scale=lambda s: [s[0].flip(0)])),
    Flip("npu_grouped_matmul", "what int4 leaves out is added", but(bias=lambda b: [torch.zeros_like(b[0])])),
    Flip("npu_grouped_matmul", "blocks have their own exponents", but(antiquant_scale=lambda s: [s[0].flip(1)])),
    Flip("npu_convert_weight_to_int4pack", "eight outputs share a word", at(0, lambda x: x.flip(-1))),
    Flip("npu_grouped_matmul", "the result's dtype is named", without("output_dtype")),
    Flip("npu_moe_init_routing_v2", "rows are quantised", but(quant_mode=lambda _: -1), {"quant_mode": 1}),
    Flip(SWIGLU_QUANT, "the first half is activated", without("activate_left")),
    Flip(SWIGLU_QUANT, "a token has its own scale", without("quant_mode")),
    Flip(SWIGLU_QUANT, "values come first", result=lambda r: (r[1], r[0])),
    Flip(GROUPED_SWIGLU, "group sizes are running sums", at(4, lambda sums: sums.diff(prepend=sums.new_zeros(1)))),
    Flip(GROUPED_SWIGLU, "the scales are those of blocks", without("dequant_mode", "quant_mode")),
    Flip(GROUPED_SWIGLU, "exponents have a dtype", but(x_scale_dtype=lambda _: torch.float8_e8m0fnu)),
    Flip("npu_quantize", "the reciprocal is multiplied with", at(1, torch.reciprocal)),
    Flip("npu_quantize", "the offset is added", at(2, torch.neg)),
    Flip("npu_quantize", "a product, not a quotient", without("div_mode")),
    Flip("npu_dynamic_quant", "the scale is that of a step", result=lambda r: (r[0], r[1].reciprocal())),
    Flip("npu_dynamic_quant", "values come first", result=lambda r: (r[1], r[0])),
    Flip(PRODUCT, "weights by inputs", at(1, lambda weight: weight.mT)),
    Flip(PRODUCT, "the result's dtype is named", without("output_dtype")),
    Flip(PRODUCT, "a token has its own scale", but(pertoken_scale=lambda scale: scale.flip(0))),
    Flip(PRODUCT, "an output has its own scale", at(2, lambda scale: scale.flip(0))),
    Flip(PRODUCT, "the correction is added", without("bias"), {"pertoken_scale": None}),
    Flip(PRODUCT, "exponents have torch_npu's dtype", but(scale_dtype=lambda _: torch.float8_e8m0fnu)),
    Flip(PRODUCT, "exponents in the order of blocks", but(pertoken_scale=lambda s: s.flip(-1)), {"scale_dtype": 293}),
    Flip(PRODUCT, "blocks of 32", without("group_sizes")),
    Flip("npu_dynamic_mx_quant", "float8, not float4", without("dst_type")),
    Flip("npu_dynamic_mx_quant", "exponents come second", result=lambda r: (r[1], r[0])),
    Flip("npu_moe_token_unpermute", "choices are weighted", without("probs")),
    Flip("npu_moe_token_unpermute", "places are token-major", at(1, by_choice)),
    Flip("npu_fused_causal_conv1d", "the oldest tap first", at(1, lambda taps: taps.flip(0).contiguous())),
    Flip("npu_fused_causal_conv1d", "the window is oldest first", at(2, lambda w: w.flip(1).contiguous())),
    Flip("npu_mhc_post", "the output is weighed, not the streams", swapped(2, 3)),
    Flip("npu_mhc_post", "weights in the order of the streams", at(3, lambda h: h.flip(1))),
    Flip("npu_mhc_post", "weights may exceed one", at(3, lambda h: h.clamp(max=1))),
    Flip("npu_fused_causal_conv1d", "starts begin with 0", but(query_start_loc=lambda starts: starts[1:].contiguous())),
]  # fmt: skip


class Flipped:
    """Stands for operators, with one convention of one of them flipped; `met` once a call was changed."""

    def __init__(self, flip: Flip, operators: Any = features.npu, prefix: str = "") -> None:
        self.flip, self.met, self.operators, self.prefix = flip, False, operators, prefix

    def __getattr__(self, name: str) -> Any:
        operator, flip = getattr(self.operators, name), self.flip
        if self.prefix + name != flip.operator:
            return operator

        def call(*args: Any, **kwargs: Any) -> Any:
            if flip.where and any(kwargs.get(key) != value for key, value in flip.where.items()):
                return operator(*args, **kwargs)
            self.met = True
            if flip.change is not None:
                args, kwargs = flip.change(args, kwargs)
            result = operator(*args, **kwargs)
            return result if flip.result is None else flip.result(result)

        return call


@pytest.mark.plain
@pytest.mark.mutation
@pytest.mark.parametrize("flip", FLIPS, ids=str)
def test_a_flipped_convention_is_noticed(flip: Flip, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a wrong value, or by the operator's reference, which refuses the call."""
    npu_reference.load()
    operators = Flipped(flip)
    if flip.operator.startswith("atb."):
        operators = Flipped(flip, features.atb, "atb.")
        monkeypatch.setattr(mla, "atb", operators)
    for module in () if flip.operator.startswith("atb.") else MODULES:
        monkeypatch.setattr(module, "npu", operators)
    for target in MACHINES:
        for case in CASES:
            for kernel in () if case.bench or flip.only not in (None, case.op) else served(case.op, target):
                if flip.operator not in kernel.operators or refusal(kernel, case, target, torch.bfloat16):
                    continue
                operators.met = False
                try:
                    check(case, kernel.name, target, torch.bfloat16)
                except (AssertionError, LoweringError, RuntimeError, IndexError):
                    assert operators.met, f"{case} fails without the flip"
                    return
    pytest.fail(f"no case notices: {flip}")


def test_every_operator_has_a_flip() -> None:
    """All but the one that only changes how weights are stored."""
    assert {flip.operator for flip in FLIPS} == features.ARGUMENTS.keys() - {"npu_format_cast"}
