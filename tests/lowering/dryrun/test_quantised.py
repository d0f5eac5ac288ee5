"""Quantised weights through the schemas and shape functions of the real torch_npu, at published sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
import params
from lowering import ops
from lowering.cases.weights import QUANTIZED
from params.quant.rounding import mxfp8
from params.quant.values import MXFP8Weight
from tests.lowering.npu.test_kernels_published import MOE, SIZES

KERNELS = {
    "ascend910b": ("W8A8_DYNAMIC", {"npu_quant_matmul", "npu_grouped_experts_int"}),
    "ascend950": ("W8A8_MXFP8", {"npu_quant_matmul_mx", "npu_grouped_experts_mx"}),
}
EXPERTS = {
    ("w8a8_dynamic", "ascend910_93"): "npu_grouped_experts_int",
    ("w8a8_dynamic", "ascend950"): "npu_grouped_experts_int_apart",
    ("w4a8_dynamic", "ascend910b"): "npu_grouped_experts_int",
    ("w4a16_mxfp4", "ascend950"): "npu_grouped_experts_mx4",
}


def called(low: Any) -> set[str]:
    return {operator.name for call in low.calls for operator in call.operators if operator.name.startswith("npu.")}


@pytest.mark.parametrize("target", KERNELS)
def test_a_published_mixture_of_experts(target: str) -> None:
    """None of its tensors exists. Every version of torch_npu takes the calls."""
    scheme, kernels = KERNELS[target]
    model = fm.build(SIZES | MOE)
    weights = params.quantize(model.init_params(dtype=torch.bfloat16, device="meta"), scheme)
    state = model.init_state(3, 4096, torch.bfloat16, recurrent_dtype=torch.bfloat16, device="meta")
    low = lowering.lower(model.forward, weights, state, fm.Batch.from_lists([[1], [2], [3]]), target=target)
    assert kernels <= {row.kernel for row in low.report.rows} and not low.problems
    assert "npu.npu_quant_matmul" in called(low) and "npu.npu_format_cast" not in called(low)


@pytest.mark.parametrize(("scheme", "target"), EXPERTS)
def test_experts_of_every_scheme(scheme: str, target: str) -> None:
    """In every recorded version of torch_npu."""
    weights = [QUANTIZED[scheme](torch.randn(8, outputs, 128)) for outputs in (256, 128)]
    x, chosen = torch.zeros(5, 128).bfloat16(), (torch.zeros(5, 2).bfloat16(), torch.zeros(5, 2).long())
    low = lowering.lower(ops.experts, x, *chosen, *weights, target=target)
    assert [row.kernel for row in low.report.rows] == [EXPERTS[scheme, target]] and not low.problems


@pytest.mark.parametrize("inputs", [32, 64, 96, 100, 160, 4304])
def test_blocks_of_which_the_last_is_short(inputs: int) -> None:
    """Its exponents fill a pair up on either side, or the shape function refuses the product."""
    weight = MXFP8Weight(*mxfp8(torch.randn(24, inputs), "half_away"))
    low = lowering.lower(ops.linear, torch.zeros(5, inputs).bfloat16(), weight, target="ascend950")
    assert called(low) == {"npu.npu_dynamic_mx_quant", "npu.npu_quant_matmul"} and not low.problems
