"""Kimi-K3 against the float64 transcription of its formulas: outputs, layers, states, any split and any rollback."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given
from torch import Tensor

import funcmodels as fm
from tests.oracle.families import close, schedules
from tests.oracle.kimi_k3 import SEEDS, Row, pair, run
from tests.oracle.qwen3_5 import tokens
from tests.oracle.states import advance, per_row, run_schedule
from tests.tolerances import assert_close

NORMS = "layer after layer, and experts' sums are small before a norm makes them large"
seeds = pytest.mark.parametrize("seed", SEEDS)


def empty(one: Any, rows: int, max_len: int, **options: Any) -> fm.State:
    """A state in the dtype of the parameters."""
    dtype = one.params.embed.weight.dtype
    return one.model.init_state(rows, max_len, dtype=dtype, recurrent_dtype=dtype, **options)


def chosen_experts(routing: Any, ids: Any, row: int) -> Tensor:
    return torch.stack([per_row(layer, ids)[row] for layer in routing.ids]).sort(-1).values


def test_the_random_models_are_of_every_kind() -> None:
    texts = [pair(seed).theirs[0]["text_config"] for seed in SEEDS]
    assert {text["attn_res_block_size"] for text in texts} == {1, 2, 3}
    assert {text["activation_situ_linear_beta"] is None for text in texts} == {False, True}
    assert {text["num_expert_group"] for text in texts} == {1, 2}
    assert {text["linear_attn_config"]["full_attn_layers"][0] == 1 for text in texts} == {False, True}


@seeds
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outputs_layers_and_entries(seed: int, dtype: torch.dtype) -> None:
    """Of ragged rows, with and without a state."""
    one = pair(seed, dtype)
    ids = tokens(one, 1, 13, 2, 29, seed=seed)
    layers = [f"layers.{index}" for index in range(one.config.num_hidden_layers)]
    state = empty(one, 4, 40, page_size=(1, 3, 8, 128)[seed])
    out, after = advance(one, state, ids, outputs=[*layers, "router"])
    plain, _ = one.model.forward(one.params, None, fm.Batch.from_lists(ids))
    for row, row_ids in enumerate(ids):
        theirs = run(one, row_ids)
        ours = [fm.logical(after, row), *(per_row(x, ids)[row] for x in (out.logits, plain.logits, out.hidden))]
        ours.append([per_row(out.extra[layer], ids)[row] for layer in layers])
        right = [theirs.entries, theirs.logits, theirs.logits, theirs.hidden, theirs.layers]
        assert_close(ours, right, looser=5 if dtype == torch.float64 else 30, reason=NORMS)
        assert torch.equal(chosen_experts(out.extra["router"], ids, row), torch.stack(theirs.chosen).sort(-1).values)


@pytest.mark.parametrize("seed", [0, 2])
def test_a_conversation_of_several_calls(seed: int) -> None:
    """Prompts longer and shorter than the delta rule's chunk, and single tokens."""
    one = pair(seed)
    state, row = empty(one, 1, 96, page_size=4), Row(*one.theirs)
    for part in tokens(one, 5, 1, 2, 66, 1, 9, seed=seed):
        out, state = advance(one, state, [part])
        theirs = run(one, part, row)
        close(out.logits, theirs.logits)
        close(fm.logical(state, 0), theirs.entries)


@given(case=schedules())
@example(case=([11, 3, 7], [[5, 0, 2], [0, 3, 1], [1, 0, 1], [2, 0, 3], [3, 0, 0]]))
def test_mixed_and_interleaved_rows(case: tuple[list[int], list[list[int]]]) -> None:
    lengths, schedule = case
    one = pair(len(lengths) % 4)
    ids = tokens(one, *lengths)
    logits, state = run_schedule(one, empty(one, len(ids), 16, page_size=3, pages=64), ids, schedule)
    for row, row_ids in enumerate(ids):
        theirs = run(one, row_ids)
        close(logits[row], theirs.logits)
        close(fm.logical(state, row), theirs.entries)


@pytest.mark.parametrize("seed", [0, 1])
def test_any_number_of_drafts_can_be_kept(seed: int) -> None:
    """A window behind a prompt: of its tokens the first few count, and the state is that of these alone."""
    one = pair(seed)
    prompts, drafts = tokens(one, 7, 4, seed=seed), tokens(one, 4, 4, seed=seed + 5)
    _, state = advance(one, empty(one, 2, 24, page_size=4), prompts)
    kept = [[run(one, [*p, *d[:count]]) for count in range(5)] for p, d in zip(prompts, drafts, strict=True)]
    for accepted in itertools.product(range(5), (0, 3, 4)):
        out, pending = advance(one, state, drafts, keep_steps=True)
        after = fm.commit(pending, list(accepted))
        for row, count in enumerate(accepted):
            close(fm.logical(after, row), kept[row][count].entries)
            close(per_row(out.logits, drafts)[row], kept[row][4].logits[-4:])
