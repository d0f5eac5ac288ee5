"""Bias and penalties against their formulas in float64, transformers' processors, and windows against single tokens."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

import funcmodels as fm
from funcmodels import RowSampling, Sampling, TokenCounts, sample
from funcmodels.sampling import draws as sampling
from params.tree import tree_map
from tests.sampling.test_sampling import chi_square, expected_law

VOCAB = 23


def penalised(logits: np.ndarray, given: Sampling, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """The documented logits, token by token, in float64."""
    changed = logits.astype(np.float64)
    for token, value in given.logit_bias:
        changed[token] += value
    times = Counter(output)
    for token in {*prompt, *output}:
        x = changed[token]
        changed[token] = x / given.repetition_penalty if x > 0 else x * given.repetition_penalty
    for token, count in times.items():
        changed[token] -= given.frequency_penalty * count + given.presence_penalty
    return changed


def settings(of: random.Random) -> Sampling:
    """Some of everything, and of nothing."""
    bias = {of.randrange(VOCAB): of.choice((-math.inf, -3.0, 2.5)) for _ in range(of.choice((0, 0, 1, 4)))}
    return Sampling(
        of.choice((0.0, 0.7, 1.3)), of.choice((0, 5)), of.choice((0.9, 1.0)), of.choice((0.0, 0.02)), of.randrange(9),
        of.choice((1.0, 0.8, 1.7)), of.choice((0.0, 0.9, -0.5)), of.choice((0.0, 0.4, -0.2)), tuple(bias.items()),
    )  # fmt: skip


def padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Rows filled up with -1."""
    most = max(map(len, rows))
    return torch.tensor([[*row, *[-1] * (most - len(row))] for row in rows], dtype=torch.int64)


def changed(logits: torch.Tensor, rows: Sequence[Sampling], counts: TokenCounts | None) -> torch.Tensor:
    """Our logits of one place a row."""
    none = torch.zeros(len(rows), 0, dtype=torch.int64)
    return sampling.adjusted(logits[:, None], RowSampling.of(rows), counts, none)[0][:, 0]


@pytest.mark.parametrize("seed", range(6))
def test_logits_and_laws_are_those_of_the_formulas(seed: int) -> None:
    of, numbers = random.Random(seed), np.random.default_rng(seed)
    logits = (numbers.normal(size=(40, VOCAB)) * 2).astype(np.float32)
    rows = [settings(of) for _ in logits]
    prompts = [[of.randrange(VOCAB) for _ in range(of.randrange(9))] for _ in rows]
    outputs = [[of.randrange(VOCAB) for _ in range(of.randrange(12))] for _ in rows]
    counts = TokenCounts.of(prompts, VOCAB).add(padded(outputs))
    ours = changed(torch.from_numpy(logits), rows, counts)
    laws = sampling.law(torch.from_numpy(logits), RowSampling.of(rows), counts).numpy()
    for row, given in enumerate(rows):
        right = penalised(logits[row], given, prompts[row], outputs[row])
        np.testing.assert_allclose(ours[row].numpy(), right, rtol=1e-5, atol=1e-5)
        assert np.abs(laws[row] - expected_law(right, given)).sum() / 2 < 1e-5, given


@pytest.mark.parametrize("repetition", [0.6, 1.0, 1.5])
def test_the_bias_comes_before_the_repetition_penalty_as_in_transformers(repetition: float) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    seen: Any = torch.tensor([[3, 7, 3, 9], [1, 1, 22, 0]])
    bias = {7: -4.0, 9: 4.0, 5: 1.5, 0: -0.5}
    biased = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])(seen, logits.clone())
    right = RepetitionPenaltyLogitsProcessor(repetition)(seen, biased)
    given = Sampling(repetition_penalty=repetition, logit_bias=tuple(bias.items()))
    for of_prompt in (0, 2, 4):
        parts = seen[:, :of_prompt], seen[:, of_prompt:]
        counts = TokenCounts.of(parts[0].tolist(), VOCAB).add(parts[1])
        torch.testing.assert_close(changed(logits, [given] * 2, counts), right)


def test_what_each_penalty_looks_at() -> None:
    """Repetition at prompt and output, presence and frequency at the output alone."""
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0]])
    counts = TokenCounts.of([[0, 1, 1]], 5).add(torch.tensor([[2, 2, 3, -1]]))
    given: dict[str, Any] = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    found = {
        name: changed(logits, [replace(Sampling(), **{name: value})], counts)[0].tolist()
        for name, value in given.items()
    }
    assert found == {
        "repetition_penalty": [1.0, -4.0, 1.0, -4.0, 2.0],
        "presence_penalty": [2.0, -2.0, 1.5, -2.5, 2.0],
        "frequency_penalty": [2.0, -2.0, 1.0, -2.5, 2.0],
    }


LOGITS = [0.3, -1.0, 2.0, 1.1, -3.5, 0.0, 1.9, -0.4]
GIVEN = Sampling(
    0.9, top_k=7, top_p=0.95, min_p=0.01, seed=4, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3,
    logit_bias=((1, 1.5), (6, -1.0)),
)  # fmt: skip
PROMPT, OUTPUT = [2, 4], [3, 3, 6, 0]


def test_draws_follow_the_law() -> None:
    count = 40_000
    index = torch.arange(count)
    counts = tree_map(lambda x: x.expand(count, -1), TokenCounts.of([PROMPT], 8).add(torch.tensor([OUTPUT])))
    tokens = sample(torch.tensor([LOGITS]).expand(count, -1), GIVEN, index % 173, index // 173, counts)
    seen = torch.bincount(tokens, minlength=8)
    rows = np.array(LOGITS, np.float32)
    right = torch.from_numpy(expected_law(penalised(rows, GIVEN, PROMPT, OUTPUT), GIVEN))
    assert chi_square(seen, right * count) > 1e-3
    for prompt, output in ((PROMPT, [3, 6, 0]), ([4], OUTPUT), ([*PROMPT, 3], [3, 6, 0])):
        other = torch.from_numpy(expected_law(penalised(rows, GIVEN, prompt, output), GIVEN))
        assert (other[seen > 0] == 0).any() or chi_square(seen, other * count) < 1e-6, (prompt, output)


# Windows


@pytest.mark.parametrize("seed", range(5))
def test_a_window_is_single_tokens_to_the_last_bit(seed: int) -> None:
    """Each place given the drafts before it, repeats among them and old tokens too."""
    of, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    steps, rows = 1 + seed, [settings(of) for _ in range(31)]
    logits = torch.randn(31, steps + 1, VOCAB, generator=generator) * 2
    counts = TokenCounts.of([[of.randrange(VOCAB) for _ in range(7)] for _ in rows], VOCAB)
    counts = counts.add(torch.randint(0, VOCAB, (31, 5), generator=generator))
    drafts = torch.randint(0, 4, (31, steps), generator=generator)
    window, left = sampling.adjusted(logits, RowSampling.of(rows), counts, drafts)
    assert left.bias is None and left.penalties is None
    for place in range(steps + 1):
        assert torch.equal(window[:, place], changed(logits[:, place], rows, counts)), place
        if place < steps:
            counts = counts.add(drafts[:, place : place + 1])


def test_drafted_tokens_are_the_undrafted_ones() -> None:
    """Token for token over rounds, when logits depend on the token before alone and penalties on all."""
    of = random.Random(5)
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    rows = RowSampling.of([settings(of) for _ in range(500)])
    requests, start, root = torch.arange(500), torch.full((500,), 4), torch.arange(500) % VOCAB
    counts = TokenCounts.of([[1, 2], [3]] * 250, VOCAB).add(root[:, None])
    plain, token, seen = [], root, counts
    for place in range(8):
        token = sample(table[token], rows, requests, start + 1 + place, seen)
        seen = seen.add(token[:, None])
        plain.append(token)
    whole = torch.stack(plain, 1)
    held, met = torch.zeros(500, dtype=torch.int64), 0
    while int(held.min()) < 5:
        known = torch.cat((root[:, None], whole, torch.zeros(500, 4, dtype=torch.int64)), 1)
        window = known.gather(1, (held[:, None] + torch.arange(4)).clamp(max=11))
        window[:, 1:] = torch.where(torch.rand(500, 3) < 0.8, window[:, 1:], 2)
        out = fm.Output(table[window].flatten(0, 1), torch.zeros(2000, 1), {})
        verdict = fm.verify(out, fm.Proposal(window[:, 0], window[:, 1:], start + held), rows, requests, counts)
        counts = counts.add(verdict.tokens)
        for row, (at, count) in enumerate(zip(held.tolist(), verdict.accepted.tolist(), strict=True)):
            wanted = whole[row, at : at + count].tolist()
            assert verdict.tokens[row, : len(wanted)].tolist() == wanted
            met += count > 1
        held = held + verdict.accepted
    assert met > 300, "drafts were accepted"


# Counts


def test_counts_are_values() -> None:
    first = TokenCounts.of([[1, 1], []], 4)
    second = first.add(torch.tensor([[0, 0, -1], [3, -1, -1]], dtype=torch.int32))
    assert first.output.sum() == 0 and first.prompt.tolist() == [[False, True, False, False], [False] * 4]
    assert second.output.tolist() == [[2, 0, 0, 0], [0, 0, 0, 1]]
    with pytest.raises(IndexError):
        TokenCounts.of([[4]], 4)


def test_rows_without_penalties_beside_others_keep_their_bits() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)) * 5
    counts = TokenCounts.of([[1, 2]] * 3, VOCAB).add(torch.randint(0, VOCAB, (3, 9)))
    found = changed(logits, [Sampling(), GIVEN, Sampling(1.0, seed=3)], counts)
    assert torch.equal(found[::2], logits[::2]) and not torch.equal(found[1], logits[1])
    assert RowSampling.of([Sampling()]).penalties is None and RowSampling.of([Sampling()]).bias is None


@pytest.mark.parametrize("given", [Sampling(presence_penalty=1.0), Sampling(1.0, repetition_penalty=1.1)])
def test_penalties_want_counts(given: Sampling) -> None:
    logits, index = torch.zeros(2, VOCAB), torch.arange(2)
    with pytest.raises(ValueError, match=rf"need counts of \[2, {VOCAB}\] tokens, and was given none; make them with"):
        sample(logits, given, index, index)
    with pytest.raises(ValueError, match=r"and was given those of \[3, 23\]"):
        sample(logits, given, index, index, TokenCounts.of([[]] * 3, VOCAB))
    out = fm.Output(torch.zeros(4, VOCAB), torch.zeros(4, 1), {})
    proposal = fm.Proposal(index, index[:, None], index)
    with pytest.raises(ValueError, match=r"and was given those of \[2, 5\]"):
        fm.verify(out, proposal, given, counts=TokenCounts.of([[]] * 2, 5))


def test_a_forbidden_token_never_comes_and_nothing_left_gives_minus_one() -> None:
    index = torch.arange(300)
    logits = torch.zeros(300, 3)
    free = sample(logits, Sampling(1.0, logit_bias=((1, -math.inf),)), index, index)
    assert set(free.tolist()) == {0, 2}
    none = Sampling(1.0, logit_bias=tuple((token, -math.inf) for token in range(3)))
    assert set(sample(logits, none, index, index).tolist()) == {-1}


BAD = [
    ({"repetition_penalty": 0.0}, "repetition_penalty must be a positive number"),
    ({"repetition_penalty": math.inf}, "repetition_penalty"), ({"presence_penalty": math.nan}, "presence_penalty"),
    ({"frequency_penalty": -math.inf}, "frequency_penalty must be a number"),
    ({"logit_bias": ((1, math.inf),)}, "logit_bias"), ({"logit_bias": ((1, math.nan),)}, "logit_bias"),
    ({"logit_bias": ((-1, 0.0),)}, "logit_bias"),
    ({"logit_bias": ((1, 0.5), (1, 0.5))}, r"logit_bias must be a tuple of pairs \(token, number below inf\), each"),
    pytest.param({"logit_bias": {1: 0.5}}, "logit_bias", marks=pytest.mark.plain),
    pytest.param({"logit_bias": (1, 0.5)}, "logit_bias", marks=pytest.mark.plain),
    pytest.param({"presence_penalty": None}, "presence_penalty", marks=pytest.mark.plain),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), BAD)
def test_settings_out_of_range(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.* found"):
        Sampling(**given)


def test_verification_with_penalties_reads_nothing_on_the_host() -> None:
    rows = RowSampling.of([settings(random.Random(seed)) for seed in range(5)])
    assert rows.penalties is not None and rows.bias is not None

    def call(
        logits: torch.Tensor, proposal: fm.Proposal, counts: TokenCounts, rows: RowSampling
    ) -> tuple[fm.Verdict, TokenCounts]:
        verdict = fm.verify(fm.Output(logits, logits[:, :1], {}), proposal, rows, proposal.start, counts)
        return verdict, counts.add(verdict.tokens)

    def case(seed: int) -> tuple[torch.Tensor, fm.Proposal, TokenCounts, RowSampling]:
        generator = torch.Generator().manual_seed(seed)
        drafts, laws = torch.randint(0, 3, (5, 2), generator=generator), torch.randn(5, 2, VOCAB, generator=generator)
        proposal = fm.Proposal(drafts[:, 0], drafts, torch.arange(5), laws)
        counts = TokenCounts.of([[seed]] * 5, VOCAB)
        return torch.randn(15, VOCAB, generator=generator) * 3, proposal, counts, rows

    traced = make_fx(call, tracing_mode="fake")(*case(0))
    for seed in (1, 2, 3):
        (one, first), (two, second) = traced(*case(seed)), call(*case(seed))
        assert one == two and first == second
