"""Whole models lowered for each Ascend target, run through the operators' CPU references, against the Torch forward.

In half precision two right forwards differ by their roundings, layer after layer. So both are held to the Torch forward
in float32: the lowered one may be at most `FURTHER` times as far from it as the Torch forward of its own dtype is. (An
expert chosen otherwise at a near tie moves a token by more than a rounding, in either of them.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
import params as trees
from lowering import npu_reference, ops
from lowering.target import ASCEND
from tests import held_out
from tests.lowering.npu.lowered import assert_near

PAGE = 128
BASE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "max_position_embeddings": 1024, "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
                        "mrope_section": [6, 5, 5]},
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {**BASE, "model_type": "qwen3_5_text", "head_dim": 128, "intermediate_size": 224},
    "moe": {
        **BASE, "model_type": "qwen3_5_moe_text", "head_dim": 256, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 96, "shared_expert_intermediate_size": 64,
        "rope_parameters": {**BASE["rope_parameters"], "mrope_section": [11, 11, 10]},
    },
}  # fmt: skip
SCHEDULE = [[131, 20, 0], [0, 121, 3], [1, 1, 1], [4, 4, 4], [1, 1, 1], [9, 0, 140]]
"""New tokens of each row a forward: prompts, a chunk, decoding, a window to verify, an idle row, page boundaries."""
VERIFY, ACCEPTED = 3, [4, 0, 2]


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    npu_reference.load()


@pytest.fixture(scope="module", params=CONFIGS)
def made(request: pytest.FixtureRequest) -> tuple[fm.Model, Any]:
    """A model with every parameter random, in float32. Every expert is chosen: among near equals a last bit decides."""
    model = fm.build({**CONFIGS[request.param], "num_experts_per_tok": 6})
    draw = torch.Generator().manual_seed(3)

    def random(leaf: torch.Tensor) -> torch.Tensor:
        return torch.randn(leaf.shape, generator=draw) * leaf.shape[-1] ** -0.5

    return model, trees.tree_map(random, model.init_params())


@torch.no_grad()
def outcome(model: fm.Model, params: Any, dtype: torch.dtype, recurrent: torch.dtype) -> list[torch.Tensor]:
    """Logits of every forward of the schedule and the draft head's, then every logical entry of both states."""
    params = trees.tree_map(lambda leaf, value: value.to(leaf.dtype or dtype), model.param_spec(), params)
    state = model.init_state(3, 4 * PAGE, dtype, recurrent, page_size=PAGE)
    draft = fm.draft(model, "mtp")
    drafted, found = draft.init_state(state), []
    draw = torch.Generator().manual_seed(8)
    for at, counts in enumerate(SCHEDULE):
        ids = torch.randint(model.config.vocab_size, (sum(counts),), generator=draw)
        batch = fm.Batch.from_tokens(ids, counts, state)
        out, state = model.forward(params, state, batch, keep_steps=at == VERIFY)
        following = ids.roll(-1)
        if at == VERIFY:
            state = fm.commit(state, ACCEPTED)
            kept = torch.cat([torch.arange(4) < count for count in ACCEPTED])
            following = torch.where(kept, following, -1)
        drafted, carry = draft.extend(params, drafted, out, batch, following)
        found += [out.logits, ops.linear(*draft.head.read(model.config, params, carry.hidden))]
    found += [value for row in range(3) for which in (state, drafted) for value in fm.logical(which, row).values()]
    return [value.float() for value in found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("target", ASCEND)
def test_a_lowered_forward_is_as_near_to_float32_as_torch_is(
    target: str, dtype: torch.dtype, made: tuple[fm.Model, Any]
) -> None:
    """The operators take bfloat16 recurrent states alone; with float16 they are refused and Torch's rule runs."""
    exact = outcome(*made, torch.float32, torch.float32)
    plain = outcome(*made, dtype, torch.bfloat16)
    with lowering.use(target=target), lowering.record() as report:
        lowered = outcome(*made, dtype, torch.bfloat16)
    chosen = {row.kernel for row in report.rows}
    assert len([name for name in chosen if name.startswith("npu_")]) >= 4, f"hardly anything was lowered: {chosen}"
    assert_near(lowered, exact, plain)


@pytest.mark.plain
def test_drafted_text_through_the_910b_lowering_is_the_text_on_cpu() -> None:
    """The bundled model, greedy, in bfloat16; texts may part only where two scores are within rounding."""
    model, params = fm.load("bundled", dtype=torch.bfloat16)
    assert model.tokenizer is not None
    prompts = held_out.prompts(model.tokenizer, 3, 20, 50)
    setup: dict[str, Any] = {"draft": "mtp", "rows": 2, "recurrent_dtype": torch.bfloat16}
    plain = fm.generate(model, params, prompts, 16, **setup)
    with lowering.use(target="ascend910b"), lowering.record() as report:
        lowered = fm.generate(model, params, prompts, 16, **setup)
    kernels = {row.op: row.kernel for row in report.rows}
    assert kernels["gated_delta_rule"].startswith("npu_") and kernels["paged_attention"].startswith("npu_fia")
    for prompt, one, other in zip(prompts, plain, lowered, strict=True):
        if one.tokens != other.tokens:
            gap = parting(model, params, prompt, one.tokens, other.tokens)
            print(f"two scores {gap:.3f} apart were swapped")
            assert gap < 0.25, "bfloat16 keeps 8 bits: logits of 16 and more lie 1/8 apart"


@torch.no_grad()
def parting(model: fm.Model, params: Any, prompt: list[int], one: list[int], other: list[int]) -> float:
    """How far apart the scores of the two tokens are where two texts part."""
    at = next(at for at, (x, y) in enumerate(zip(one, other, strict=False)) if x != y)
    out, _ = model.forward(params, None, fm.Batch.from_lists([prompt + one[:at]]), logits="last")
    return abs(float(out.logits[0, one[at]] - out.logits[0, other[at]]))
