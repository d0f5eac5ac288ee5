"""`keep_top` against a float64 law over sets of tokens, at its ties, at a large vocabulary, and its kernels' choice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import lowering
from lowering import OPS, ops
from lowering.kernel import REFERENCE
from lowering.portable.sampling import _smallest, _smallest_by_row

KERNELS = [name for name, kernel in OPS["keep_top"].kernels.items() if kernel.portable]


def call(kernel: str, logits: Tensor, k: list[int] | None, p: list[float] | None) -> Tensor:
    """The tokens kept, by a kernel that is asked for by name, with hints as tight as they can be."""
    rows = logits.shape[0]
    alone = any(top == 0 and share < 1 for top, share in zip(k or [0] * rows, p or [1.0] * rows, strict=True))
    largest = max(k or [0])
    ks, ps = None if k is None else torch.tensor(k), None if p is None else torch.tensor(p)
    hints: dict[str, Any] = {"largest_k": largest, "p_alone": alone}
    # A kernel that refuses small rows for speed alone is right about them too.
    return OPS["keep_top"].kernels[kernel].run(logits, ks, ps, **hints)


def expected(logits: np.ndarray, k: int, p: float) -> set[int]:
    """The definition: which tokens have few enough, and light enough, larger ones. Ends of shares are not near."""
    left = {at for at, x in enumerate(logits) if k == 0 or (logits > x).sum() < k}
    weights = {at: math.exp(float(logits[at]) - float(logits.max())) for at in left}
    total = math.fsum(weights.values())
    if p == 1:
        return left
    return {at for at in left if math.fsum(w for other, w in weights.items() if logits[other] > logits[at]) < p * total}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_is_the_definition(kernel: str, seed: int) -> None:
    """With logits rounded to quarters, many of them are equal."""
    of = np.random.default_rng(seed)
    logits = np.round(of.normal(size=(23, 61)) * 8) / (4 if seed % 2 else 1)
    k = [int(of.choice([0, 1, 5, 61, 300])) for _ in logits]
    p = [float(of.choice([1.0, 0.1, 0.5, 0.93])) for _ in logits]
    for ks, ps in ((k, p), (k, None), (None, p)):
        kept = call(kernel, torch.from_numpy(logits).float(), ks, ps)
        for row, x in enumerate(logits):
            right = expected(x, ks[row] if ks else 0, ps[row] if ps else 1.0)
            assert set(kept[row].nonzero()[:, 0].tolist()) == right, (row, ks and ks[row], ps and ps[row])


TIES: dict[str, tuple[list[float], int, float, list[int]]] = {
    "all equal to the k-th stay": ([3, 1, 2, 2, 2, 0], 2, 1.0, [0, 2, 3, 4]),
    "more of them than the list is long": ([5, 5, 5, 5, 5, 1], 1, 1.0, [0, 1, 2, 3, 4]),
    "and their mass counts": ([1, 0, 0, 0, 0, -9], 2, 0.45, [0, 1, 2, 3, 4]),
    "which one more shows": ([1, 0, 0, 0, 0, -9], 2, 0.40, [0]),
    "equal at the edge of the mass": ([0, 0, 0, 0], 0, 0.01, [0, 1, 2, 3]),
    "mass of larger ones equal to the share": ([0, 0, -30, -30], 0, 0.5, [0, 1]),
    "the largest stays": ([0, -1e-3, -5], 0, 1e-30, [0]),
    "forbidden tokens count for nothing": ([-math.inf, 0, -math.inf, -1], 3, 0.9, [1, 3]),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", TIES)
def test_ties_and_edges(name: str, kernel: str) -> None:
    logits, k, p, right = TIES[name]
    kept = call(kernel, torch.tensor([logits, logits[::-1]], dtype=torch.float32), [k, k], [p, p])
    kept &= torch.tensor([logits, logits[::-1]]) > -math.inf
    assert kept[0].nonzero()[:, 0].tolist() == right
    assert kept[1].flip(0).nonzero()[:, 0].tolist() == right


@pytest.mark.parametrize("vocab", [163_840, 248_320])
@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_large_vocabularies(vocab: int, spread: float) -> None:
    """Searching sums in another order than sorting, so tokens at the share's edge may differ by its rounding alone."""
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0)) * spread
    k, p = [0, 40, 0], [0.9, 0.95, 0.3]
    found = {kernel: call(kernel, logits, k, p) for kernel in KERNELS}
    assert torch.equal(found["torch_search"], found["torch_search_by_row"]), "the same sums in the same order"
    weights = logits.double().softmax(-1)
    for row in range(3):
        one, two = found[REFERENCE][row], found["torch_search"][row]
        assert weights[row][one != two].sum() < 1e-5
        assert two.any() and int((one != two).sum()) < 1e-3 * vocab
        if k[row]:
            assert torch.equal(one, two) and int(two.sum()) <= 40
        else:
            mass = weights[row][two].sum()
            assert p[row] - 1e-5 < mass < p[row] + weights[row][two].min() + 1e-5


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("spread", [0.0, 0.02, 1.0, 6.0, 40.0])
def test_fewer_sums_over_a_row_find_what_all_halvings_find(spread: float, rounded: bool) -> None:
    """At shares from nearly nothing to nearly all, of rows with many equal weights, with few, and with none."""
    generator = torch.Generator().manual_seed(round(100 * spread) + rounded)
    for vocab in (1, 2, 7, 50, 9001):
        logits = torch.randn(20, vocab, generator=generator) * spread
        logits = logits.bfloat16().float() if rounded else logits
        logits[3, 1:] = -torch.inf
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        share = torch.rand(20, generator=generator)
        share[:6] = torch.tensor([1e-6, 0.5, 1 - 1e-6, 0.5, 1.0, torch.inf])
        limit = share * weights.sum(-1)
        weights[9] = torch.nan
        assert torch.equal(_smallest_by_row(weights, limit), _smallest(weights, limit)), vocab


def test_a_kernel_that_reads_the_host_is_for_eager_calls() -> None:
    logits, p = torch.randn(2, 9000), torch.tensor([0.5, 0.9])
    hints: dict[str, Any] = {"largest_k": 0, "p_alone": True}

    def kept(logits: Tensor, p: Tensor) -> Tensor:
        return ops.keep_top(logits, None, p, **hints)

    assert ops.keep_top.explain(logits, None, p, **hints).kernel.name == "torch_search_by_row"
    traced = make_fx(kept)(logits, p)
    assert torch.equal(traced(logits + 1, p), kept(logits + 1, p))
    with lowering.record() as report:
        make_fx(kept, tracing_mode="fake")(logits, p)
    (row,) = report.rows
    assert row.kernel == "torch_search"
    narrow = ops.keep_top.explain(logits, torch.tensor([3, 4]), p, largest_k=4, p_alone=False)
    assert narrow.kernel.name == "torch_search"
    assert narrow.refused["torch_search_by_row"] == "searches the whole vocabulary; here the top k decide"
    small = ops.keep_top.explain(logits[:, :50], None, p, **hints)
    assert small.refused["torch_search_by_row"].startswith("takes rows of at least 8192 tokens; these have 50")
    wide = ops.keep_top.explain(logits.double(), None, p, **hints)
    assert wide.kernel.name == REFERENCE and "torch.float64" in wide.refused["torch_search"]


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
@pytest.mark.parametrize(("vocab", "most"), [(1, 300), (40, 300), (9000, 300), (9001, 50)])
def test_draws_of_all_kernels_are_the_same_tokens(vocab: int, most: int, spread: float) -> None:
    """Many settings side by side; rounded logits, so that tokens equal to the k-th lie beyond the list."""
    of, generator = np.random.default_rng(vocab), torch.Generator().manual_seed(vocab)
    rows = 37
    logits = (torch.randn(rows, vocab, generator=generator) * spread).bfloat16().float()
    logits[5], logits[6, 0], logits[7], logits[8, -1] = torch.nan, torch.inf, -torch.inf, torch.nan
    keys = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    k = torch.tensor(of.choice([0, 1, 7, most], rows))
    p = torch.tensor(of.choice([1.0, 0.3, 0.9], rows), dtype=torch.float32)
    min_p = torch.tensor(of.choice([0.0, 0.1, 1.0], rows), dtype=torch.float32)
    temperature = torch.tensor(of.choice([0.3, 1.0, 3.0], rows), dtype=torch.float32)
    for cuts in ((k, p, min_p), (k, None, None), (None, p, None), (None, None, min_p), (None, None, None)):
        hints: dict[str, Any] = {"largest_k": 0 if cuts[0] is None else most, "p_alone": cuts[1] is not None}
        found = {
            name: kernel.run(logits, keys, temperature, *cuts, **hints)
            for name, kernel in OPS["draw"].kernels.items()
            if kernel.portable
        }
        assert torch.equal(found["torch_by_row"], found["torch_search"])
        assert torch.equal(found[REFERENCE], found["torch_search"])
        assert found[REFERENCE].max() < vocab
        assert [row for row, token in enumerate(found[REFERENCE].tolist()) if token < 0] == [5, 6, 7, 8]


@pytest.mark.parametrize("target", ["ascend910b", "ascend910_93", "ascend950"])
def test_ascend_says_why_it_has_no_operator_of_its_own(target: str) -> None:
    logits, k = torch.randn(2, 50), torch.tensor([3, 4])
    choice = ops.keep_top.explain(logits, k, None, largest_k=4, p_alone=False, target=target)
    assert choice.kernel.name == "torch_search" and "npu_top_k_top_p" in choice.refused["fused"]
