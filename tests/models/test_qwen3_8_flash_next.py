"""Qwen3.8-Flash-Next against transformers: outputs, streams of every layer, every state entry, rollbacks, gradients."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import funcmodels as fm
import params
from funcmodels.models.qwen3_8_flash_next_index import with_index
from tests.oracle.families import (
    assert_as_near,
    assert_same_gradients,
    check_per_example,
    check_stacked,
    close,
    loss_of,
    schedules,
    their_gradients,
    together,
    total_loss,
)
from tests.oracle.qwen3_8_flash_next import SEEDS, Pair, build, first_of_equals, pair, run, sizes, small, tokens
from tests.oracle.states import advance, assert_rows_close, per_row, poison, run_schedule
from tests.tolerances import assert_close

LAYERS = tuple(f"layers.{index}" for index in range(4))

seeds = pytest.mark.parametrize("seed", SEEDS)


def ratio(one: Pair) -> int:
    return one.config.indexer_compress_ratio


def reach(one: Pair) -> int:
    """The longest row over which selecting changes nothing."""
    return one.config.indexer_budget + ratio(one) - 1


# Against transformers


@seeds
def test_outputs_layers_and_entries_are_those_of_transformers(seed: int) -> None:
    one = pair(seed)
    ids = tokens(one, 1, 13, 2, 30, seed=seed)
    state = one.model.init_state(4, 40, page_size=ratio(one) * (1, 2, 5, 32)[seed % 4])
    out, state = together(one, state, ids, outputs=(*LAYERS, "router", "mixed"))
    plain, _ = together(one, None, ids)
    for row, row_ids in enumerate(ids):
        theirs = run(one, row_ids)
        assert fm.logical(state, row).keys() == theirs.entries.keys()
        close(fm.logical(state, row), theirs.entries)
        close(per_row(out.logits, ids)[row], theirs.logits)
        close(per_row(plain.logits, ids)[row], theirs.logits)
        close(per_row(out.hidden, ids)[row], theirs.hidden)
        close([per_row(out.extra[layer], ids)[row].flatten(1) for layer in LAYERS], theirs.layers)
        chosen = torch.stack([per_row(layer, ids)[row] for layer in out.extra["router"].ids])
        assert torch.equal(chosen.sort(-1).values, torch.stack(theirs.chosen).sort(-1).values)


@pytest.mark.parametrize("seed", [0, 4, 5])
def test_a_conversation_of_several_calls_is_that_of_transformers(seed: int) -> None:
    one = pair(seed)
    parts = tokens(one, 5, 1, 1, 2, 70, 1, seed=seed)
    state, cache = one.model.init_state(1, 80, page_size=2 * ratio(one)), None
    for part in parts:
        out, state = advance(one, state, [part])
        theirs = run(one, part, cache=cache)
        cache = theirs.cache
        close(out.logits, theirs.logits)
        close(fm.logical(state, 0), theirs.entries)


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


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_bfloat16_is_as_near_the_truth_as_transformers(seed: int) -> None:
    """Root mean square distance to float32 on the same rounded weights: at most twice transformers', plus 0.5%."""
    fields = sizes(seed)
    # A choice among equals would turn on the last bit: all experts and all blocks are chosen.
    fields |= {"num_experts_per_tok": fields["num_experts"], "indexer_budget": 40 * fields["indexer_compress_ratio"]}
    low, high = (build(fields, seed, torch.bfloat16) for _ in range(2))
    high.theirs.float()
    ids = tokens(low, 33, seed=seed)
    state = low.model.init_state(1, 40, dtype=torch.bfloat16, page_size=2 * ratio(low))
    out, state = together(low, state, ids, outputs=LAYERS)
    streams = {name: out.extra[name].flatten(1) for name in LAYERS}
    ours = {"logits": out.logits, "hidden": out.hidden, **streams, **fm.logical(state, 0)}
    assert_as_near(ours, run(low, ids[0]), run(high, ids[0]))


@pytest.mark.parametrize("seed", [0, 4, 5])
def test_gradients_are_those_of_transformers(seed: int) -> None:
    """Of every parameter but those of the index, through whose choice nothing is learned."""
    one = pair(seed)
    ids = tokens(one, 17, 5, seed=seed)
    with first_of_equals():
        loss, theirs = their_gradients(one, ids)
    grads, found = torch.func.grad_and_value(lambda tree: loss_of(one, tree, ids))(one.params)
    close(found, loss)
    named = params.to_checkpoint(grads, one.model.param_spec(), one.model.family.names)
    for name, grad in theirs.items():
        if ".indexer." in name:
            assert grad is None and not named[name].any()
            continue
        assert grad is not None and grad.abs().max() > 0, f"{name} has no gradient to compare"
        ours = whole_table(named, name) if "ngram_embedding" in name else named[name]
        assert_close(ours, grad, looser=20, reason="a backward sums over tokens, layers and both rows")


def whole_table(named: dict[str, Tensor], name: str) -> Tensor:
    shard = name.removesuffix("weight") + "shard_"
    found = {leaf: part for leaf, part in named.items() if leaf.startswith(shard)}
    return torch.cat([found[f"{shard}{number}.weight"] for number in range(len(found))])


# Any split gives the same


@given(case=schedules(), pages=st.sampled_from((1, 2, 40)), seed=st.sampled_from(SEEDS))
def test_mixed_and_interleaved_rows(case: tuple[list[int], list[list[int]]], pages: int, seed: int) -> None:
    lengths, schedule = case
    one = small(seed)
    ids = tokens(one, *lengths, seed=seed)
    state = one.model.init_state(len(ids), 16, page_size=pages * ratio(one), pages=64)
    logits, state = run_schedule(one, state, ids, schedule)
    for row, row_ids in enumerate(ids):
        whole, expected = advance(one, one.model.init_state(1, 16, page_size=4 * ratio(one)), [row_ids])
        close(logits[row], whole.logits)
        assert_rows_close(state, expected, [(row, 0)])


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


# Padding and what nobody may read


@pytest.mark.parametrize("seed", [0, 2, 4])
@pytest.mark.parametrize("counts", [(3, 0, 1, 8), (1, 1, 1, 1), (0, 0, 9, 0)], ids=str)
def test_padding_and_unread_places_may_hold_nan(seed: int, counts: tuple[int, ...]) -> None:
    one = pair(seed)
    bad = one.config.vocab_size - 1
    pasts = (reach(one) + 2, 0, 8, 9)
    ids = [[token % bad for token in row] for row in tokens(one, *(p + c for p, c in zip(pasts, counts, strict=True)))]
    weight = one.params.embed.weight.clone()
    weight[bad] = torch.nan
    broken = replace(one, params=params.put(one.params, "embed.weight", weight))
    fed = [row[past:] for row, past in zip(ids, pasts, strict=True)]

    def continued(this: Pair, spoiled: bool) -> tuple[Any, fm.State]:
        state = this.model.init_state(4, 40, page_size=ratio(one) * 2)
        _, state = advance(this, state, [row[:past] for row, past in zip(ids, pasts, strict=True)])
        batch = fm.Batch.from_lists(fed, state)
        if spoiled:
            state, batch = poison(state), batch.pad(sum(counts) + 5)
            batch = replace(batch, tokens=batch.tokens.index_fill(0, torch.arange(sum(counts), sum(counts) + 5), bad))
        return this.model.forward(this.params, state, batch)

    if one.config.tie_word_embeddings:
        broken = one
    (clean, expected), (out, after) = continued(one, False), continued(broken, True)
    live = slice(0, sum(counts))
    close((out.logits[live], out.hidden[live]), (clean.logits, clean.hidden))
    assert_rows_close(after, expected)


def test_padding_leaves_kept_steps_alone() -> None:
    one = pair(1)
    ids = tokens(one, 16, 4, 5)
    _, state = advance(one, one.model.init_state(3, 24, page_size=ratio(one)), ids)
    batch = fm.Batch.from_lists([[1, 2, 3], [], [4]], state)
    _, pending = one.model.forward(one.params, poison(fm.fork(state)), batch.pad(9), keep_steps=True)
    _, expected = advance(one, state, [[1, 2], [], [4]])
    assert_rows_close(fm.commit(pending, [2, 0, 1]), expected)


@pytest.mark.parametrize("owned", [True, False])
def test_rows_that_fork_move_and_start_anew(owned: bool) -> None:
    """An emptied row has no n-gram context: its next text is that of a fresh row."""
    one = pair(5)
    ids = tokens(one, 13, 6, seed=3)
    state = one.model.init_state(2, 24, page_size=2 * ratio(one), pages=None if owned else 40)
    _, state = advance(one, state, ids)
    forked = fm.fork(state, [1, 0, 1])
    _, forked = advance(one, forked, [[4], [5, 6], [7]])
    _, state = advance(one, state, [[5, 6], [4]])
    assert_rows_close(forked, state, [(1, 0), (0, 1)])
    moved = fm.select(forked, [-1, 1, 0])
    new = tokens(one, 3, seed=8)[0]
    _, moved = advance(one, moved, [new, [], [9]])
    _, fresh = advance(one, one.model.init_state(1, 24, page_size=ratio(one)), [new])
    assert_rows_close(moved, fresh, [(0, 0)])
    assert_rows_close(moved, state, [(1, 0)])


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


# Transforms and tracing


def test_mapping_over_stacked_parameters() -> None:
    one = pair(0)
    check_stacked(one, tokens(one, 12, 2))


def test_per_example_gradients() -> None:
    one = pair(4)
    check_per_example(one, torch.tensor(tokens(one, 14, 14, 14)), silent=lambda path: "index_" in path)


def test_a_state_made_inside_a_gradient() -> None:
    """Backward through several calls that write the same pages: equal to the stateless gradient."""
    one = pair(5)
    ids = tokens(one, 9, 4)

    def loss(tree: Any) -> Tensor:
        state = one.model.init_state(2, 12, page_size=2 * ratio(one))
        logits, _ = run_schedule(replace(one, params=tree), state, ids, [[5, 1], [1, 0], [3, 3]])
        return total_loss(logits, ids)

    grads = torch.func.grad(loss)(one.params)
    expected = torch.func.grad(lambda tree: loss_of(one, tree, ids))(one.params)
    assert_same_gradients(grads, expected, silent=lambda path: "index_" in path)


@pytest.mark.parametrize(
    ("new", "keep_steps", "checked"),
    [([[1], [2]], False, True), ([[1, 2, 3], [4]], True, False)],
    ids=["decode", "verify"],
)
def test_a_traced_forward_reads_nothing_and_replays(new: list[list[int]], keep_steps: bool, checked: bool) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    one = small(2)
    state = one.model.init_state(2, 40, page_size=2 * ratio(one), checked=checked)
    _, state = advance(one, state, tokens(one, 25, 3))
    batch = fm.Batch.from_lists(new, state).pad(sum(map(len, new)) + 2)

    def step(tree: Any, state: fm.State, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        out, after = one.model.forward(tree, state, replace(batch, tokens=ids), keep_steps=keep_steps)
        after = fm.commit(after, torch.ones(2, dtype=torch.int32)) if keep_steps else after
        return out.logits, params.leaves(after)

    spare = params.tree_map(torch.clone, state)
    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(one.params, spare, batch.tokens)
    assert spare == state, "tracing wrote the example state"
    other = (batch.tokens + 11) % one.config.vocab_size
    logits, leaves = graph(one.params, spare, other)
    expected_logits, expected = step(one.params, state, other)
    live = sum(map(len, new))
    close(logits[:live], expected_logits[:live])
    for leaf, right in zip(leaves, expected, strict=True):
        assert leaf.is_floating_point() or torch.equal(leaf, right)


def test_a_forward_on_the_meta_device() -> None:
    one = pair(2)
    tree = params.to(one.params, device="meta")
    state = one.model.init_state(2, 32, page_size=ratio(one), device="meta")
    for new, keep_steps in (([[1, 2, 3], []], False), ([[4], [5]], False), ([[6], [7, 8]], True)):
        batch = fm.Batch.from_lists(new, state)
        out, state = one.model.forward(tree, state, batch, logits="last", keep_steps=keep_steps)
        assert out.logits.device.type == "meta" and out.logits.shape == (2, one.config.vocab_size)
        assert state is not None
    assert fm.commit(state, [1, 2]).ledger.lengths == (5, 3)
