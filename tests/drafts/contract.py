"""The drafts that `test_contract` holds to what every draft must satisfy.

A draft enters by one line of `SUBJECTS`: how a random one is made beside a random model, and what is its own there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch

import funcmodels as fm
from tests.lowering.jit.test_round import same
from tests.oracle import block_drafts, mtp, qwen3_5, qwen3_8_flash_next_mtp
from tests.oracle.qwen3_5 import Pair
from tests.oracle.states import ROUNDING, advance
from tests.tolerances import assert_close

LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


@dataclass(frozen=True)
class Drafted:
    """A model, a draft for it, and the size of pages that both take."""

    one: Pair
    draft: Any
    page: int = 4
    exact: bool = True
    """Whether a captured call has the kernels of a plain one, and so its last bits."""

    @property
    def joined(self) -> Any:
        """All that a captured call reads."""
        return self.draft.joined(self.one.params)

    def begun(self, prompts: Sequence[Sequence[int]], **options: Any) -> tuple[fm.State, fm.State, fm.Carry]:
        """Both states and the carry of rows whose prompts are in; token 1 follows each."""
        state = self.one.model.init_state(len(prompts), 60, page_size=self.page, **options)
        out, after = advance(self.one, state, [list(prompt) for prompt in prompts], outputs=self.draft.outputs)
        batch = fm.Batch.from_lists(prompts)
        following = fm.next_tokens(batch, torch.ones(len(prompts), dtype=torch.int64))
        return after, *self.draft.extend(self.one.params, self.draft.init_state(state), out, batch, following)

    def assert_same(self, actual: Any, expected: Any, message: str) -> None:
        """To the last bit where kernels are the same, else as far as rounding goes."""
        if self.exact:
            assert same(actual, expected), message
        else:
            assert_close(actual, expected, looser=5, dtype=torch.float32, reason=ROUNDING)


@cache
def head(kind: str) -> Drafted:
    """Qwen3.5's head for a model of two layers, of so few tokens that a random head is often right."""
    one = mtp.build(kind, mtp.sizes(kind, 0) | LAYERS | {"vocab_size": 11}, 0, 1)
    return Drafted(one, fm.draft(one.model, "mtp"))


@cache
def flash_head() -> Drafted:
    """That of Qwen3.8-Flash-Next, likewise."""
    one = qwen3_8_flash_next_mtp.of_few_words(2)
    return Drafted(one, fm.draft(one.model, "mtp"), 2 * one.config.indexer_compress_ratio, exact=False)


@cache
def block(variant: str) -> Drafted:
    """A block draft of a variant, for a model of two layers of Qwen3.5."""
    one = block_drafts.build(qwen3_5.build("dense", qwen3_5.sizes("dense", 0) | LAYERS, 0), variant, 0)
    return Drafted(one.one, one.draft)


SUBJECTS: dict[str, Callable[[], Drafted]] = {
    "mtp dense": partial(head, "dense"),
    "mtp moe": partial(head, "moe"),
    "mtp flash-next": flash_head,
    **{variant: partial(block, variant) for variant in ("dflash", "vanilla", "gated", "rnn", "narrow")},
}


def drafts(*names: str) -> pytest.MarkDecorator:
    """The test runs over these drafts, or over all."""
    return pytest.mark.parametrize("make", [pytest.param(SUBJECTS[name], id=name) for name in names or SUBJECTS])
