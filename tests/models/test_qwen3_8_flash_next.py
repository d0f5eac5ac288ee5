"""What Flash-Next has of its own: selection, rollbacks of blocks, n-grams. `test_contract` holds it to its oracle."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import funcmodels as fm
from funcmodels.models.qwen3_8_flash_next_index import with_index
from tests.oracle.families import (
    close,
    together,
)
from tests.oracle.qwen3_8_flash_next import SEEDS, Pair, build, pair, run, sizes, small, tokens
from tests.oracle.states import advance, assert_rows_close
from tests.tolerances import assert_close

seeds = pytest.mark.parametrize("seed", SEEDS)


def ratio(one: Pair) -> int:
    return one.config.indexer_compress_ratio


def reach(one: Pair) -> int:
    """The longest row over which selecting changes nothing."""
    return one.config.indexer_budget + ratio(one) - 1


# Against transformers


@seeds
def test_selection_begins_just_past_the_budget(seed: int) -> None:
    """With budget + ratio - 1 tokens attention is dense; the token after is the first that may miss one."""
    one = pair(seed)
    dense = with_index(one.model, budget=ratio(one) * 40)
    most = reach(one)
    for length in (most - 1, most, most + 1, most + ratio(one)):
        ids = tokens(one, length, seed=length)
        state, whole = (
            one.model.init_state(1, 40, page_size=ratio(one)),
            one.model.init_state(1, 40, page_size=ratio(one)),
        )
        out, state = together(one, state, ids)
        theirs = run(one, ids[0])
        close(out.logits, theirs.logits)
        close(together(one, None, ids)[0].logits, theirs.logits)
        right, _ = dense.forward(one.params, whole, fm.Batch.from_lists(ids, whole))
        close(out.logits[:most], right.logits[:most])
        assert length <= most or not torch.allclose(out.logits, right.logits, atol=1e-3)


@pytest.mark.parametrize("seed", [1, 2, 8])
def test_later_tokens_change_no_earlier_row(seed: int) -> None:
    one = pair(seed)
    (first,) = tokens(one, 30, seed=seed)
    (other,) = tokens(one, 30, seed=seed + 100)
    cut = 17
    out, _ = together(one, None, [first])
    changed, _ = together(one, None, [first[:cut] + other[cut:]])
    close(changed.logits[:cut], out.logits[:cut])
    assert not torch.allclose(changed.logits[cut:], out.logits[cut:], atol=1e-3)


# Any split gives the same


@pytest.mark.parametrize("seed", [1, 2, 5, 6])
def test_rollbacks_from_every_phase_of_a_block(seed: int) -> None:
    """Every length modulo ratio, window up to ratio + 1, and count accepted; and the token after it."""
    one = small(seed)
    for phase in range(ratio(one)):
        for width in range(1, ratio(one) + 2):
            check_rollbacks(one, reach(one) + ratio(one) + phase, width)


def check_rollbacks(one: Pair, length: int, width: int) -> None:
    """Row r of width + 1 equal ones accepts r tokens of the window, and goes on with others."""
    accepted = list(range(width + 1))
    (prompt,) = tokens(one, length, seed=length)
    window, after = tokens(one, width, 3, seed=width)
    _, held = advance(
        one, one.model.init_state(width + 1, length + 9, page_size=2 * ratio(one)), [prompt] * (width + 1)
    )
    before = [fm.logical(held, row) for row in range(held.rows)]
    _, pending = advance(one, fm.fork(held), [window] * (width + 1), keep_steps=True)
    state = fm.commit(pending, accepted)
    right, expected = advance(one, fm.fork(held), [[*window[:count], after[0]] for count in accepted])
    out, state = advance(one, state, [after[:1]] * (width + 1))
    close(out.logits, right.logits[[sum(accepted[: row + 1]) + row for row in range(width + 1)]])
    assert_rows_close(state, expected)
    for row, leaves in enumerate(before):
        assert_close(fm.logical(held, row), leaves)


@pytest.mark.parametrize("seed", [1, 5, 8])
def test_a_commit_leaves_what_the_shorter_run_leaves(seed: int) -> None:
    """Also of rows shorter than the n-grams, and where n-grams end within and at the edge of the window."""
    one = small(seed)
    end = one.config.eos_token_id
    window = [7, end, 4, end]
    for prompts in ([[], [9], [end, 9], [9, end, 8]], [[end], [end, end], [8] * 20, [9] * 3]):
        state = one.model.init_state(4, 32, page_size=ratio(one))
        if any(prompts):
            _, state = advance(one, state, prompts)
        for accepted in ([0, 1, 2, 3], [4, 3, 2, 1], [1, 0, 4, 2]):
            _, pending = advance(one, fm.fork(state), [window] * 4, keep_steps=True)
            kept = fm.fork(state)
            _, kept = advance(one, kept, [window[:count] for count in accepted])
            assert_rows_close(fm.commit(pending, accepted), kept)


# What a forward returns, and the index as a value


def test_taps_of_every_kind() -> None:
    one = pair(2)
    config, ids = one.config, tokens(one, 3, 30)
    streams, count = config.hc_count, config.num_attention_heads
    layer = config.layer_types.index("indexed_attention")
    ngrams = config.ple_layer_ids[0] - 1
    names = (
        "router",
        "blocks",
        "attn_inject",
        "mlp_inject",
        f"layers.{ngrams}.ngram_gate",
        f"layers.{layer}.output_gate",
    )
    out, _ = together(one, None, ids, outputs=(*names, "layers.1", "mixed"))
    extra = out.extra
    attentions = config.layer_types.count("indexed_attention")
    assert extra["layers.1"].shape == (33, streams, config.hidden_size)
    assert extra["mixed"].shape == (33, config.hidden_size)
    assert extra["router"].ids.shape == (4, 33, config.num_experts_per_tok)
    assert extra["blocks"].shape == (attentions, 33, config.indexer_budget // ratio(one))
    assert extra["attn_inject"].shape == extra["mlp_inject"].shape == (4, 33, streams)
    assert extra["mlp_inject"].min() > 0 and extra["mlp_inject"].max() < 2
    assert extra[f"layers.{ngrams}.ngram_gate"].shape == (33, streams)
    assert extra[f"layers.{layer}.output_gate"].shape == (33, count, config.head_dim)
    close(one.theirs.lm_head(extra["mixed"]), out.logits)
    stateful, _ = together(one, one.model.init_state(2, 40, page_size=ratio(one)), ids, outputs=("blocks",))
    assert torch.equal(stateful.extra["blocks"].sort(-1).values, extra["blocks"].sort(-1).values)


@pytest.mark.parametrize("alone", [True, False])
def test_blocks_are_shown_where_attention_is_dense(alone: bool) -> None:
    """Within the budget a query selects every block that it sees, and there are none past it."""
    one = pair(1)
    model = with_index(one.model, budget=8 * ratio(one))
    length = 5 * ratio(one) + 1
    state: Any = None if alone else model.init_state(1, length, page_size=ratio(one))
    out, _ = model.forward(one.params, state, fm.Batch.from_lists(tokens(one, length)), outputs=("blocks",))
    for layer in out.extra["blocks"]:
        for place, blocks in enumerate(layer.tolist()):
            seen = (place + 1) // ratio(one)
            assert sorted(blocks, reverse=True) == [*range(seen - 1, -1, -1), *[-1] * (8 - seen)]


def test_another_index_without_another_model() -> None:
    """A budget is a choice; a ratio that the weights have not seen is warned about. Both are what transformers does."""
    fields = sizes(2) | {"indexer_budget": 8, "indexer_compress_ratio": 4}
    one = build(fields, 2)
    ids = tokens(one, 30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wider = with_index(one.model, budget=12)
    with pytest.warns(UserWarning, match="indexer_compress_ratio 3.*blocks of 4 tokens"):
        finer = with_index(one.model, budget=9, ratio=3)
    for model, change in ((wider, {"indexer_budget": 12}), (finer, {"indexer_budget": 9, "indexer_compress_ratio": 3})):
        out, _ = model.forward(one.params, None, fm.Batch.from_lists(ids))
        close(out.logits, run(build(fields | change, 2), ids[0]).logits)
    with pytest.raises(
        fm.ConfigError, match="indexer_budget must be a multiple of indexer_compress_ratio, found 9 and 4"
    ):
        with_index(one.model, budget=9)
    with pytest.raises(fm.ConfigError, match="indexer_compress_ratio must be positive, found 0"):
        with_index(one.model, ratio=0)
    state = one.model.init_state(1, 36, page_size=12)
    with pytest.raises(fm.StateError, match="a key for every 4 tokens, the config says 3"):
        finer.forward(one.params, state, fm.Batch.from_lists(ids, state))


def test_what_the_model_refuses() -> None:
    one = build(sizes(2) | {"indexer_budget": 8, "indexer_compress_ratio": 4}, 2)
    with pytest.raises(ValueError, match=r"page_size 6 is not a multiple of 4.*as 8"):
        one.model.init_state(1, 8, page_size=6)
    batch = fm.Batch.from_lists([[1, 2]])
    with pytest.raises(ValueError, match=r"this model reads none: .*; leave positions out"):
        one.model.forward(one.params, None, replace(batch, positions=torch.zeros(3, 2, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"nearest: layers\.0\.router"):
        one.model.forward(one.params, None, batch, outputs=("layers.0.ruter",))
