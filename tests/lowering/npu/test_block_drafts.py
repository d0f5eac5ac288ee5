"""A block draft lowered for each Ascend target, run through the operators' CPU references, against Torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
import params as trees
from funcmodels.drafts.named import BlockParams, DSparkDraft, read_config, with_context
from lowering import npu_reference
from lowering.target import ASCEND
from tests.lowering.npu.lowered import assert_near
from tests.lowering.npu.test_models import CONFIGS, PAGE

DRAFT: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"], "vocab_size": 160, "hidden_size": 192, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention"], "block_size": 5, "mask_token_id": 3,
    "target_layer_ids": [0, 3], "markov_rank": 32,
}  # fmt: skip
"""A layer that looks to both sides, and one that is causal over a window."""


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    npu_reference.load()


@torch.no_grad()
def outcome(dtype: torch.dtype) -> list[torch.Tensor]:
    """The context's entries, and the law of each place of a block behind rows that begin, fill and cross pages."""
    model = fm.build(CONFIGS["dense"])
    config = read_config(DRAFT, 4)
    draw = torch.Generator().manual_seed(3)

    def random(leaf: torch.Tensor) -> torch.Tensor:
        return torch.randn(leaf.shape, generator=draw) * leaf.shape[-1] ** -0.5

    target = trees.tree_map(random, model.init_params())
    own = trees.tree_map(random, trees.init(BlockParams.spec(config), 0))
    target = trees.tree_map(lambda leaf, value: value.to(leaf.dtype or dtype), model.param_spec(), target)
    draft = DSparkDraft(model, config, with_context(trees.to(own, dtype=dtype)))
    state = model.init_state(3, 4 * PAGE, dtype, torch.bfloat16, page_size=PAGE)
    drafted = draft.init_state(state)
    ids = torch.randint(160, (131 + 1 + 127,), generator=draw)
    batch = fm.Batch.from_tokens(ids, (131, 1, 127), state)
    features = {name: torch.randn(259, 192, generator=draw).to(dtype) for name in draft.outputs}
    out = fm.Output(torch.zeros(0, 160, dtype=dtype), torch.zeros(259, 192, dtype=dtype), features)
    drafted, carry = draft.extend(target, drafted, out, batch, ids)
    noise = fm.DraftNoise(fm.RowSampling.of([fm.Sampling(1.0)] * 3), torch.arange(3))
    proposal, drafted = draft.propose(target, drafted, carry, 1, noise)
    assert proposal.logits is not None
    found = [value for row in range(3) for value in fm.logical(drafted, row).values()]
    return [value.float() for value in (*found, proposal.logits[:, 0])]


@pytest.mark.parametrize("target", ASCEND)
def test_a_lowered_block_is_as_near_to_float32_as_torch_is(target: str) -> None:
    dtype = torch.bfloat16
    exact, plain = outcome(torch.float32), outcome(dtype)
    with lowering.use(target=target), lowering.record() as report:
        lowered = outcome(dtype)
    kernels = {row.op: row.kernel for row in report.rows}
    assert kernels["block_attention"] == "npu_fia_block" and kernels["paged_attention"] == "npu_fia_tnd"
    assert_near(lowered, exact, plain)
