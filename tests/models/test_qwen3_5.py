"""What Qwen3.5 has of its own: a state in other dtypes, positions of images. `test_contract` holds it to its oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import funcmodels as fm
from funcmodels.blocks.mlp import Routing
from tests.oracle.families import (
    close,
    together,
)
from tests.oracle.qwen3_5 import KINDS, build, pair, run, sizes, tokens
from tests.oracle.states import per_row, run_schedule
from tests.tolerances import assert_close

kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_float32_weights_and_a_bfloat16_state(kind: str) -> None:
    """Pages and windows round to 8 bits; the delta matrices follow their own dtype."""
    one = pair(kind, 2)
    ids = tokens(one, 9, 4)
    state = one.model.init_state(2, 16, dtype=torch.bfloat16, recurrent_dtype=torch.float64)
    kinds_found = {name.rpartition(".")[2]: value.dtype for name, value in fm.logical(state, 0).items()}
    assert kinds_found == {"k": torch.bfloat16, "v": torch.bfloat16, "window": torch.bfloat16, "delta": torch.float64}
    out, state = together(one, state, ids)
    exact, _ = together(one, None, ids)
    assert {name.rpartition(".")[2]: value.dtype for name, value in fm.logical(state, 0).items()} == kinds_found
    assert_close(out.logits, exact.logits, dtype=torch.bfloat16, looser=4, reason="every layer rounds its state")


# Positions of images


@kinds
@pytest.mark.parametrize("seed", range(3))
def test_three_position_axes_are_those_of_transformers(kind: str, seed: int) -> None:
    one = pair(kind, seed)
    ids = tokens(one, 11, 6, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 40, (3, len(row)), generator=generator) for row in ids]
    state = one.model.init_state(2, 16, page_size=4)
    batch = replace(fm.Batch.from_lists(ids, state), positions=torch.cat(rows, 1))
    plain, _ = one.model.forward(one.params, None, batch)
    out, after = one.model.forward(one.params, state, batch.pad(20))
    for row, row_ids in enumerate(ids):
        theirs = run(one, row_ids, rows[row])
        close(per_row(plain.logits, ids)[row], theirs.logits)
        close(per_row(out.logits, ids)[row], theirs.logits)
        close(fm.logical(after, row), theirs.entries)


def test_equal_position_axes_are_text() -> None:
    one = pair("dense", 0)
    ids = tokens(one, 9, 3)
    batch = fm.Batch.from_lists(ids)
    text, _ = one.model.forward(one.params, None, batch)
    same = torch.tensor([*range(9), *range(3)]).expand(3, -1)
    out, _ = one.model.forward(one.params, None, replace(batch, positions=same))
    assert torch.equal(out.logits, text.logits)


def test_convolutions_longer_than_the_prompt() -> None:
    one = build("dense", sizes("dense", 3) | {"linear_conv_kernel_dim": 7})
    ids = tokens(one, 9)
    theirs = run(one, ids[0])
    for split in ([9], [1] * 9, [2, 2, 2, 2, 1], [5, 4]):
        logits, state = run_schedule(one, one.model.init_state(1, 9), ids, [[n] for n in split])
        close(logits[0], theirs.logits)
        close(fm.logical(state, 0), theirs.entries)


# What a forward returns


def test_choices_of_experts_are_given() -> None:
    one = pair("moe", 0)
    routing = together(one, None, tokens(one, 3, 4), outputs=("router",))[0].extra["router"]
    assert isinstance(routing, Routing)
    assert routing.ids.shape == routing.weights.shape == (4, 7, one.config.num_experts_per_tok)
    close(routing.weights.sum(-1), torch.ones(4, 7))


def test_a_tap_of_the_one_layer_of_experts_has_a_layer_axis() -> None:
    fields = sizes("moe", 0) | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    one = build("moe", fields)
    out, _ = together(one, None, tokens(one, 3), outputs=("router",))
    assert out.extra["router"].ids.shape == (1, 3, one.config.num_experts_per_tok)
