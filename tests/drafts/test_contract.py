"""What every draft must satisfy; what is one draft's own stands in its own file."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import funcmodels as fm
import lowering
import params
from tests.drafts.contract import Drafted, drafts
from tests.drafts.rounds import GREEDY, Asked, Rows, agreement, undrafted
from tests.lowering.jit.test_round import same
from tests.oracle.qwen3_5 import tokens
from tests.tolerances import assert_close

Make = Callable[[], Drafted]
WARM = fm.Sampling(temperature=0.9, seed=5)
STEPS = 3


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@drafts()
@pytest.mark.parametrize("given", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_drafts_change_no_token(make: Make, given: fm.Sampling) -> None:
    """Rows of all lengths within a page and beside each other, over many rounds; both states are those from scratch."""
    case = make()
    steps = min(case.draft.most_steps or STEPS, 4)
    prompts = tokens(case.one, *range(1, 8), seed=3)
    asked = [Asked(ids, number, given) for number, ids in enumerate(prompts)]
    truths = undrafted(case.one, asked, 20)
    rows = Rows(case.one, asked, case.draft, max_len=40, page_size=case.page, checked=True)
    accepted = [rows.round(rows.propose(steps)) for _ in range(8)]
    compared, left_out = agreement(rows, truths)
    assert compared > 7 * 6 and left_out <= compared // 20
    assert {count for counts in accepted for count in counts} > {1}, "some drafts must be right"
    rows.check()


@drafts()
def test_generated_text_is_that_without_a_draft(make: Make) -> None:
    """More prompts than rows, in chunks, some sampled."""
    case = make()
    prompts = tokens(case.one, 3, 17, 1, 9, seed=case.page)
    asked: dict[str, Any] = {"rows": 3, "chunk": 5, "page_size": case.page, "eos": ()}
    asked["sampling"] = [GREEDY, replace(WARM, seed=1), GREEDY, WARM]
    plainly = fm.generate(case.one.model, case.one.params, prompts, 16, draft="none", **asked)
    drafted = fm.generate(case.one.model, case.one.params, prompts, 16, draft=case.draft, **asked)
    assert [result.tokens for result in drafted] == [result.tokens for result in plainly]
    assert sum(result.rounds for result in drafted) < sum(result.rounds for result in plainly)


@drafts()
@pytest.mark.parametrize(
    ("temperature", "drawn"), [(0.0, False), (0.8, False), (0.8, True)], ids=["greedy", "sampled", "drawn"]
)
def test_a_captured_round_equals_its_parts(make: Make, temperature: float, drawn: bool) -> None:
    """Rows that accept any number of tokens, none among them; one capture for all rounds, whose results stay."""
    case, draw = make(), random.Random(f"{temperature} {drawn}")
    steps = min(case.draft.most_steps or STEPS, STEPS)
    plainly: Any = fm.Round(case.one.model, case.draft).run
    step = lowering.jit(plainly, donate=("state", "drafted"), backend="fx")
    sampling = fm.RowSampling.of([fm.Sampling(temperature, top_k=9, seed=row) for row in range(3)])
    requests, prompts = torch.tensor([4, 7, 2]), tokens(case.one, 17, 1, 9)
    mine: Any = case.begun(prompts, pages=60)
    right: Any = case.begun(prompts)
    kept = []
    for number in range(6):
        most = torch.tensor([draw.randint(0, steps + 1), steps + 1, (steps + 1) * (number > 1)])
        found, *mine = step(case.joined, *mine, sampling, requests, most, steps=steps, drawn=drawn)
        with lowering.use(paged_attention="torch", block_attention="torch", experts="torch"):
            expected, *right = plainly(case.one.params, *right, sampling, requests, most, steps=steps, drawn=drawn)
        assert same(found, expected), f"round {number}"
        case.assert_same(mine[2], right[2], f"round {number}")
        kept.append((found, params.tree_map(torch.clone, found)))
        for actual, plain in zip(mine[:2], right[:2], strict=True):
            assert actual.ledger.lengths == plain.ledger.lengths == tuple(plain.lengths.tolist())
            for row in range(3):
                case.assert_same(fm.logical(actual, row), fm.logical(plain, row), f"round {number}, row {row}")
    assert all(same(*pair) for pair in kept)
    assert step.captures == 1


@drafts()
def test_a_round_refuses_what_its_parts_refuse(make: Make) -> None:
    """Before anything is written: a state that is gone, a row without room, a pool without pages."""
    case = make()
    steps = min(case.draft.most_steps or STEPS, STEPS)
    step = lowering.jit(fm.Round(case.one.model, case.draft).run, donate=("state", "drafted"), backend="fx")
    rest = (fm.RowSampling.of([GREEDY] * 2), torch.arange(2), torch.tensor([steps + 1] * 2))

    def run(state: fm.State, drafted: fm.State, carry: fm.Carry) -> Any:
        return step(case.joined, state, drafted, carry, *rest, steps=steps)

    most = 60 // case.page * case.page
    begun = case.begun([[5] * (most - steps - 1 - case.page), [4]], pages=40)
    _, after, _, again = run(*begun)
    with pytest.raises(fm.StateError, match="donated"):
        run(after, begun[1], begun[2])
    begun = case.begun([[5] * (61 - steps - 1), [4]], pages=40)
    with pytest.raises(ValueError, match=f"row 0: {steps + 1} new tokens do not fit: it holds {60 - steps}"):
        run(*begun)
    filled = case.page * 2
    begun = case.begun([[5] * filled, [4] * filled], pages=4)
    with pytest.raises(fm.OutOfPages, match="2 more pages are needed and 0 of 4 are free"):
        run(*begun)
    assert step.captures == 1 and fm.logical(begun[0], 0).keys() and begun[0].ledger.lengths == (filled, filled)
    assert again.token.shape == (2,)


@drafts("mtp dense", "mtp moe", "mtp flash-next")
def test_gradients_reach_the_trunk_through_a_head(make: Make) -> None:
    """Trained together: the slope along a random direction is the difference quotient, in float64."""
    case, generator = make(), torch.Generator().manual_seed(0)
    wide = params.to(case.one.params, dtype=torch.float64)
    batch = fm.Batch.from_lists(tokens(case.one, 8, 5))
    following = replace(batch, tokens=fm.next_tokens(batch, torch.tensor([3, 4])))

    def loss(values: Any) -> Tensor:
        out, _ = case.one.model.forward(values, None, batch, logits=None)
        return case.draft.forward(values, None, following, out.hidden)[0].logits.log_softmax(-1)[:, 5].sum()

    aim = params.tree_map(lambda leaf: torch.randn(leaf.shape, generator=generator, dtype=torch.float64), wide)
    ahead, behind = (loss(params.tree_map(lambda x, d, s=s: x + s * d, wide, aim)) for s in (1e-7, -1e-7))
    with torch.enable_grad():
        grads = torch.func.grad(loss)(wide)
    slope = sum((x * d).sum() for x, d in zip(params.leaves(grads), params.leaves(aim), strict=True))
    assert_close((ahead - behind) / 2e-7, slope, dtype=torch.float32, looser=10, reason="a difference over a step")
