"""The bundled checkpoint: what it is to transformers, and how its draft head does on text it never saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import funcmodels as fm
from funcmodels.checkpoint.loading import BUNDLED
from tests import held_out
from tests.tolerances import assert_close, bound

PROMPTS, NEW = 208, 32
LEAST_TOKENS_A_ROUND = 2.3

pytestmark = pytest.mark.plain  # shapes are checked on small models; here are thousands of forwards


@pytest.fixture(scope="module")
def bundled() -> tuple[fm.Model, Any]:
    return fm.load("bundled", dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(bundled: tuple[fm.Model, Any]) -> list[list[int]]:
    assert bundled[0].tokenizer is not None
    return held_out.prompts(bundled[0].tokenizer, PROMPTS, 8, 64)


@torch.no_grad()
def test_transformers_reads_it_and_gives_the_same_logits(
    bundled: tuple[fm.Model, Any], prompts: list[list[int]]
) -> None:
    from transformers import AutoModelForCausalLM

    model, params = bundled
    theirs = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    prompt = max(prompts, key=len)
    out, _ = model.forward(params, None, fm.Batch.from_lists([prompt]))
    assert_close(out.logits, theirs(torch.tensor([prompt])).logits[0], length=model.config.hidden_size)


def test_drafted_text_is_plain_text_and_takes_fewer_rounds(
    bundled: tuple[fm.Model, Any], prompts: list[list[int]]
) -> None:
    """Greedy, in another order and with other rows beside each prompt; texts may part where two scores tie."""
    model, params = bundled
    plain = fm.generate(model, params, prompts, NEW, rows=16)
    order = torch.randperm(PROMPTS, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = fm.generate(model, params, [prompts[index] for index in order], NEW, rows=11, draft="mtp")
    drafted = [shuffled[order.index(index)] for index in range(PROMPTS)]
    ties = [
        tie
        for prompt, one, other in zip(prompts, plain, drafted, strict=True)
        if (tie := first_difference(model, params, prompt, one.tokens, other.tokens)) is not None
    ]
    print(f"{len(ties)} of {PROMPTS} texts part at a tie: {ties}")
    assert len(ties) <= PROMPTS // 50
    rounds = sum(result.rounds for result in drafted)
    tokens = sum(len(result.tokens) - 1 for result in drafted)
    shares = [sum(places) / rounds for places in zip(*(x.accepted for x in drafted if x.accepted), strict=True)]
    print(f"{tokens / rounds:.2f} tokens a round; accepted by position {shares}")
    assert tokens / rounds >= LEAST_TOKENS_A_ROUND


@torch.no_grad()
def first_difference(
    model: fm.Model, params: Any, prompt: list[int], one: list[int], other: list[int]
) -> tuple[int, float] | None:
    """The place where two texts part and how far apart the two scores are there; they must be within rounding."""
    if one == other:
        return None
    at = next(at for at, (x, y) in enumerate(zip(one, other, strict=False)) if x != y)
    out, _ = model.forward(params, None, fm.Batch.from_lists([prompt + one[:at]]), logits="last")
    scores = out.logits[0]
    gap = float(scores[one[at]] - scores[other[at]])
    assert abs(gap) <= 4 * bound(torch.float32, model.config.hidden_size) * float(scores.abs().max()), (
        f"texts part at {at} without a tie: {one[at]} and {other[at]} are {gap} apart"
    )
    return at, gap
