"""Drafts picked by the noise of the model's own draw: how often they are taken, and that they change no token."""

from __future__ import annotations

import pytest
import torch

import funcmodels as fm
from tests.sampling.test_sampling import expected_law

VOCAB, STEPS = 9, 3
SETTINGS = [
    fm.Sampling(), fm.Sampling(0.7, seed=3), fm.Sampling(1.3, top_k=4, seed=4), fm.Sampling(1.0, top_p=0.8, seed=-5),
    fm.Sampling(2.0, min_p=0.2, logit_bias=((2, 3.0), (4, -float("inf")))),
]  # fmt: skip


def windows(logits: torch.Tensor) -> fm.Output:
    return fm.Output(logits.flatten(0, 1), torch.zeros(logits.shape[0] * logits.shape[1], 1), {})


def proposed(noise: fm.DraftNoise, logits: torch.Tensor, start: torch.Tensor) -> fm.Proposal:
    """A draft for each place but the last, from logits of its own."""
    picked = [noise.draw(logits[:, step], start + 1 + step) for step in range(STEPS)]
    assert all(law is None for _, law in picked)
    return fm.Proposal(start * 0, torch.stack([token for token, _ in picked], 1), start)


@pytest.mark.parametrize("seed", range(3))
def test_a_draft_that_knows_the_models_law_is_always_taken(seed: int) -> None:
    """Whatever the settings: greedy rows, filters and bias."""
    logits = torch.randn(5 * 40, STEPS + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    given, requests = fm.RowSampling.of(SETTINGS * 40), torch.arange(200)
    proposal = proposed(fm.CoupledNoise(given, requests), logits, requests % 17)
    verdict = fm.verify(windows(logits), proposal, given, requests)
    assert (verdict.accepted == STEPS + 1).all()
    plain = fm.sample(logits[:, 1], given, requests, requests % 17 + 2)
    assert torch.equal(verdict.tokens[:, 1], plain)


@pytest.mark.parametrize("given", SETTINGS[1:4], ids=["plain", "top_k", "top_p"])
def test_a_draft_is_taken_as_often_as_two_races_with_one_noise_end_alike(given: fm.Sampling) -> None:
    """Token v wins both of them with probability 1 / sum over u of max(p[u] / p[v], q[u] / q[v])."""
    rows, generator = 6000, torch.Generator().manual_seed(8)
    p_logits, q_logits = (torch.randn(VOCAB, generator=generator) * 1.5 for _ in range(2))
    p, q = (torch.from_numpy(expected_law(x.numpy(), given)) for x in (p_logits, q_logits))
    both = (p > 0) & (q > 0)
    ratios = torch.maximum(p[:, None] / p[both], q[:, None] / q[both])
    expected = float((1 / ratios.sum(0)).sum())
    assert 0.2 < expected < 0.9 * float(torch.minimum(p, q).sum()), "laws so alike or apart tell nothing"
    each, requests = fm.RowSampling.of([given] * rows), torch.arange(rows)
    proposal = proposed(fm.CoupledNoise(each, requests), q_logits.expand(rows, STEPS, VOCAB), requests % 5)
    verdict = fm.verify(windows(p_logits.expand(rows, STEPS + 1, VOCAB)), proposal, each, requests)
    taken = float((verdict.accepted > 1).float().mean())
    assert abs(taken - expected) < 4.5 * (expected * (1 - expected) / rows) ** 0.5
    first = torch.bincount(verdict.tokens[:, 0], minlength=VOCAB) / rows
    assert (first - p).abs().max() < 4.5 * 0.5 / rows**0.5


def test_logits_that_are_no_numbers_pick_a_token_all_the_same() -> None:
    noise = fm.CoupledNoise(fm.RowSampling.of([fm.Sampling(1.0), fm.Sampling()]), torch.arange(2))
    for value in (torch.nan, torch.inf, -torch.inf):
        token, _ = noise.draw(torch.full((2, VOCAB), value), torch.tensor([1, 2]))
        assert ((token >= 0) & (token < VOCAB)).all()


def test_penalties_are_left_to_the_model() -> None:
    """The draft has no counts: a row that penalises drafts as one that does not, and needs none."""
    hard, soft = (fm.RowSampling.of([one]) for one in (fm.Sampling(1.0, frequency_penalty=3.0), fm.Sampling(1.0)))
    logits, place = torch.randn(1, VOCAB), torch.tensor([4])
    found = [fm.CoupledNoise(given, torch.tensor([3])).draw(logits, place)[0] for given in (hard, soft)]
    assert torch.equal(*found)
