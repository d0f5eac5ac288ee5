"""Small models in bfloat16 for the Ascend lowering, and twins of them: captured on the double, and called plainly."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
import params as trees
from lowering.jit import backends as graphs
from lowering.jit.buckets import Buckets
from lowering.jit.npu import NpuGraphs
from tests.lowering.jit.npu_double import Double
from tests.lowering.npu import test_flash_next
from tests.lowering.npu.test_models import CONFIGS

PAGE, ROWS, MAX_LEN, BUCKETS = 128, 3, 256, (8,)
SMALL: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2,
}  # fmt: skip
KINDS = CONFIGS | {"flash": test_flash_next.BASE | {"indexer_budget": 64}}


@dataclass(frozen=True)
class Made:
    """A model and random parameters."""

    model: fm.Model
    params: Any

    def state(self, rows: int = ROWS, **kwargs: Any) -> fm.State:
        """An empty state, in bfloat16."""
        return self.model.init_state(rows, MAX_LEN, torch.bfloat16, torch.bfloat16, page_size=PAGE, **kwargs)


@functools.cache
def made(kind: str) -> Made:
    """The model of this kind, the same each time."""
    model = fm.build(KINDS[kind] | SMALL)
    draw = torch.Generator().manual_seed(5)

    def random_leaf(spec: Any) -> torch.Tensor:
        return (torch.randn(spec.shape, generator=draw) * spec.shape[-1] ** -0.5).to(spec.dtype or torch.bfloat16)

    return Made(model, trees.tree_map(random_leaf, model.param_spec()))


def on(double: Double, monkeypatch: pytest.MonkeyPatch, cls: type = NpuGraphs) -> None:
    """Let backend "npu" capture CPU tensors on the double."""
    monkeypatch.setitem(graphs.BACKENDS, "npu", lambda: cls(double, "cpu"))


class NpuTwins:
    """Two runs of one model, each with its own state. What is captured equals what is called, to the last bit."""

    def __init__(self, kind: str, seed: int, backend: str = "npu", **state: Any) -> None:
        self.one, self.draw = made(kind), random.Random(seed)
        self.captured, self.plain = self.one.state(**state), self.one.state(**state)
        self.step = lowering.jit(self.one.model.forward, ("state",), BUCKETS, backend)
        self.commit = lowering.jit(fm.commit, ("state",), backend=backend)
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, counts: Sequence[int], bucket: int = BUCKETS[0], **kwargs: Any) -> None:
        """The same new tokens on both sides."""
        ids = [[self.draw.randrange(50) for _ in range(count)] for count in counts]
        batch = fm.Batch.from_lists(ids, self.captured)
        padded = Buckets.of((bucket,)).fit(batch)
        with torch.no_grad(), lowering.use(target="ascend910b"):
            right, self.plain = self.one.model.forward(self.one.params, self.plain, padded, **kwargs)
            out, self.captured = self.step(self.one.params, self.captured, batch, **kwargs)
        assert torch.isfinite(right.logits).all()
        assert torch.equal(out.logits, right.logits[: sum(counts)]), f"logits of {list(counts)} differ"
        self.kept.append((out.logits, out.logits.clone()))

    def verify(self, count: int) -> None:
        """A window a row, of which a random part counts."""
        self.forward([count] * ROWS, keep_steps=True)
        accepted = [self.draw.randint(0, count) for _ in range(ROWS)]
        with lowering.use(target="ascend910b"):
            self.captured, self.plain = self.commit(self.captured, accepted), fm.commit(self.plain, accepted)

    def both(self, move: Any, *args: Any) -> None:
        """What happens to rows between forwards."""
        self.captured, self.plain = move(self.captured, *args), move(self.plain, *args)

    def check(self) -> None:
        """Both states remember the same, and what was handed out earlier has not changed."""
        assert self.captured.ledger.lengths == self.plain.ledger.lengths
        for row in range(ROWS):
            mine, right = fm.logical(self.captured, row), fm.logical(self.plain, row)
            assert all(torch.equal(mine[name], right[name]) for name in right), f"row {row}"
        assert all(torch.equal(now, then) for now, then in self.kept), "a replay changed an earlier output"
