"""Weights prepared for Ascend: made once, read by their kernels alone or as plain ones, and the plain tree kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import funcmodels as fm
import lowering
from lowering import LoweringError, npu_reference, ops
from lowering.npu.moe import GroupedWeight
from lowering.npu.norm import OnePlusWeight
from params import tree
from params.tree import tree_map
from tests.cases import cases_of
from tests.tiny import SIZES
from tests.tolerances import assert_close

MOE: dict[str, Any] = {
    **SIZES, "model_type": "qwen3_5_moe_text", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    """The namespace `npu`, on the CPU."""
    npu_reference.load()


def test_one_plus_weights_give_the_same_as_plain_ones() -> None:
    """To the last bit, on the target that wants them; elsewhere the reference reads them as they were."""
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(64).bfloat16()
    prepared = ops.gemma_rms_norm.kernels["npu_rms_norm_1p"].prepare(weight)  # type: ignore[misc]
    assert isinstance(prepared, OnePlusWeight) and prepared.one_plus.dtype == torch.float32
    assert prepared.shape == weight.shape and prepared.device == weight.device
    for op, args in (
        (ops.gemma_rms_norm, (x,)), (ops.gemma_rms_norm_rstd, (x,)), (ops.add_gemma_rms_norm, (x, x.flip(0))),
    ):  # fmt: skip
        wanted: dict[str, Any] = {op.name: next(name for name in op.kernels if name.endswith("_1p"))}
        with lowering.use(target="ascend950", **wanted), lowering.record() as report:
            assert tree.equal(op(*args, prepared, eps=1e-6), op(*args, weight, eps=1e-6))
        assert {row.kernel for row in report.rows} <= {"npu_rms_norm_1p", "npu_add_rms_norm_1p"}
        assert tree.equal(op(*args, prepared, eps=1e-6), op(*args, weight, eps=1e-6))
        refused = op.explain(*args, prepared, eps=1e-6, target="ascend910b").refused
        assert "takes no weight that was prepared for npu_rms_norm_1p, npu_add_rms_norm_1p" in refused.values()


def test_grouped_weights_give_the_same_as_plain_ones() -> None:
    """Blocked once instead of viewed transposed at each call; the reference reads them back."""
    (case,) = [case for case in cases_of("experts") if case.name == "tiny"]
    (x, weights, ids, gate_up, down), _ = case.arguments(torch.bfloat16)
    kernel = ops.experts.kernels["npu_grouped_experts"]
    blocked = [kernel.prepare(weight) for weight in (gate_up, down)]  # type: ignore[misc]
    assert all(isinstance(weight, GroupedWeight) for weight in blocked)
    assert blocked[0].blocked.shape == (8, 32, 32) and blocked[1].blocked.shape == (8, 16, 32)
    for target in ("ascend910b", "cpu"):
        with lowering.use(target=target), lowering.record() as report:
            found = ops.experts(x, weights, ids, *blocked)
        assert report.rows[0].kernel == ("npu_grouped_experts" if target == "ascend910b" else "torch")
        assert_close(found, ops.experts.body(x, weights, ids, gate_up, down), length=32)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 24, 16), torch.bfloat16), ((3, 16, 24), torch.bfloat16), ((3, 32, 16), torch.float32)]
)
def test_weights_that_do_not_fill_blocks_stay_plain(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """And weights of a dtype that has no such blocks."""
    assert ops.experts.kernels["npu_grouped_experts"].prepare(torch.zeros(shape, dtype=dtype)) is None  # type: ignore[misc]


def test_a_weight_that_only_its_kernel_reads_says_so() -> None:
    """Where that kernel is refused."""
    plain = torch.randn(1024, 1024)
    packed = ops.linear.kernels["onednn_packed"].prepare(plain)  # type: ignore[misc]
    with pytest.raises(LoweringError, match="a PackedWeight can only be read by onednn_packed, and that kernel is"):
        packed.plain()


@pytest.mark.parametrize("target", ["ascend910b", "ascend950"])
def test_prepared_parameters_run_the_same_forward(target: str) -> None:
    """Each target's own weights are prepared, the plain tree is left alone, and the model computes the same."""
    model = fm.build(MOE)
    params = model.init_params(seed=3, dtype=torch.bfloat16)
    before = tree_map(Tensor.clone, params)
    with lowering.use(target=target):
        prepared = lowering.prepare(params)
    assert tree.equal(params, before)
    norm, experts = prepared.layers[0].input_norm.weight, prepared.layers[0].mlp.experts.gate_up
    assert isinstance(norm, Tensor)  # a rule orders the kernels of norms on 950, and none of both reads another weight
    assert isinstance(experts, GroupedWeight)
    assert isinstance(prepared.layers[0].attn.norm.weight, Tensor)
    batch = fm.Batch.from_lists([[5, 6, 7, 8, 9], [1, 2]])
    with lowering.use(target=target), lowering.record() as report:
        found = model.forward(prepared, None, batch)[0].logits
    assert {row.kernel for row in report.rows if row.op == "experts"} == {"npu_grouped_experts"}
    with lowering.use(target=target):
        assert_close(found, model.forward(params, None, batch)[0].logits, length=64)
    shown = lowering.explain(model.forward, prepared, None, batch, target=target)
    assert {(row.op, row.kernel) for row in shown.rows} == {(row.op, row.kernel) for row in report.rows}
