"""The greedy head among ranks, without processes: the exchange against the definition of argmax, and what it costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lowering
import params as trees
from funcmodels.blocks.linear import Linear
from lowering import OPS, ops
from lowering.ops.greedy import own_logits
from lowering.portable import greedy
from lowering.portable.greedy import best_of, own_best
from lowering.weights import PreparedWeight
from params.sharding import Ranks, Vocabulary
from params.shards import VocabularyWeight
from params.spec import TensorSpec
from params.tree import unchecked

EVERYTHING = (-math.inf, -1.0, -0.0, 0.0, 1.0, math.inf, math.nan)
"""What a logit may be: two of them are equal."""


def defined(logits: Tensor) -> np.ndarray:
    """The lowest id of a NaN in each row; without any, the lowest of the largest."""
    rows = logits.double().numpy()
    lost = np.isnan(rows)
    largest = np.where(lost, -np.inf, rows).max(1, keepdims=True)
    return np.where(lost.any(1), lost.argmax(1), (rows == largest).argmax(1))


def partitions(vocab: int, ranks: int) -> Iterator[list[range]]:
    """Every way to give each rank a run of ids, some of them none."""
    for cuts in itertools.combinations_with_replacement(range(vocab + 1), ranks - 1):
        yield [range(*ends) for ends in pairwise([0, *cuts, vocab])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("ranks", range(1, 6))
def test_the_exchange_is_argmax_for_every_row_and_every_partition(ranks: int, dtype: torch.dtype) -> None:
    """All rows of four logits of each kind; ranks of all sizes, empty ones anywhere, padding that would win."""
    logits = torch.tensor(list(itertools.product(EVERYTHING, repeat=4)), dtype=dtype)
    right = defined(logits)
    count = 0
    for held in partitions(4, ranks):
        found = []
        for rank, tokens in enumerate(held):
            padding = torch.full((len(logits), 2), (math.nan, math.inf)[rank % 2], dtype=dtype)
            found.append(own_best(torch.cat((logits[:, tokens.start : tokens.stop], padding), 1), tokens))
        values, ids = (torch.cat(some, 1) for some in zip(*found, strict=True))
        assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert ids.dtype == torch.int32
        # Nothing depends on the order that ranks are heard in.
        order = torch.arange(ranks).roll(count)
        assert np.array_equal(best_of(values[:, order], ids[:, order]).numpy(), right), held
        count += 1
    assert count == math.comb(4 + ranks - 1, 4)


def shared(head: Tensor, ranks: int, each: int) -> list[VocabularyWeight]:
    """Parts of a table of `each` rows a rank; rows past the vocabulary are zeros."""
    rows = torch.cat((head, head.new_zeros(ranks * each - len(head), head.shape[1]))).split(each)
    return [VocabularyWeight(part, rank * each, len(head), ranks, "g") for rank, part in enumerate(rows)]


def together(
    monkeypatch: pytest.MonkeyPatch, heads: Sequence[VocabularyWeight], run: Callable[[VocabularyWeight], Tensor]
) -> list[Tensor]:
    """What `run` gives on each rank: once to hear what it says, once with what all have said.

    Fails where something is exchanged that is wider than one number a row.
    """
    said: dict[int, list[Tensor]] = {rank: [] for rank in range(len(heads))}
    heard: list[int] = [0]
    me: list[int] = [0]

    def speak(x: Tensor, *, group: str, ranks: int) -> Tensor:
        assert x.shape[-1] == 1 and (group, ranks) == ("g", len(heads))
        said[me[0]].append(x)
        return x.expand(*x.shape[:-1], ranks)

    def hear(x: Tensor, *, group: str, ranks: int) -> Tensor:
        at, heard[0] = heard[0], heard[0] + 1
        return torch.cat([said[rank][at] for rank in range(ranks)], -1)

    found = []
    for gather in (speak, hear):
        monkeypatch.setattr(greedy, "all_gather", gather)
        found = []
        for rank, head in enumerate(heads):
            me[0], heard[0] = rank, 0
            found.append(run(head))
    return found


def whole_numbers(generator: torch.Generator, most: int, *shape: int) -> Tensor:
    """Values whose products are exact in float32, whatever the order of sums, and round in bfloat16."""
    return torch.randint(-most, most + 1, shape, generator=generator).bfloat16()


SHARES = [(1, 97), (2, 64), (3, 33), (4, 64), (5, 24)]
"""Ranks and rows of each, for 97 tokens: even and uneven ones, the last rank empty or nearly so."""


@pytest.mark.parametrize(("ranks", "each"), SHARES)
def test_random_rows_with_many_ties(ranks: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 rows for each number of ranks and each op; sums are rounded before the choice, so that many are equal."""
    generator = torch.Generator().manual_seed(ranks)
    x, head = whole_numbers(generator, 3, 20_000, 6), whole_numbers(generator, 3, 97, 6)
    x[:, 0], head[:, 0] = 20, 20  # around 400 every second number has a place in bfloat16
    found, w2 = whole_numbers(generator, 4, 20_000, 5), whole_numbers(generator, 4, 103, 5)
    w2[97:] = math.inf
    base = (x.double() @ head.double().T).bfloat16()
    bias = (found.double() @ w2[:97].double().T).bfloat16()
    corrected = (base.double() + bias.double()).bfloat16()
    assert ((corrected == corrected.amax(1, keepdim=True)).sum(1) > 1).float().mean() > 0.1, "few ties"
    heads = shared(head, ranks, each)
    plain = OPS["greedy_token"].kernels["best_of_ranks"].run
    markov = OPS["greedy_markov_token"].kernels["best_of_ranks"].run
    for tokens in (*together(monkeypatch, heads, lambda part: plain(x, part)), ops.greedy_token(x, head)):
        assert tokens.dtype == torch.int64
        assert np.array_equal(tokens.numpy(), defined(base))
    chosen = together(monkeypatch, heads, lambda part: markov(own_logits(x, part), found, w2, part))
    for tokens in (*chosen, ops.greedy_markov_token(base, found, w2, head), ops.greedy_markov_token(base, found, w2)):
        assert np.array_equal(tokens.numpy(), defined(corrected))


@pytest.mark.parametrize("size", [2, 5])
def test_rows_below_the_vocabulary_never_win(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule that cuts tables: 70 tokens, of five ranks three have none. Zeros are more than the tokens' -inf."""
    cuts = [Vocabulary().cut((70, 1), Ranks(rank, size, "g")) for rank in range(size)]
    heads = shared(torch.ones(70, 1), size, cuts[0].length)
    assert [len(head.tokens) for head in heads] == [sum(map(len, cut.ranges)) for cut in cuts]
    x = torch.tensor([[-math.inf], [-2.0], [math.nan]])
    for tokens in together(monkeypatch, heads, lambda part: ops.greedy_token.kernels["best_of_ranks"].run(x, part)):
        assert tokens.tolist() == [0, 0, 0]


def test_a_prepared_head_is_read_in_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's rows are packed by themselves; what is chosen stays the same."""
    generator = torch.Generator().manual_seed(0)
    x, head = (torch.randn(rows, 512, generator=generator) for rows in (3, 3000))
    packed: list[Any] = [lowering.prepare(unchecked(Linear, weight=part)).weight for part in shared(head, 2, 1536)]
    assert all(isinstance(part.weight, PreparedWeight) for part in packed)
    assert all(ops.greedy_token.explain(x, part).kernel.name == "best_of_ranks" for part in packed)
    for tokens in together(monkeypatch, packed, lambda part: ops.greedy_token(x, part)):
        assert torch.equal(tokens, (x @ head.T).argmax(-1))


def test_fewer_tokens_to_choose_among() -> None:
    """They are those of the list, and the first in it wins among equals."""
    head = torch.tensor([[3.0], [5.0], [5.0], [9.0]])
    x, only = torch.ones(2, 1), torch.tensor([2, 0, 1])
    assert ops.greedy_token(x, head, only).tolist() == [2, 2]
    w2 = torch.tensor([[0.0], [4.0], [0.0]])
    found = torch.tensor([[1.0], [0.0]])
    assert ops.greedy_markov_token(own_logits(x, head), found, w2, head, only).tolist() == [0, 2]


# Which kernel, and what it costs

VOCAB, SIZE, HIDDEN, RANK, ROWS, PLACES = 163_840, 32, 512, 256, 8, 7
MINE = VOCAB // SIZE
GATHERED = lowering.Policy({"greedy_token": "torch", "greedy_markov_token": "torch"})


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, dtype=torch.bfloat16)


def head_of_rank(weight: Any) -> VocabularyWeight:
    """The rows of the fourth of 32 ranks."""
    return unchecked(VocabularyWeight, weight=weight, first=3 * MINE, vocab=VOCAB, ranks=SIZE, group="tp")


def block(x: Tensor, head: Any, found: Tensor, w2: Tensor) -> Tensor:
    """A block's tokens: one product for all places, then a choice for each."""
    base = own_logits(x, head).unflatten(0, (ROWS, PLACES))
    return torch.stack([ops.greedy_markov_token(base[:, i], found, w2, head) for i in range(PLACES)], 1)


def lowered(policy: lowering.Policy, head: Any) -> lowering.Lowered:
    """`block` for bfloat16 values that nobody has, and ranks that nobody started."""
    x, found, w2 = spec(ROWS * PLACES, HIDDEN), spec(ROWS, RANK), spec(VOCAB, RANK)
    return lowering.lower(block, x, head, found, w2, target="cpu", policy=policy)


def cost_of(program: lowering.Lowered, op: str) -> tuple[int, int]:
    """FLOPs and bytes of all calls of an op."""
    rows = [row.cost for row in program.cost_analysis().rows if row.op == op]
    return sum(cost.flops for cost in rows), sum(cost.bytes for cost in rows)


def test_a_rank_multiplies_its_rows_alone() -> None:
    """At a vocabulary of 163,840 one rank of 32 touches 5,120 rows of the head and of W2, and gets no logits."""
    mine = lowered(lowering.Policy(), head_of_rank(spec(MINE, HIDDEN)))
    full = lowered(GATHERED, head_of_rank(spec(MINE, HIDDEN)))
    one = lowered(lowering.Policy(), spec(VOCAB, HIDDEN))
    flops = 2 * ROWS * PLACES * MINE
    moved = 2 * MINE * (HIDDEN + PLACES * RANK) + 2 * ROWS * PLACES * (HIDDEN + RANK + 2 * MINE)
    assert cost_of(mine, "linear") == (flops * (HIDDEN + RANK), moved)
    assert cost_of(full, "linear")[0] == flops * (HIDDEN + SIZE * RANK)
    assert cost_of(one, "linear") == (SIZE * flops * (HIDDEN + RANK), moved + 2 * (SIZE - 1) * MINE * (
        HIDDEN + PLACES * RANK + 2 * ROWS * PLACES))  # fmt: skip
    # Each place: a value and an id of four bytes from each rank, in and out, and that side by side.
    assert cost_of(mine, "all_gather")[1] < PLACES * ROWS * SIZE * 4 * 2 * 4
    assert cost_of(full, "all_gather")[1] > PLACES * ROWS * VOCAB * 2
    assert mine.cost_analysis().total.bytes < full.cost_analysis().total.bytes / 20


def test_plain_paths_say_why() -> None:
    """A head or a Markov weight that is quantised, a vocabulary of the draft's own; one device has nothing to say."""
    x, w2 = torch.zeros(2, 32), torch.zeros(64, 3)
    quantised = trees.quantize(unchecked(Linear, weight=torch.ones(32, 32)), "W8A8_DYNAMIC").weight
    small = trees.quantize(unchecked(Linear, weight=torch.ones(64, 32)), "W8A8_DYNAMIC").weight
    heads = [unchecked(VocabularyWeight, weight=weight, first=0, vocab=64, ranks=2, group="g")
             for weight in (torch.ones(32, 32), quantised)]  # fmt: skip
    only, base = torch.arange(3), torch.zeros(2, 32)
    assert reasons(ops.greedy_token, x, heads[0]) == ""
    assert reasons(ops.greedy_token, x, torch.ones(64, 32)) == ""
    assert "quantised (Int8Weight), its logits are gathered" in reasons(ops.greedy_token, x, heads[1])
    assert "vocabulary of its own" in reasons(ops.greedy_token, x, heads[0], only)
    assert "quantised (Int8Weight)" in reasons(ops.greedy_markov_token, base, x[:, :3], w2, heads[1])
    assert "Markov head; this one is quantised" in reasons(ops.greedy_markov_token, base, x, small, heads[0])
    assert "vocabulary of its own" in reasons(ops.greedy_markov_token, base, x[:, :3], w2[:3], heads[0], only)


def reasons(op: Any, *args: Any) -> str:
    """What the report says of the op's one call."""
    (row,) = [row for row in lowering.explain(op, *args).rows if row.op == op.name]
    shared_head = any(isinstance(given, VocabularyWeight) for given in args)
    assert (row.kernel == "best_of_ranks") == (shared_head and not row.reasons())
    return row.reasons()
