"""Rounds with block drafts: tokens and laws are the model's own, eager and captured, by hand and through `generate`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import funcmodels as fm
import lowering
import params
from funcmodels.drafts.named import NAMES, BlockParams
from params.tree import tree_map
from tests.drafts.rounds import Asked, Rows, agreement, undrafted
from tests.drafts.test_law import merged
from tests.oracle import block_drafts, qwen3_5
from tests.oracle.block_drafts import Drafter, begun
from tests.oracle.qwen3_5 import tokens
from tests.sampling.test_sampling import chi_square, expected_law

WARM = fm.Sampling(temperature=0.9, seed=5)
KINDS = ("dflash", "vanilla", "rnn", "narrow")
drafts = pytest.mark.parametrize("variant", KINDS)


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


@functools.cache
def drafter(variant: str, seed: int = 0, vocab: int = 0) -> Drafter:
    """A random draft for a random model of two layers, the same for the same arguments."""
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    fields = qwen3_5.sizes("dense", seed) | layers | ({"vocab_size": vocab} if vocab else {})
    return block_drafts.build(qwen3_5.build("dense", fields, seed), variant, seed)


@pytest.mark.parametrize("right", range(5))
def test_any_count_of_a_window_may_count(right: int) -> None:
    """Windows of which 0 to 4 tokens are kept, in rows at every place of a page; then a round of the draft's own."""
    one = drafter("vanilla")
    asked = [Asked(ids) for ids in tokens(one.one, 3, 4, 5, 6)]
    truths = undrafted(one.one, asked, 12)
    rows = Rows(one.one, asked, one.draft, max_len=40, page_size=4)
    wrong = torch.tensor([[(token + 1) % one.one.config.vocab_size for token in truth.tokens[1:4]] for truth in truths])
    ahead = torch.tensor([truth.tokens[1:4] for truth in truths])
    counts = rows.round(torch.where(torch.arange(3) < right - 1, ahead, wrong), [right] * 4)
    assert counts == [right] * 4
    rows.round(rows.propose(2))
    agreement(rows, truths)
    rows.check()


def check_law(variant: str, count: int) -> None:
    """Two tokens of many rows of one prompt, with drawn drafts, against laws from forwards of every first token."""
    one = drafter(variant, 2, vocab=9 if variant == "narrow" else 7)
    model, vocab = one.one.model, one.one.config.vocab_size
    given = fm.Sampling(1.2, top_k=6, top_p=0.95, min_p=0.03, seed=7)
    (prompt,) = tokens(one.one, 4)
    rows = Rows(one.one, [Asked(prompt, number, given) for number in range(count)], one.draft, max_len=12, page_size=12)
    taken = []
    while min(map(len, rows.tokens)) < len(prompt) + 3:
        taken += rows.round(rows.proposal(2, drawn=True))
    assert sum(taken) > 1.2 * len(taken), "drafts that are never taken test nothing"
    seen = torch.tensor([row[len(prompt) + 1 : len(prompt) + 3] for row in rows.tokens])
    firsts = torch.tensor([row[len(prompt)] for row in rows.tokens])
    out, _ = model.forward(
        one.one.params, None, fm.Batch.from_lists([[*prompt, a, b] for a in range(vocab) for b in range(vocab)])
    )
    logits = out.logits.view(vocab, vocab, -1, vocab).numpy()
    share = torch.bincount(firsts, minlength=vocab).double() / count
    after = np.stack([expected_law(logits[a, 0, -2], given) for a in range(vocab)])
    pair = np.stack([[expected_law(logits[a, b, -1], given) for b in range(vocab)] for a in range(vocab)])
    both = torch.einsum("a,ab,abc->bc", share, torch.from_numpy(after), torch.from_numpy(pair))
    assert (both > 0.01).sum() > vocab, "a law of so few pairs tells nothing"
    cells = torch.bincount(seen[:, 0] * vocab + seen[:, 1], minlength=vocab**2)
    assert chi_square(*merged(torch.bincount(seen[:, 0], minlength=vocab), both.sum(1) * count)) > 1e-3
    assert chi_square(*merged(cells, both.flatten() * count)) > 1e-3


@pytest.mark.parametrize("variant", ["dflash", "vanilla"])
def test_drawn_drafts_leave_the_models_law(variant: str) -> None:
    check_law(variant, 1500)


@pytest.mark.sweep
@pytest.mark.parametrize("variant", ["dflash", "vanilla", "gated", "rnn", "narrow"])
def test_drawn_drafts_leave_the_models_law_in_many_rows(variant: str) -> None:
    check_law(variant, 20_000)


def test_greedy_rows_draft_as_greedy_beside_drawn_ones() -> None:
    """A batch that mixes both draws; its greedy rows have the tokens, and a law all on one, of a greedy batch."""
    one = drafter("vanilla", 1)
    _, dstate, carry, _ = begun(one, tokens(one.one, 5, 5, 3, 3))
    given = fm.RowSampling.of([fm.Sampling(), fm.Sampling(3.0, seed=1)] * 2)
    noise = fm.DraftNoise(given, torch.arange(4))
    mixed, _ = one.draft.propose(one.one.params, dstate, carry, one.draft.most_steps, noise)
    greedy, _ = one.draft.propose(one.one.params, dstate, carry, one.draft.most_steps)
    assert torch.equal(mixed.tokens[::2], greedy.tokens[::2]) and greedy.logits is None
    assert not torch.equal(mixed.tokens[1::2], greedy.tokens[1::2])
    assert mixed.logits is not None
    assert torch.equal(mixed.logits[::2].softmax(-1).argmax(-1), greedy.tokens[::2])
    assert (mixed.logits[::2].softmax(-1).amax(-1) == 1).all() and (mixed.logits[1::2].softmax(-1).amax(-1) < 1).all()


# Captured


def test_captured_parts_follow_the_drafts_parameters() -> None:
    """They are inputs: another draft of the same shapes replays the same program with its own values."""
    one = drafter("vanilla")
    other = type(one.draft)(one.one.model, one.draft.config, tree_map(lambda x: x * 1.5, one.draft.params))
    _, dstate, carry, _ = begun(one, [[5, 6, 7], [8]])
    noise = fm.DraftNoise(fm.RowSampling.of([fm.Sampling(5.0)] * 2), torch.arange(2))
    step = lowering.jit(one.draft.propose, backend="fx")
    for draft in (one.draft, other, one.draft):
        found, _ = step(draft.joined(one.one.params), dstate, carry, steps=2, noise=noise)
        right, _ = draft.propose(one.one.params, dstate, carry, 2, noise)
        assert torch.equal(found.tokens, right.tokens)
        torch.testing.assert_close(found.logits, right.logits, atol=1e-5, rtol=1e-5)
    assert step.captures == 1


# generate and serve


def saved(one: Drafter, path: Path) -> Path:
    """The draft as a directory."""
    own = params.put(one.draft.params, "context", None)
    return params.save(own, path, BlockParams.spec(one.draft.config), NAMES, one.fields)


def outcome(results: list[fm.Result]) -> list[tuple[Any, ...]]:
    return [(result.tokens, result.finish_reason) for result in results]


@pytest.mark.parametrize(("variant", "backend"), [("dflash", None), ("vanilla", None), ("vanilla", "fx")])
def test_generate_takes_a_directory(variant: str, backend: str | None, tmp_path: Path) -> None:
    """More prompts than rows, in chunks, some sampled, some that begin alike: the tokens are those without a draft."""
    one = drafter(variant)
    model, given = one.one.model, [fm.Sampling(), WARM] * 3
    common = tokens(one.one, 9)[0]
    prompts = [common + more for more in tokens(one.one, 3, 1, 2)] + tokens(one.one, 1, 6, 4, seed=1)
    setup: dict[str, Any] = {"sampling": given, "rows": 2, "page_size": 4, "chunk": 5, "backend": backend}
    plain = fm.generate(model, one.one.params, prompts, 12, **setup)
    directory = saved(one, tmp_path / "draft")
    drafted = fm.generate(model, one.one.params, prompts, 12, draft=directory, **setup)
    assert outcome(drafted) == outcome(plain)
    assert [len(result.accepted) for result in drafted] == [one.draft.most_steps] * 6
    with pytest.raises(ValueError, match=f"draft_steps must be at most {one.draft.most_steps}, found 8"):
        fm.generate(model, one.one.params, prompts, 12, draft=one.draft, draft_steps=8)
