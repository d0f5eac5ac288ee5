"""Prompts that begin alike run what they share once: the plan, the tokens, the work, the pages."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import funcmodels as fm
from funcmodels.serving.prefixes import Share, pages_held, plan
from funcmodels.state import pages
from params.tree import tree_map
from tests import tiny
from tests.serving.test_generate_drafted import outcome, scripted

Loaded = tuple[fm.Model, Any]
SAMPLED = fm.Sampling(temperature=1.2, top_k=60, top_p=0.95, seed=9)


def family(draw: random.Random, depth: int) -> list[list[int]]:
    """Prompts of a tree: branches at random lengths, some of them leaves, some twice."""
    if depth == 0 or draw.random() < 0.2:
        return [[draw.randrange(tiny.VOCAB) for _ in range(draw.randint(0, 12))]] * draw.choice([1, 1, 2, 3])
    stem = [draw.randrange(tiny.VOCAB) for _ in range(draw.randint(1, 20))]
    return [stem + rest for _ in range(draw.randint(1, 3)) for rest in family(draw, depth - 1)]


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_is_possible_and_leaves_little_to_run_twice(seed: int) -> None:
    """Walked in order: each start is among the tokens that its source runs, and is still held when its turn comes."""
    draw = random.Random(seed)
    prompts = [[seed, *prompt] for _ in range(3) for prompt in family(draw, 3)]
    least = draw.randint(1, 9)
    shares = plan(prompts, least)
    held, most = dict[tuple[int, int], int](), 0
    for number, (prompt, share) in enumerate(zip(prompts, shares, strict=True)):
        assert share.start < len(prompt) and list(share.holds) == sorted(set(share.holds))
        if share.source is not None:
            assert (share.source, share.start) in held and prompts[share.source][: share.start] == prompt[: share.start]
        assert all(share.start + least <= at < len(prompt) for at in share.holds)
        # Nothing that a later one begins from has been let go of.
        held |= {(number, at): at for at in share.holds}
        later = {(other.source, other.start) for other in shares[number + 1 :]}
        held = {key: at for key, at in held.items() if key in later}
        most = max(most, len(held) and max(held.values()) // 4 + len(held))
        common = max((shared(prompt, other) for other in prompts[:number][-1:]), default=0) - 1
        assert share.start > common - 2 * least, "not much more than a page is run twice"
    assert most <= pages_held(shares, 4)
    assert {share.source for share in shares} != {None} or least > 1


def shared(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with, counted one by one."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


PLANS = [
    ([[1, 2, 3, 4, 5], [1, 2, 3, 9]], 2, [Share(None, 0, (2,)), Share(0, 2, ())]),
    ([[1, 2, 3, 4, 5], [1, 2, 3, 9]], 3, [Share(None, 0, ())] * 2),
    ([[1, 2, 3]] * 3, 2, [Share(None, 0, (2,)), Share(0, 2, ()), Share(0, 2, ())]),
    # The system prompt of all, and each of two prompts twice: held at two lengths.
    (
        [[7, 7, 7, 1, 1, 1], [7, 7, 7, 1, 1, 1], [7, 7, 7, 2, 2, 2], [7, 7, 7, 2, 2, 2]], 2,
        [Share(None, 0, (2, 5)), Share(0, 5, ()), Share(0, 2, (5,)), Share(2, 5, ())],
    ),
    ([[1, 2, 3], [4, 5, 6], [1, 2, 3]], 1, [Share(None, 0, ())] * 3),
    ([[5]], 1, [Share(None, 0, ())]),
]  # fmt: skip


@pytest.mark.parametrize(("prompts", "least", "expected"), PLANS)
def test_plans_of_simple_prompts(prompts: list[list[int]], least: int, expected: list[Share]) -> None:
    assert plan(prompts, least) == expected


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """A random model with a random head."""
    sizes = {**tiny.SIZES, "max_position_embeddings": 512, "num_hidden_layers": 2}
    sizes["layer_types"] = ["linear_attention", "full_attention"]
    model = fm.build({"model_type": "qwen3_5_text", **sizes, "mtp_num_hidden_layers": 1})
    generator = torch.Generator().manual_seed(0)
    return model, tree_map(lambda x: torch.randn(x.shape, generator=generator) / 6, model.init_params(seed=1))


class Watched(pages.PagePool):
    """A pool that remembers the most pages that were held."""

    made: list[Watched]

    def __init__(self, pages: int, owned: bool) -> None:
        super().__init__(pages, owned)
        self.most = 0
        self.made.append(self)

    def take(self, count: int) -> list[int]:
        """As a pool does."""
        taken = super().take(count)
        self.most = max(self.most, self.pages - self.free)
        return taken


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """The pools that were made, that of the model's state before that of the draft's."""
    made: list[Watched] = []
    monkeypatch.setattr(Watched, "made", made, raising=False)
    for module in ("model", "state.state"):
        monkeypatch.setattr(f"funcmodels.{module}.PagePool", Watched)
    return made


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward of the model runs."""
    counts: list[int] = []
    forward = fm.Model.forward

    def counted(self: fm.Model, params: Any, state: Any, batch: fm.Batch, **kwargs: Any) -> Any:
        counts.append(sum(batch.counts))
        return forward(self, params, state, batch, **kwargs)

    monkeypatch.setattr(fm.Model, "forward", counted)
    return counts


@pytest.fixture
def unshared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`unshared()`: from now on no prompt is seen to share anything."""
    alone: Any = lambda prompts, least: [Share(None, 0, ())] * len(prompts)  # noqa: E731
    return lambda: monkeypatch.setattr("funcmodels.serving.engine.plan", alone)


@pytest.mark.parametrize("draft", [None, "mtp"])
@pytest.mark.parametrize("rows", [8, 3])
def test_a_common_beginning_is_run_once_and_takes_pages_once(
    rows: int, draft: str | None, loaded: Loaded, pools: list[Watched], run: list[int], unshared: Any
) -> None:
    """Eight prompts of 300 common tokens: 299 of them are run once. Nothing else changes."""
    draw = random.Random(1)
    system = [draw.randrange(tiny.VOCAB) for _ in range(300)]
    prompts = [system + [draw.randrange(tiny.VOCAB) for _ in range(1 + at)] for at in range(8)]
    given: dict[str, Any] = {"eos": (), "rows": rows, "page_size": 16, "draft": draft, "draft_steps": 2}
    found = fm.generate(*loaded, prompts, 1, **given)
    assert [result.shared_tokens for result in found] == [0] + [299] * 7
    assert sum(run) == 299 + sum(len(prompt) - 299 for prompt in prompts)
    found = fm.generate(*loaded, prompts, 6, **given)
    shared_pools, pools[:] = pools[:], []
    unshared()
    right = fm.generate(*loaded, prompts, 6, **given)
    assert [result.shared_tokens for result in right] == [0] * 8
    assert outcome(found) == outcome(right)
    # The draft saw the same places, so it drafted the same tokens.
    assert [(x.rounds, x.accepted) for x in found] == [(x.rounds, x.accepted) for x in right]
    for pool in shared_pools:
        assert pool.free == pool.pages, "all pages are returned"
        assert pool.most <= 300 // 16 + 3 * rows + 2
    assert len(shared_pools) == (4 if draft else 2)
    assert min(pool.pages for pool in pools) >= rows * (306 // 16)


@pytest.fixture
def trees() -> list[list[int]]:
    """Prompts that share at several lengths, with some that share nothing between them."""
    draw = random.Random(8)
    found = [prompt for _ in range(2) for prompt in family(draw, 3)] + [[3], [4, 4]]
    return [prompt or [1] for prompt in found][:16]


@pytest.mark.plain  # the tests around it run the same calls with checks
@pytest.mark.parametrize("sampling", [fm.Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("rows", "chunk", "page_size"), [(1, 512, 4), (3, 5, 8), (16, 512, 3), (5, 2, 1)])
def test_sharing_changes_no_token(
    rows: int, chunk: int, page_size: int, sampling: fm.Sampling, loaded: Loaded, trees: list[list[int]], unshared: Any
) -> None:
    given: dict[str, Any] = {"eos": (), "sampling": sampling, "chunk": chunk}
    found = [
        fm.generate(*loaded, trees, 6, draft=draft, rows=rows, page_size=page_size, **given) for draft in (None, "mtp")
    ]
    unshared()
    right = fm.generate(*loaded, trees, 6, **given)
    assert outcome(found[0]) == outcome(found[1]) == outcome(right)
    assert sum(result.shared_tokens > 0 for result in found[0]) > 11


def test_sharing_in_captured_rounds(loaded: Loaded, trees: list[list[int]], unshared: Any) -> None:
    given: dict[str, Any] = {"eos": (), "rows": 3, "page_size": 8, "chunk": 16}
    found = fm.generate(*loaded, trees, 6, draft="mtp", backend="fx", **given)
    unshared()
    assert outcome(found) == outcome(fm.generate(*loaded, trees, 6, **given))
    assert sum(result.shared_tokens for result in found) > 100


def test_rows_of_any_draft_are_copied(loaded: Loaded, trees: list[list[int]]) -> None:
    given: dict[str, Any] = {"eos": (), "rows": 4, "page_size": 8}
    plain = fm.generate(*loaded, trees, 6, **given)
    draft = scripted(trees, plain)
    assert outcome(fm.generate(*loaded, trees, 6, draft=draft, **given)) == outcome(plain)


@pytest.mark.parametrize("number", [2, 5])
def test_one_prompt_many_times(number: int, loaded: Loaded, run: list[int]) -> None:
    """Best of n: each draws for itself, as it would alone in a list of as many."""
    prompt = [*range(20, 57)]
    given: dict[str, Any] = {"eos": (), "sampling": SAMPLED, "rows": 2}
    found = fm.generate(*loaded, [prompt] * number, 5, page_size=8, **given)
    assert sum(run[:2]) == 36 + min(number, 2), "the last token is each one's own"
    assert outcome(found) == outcome(fm.generate(*loaded, [prompt] * number, 5, page_size=64, **given))
    assert len({tuple(result.tokens) for result in found}) == number
