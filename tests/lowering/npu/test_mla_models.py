"""DeepSeek-V2 lowered for Ascend, kernel by kernel and in both layouts of pages, and captured decoding."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
from funcmodels.attention.mla import LatentPages
from lowering import Policy, npu_reference
from lowering.layouts import NzPages
from tests.lowering.jit.npu_double import Double
from tests.lowering.jit.npu_models import on

from .lowered import PAGE, Lowered, assert_near, usual
from .test_mla import ABSORBED, BY_HEAD, CONCAT, OP, RING, TWO

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v2", "vocab_size": 97, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "q_lora_rank": 48, "intermediate_size": 160, "first_k_dense_replace": 1, "n_routed_experts": 6,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "topk_method": "greedy",
    "max_position_embeddings": 1024,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    npu_reference.load()


@functools.cache
def made() -> Lowered:
    return Lowered.of(CONFIG)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("layout", ["nd", "nz"])
@pytest.mark.parametrize(
    ("kernel", "target"), [*((kernel, "ascend910b") for kernel in (None, TWO, CONCAT, RING)), (None, "ascend950")]
)
def test_a_lowered_forward_is_as_near_to_float32_as_torch_is(
    kernel: str | None, target: str, layout: str, dtype: torch.dtype
) -> None:
    """By the rule of shapes, and with each kernel that takes every batch."""
    policy = Policy({} if kernel is None else {OP.name: kernel})
    with lowering.use(policy, target=target), lowering.record() as report:
        found = made().outcome(dtype, layout)
    chosen = {row.kernel for row in report.rows if row.op == OP.name}
    absorbed = ABSORBED if target == "ascend950" else BY_HEAD
    assert chosen == ({absorbed, TWO} if kernel is None else {kernel})
    writes = {row.kernel for row in report.rows if row.op == "latent_norm_rope_write"}
    assert writes == {"npu_kv_rmsnorm_rope_cache_v2"}
    assert_near(found, *usual(made(), dtype))


def test_the_layout_is_that_of_the_target() -> None:
    model = made().model
    with lowering.use(target="ascend910_93"):
        tiled = model.init_state(1, PAGE, torch.bfloat16, page_size=PAGE)
    plain = model.init_state(1, PAGE, torch.bfloat16, page_size=PAGE)
    entries = [x for state in (tiled, plain) for x in state.layers if isinstance(x, LatentPages)]
    assert [isinstance(x.latent, NzPages) for x in entries] == [True] * 3 + [False] * 3


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")
def test_captured_decoding_equals_plain_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: one capture reads latents over other lengths in each replay."""
    on(Double(), monkeypatch)
    model, params = made().model, made().typed(torch.bfloat16)
    step = lowering.jit(model.forward, ("state",), (4,), backend="npu")
    with lowering.use(target="ascend910b"):
        states = [model.init_state(3, 4 * PAGE, torch.bfloat16, page_size=PAGE) for _ in range(2)]
        prompts = [[5] * 127, [7, 8], [9]]
        for at, state in enumerate(states):
            states[at] = model.forward(params, state, fm.Batch.from_lists(prompts, state))[1]
        with lowering.record() as report:
            for token in range(4):
                batch = fm.Batch.from_lists([[token], [token + 1], [token + 2]], states[0])
                padded = fm.Batch.from_lists([[token], [token + 1], [token + 2]], states[1]).pad(4)
                out, states[0] = step(params, states[0], batch)
                right, states[1] = model.forward(params, states[1], padded)
                assert torch.equal(out.logits, right.logits[:3]), f"token {token}"
    assert step.captures == 1
    assert {row.kernel for row in report.rows if row.op == OP.name} == {BY_HEAD}
    for row in range(3):
        one, two = (fm.logical(state, row) for state in states)
        assert all(torch.equal(one[name], two[name]) for name in one)
