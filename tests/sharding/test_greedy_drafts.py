"""What one of many ranks runs to propose: lowered without weights or other ranks, for every kind of draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
import params as trees
from funcmodels.drafts.named import BlockParams, DFlashDraft, DSparkDraft, read_config
from funcmodels.drafts.protocol import DraftedParams
from params.sharding import Ranks
from tests.oracle import block_drafts
from tests.oracle.qwen3_5 import Pair
from tests.sharding.kinds import HEADS, KINDS

pytestmark = pytest.mark.plain
VOCAB, SIZE, ROWS, STEPS = 163_840, 4, 3, 2
ALONE = {"dflash": 1, "plain": 1, "vanilla": STEPS, "gated": STEPS, "rnn": STEPS, "narrow": 0}
"""Block drafts, and how often ranks exchange their best tokens for two places; 0 where they gather logits instead."""


def one_of_many(kind: str) -> tuple[fm.Model, Any]:
    """The third of four ranks of a model with a large vocabulary, and its parameters' spec."""
    model = fm.build(KINDS[kind] | {"vocab_size": VOCAB}).sharded(Ranks(2, SIZE, "tp"))
    return model, model.param_spec(torch.bfloat16)


def proposed(draft: Any, params: Any) -> lowering.Lowered:
    """`propose` of two tokens for three rows, lowered without values."""
    state = draft.model.init_state(ROWS, 64, device="meta")
    width = draft.model.config.hidden_size * getattr(draft.model.config, "hc_count", 1)
    hidden = torch.empty(ROWS, width, dtype=torch.bfloat16, device="meta")
    carry = fm.Carry(torch.empty(ROWS, dtype=torch.int64, device="meta"), hidden)
    return lowering.lower(draft.propose, params, draft.init_state(state), carry, STEPS, target="cpu")


def calls(lowered: lowering.Lowered, op: str) -> dict[str, int]:
    """The results of an op's calls, and how many of each."""
    found: dict[str, int] = {}
    for call in lowered.calls:
        if call.op == op:
            found[call.result] = found.get(call.result, 0) + call.count
    return found


def block_draft(variant: str) -> tuple[Any, Any]:
    """A draft for one of many ranks, and specs for its parameters and the model's."""
    model, params = one_of_many("qwen_moe")
    fields = block_drafts.config_of(Pair(None, model, None), variant, 1)
    config = read_config(fields, model.config.num_hidden_layers)
    own = trees.tree_map(lambda leaf: replace(leaf, dtype=leaf.dtype or torch.bfloat16), BlockParams.spec(config))
    kind = DFlashDraft if variant == "dflash" else DSparkDraft
    return kind(model, config, own), DraftedParams(params, own)


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_heads_gather_no_logits(kind: str) -> None:
    """A value and an id of each rank for each row and token; then every token as the first rank has it."""
    model, params = one_of_many(kind)
    lowered = proposed(fm.draft(model, "mtp"), params)
    assert calls(lowered, "all_gather") == {f"f32[{ROWS},{SIZE}]": STEPS, f"i32[{ROWS},{SIZE}]": STEPS}
    assert calls(lowered, "from_first") == {f"i64[{ROWS}]": STEPS}


@pytest.mark.parametrize("variant", ALONE)
def test_block_drafts_gather_no_logits(variant: str) -> None:
    """Places that are independent are chosen at once; a draft with a vocabulary of its own reads all logits."""
    lowered = proposed(*block_draft(variant))
    places = (ROWS, STEPS) if ALONE[variant] == 1 else (ROWS,)
    shape = ",".join(map(str, (*places, SIZE)))
    gathered = {f"f32[{shape}]": ALONE[variant], f"i32[{shape}]": ALONE[variant]}
    if variant == "narrow":
        gathered = {f"bf16[{ROWS},{VOCAB}]": STEPS}
    assert calls(lowered, "all_gather") == gathered
    assert calls(lowered, "from_first") == {f"i64[{','.join(map(str, places))}]": 1 if len(places) == 2 else STEPS}
    reasons = {row.reasons() for row in lowered.explain().rows if row.op in ("greedy_token", "greedy_markov_token")}
    assert any("vocabulary of its own" in reason for reason in reasons) == (variant == "narrow")
