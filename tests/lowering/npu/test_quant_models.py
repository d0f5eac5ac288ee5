"""Quantised models lowered for Ascend: which kernels run, that preparing changes nothing, how near the logits are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import funcmodels as fm
import lowering
import params as trees
from lowering import npu_reference
from tests.lowering.npu.test_models import BASE

MOE: dict[str, Any] = {
    **BASE, "model_type": "qwen3_5_moe_text", "head_dim": 256, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "rope_parameters": {**BASE["rope_parameters"], "mrope_section": [11, 11, 10]},
}  # fmt: skip
SCHEMES: dict[str, tuple[Any, str, set[str]]] = {
    "W8A8_DYNAMIC": ("W8A8_DYNAMIC", "ascend910b", {"npu_quant_matmul", "npu_grouped_experts_int"}),
    "W4A8_DYNAMIC": (
        {"**.experts.*": "W4A8_DYNAMIC", "**": "W8A8_DYNAMIC"}, "ascend910_93",
        {"npu_quant_matmul", "npu_grouped_experts_int"},
    ),
    "W8A8_MXFP8": ("W8A8_MXFP8", "ascend950", {"npu_quant_matmul_mx", "npu_grouped_experts_mx"}),
}  # fmt: skip
"""What each quantises, a target for it, and the kernels that must run there."""
FURTHER = 1.5


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    npu_reference.load()


@pytest.fixture(scope="module")
def made() -> tuple[fm.Model, Any]:
    """A model with every parameter random, in float32."""
    model = fm.build(MOE)
    draw = torch.Generator().manual_seed(3)

    def random(leaf: Tensor) -> Tensor:
        return torch.randn(leaf.shape, generator=draw) * leaf.shape[-1] ** -0.5

    return model, trees.tree_map(random, model.init_params())


@torch.no_grad()
def logits(model: fm.Model, params: Any, dtype: torch.dtype) -> Tensor:
    """Those of a prompt, a chunk and a decoding step of two rows."""
    state, found = model.init_state(2, 256, dtype, torch.bfloat16, page_size=128), []
    draw = torch.Generator().manual_seed(8)
    for counts in ([21, 6], [0, 9], [1, 1]):
        ids = torch.randint(model.config.vocab_size, (sum(counts),), generator=draw)
        out, state = model.forward(params, state, fm.Batch.from_tokens(ids, counts, state))
        found.append(out.logits.float())
    return torch.cat(found)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_model(scheme: str, made: tuple[fm.Model, Any]) -> None:
    """Its lowered forward is as near to the float model as the formulas' forward is, and so it is when prepared.

    But for int8 experts, of which one operator then does what two did, it is the same.
    """
    model, plain = made
    words, target, kernels = SCHEMES[scheme]
    half = trees.tree_map(lambda leaf, value: value.to(leaf.dtype or torch.bfloat16), model.param_spec(), plain)
    params = trees.quantize(half, words)
    exact, usual = logits(model, plain, torch.float32), logits(model, params, torch.bfloat16)
    with lowering.use(target=target), lowering.record() as report:
        found = logits(model, params, torch.bfloat16)
    chosen = {row.kernel for row in report.rows}
    assert kernels <= chosen
    quantized = [row for row in report.rows if row.op == "experts"]
    assert {row.kernel for row in quantized} <= kernels
    away, expected = ((value - exact).norm() / exact.norm() for value in (found, usual))
    assert away <= FURTHER * expected
    prepared = lowering.prepare(params, target)
    with lowering.use(target=target), lowering.record() as again:
        laid = logits(model, prepared, torch.bfloat16)
    assert torch.equal(laid, found) or scheme == "W8A8_DYNAMIC"
    assert (laid - exact).norm() <= FURTHER * expected * exact.norm()
    assert {row.kernel for row in again.rows} == chosen
