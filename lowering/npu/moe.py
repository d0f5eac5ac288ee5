"""Mixture of experts: routing in one operator; experts as a sort of the rows, two grouped products and a weighted sum.

The operators are npu_moe_gating_top_k_softmax_v2, or npu_moe_gating_top_k for experts in groups, for sigmoids and on
950, then npu_moe_init_routing_v2, npu_grouped_matmul, npu_swiglu and npu_moe_token_unpermute. Rows are token-major: row
i * choices + j is choice j of token i. Group sizes are counts, on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from params.tree import tree

from ..ops.moe import experts, route_grouped, route_sigmoid, route_softmax
from ..weights import PreparedWeight, plain
from .features import npu
from .kernel import FLOATS, HALVES, above, empty, fused, machine, wrong_dtype
from .mlp import activated

NZ = 29
"""Number of the blocked format that the device's matrix unit reads without rearranging."""
MOST_CHOICES = 512
MOST_EXPERTS = 1024
ROWS_OF_X = 0
"""Groups of the matrix product are groups of x's rows."""
COUNTS = 1
"""Group sizes are given as counts, not as their running sum."""
ONE_OUTPUT = 2
UNQUANTIZED, BY_TOKEN = -1, 1
"""Rows as they are, or as int8 with a scale each."""


@tree
class GroupedWeight(PreparedWeight):
    """All experts' weights [experts inputs outputs], in the device's blocked format."""

    kernels = ("npu_grouped_experts",)

    blocked: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the plain weight: experts, outputs, inputs."""
        experts, inputs, outputs = self.blocked.shape
        return experts, outputs, inputs

    def plain(self) -> Tensor:
        """The weights [experts outputs inputs], as a view."""
        return self.blocked.transpose(1, 2)


def _prepare(weight: Tensor) -> GroupedWeight | None:
    # Blocks are 16 by 16: other sizes would be padded, which the grouped product does not take.
    if weight.dtype == torch.float32 or weight.shape[1] % 16 or weight.shape[2] % 16:
        return None
    return GroupedWeight(npu.npu_format_cast(weight.detach().transpose(1, 2).contiguous(), NZ))


def _by_inputs(weight: Tensor | PreparedWeight) -> Tensor:
    """[experts inputs outputs]: as prepared, or a view of the plain weight."""
    return weight.blocked if isinstance(weight, GroupedWeight) else plain(weight).contiguous().transpose(1, 2)


def _refuse_route(logits, *, top_k) -> str | None:
    return wrong_dtype(FLOATS, logits=logits) or empty(logits=logits) or above(1024, top_k=top_k)


@fused(
    route_softmax,
    "npu_moe_gating_top_k_softmax_v2",
    "npu_moe_gating_top_k_softmax_v2",
    refuse=_refuse_route,
)
def _route(logits, *, top_k):
    # renorm=1 takes the best first and the softmax over those: the softmax over all, renormalised over those chosen.
    weights, ids, _ = npu.npu_moe_gating_top_k_softmax_v2(logits.contiguous(), k=top_k, renorm=1, output_softmax=False)
    return weights, ids


MOST_GROUPED = 2048
"""Experts that npu_moe_gating_top_k takes, groups of which some are kept filled up to multiples of 32."""
BY_BEST, SOFTMAX, NORM_FIRST = 0, 0, 0
"""A group is as good as its best expert; scores are a softmax; over all experts, before any is chosen."""
BY_BEST_TWO, SIGMOID = 1, 1
"""A group is as good as its two best experts; scores are sigmoids, renormalised over those chosen."""


def _refuse_all(logits, *, top_k) -> str | None:
    return wrong_dtype(FLOATS, logits=logits) or empty(logits=logits) or above(MOST_GROUPED, experts=logits.shape[1])


@fused(route_softmax, "npu_moe_gating_top_k", "npu_moe_gating_top_k", refuse=_refuse_all)
def _route_all(logits, *, top_k):
    # It leaves the softmax as it is over those chosen, in the logits' dtype: float32, for the quotient is rounded too.
    weights, ids, _ = npu.npu_moe_gating_top_k(logits.float(), top_k, renorm=NORM_FIRST, norm_type=SOFTMAX)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), ids


def _refuse_grouped(logits, *, top_k, groups, kept_groups, scale) -> str | None:
    count = logits.shape[1]
    if not 1 <= top_k <= count // groups * kept_groups:
        return f"takes as many choices as the kept groups have experts at most; this call has {top_k}"
    if kept_groups < groups < count and -(-(count // groups) // 32) * 32 * groups > MOST_GROUPED:
        return f"takes at most {MOST_GROUPED} experts, groups filled up to multiples of 32; this call has {count}"
    return wrong_dtype(FLOATS, logits=logits) or empty(logits=logits) or above(MOST_GROUPED, experts=count)


@fused(route_grouped, "npu_moe_gating_top_k", "npu_moe_gating_top_k", refuse=_refuse_grouped)
def _route_grouped(logits, *, top_k, groups, kept_groups, scale):
    # It scales what it returns, and leaves the softmax as it is over those chosen.
    weights, ids, _ = npu.npu_moe_gating_top_k(
        logits,
        top_k,
        k_group=kept_groups,
        group_count=groups,
        group_select_mode=BY_BEST,
        renorm=NORM_FIRST,
        norm_type=SOFTMAX,
        routed_scaling_factor=scale,
    )
    return weights, ids


def _refuse_sigmoid(logits, bias, *, top_k, groups, kept_groups, scale, renormalise) -> str | None:
    if not renormalise:
        return "renormalises over those chosen; this call does not"
    if logits.shape[1] // groups < 2:
        return f"takes groups of 2 experts or more; this call has {logits.shape[1] // groups}"
    sizes = {"top_k": top_k, "groups": groups, "kept_groups": kept_groups, "scale": scale}
    return wrong_dtype(FLOATS, logits=logits, bias=bias) or _refuse_grouped(logits, **sizes)


@fused(route_sigmoid, "npu_moe_gating_top_k", "npu_moe_gating_top_k", refuse=_refuse_sigmoid)
def _route_sigmoid(logits, bias, *, top_k, groups, kept_groups, scale, renormalise):
    weights, ids, _ = npu.npu_moe_gating_top_k(
        logits,
        top_k,
        bias=bias,
        k_group=kept_groups,
        group_count=groups,
        group_select_mode=BY_BEST_TWO,
        renorm=NORM_FIRST,
        norm_type=SIGMOID,
        routed_scaling_factor=scale,
    )
    return weights, ids


def _refuse_experts(x, weights, ids, gate_up, down, *, caps=None) -> str | None:
    up, back = _by_inputs(gate_up), _by_inputs(down)
    if not 2 <= up.shape[0] <= MOST_EXPERTS:
        return f"takes 2 to {MOST_EXPERTS} experts; this call has {up.shape[0]}"
    wide = machine(x).name != "ascend950" or machine(x).has_cann("9.0.0")
    return (
        wrong_dtype(FLOATS if wide else HALVES, x=x, weights=weights, gate_up=up, down=back)
        or empty(x=x)
        or above(65535, hidden=x.shape[1], twice_inner=up.shape[2])
        or above(MOST_CHOICES, choices=ids.shape[1])
    )


@fused(
    experts,
    "npu_grouped_experts",
    "npu_moe_init_routing_v2",
    "npu_grouped_matmul",
    "npu_swiglu",
    "npu_moe_token_unpermute",
    "npu_format_cast",
    refuse=_refuse_experts,
    prepare=_prepare,
)
def _experts(x, weights, ids, gate_up, down, *, caps=None):
    rows, places, sizes, _ = routed(x, ids, _by_inputs(gate_up).shape[0], quant_mode=UNQUANTIZED)
    inner = activated(_product(rows, gate_up, sizes), caps)
    return npu.npu_moe_token_unpermute(_product(inner, down, sizes), places, probs=weights)


def routed(x: Tensor, ids: Tensor, experts: int, *, quant_mode: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of x grouped by expert, the place of each flat choice among them, rows of each expert, scales of rows."""
    return npu.npu_moe_init_routing_v2(
        x.contiguous(),
        ids.int().contiguous(),
        active_num=ids.numel(),
        expert_num=experts,
        drop_pad_mode=0,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=quant_mode,
        active_expert_range=[0, experts],
        row_idx_type=0,
    )


def _product(rows: Tensor, weight: Tensor | PreparedWeight, sizes: Tensor) -> Tensor:
    """Each expert's rows [rows inputs] times its weight."""
    groups = {"group_list": sizes, "group_list_type": COUNTS, "group_type": ROWS_OF_X}
    return npu.npu_grouped_matmul([rows], [_by_inputs(weight)], split_item=ONE_OUTPUT, **groups)[0]
