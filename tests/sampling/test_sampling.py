"""Sampling against a float64 sort-based law, its noise against integers, and what must not change a draw."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from funcmodels import RowSampling, Sampling, TokenCounts, sample
from funcmodels.sampling import draws as sampling
from lowering.ops import sampling as hashed

MASK = 2**64 - 1


def expected_law(logits: np.ndarray, given: Sampling) -> np.ndarray:
    """The documented law, filter by filter, in float64."""
    p = np.zeros(len(logits))
    if given.temperature == 0:
        p[np.argmax(logits)] = 1
        return p
    x = logits.astype(np.float64) / given.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    if given.top_k:
        p[p < np.sort(p)[::-1][min(given.top_k, len(p)) - 1]] = 0
        p /= p.sum()
    if given.top_p < 1:
        values, at, counts = np.unique(p, return_inverse=True, return_counts=True)
        mass = values * counts
        larger = mass[::-1].cumsum()[::-1] - mass
        p[larger[at] >= given.top_p] = 0
        p /= p.sum()
    p[p < given.min_p * p.max()] = 0
    return p / p.sum()


def law(logits: np.ndarray, *rows: Sampling) -> np.ndarray:
    """Ours."""
    return sampling.law(torch.from_numpy(logits), RowSampling.of(rows)).numpy()


def draw(logits: list[float], given: Sampling, count: int) -> torch.Tensor:
    """`count` draws from one row of logits, over requests and positions."""
    index = torch.arange(count)
    return sample(torch.tensor([logits]).expand(count, -1), given, index % 173, index // 173)


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Probability of a deviation at least as large, cells without expectation left out."""
    cells = expected > 0
    assert not observed[~cells].any()
    statistic = ((observed - expected).square() / expected)[cells].sum().double()
    freedom = (cells.sum() - 1).double() / 2
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize("seed", range(4))
def test_filtered_law_is_that_of_the_sorted_float64_reference(seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = (random.normal(size=(60, 97)) * random.uniform(0.5, 4, (60, 1))).astype(np.float32)
    rows = [
        Sampling(
            temperature=random.choice([0.0, random.uniform(0.4, 2)]),
            top_k=[0, 1, int(random.integers(1, 97)), 97, 500][random.integers(5)],
            top_p=random.choice([1.0, random.uniform(0.01, 0.999)]),
            min_p=random.choice([0.0, random.uniform(0, 0.5), 1.0]),
        )
        for _ in logits
    ]
    ours = law(logits, *rows)
    for row, given in enumerate(rows):
        distance = np.abs(ours[row] - expected_law(logits[row], given)).sum() / 2
        assert distance < 1e-6, (given, distance)
        alone = law(logits[row : row + 1], given)[0]
        assert np.abs(alone - ours[row]).max() < 1e-6, given


HALF = math.log(0.5)
TIES = {
    "top-k keeps all equal to the last": ([3.0, 1, 2, 2, 2, 0], Sampling(1, top_k=2), [0, 2, 3, 4]),
    "top-k of one keeps both largest": ([1.0, 5, 5, 0], Sampling(1, top_k=1), [1, 2]),
    "top-k above the vocabulary": ([1.0, 2], Sampling(1, top_k=9), [0, 1]),
    "top-p keeps a group whose larger mass is below": ([0.0, 0, 0, 0], Sampling(1, top_p=0.01), [0, 1, 2, 3]),
    "top-p drops a group when the larger mass equals it": ([0, HALF, 2 * HALF, 2 * HALF], Sampling(1, top_p=0.5), [0]),
    "top-p just above that mass": ([0, HALF, 2 * HALF, 2 * HALF], Sampling(1, top_p=0.501), [0, 1]),
    "top-p at the next boundary": ([0, HALF, 2 * HALF, 2 * HALF], Sampling(1, top_p=0.75), [0, 1]),
    "top-p measures what top-k left": (list(np.log([0.4, 0.25, 0.15, 0.1, 0.1])), Sampling(1, 3, 0.7), [0, 1]),
    "top-p so small that the largest stays alone": ([0.0, -1e-3], Sampling(1, top_p=1e-30), [0]),
    "top-p with top-k of tied tokens": ([0.0, 0, 0, -1], Sampling(1, top_k=1, top_p=0.5), [0, 1, 2]),
    "min-p of one": ([2.0, 2, 1.999], Sampling(1, min_p=1), [0, 1]),
    "min-p after temperature": ([0, HALF, 2 * HALF], Sampling(2, min_p=0.6), [0, 1]),
    "forbidden tokens": ([-math.inf, 0, -math.inf, -5], Sampling(1), [1, 3]),
    "forbidden tokens within top-k": ([-math.inf, 0, -math.inf], Sampling(1, top_k=2, top_p=0.9), [1]),
    "no temperature overflows": ([1e4, -1e4, 9999.5], Sampling(1e-30), [0]),
    "temperature that evens out": ([1e4, -1e4], Sampling(1e9), [0, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", TIES)
def test_ties_and_boundaries(name: str) -> None:
    logits, given, support = TIES[name]
    found = law(np.array([logits], dtype=np.float32), given)[0]
    assert np.flatnonzero(found).tolist() == support
    assert set(draw([float(x) for x in logits], given, 200).tolist()) <= set(support)


@pytest.mark.parametrize(
    "given",
    [Sampling(1.0), Sampling(0.7, seed=3), Sampling(1.3, top_k=4), Sampling(1, top_p=0.8), Sampling(0.9, 6, 0.9, 0.05)],
)
def test_draws_follow_the_law(given: Sampling) -> None:
    logits = [0.3, -1.0, 2.0, 1.1, -3.5, 0.0, 1.9, -0.4]
    count = 40_000
    seen = torch.bincount(draw(logits, given, count), minlength=8)
    right = torch.from_numpy(expected_law(np.array(logits, np.float32), given))
    assert chi_square(seen, right * count) > 1e-3
    bent = right * torch.where(torch.arange(8) == 2, 1.06, 1)
    assert chi_square(seen, bent / bent.sum() * count) < 1e-4


def test_rare_tokens_of_a_large_vocabulary_come_as_often_as_they_should() -> None:
    logits = torch.zeros(1, 20_000)
    logits[0, 10_000:] = -3
    index = torch.arange(50)
    draws = (sample(logits.expand(50, -1), Sampling(1, seed=seed), index, index) for seed in range(40))
    tokens = torch.cat(list(draws))
    rare = int((tokens >= 10_000).sum())
    share = 1 / (1 + math.exp(3))
    assert abs(rare - 2000 * share) < 4 * math.sqrt(2000 * share * (1 - share))
    assert abs(int((tokens % 10_000 < 5000).sum()) - 1000) < 4 * math.sqrt(500)
    assert len(set(tokens.tolist())) > 1700


def finalised(x: int) -> int:
    """The SplitMix64 finaliser on Python integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def expected_noise(seed: int, request: int, position: int, token: int) -> float:
    """The documented number, in exact integers and float64."""
    key = seed
    for counter in (request, position, token):
        key = finalised((key * 0x9E3779B97F4A7C15 + counter * 0xC2B2AE3D27D4EB4F + 1) & MASK)
    return -math.log1p(-((key >> 24) + 0.5) / 2**40)


COUNTERS = [
    (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (5, 2**31 - 1, 2**31 - 1), (2**63 - 1, 2**40, 2**62), (-(2**63), -1, 7),
]  # fmt: skip


@pytest.mark.parametrize("counter", COUNTERS)
def test_noise_is_the_same_number_everywhere(counter: tuple[int, int, int]) -> None:
    seed, request, position = (torch.tensor([value]) for value in counter)
    ours = sampling.noise(seed, request, position, 50)[0]
    wanted = torch.tensor([expected_noise(*counter, token) for token in range(50)])
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("bits", [0, -1, 2**24 - 1, 2**63 - 1, -(2**63)])
def test_noise_is_positive_and_finite_at_the_ends_of_the_hash(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed, "mix", lambda a, b: torch.full(torch.broadcast_shapes(a.shape, b.shape), bits))
    zero = torch.zeros(2, dtype=torch.int64)
    found = sampling.noise(zero, zero, zero, 3)
    assert found.shape == (2, 3)
    assert (found > 0).all() and found.isfinite().all()
    assert sample(torch.tensor([[-3.0, 0], [0, -3]]), Sampling(1, top_k=1), zero, zero).tolist() == [1, 0]


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("mixed", [False, True])
def test_settings_put_together_by_hand_harm_no_other_row(name: str, mixed: bool) -> None:
    """Out of range, they leave their row no token; nothing is read from the device to find out."""
    logits, index = torch.randn(2, 50, generator=torch.Generator().manual_seed(1)), torch.arange(2)
    rows = RowSampling.of([Sampling(0.7, top_p=0.9, min_p=0.01), Sampling(0.0 if mixed else 0.7, top_p=0.9)])
    right = sample(logits, rows, index, index)
    for bad in (math.nan, -1.0) if name != "top_p" else (0.0, -1.0):
        one = replace(rows, **{name: torch.tensor([bad, float(getattr(rows, name)[1])])})
        assert sample(logits, one, index, index).tolist() == [-1, int(right[1])]


@pytest.mark.parametrize("axis", ["seed", "request", "position", "token"])
def test_noise_is_uniform_and_independent_along_each_counter(axis: str) -> None:
    count = 20_001
    run, zero = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    seed, request, position = (run if axis == name else zero for name in ("seed", "request", "position"))
    if axis == "token":
        numbers = sampling.noise(zero[:1], zero[:1], zero[:1], count)[0]
    else:
        numbers = sampling.noise(seed, request, position, 3)[:, 1]
    cell = (-torch.expm1(-numbers.double()) * 16).long()
    assert chi_square(torch.bincount(cell, minlength=16), torch.full((16,), count / 16)) > 1e-3
    pairs = torch.bincount(cell[1:] * 16 + cell[:-1], minlength=256)
    assert chi_square(pairs, torch.full((256,), (count - 1) / 256)) > 1e-3


def test_counters_are_told_apart() -> None:
    seed, request, position = torch.cartesian_prod(*[torch.arange(12)] * 3).unbind(1)
    numbers = sampling.noise(seed, request, position, 4)
    assert len(numbers.unique()) > 0.999 * numbers.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    """Not even by the dtype that its neighbours' penalties are worked out in."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(40, 61, generator=generator) * 2).to(dtype)
    logits[::7, 9], logits[::7, 11] = 30, 30 + 1e-9
    kinds = [
        Sampling(), Sampling(0.8, seed=1), Sampling(1.2, 5, 0.9), Sampling(1, top_p=0.7), Sampling(1, min_p=0.1),
        Sampling(0.0, logit_bias=((3, 0.1), (60, -math.inf))), Sampling(0.9, presence_penalty=1e30),
    ]  # fmt: skip
    rows = [kinds[index % 7] for index in range(40)]
    requests, positions = torch.arange(40) // 3, torch.arange(40) * 7
    counts = TokenCounts.of([[1, 2]] * 40, 61)
    whole = sample(logits, RowSampling.of(rows), requests, positions, counts)
    assert len(whole.unique()) > 10 and whole[0] == (9 if dtype == torch.float32 else 11)
    for size in (1, 1, 1, 3, 17):
        order = torch.randperm(40, generator=generator)[:size]
        picked = RowSampling.of([rows[index] for index in order.tolist()])
        seen = TokenCounts(counts.prompt[order], counts.output[order])
        found = sample(logits[order], picked, requests[order], positions[order], seen)
        assert torch.equal(found, whole[order])


def test_greedy_rows_beside_sampled_ones() -> None:
    logits = torch.tensor([[-8.0, -3, -2, -1, 0, 9, 1, 2]]).expand(2, -1)
    rows = RowSampling.of([Sampling(), Sampling(0.7)])
    for position in range(50):
        at = torch.tensor([position, position])
        assert sample(logits, rows, torch.tensor([0, 1]), at)[0] == 5
    flat = torch.zeros(300, 8)
    index = torch.arange(300)
    mixed = sample(flat, RowSampling.of([Sampling(), Sampling(0.7)] * 150), index, index)
    assert not mixed[::2].any()
    assert len(mixed[1::2].unique()) == 8
    assert not sample(flat, Sampling(), index, index).any()


def test_improbable_tokens_are_never_emitted() -> None:
    tokens = draw([0.0, -math.inf, -200.0, 0.5, -1e30], Sampling(1), 20_000)
    assert set(tokens.tolist()) == {0, 3}


@pytest.mark.parametrize("given", [Sampling(), Sampling(1), Sampling(1, 2, 0.9, 0.1)])
def test_rows_without_a_finite_largest_logit_give_minus_one(given: Sampling) -> None:
    bad = [[math.nan] * 3, [-math.inf] * 3, [0, math.nan, 1], [0, math.inf, 1]]
    logits = torch.tensor([*bad, [-math.inf, 4, -math.inf]])
    index = torch.arange(5)
    assert sample(logits, given, index, index).tolist() == [-1, -1, -1, -1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_left_alone_and_nothing_is_read_on_the_host(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 33).to(dtype)
    before, version = logits.clone(), logits._version
    plain = [Sampling(), Sampling(1), Sampling(0.5, 3), Sampling(2, top_p=0.5, min_p=0.01)]
    rows = RowSampling.of([replace(row, frequency_penalty=0.5, logit_bias=((3, 1.0),)) for row in plain])
    counts = TokenCounts.of([[1], [2, 3], [], [4]], 33)
    index = torch.arange(4, dtype=torch.int32)

    def call(logits: torch.Tensor, rows: RowSampling, index: torch.Tensor, counts: TokenCounts) -> torch.Tensor:
        return sample(logits, rows, index, index, counts)

    eager = call(logits, rows, index, counts)
    assert eager.dtype == torch.int64
    assert torch.equal(logits, before) and logits._version == version
    traced = make_fx(call, tracing_mode="fake")(logits, rows, index, counts)
    other, counts = torch.randn(4, 33).to(dtype), counts.add(torch.tensor([[5, 5], [6, -1], [-1, -1], [32, 0]]))
    assert torch.equal(traced(other, rows, index, counts), call(other, rows, index, counts))


def test_an_empty_batch_gives_no_tokens() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert sample(torch.zeros(0, 5), Sampling(1, 2), none, none).shape == (0,)


BAD = [
    ({"temperature": -0.1}, "temperature"), ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"), ({"top_k": -1}, "top_k"),
    pytest.param({"top_k": 2.5}, "top_k", marks=pytest.mark.plain),
    pytest.param({"temperature": "0.8"}, "temperature", marks=pytest.mark.plain),
    pytest.param({"top_p": None}, "top_p", marks=pytest.mark.plain),
    pytest.param({"min_p": "0"}, "min_p", marks=pytest.mark.plain),
    ({"top_p": 0.0}, "top_p"), ({"top_p": 1.01}, "top_p"), ({"top_p": math.nan}, "top_p"), ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.5}, "min_p"), ({"seed": 2**63}, "seed"), ({"seed": True}, "seed"), ({"top_k": True}, "top_k"),
    ({"top_k": 10**5000}, "top_k"), ({"logit_bias": ((True, 1.0),)}, "logit_bias"),
    ({"logit_bias": ((2**64, 1.0),)}, "logit_bias"), pytest.param({"seed": 0.5}, "seed", marks=pytest.mark.plain),
]  # fmt: skip


FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
NUMBERS: list[Any] = [
    0, -0.0, 0.5, 1, Fraction(1, 3), np.float16(0.5), np.float32(0.25), np.float64(1), np.int8(1), 2.0**-126, 2.0**-150,
    1e-39, 1e-46, -1e-46, Fraction(1, 10**400), Fraction(10**400, 10**400 + 1), 1 - 1e-9, 3.4e38, 1e39, -1e39, 2.0**128,
    10**400, -(10**5000), Fraction(10**5000, 7), math.nan, math.inf, -math.inf, np.float32(math.inf), True, np.True_,
    "0.5", None, 1j, Decimal("0.5"), np.array([0.5]), torch.tensor(0.5), [0.5],
]  # fmt: skip


@pytest.mark.plain
@pytest.mark.parametrize("name", FLOATS)
def test_numbers_are_refused_or_are_those_of_the_device(name: str) -> None:
    """What float32 has as 0 or as infinite is refused by name; what is accepted runs, alone and in company."""
    logits, index, seen = torch.tensor([[0.5, -1.0, 2.0]]).expand(3, -1), torch.arange(3), TokenCounts.of([[1]] * 3, 3)
    company = [Sampling(0.7, repetition_penalty=1.5), Sampling(logit_bias=((0, 1.0), (2, -2.0)))]
    refused = []
    for number in NUMBERS:
        given: dict[str, Any] = {"temperature": 1.0, name: ((1, number),) if name == "logit_bias" else number}
        try:
            one = Sampling(**given)
        except ValueError as error:
            refused.append(str(error))
            continue
        held = one.logit_bias[0][1] if name == "logit_bias" else getattr(one, name)
        device = np.float32(held)
        assert type(held) is float and held == float(number) and bool(device) == bool(number)
        assert np.isfinite(device) or (name == "logit_bias" and device == -math.inf)
        alone, beside = (RowSampling.of(rows) for rows in ([one], [*company, one]))
        counts = TokenCounts(seen.prompt[:1], seen.output[:1])
        token = sample(logits[:1], alone, index[2:], index[2:], counts)
        assert token == sample(logits, beside, index, index, seen)[2] and 0 <= int(token) < 3
    assert len(NUMBERS) - 18 <= len(refused) <= len(NUMBERS) - 9
    assert all(re.fullmatch(f"Sampling: {name} must be .*, found .*", error) and len(error) < 400 for error in refused)


@pytest.mark.parametrize(("given", "name"), BAD)
def test_settings_out_of_range(given: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .* found"):
        Sampling(**given)  # type: ignore[arg-type]


def test_every_wrong_setting_is_named() -> None:
    with pytest.raises(ValueError, match=r"temperature .*top_p"):
        Sampling(temperature=-1, top_p=2)
