"""Two runs side by side: captured calls, and the plain functions on the same padded batches, each with its own state.

The plain side is asked for the kernels that tracing allows, by name, so that both compute the same sums.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

import funcmodels as fm
import lowering
from lowering.jit.buckets import Buckets
from tests.oracle.qwen3_5 import Pair
from tests.oracle.states import poison

BUCKETS = (4, 12)


def plain_kernels(batch: fm.Batch) -> Any:
    """The policy under which a plain forward of `batch` chooses what a captured one does."""
    if batch.uniform and batch.max_query == 1:
        return lowering.use(paged_attention="torch", experts="torch", gated_delta_rule="torch")
    return lowering.use(paged_attention="torch", experts="torch")


class Twins:
    """The two states, the captured functions, and the moves that a caller can make with both."""

    def __init__(self, one: Pair, seed: int, *, rows: int, max_len: int, **state: Any) -> None:
        self.one, self.draw = one, random.Random(seed)
        self.captured = one.model.init_state(rows, max_len, **state)
        self.plain = one.model.init_state(rows, max_len, **state)
        self.step = lowering.jit(one.model.forward, donate=("state",), buckets=BUCKETS, backend="fx")
        self.commit = lowering.jit(fm.commit, donate=("state",), backend="fx")

    def lists(self, counts: Sequence[int]) -> list[list[int]]:
        return [[self.draw.randrange(self.one.config.vocab_size) for _ in range(count)] for count in counts]

    @torch.no_grad()
    def forward(self, counts: Sequence[int], **kwargs: Any) -> None:
        """The same new tokens on both sides; their outputs agree to the last bit."""
        batch = fm.Batch.from_lists(self.lists(counts), self.captured)
        padded = Buckets.of(BUCKETS).fit(batch)
        with plain_kernels(padded):
            right, self.plain = self.one.model.forward(self.one.params, self.plain, padded, **kwargs)
        out, self.captured = self.step(self.one.params, self.captured, batch, **kwargs)
        tokens = batch.tokens.shape[0]
        assert out.hidden.shape[0] == tokens
        assert torch.equal(out.hidden, right.hidden[:tokens])
        cut = slice(None) if kwargs.get("logits") == "last" else slice(tokens)
        assert torch.equal(out.logits, right.logits[cut])
        assert self.captured.ledger.lengths == self.plain.ledger.lengths
        assert self.captured.ledger.pending == self.plain.ledger.pending

    def verify(self, counts: Sequence[int]) -> None:
        """A window a row, of which a random part counts."""
        self.forward(counts, keep_steps=True)
        accepted = [self.draw.randint(0, count) for count in counts]
        given = accepted if self.draw.random() < 0.5 else torch.tensor(accepted)
        self.captured = self.commit(self.captured, given)
        self.plain = fm.commit(self.plain, given)

    def both(self, move: Any, *args: Any) -> None:
        """What happens to rows between forwards."""
        self.captured, self.plain = move(self.captured, *args), move(self.plain, *args)

    def check(self) -> None:
        """Both states remember the same, to the last bit, and the host counts what is there."""
        assert self.captured.ledger.lengths == self.plain.ledger.lengths == tuple(self.captured.lengths.tolist())
        assert self.captured.ledger.least == self.plain.ledger.least
        for row in range(self.captured.rows):
            mine, right = fm.logical(self.captured, row), fm.logical(self.plain, row)
            assert mine.keys() == right.keys()
            assert all(torch.equal(mine[name], right[name]) for name in right), f"row {row}"

    def poison(self) -> None:
        """NaN wherever nobody may read."""
        self.captured, self.plain = poison(self.captured), poison(self.plain)
