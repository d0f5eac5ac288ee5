"""Compiled captures compute what plain calls do, within rounding: prompts, tokens, windows, commits, whole rounds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
from tests.oracle import block_drafts, mtp, qwen3_5
from tests.oracle.mtp import MtpPair, begun, small
from tests.oracle.states import ROUNDING, advance, assert_rows_close, poison
from tests.tolerances import assert_close

ROWS, WINDOW = 2, 3

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning"),
    # As Inductor is loaded.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]


class Sides:
    """Compiled calls and plain ones, each with a state in which all that nobody may read is NaN."""

    def __init__(self, one: Any, seed: int, params: Any = None) -> None:
        self.one, self.draw = one, random.Random(seed)
        self.params = one.params if params is None else params
        self.step = lowering.jit(one.model.forward, donate=("state",), buckets=(4, 8))
        self.commit = lowering.jit(fm.commit, donate=("state",))
        self.captured, self.plain = (poison(one.model.init_state(ROWS, 60, page_size=4, pages=40)) for _ in range(2))
        self.pools = [leaf.data_ptr() for leaf in self.captured.pools()]

    def forward(self, counts: Sequence[int], **kwargs: Any) -> None:
        """The same new tokens on both sides."""
        ids = [[self.draw.randrange(self.one.model.config.vocab_size) for _ in range(count)] for count in counts]
        out, self.captured = self.step(self.params, self.captured, fm.Batch.from_lists(ids, self.captured), **kwargs)
        torch.empty(2**20).fill_(torch.nan)
        right, self.plain = advance(self.one, self.plain, ids, **kwargs)
        assert_close((out.logits, out.hidden), (right.logits, right.hidden), looser=5, reason=ROUNDING)

    def verify(self, accepted: Sequence[int]) -> None:
        """A window a row, of which `accepted` tokens count."""
        self.forward([WINDOW] * ROWS, keep_steps=True)
        self.captured, self.plain = self.commit(self.captured, list(accepted)), fm.commit(self.plain, accepted)
        assert_rows_close(self.captured, self.plain)

    def run(self, rounds: int) -> None:
        """Prompts of two buckets, tokens and windows in a random order, each window cut somewhere."""
        moves = ["prompt", "long prompt", *["token", "window"] * rounds]
        self.draw.shuffle(moves)
        for move in moves:
            if "prompt" in move:
                self.forward([self.draw.randint(0, 4), 1] if move == "prompt" else [5, self.draw.randint(1, 3)])
            elif move == "token":
                self.forward([1] * ROWS)
            else:
                self.verify([self.draw.randint(0, WINDOW) for _ in range(ROWS)])
        assert_rows_close(self.captured, self.plain)
        assert [leaf.data_ptr() for leaf in self.captured.pools()] == self.pools
        assert (len(self.step._graphs), len(self.commit._graphs)) == (4, 1)


@torch.no_grad()
def test_compiled_calls_equal_plain_ones() -> None:
    sides = Sides(small("dense"), 0)
    assert "inductor" in repr(sides.step)
    sides.forward([3, 2])
    for number in range(3):
        sides.forward([1, 1])
        sides.verify([number, 3 - number])
    assert (sides.step.captures, sides.commit.captures) == (3, 1)


@torch.no_grad()
@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "seed"), [("dense", 1), ("moe", 0), ("moe", 1), ("moe", 2), ("moe", 3)])
def test_compiled_calls_equal_plain_ones_in_any_order(kind: str, seed: int) -> None:
    Sides(small(kind, seed), seed).run(4)


def wide(kind: str) -> MtpPair:
    """A model whose head is large enough to be packed."""
    fields = mtp.sizes(kind, 2) | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return mtp.build(kind, fields | {"vocab_size": 2**17 // fields["hidden_size"] * 8}, 2, 1)


@torch.no_grad()
@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_prepared_weights_are_compiled_too(kind: str) -> None:
    one = wide(kind)
    prepared = lowering.prepare(one.params)
    with lowering.record() as report:
        one.model.forward(prepared, None, fm.Batch.from_lists([[1]]))
    assert ("linear", "onednn_packed") in {(row.op, row.kernel) for row in report.rows}
    sides = Sides(one, 2, prepared)
    sides.forward([3, 2])
    sides.forward([1, 1])
    sides.verify([1, 2])


@torch.no_grad()
@pytest.mark.sweep
def test_the_bundled_model_compiled() -> None:
    class Bundled:
        model, params = fm.load("bundled", dtype=torch.float32)

    sides = Sides(Bundled, 5)
    sides.forward([3, 2])
    for number in range(3):
        sides.forward([1, 1])
        sides.verify([number, 3 - number])


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "temperature", "drawn"),
    [
        pytest.param("dense", 0.0, False, marks=pytest.mark.sweep),
        pytest.param("moe", 0.9, False, marks=pytest.mark.sweep),
        pytest.param("moe", 0.9, True, marks=pytest.mark.sweep),
    ],
)
def test_a_compiled_round_equals_a_plain_one(kind: str, temperature: float, drawn: bool) -> None:
    one, draw = small(kind), random.Random(f"{kind} {temperature} {drawn}")
    plainly: Any = fm.Round(one.model, fm.draft(one.model, "mtp")).run
    step = lowering.jit(plainly, donate=("state", "drafted"))
    sampling = fm.RowSampling.of([fm.Sampling(temperature, top_k=9, top_p=0.9, seed=row) for row in range(ROWS)])
    mine, right = (list(begun(one, [[5, 6, 7], [8]], pages=40)) for _ in range(2))
    for number in range(6):
        rest = (sampling, torch.tensor([4, 7]), torch.tensor([draw.randint(0, WINDOW), WINDOW]))
        verdict, *mine = step(one.params, *mine, *rest, steps=WINDOW - 1, drawn=drawn)
        expected, *right = plainly(one.params, *right, *rest, steps=WINDOW - 1, drawn=drawn)
        assert torch.equal(verdict.tokens, expected.tokens), f"round {number}"
        for actual, plain in zip(mine[:2], right[:2], strict=True):
            assert actual.ledger.lengths == tuple(plain.lengths.tolist())
            assert_rows_close(actual, plain)
        assert_close(mine[2].hidden, right[2].hidden, looser=5, reason=ROUNDING)
    assert step.captures == 1


@torch.no_grad()
@pytest.mark.parametrize("vocab", [82, 96])
def test_a_compiled_draw_is_the_plain_one(vocab: int) -> None:
    """Rows that do not fill the lanes of the machine's vectors too."""
    sampling = fm.RowSampling.of([fm.Sampling(0.9, 9, 0.9, seed=row) for row in range(6)])
    step, requests = lowering.jit(fm.sample), torch.arange(6)
    for seed in range(30):
        logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(seed)) * 3
        given = (logits, sampling, requests, torch.full((6,), seed))
        assert torch.equal(step(*given), fm.sample(*given))
    assert step.captures == 1


@torch.no_grad()
def test_what_was_lowered_under_a_policy_is_captured_under_it() -> None:
    q, k, v = (torch.randn(6, heads, 8) for heads in (4, 2, 2))
    args = (q, k, v, lowering.Rows(torch.tensor([0, 3, 6], dtype=torch.int32), max_query=3, uniform=True))
    assert lowering.ops.attention.explain(*args, scale=0.4).kernel.name == "torch_sdpa"
    low = lowering.lower(lowering.ops.attention, *args, policy=lowering.Policy({"attention": "torch"}), scale=0.4)
    with lowering.record() as report:
        low.compile()
    assert {row.kernel for row in report.rows} == {"torch"}


def block_drafter(variant: str) -> Any:
    """A random block draft of one layer, for a model of two."""
    fields = qwen3_5.sizes("dense", 0) | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    one = qwen3_5.build("dense", fields, 0)
    return next(x for seed in range(9) if len((x := block_drafts.build(one, variant, seed)).draft.params.layers) == 1)


MIXED = (fm.Sampling(0.9, top_k=9), fm.Sampling())


@torch.no_grad()
@pytest.mark.plain
@pytest.mark.parametrize("variant", [pytest.param("dflash", marks=pytest.mark.sweep), "vanilla"])
def test_compiled_blocks_equal_plain_ones(variant: str) -> None:
    """What is drawn in a row, and what is likeliest in another, while the rows grow by what the model runs."""
    one, steps = block_drafter(variant), WINDOW - 1
    noise = fm.DraftNoise(fm.RowSampling.of(MIXED), torch.tensor([4, 7]))
    propose = lowering.jit(one.draft.propose)
    for ids in ([[5, 6, 7], [8]], [[1, 2, 3, 4, 5], [6, 7, 8]]):
        _, drafted, carry, _ = block_drafts.begun(one, ids)
        found, _ = propose(one.draft.joined(one.one.params), drafted, carry, steps, noise)
        plain, _ = one.draft.propose(one.one.params, drafted, carry, steps, noise)
        assert torch.equal(found.tokens, plain.tokens)
        assert_close(found.logits.softmax(-1), plain.logits.softmax(-1), looser=5, reason=ROUNDING)
    assert len(propose._graphs) == 1


@torch.no_grad()
@pytest.mark.sweep
@pytest.mark.parametrize("variant", ["dflash", "vanilla"])
def test_a_compiled_round_with_a_block_draft_equals_a_plain_one(variant: str) -> None:
    """Coupled drafts of DFlash, drawn ones of DSpark."""
    one, draw = block_drafter(variant), random.Random(variant)
    plainly: Any = fm.Round(one.one.model, one.draft).run
    step = lowering.jit(plainly, donate=("state", "drafted"))
    mine, right = (list(block_drafts.begun(one, [[5, 6, 7], [8]], pages=40)[:3]) for _ in range(2))
    both, how = one.draft.joined(one.one.params), {"steps": WINDOW - 1, "drawn": variant == "vanilla"}
    for number in range(4):
        most = torch.tensor([draw.randint(1, WINDOW), WINDOW])
        rest = (fm.RowSampling.of(MIXED), torch.tensor([4, 7]), most)
        verdict, *mine = step(both, *mine, *rest, **how)
        expected, *right = plainly(both, *right, *rest, **how)
        assert torch.equal(verdict.tokens, expected.tokens), f"round {number}"
        for actual, plain in zip(mine[:2], right[:2], strict=True):
            assert actual.ledger.lengths == tuple(plain.lengths.tolist())
            assert_rows_close(actual, plain)
    assert step.captures == 1
