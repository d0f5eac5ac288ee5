"""Qwen3.5, dense and mixture of experts, against transformers: outputs, every layer, every state entry, gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from torch import Tensor

import funcmodels as fm
import lowering
import params
from funcmodels.blocks.mlp import Routing
from tests.oracle.families import (
    assert_same_gradients,
    check_gradients,
    check_nearness,
    check_per_example,
    check_stacked,
    close,
    loss_of,
    schedules,
    together,
    total_loss,
)
from tests.oracle.qwen3_5 import KINDS, Pair, build, pair, run, sizes, tokens
from tests.oracle.states import advance, assert_rows_close, per_row, poison, refuses, run_schedule
from tests.tolerances import assert_close

LAYERS = tuple(f"layers.{index}" for index in range(4))
REFERENCES: dict[str, Any] = {
    "paged_attention": "torch",
    "attention": "torch",
    "gated_delta_rule": "torch",
    "experts": "torch",
}

kinds = pytest.mark.parametrize("kind", KINDS)


# Against transformers


@kinds
@pytest.mark.parametrize("seed", range(6))
def test_outputs_layers_and_entries_are_those_of_transformers(kind: str, seed: int) -> None:
    one = pair(kind, seed)
    ids = tokens(one, 1, 13, 2, 30, seed=seed)
    state = one.model.init_state(4, 40, page_size=(1, 3, 8, 128)[seed % 4])
    out, state = together(one, state, ids, outputs=(*LAYERS, *(("router",) if kind == "moe" else ())))
    plain, _ = together(one, None, ids)
    for row, row_ids in enumerate(ids):
        theirs = run(one, row_ids)
        assert fm.logical(state, row).keys() == theirs.entries.keys()
        close(fm.logical(state, row), theirs.entries)
        close(per_row(out.logits, ids)[row], theirs.logits)
        close(per_row(plain.logits, ids)[row], theirs.logits)
        close(per_row(out.hidden, ids)[row], theirs.hidden)
        close([per_row(out.extra[layer], ids)[row] for layer in LAYERS], theirs.layers)
        if kind == "moe":
            chosen = torch.stack([per_row(layer, ids)[row] for layer in out.extra["router"].ids])
            assert torch.equal(chosen.sort(-1).values, torch.stack(theirs.chosen).sort(-1).values)


@kinds
@pytest.mark.parametrize("seed", range(3))
def test_a_conversation_of_several_calls_is_that_of_transformers(kind: str, seed: int) -> None:
    one = pair(kind, seed)
    parts = tokens(one, 5, 1, 1, 2, 70, 1, seed=seed)
    state, cache = one.model.init_state(1, 80, page_size=4), None
    for part in parts:
        out, state = advance(one, state, [part])
        theirs = run(one, part, cache=cache)
        cache = theirs.cache
        close(out.logits, theirs.logits)
        close(fm.logical(state, 0), theirs.entries)


@pytest.mark.parametrize(("kind", "seed"), [*itertools.product(KINDS, range(3))])
def test_bfloat16_is_as_near_the_truth_as_transformers(kind: str, seed: int) -> None:
    """Root mean square distance to float32 on the same rounded weights: at most twice transformers', plus 0.5%."""
    fields = sizes(kind, seed)
    if kind == "moe":
        fields["num_experts_per_tok"] = fields["num_experts"]  # a choice among equals would turn on the last bit
    low = build(kind, fields, seed, torch.bfloat16)
    high = build(kind, fields, seed, torch.bfloat16)
    high.theirs.float()
    check_nearness(low, high, run, seed, LAYERS)


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


@pytest.mark.parametrize(("kind", "seed"), [*itertools.product(KINDS, (0, 4))])
def test_gradients_are_those_of_transformers(kind: str, seed: int) -> None:
    check_gradients(pair(kind, seed), tokens(pair(kind, seed), 17, 5, seed=seed))


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


# Any split gives the same


SPLITS = ([11], [8, 3], [8, 1, 1, 1], [1, 10], [2, 9], [3, 8], [1] * 11, [4, 4, 3])


@kinds
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("references", [False, True], ids=["kernels", "references"])
def test_chunks_of_one_row(kind: str, seed: int, references: bool) -> None:
    one = pair(kind, seed)
    ids = tokens(one, 11, seed=seed)
    with lowering.use(**(REFERENCES if references else {})):
        whole, expected = advance(one, one.model.init_state(1, 11, page_size=3), ids)
        for split in SPLITS:
            logits, state = run_schedule(one, one.model.init_state(1, 11, page_size=3), ids, [[n] for n in split])
            close(logits[0], whole.logits)
            assert_rows_close(state, expected)


@kinds
@pytest.mark.parametrize("split", [[64, 6], [6, 64], [67, 3], [1, 69], [35, 35], [3, 63, 4]], ids=str)
def test_chunks_around_the_chunk_of_the_delta_rule(kind: str, split: list[int]) -> None:
    one = pair(kind, 1)
    ids = tokens(one, 70)
    whole, expected = advance(one, one.model.init_state(1, 72, page_size=8), ids)
    logits, state = run_schedule(one, one.model.init_state(1, 72, page_size=8), ids, [[n] for n in split])
    close(logits[0], whole.logits)
    assert_rows_close(state, expected)


@kinds
@given(case=schedules(), page_size=st.sampled_from((1, 3, 8, 128)), seed=st.integers(0, 5))
@example(case=([11, 3, 7], [[5, 0, 2], [0, 3, 1], [1, 0, 1], [2, 0, 3], [3, 0, 0]]), page_size=4, seed=0)
@example(case=([9, 8], [[9, 0], [0, 7], [0, 1]]), page_size=8, seed=1)
@example(case=([8, 16], [[8, 8], [0, 8]]), page_size=8, seed=2)
def test_mixed_and_interleaved_rows(
    kind: str, case: tuple[list[int], list[list[int]]], page_size: int, seed: int
) -> None:
    lengths, schedule = case
    one = pair(kind, seed)
    ids = tokens(one, *lengths, seed=seed)
    state = one.model.init_state(len(ids), 16, page_size=page_size, pages=64)
    logits, state = run_schedule(one, state, ids, schedule)
    for row, row_ids in enumerate(ids):
        whole, expected = advance(one, one.model.init_state(1, 16, page_size=16), [row_ids])
        close(logits[row], whole.logits)
        assert_rows_close(state, expected, [(row, 0)])


def test_convolutions_longer_than_the_prompt() -> None:
    one = build("dense", sizes("dense", 3) | {"linear_conv_kernel_dim": 7})
    ids = tokens(one, 9)
    theirs = run(one, ids[0])
    for split in ([9], [1] * 9, [2, 2, 2, 2, 1], [5, 4]):
        logits, state = run_schedule(one, one.model.init_state(1, 9), ids, [[n] for n in split])
        close(logits[0], theirs.logits)
        close(fm.logical(state, 0), theirs.entries)


# Padding and what nobody may read


@kinds
@pytest.mark.parametrize("page_size", [1, 3, 8, 128])
@pytest.mark.parametrize("references", [False, True], ids=["kernels", "references"])
@pytest.mark.parametrize("counts", [(3, 0, 1, 8), (1, 1, 1, 1), (0, 0, 9, 0)], ids=str)
def test_padding_and_unread_places_may_hold_nan(
    kind: str, page_size: int, references: bool, counts: tuple[int, ...]
) -> None:
    """Pasts of 0 and of one token below, at and above a page's end; padding tokens are embedded as NaN."""
    one = pair(kind, 4)
    pasts = (page_size % 9 + 8, 0, 8, 9)
    bad = one.config.vocab_size - 1
    ids = [[token % bad for token in row] for row in tokens(one, *(p + c for p, c in zip(pasts, counts, strict=True)))]
    weight = one.params.embed.weight.clone()
    weight[bad] = torch.nan
    broken = replace(one, params=params.put(one.params, "embed.weight", weight))
    fed = [row[past:] for row, past in zip(ids, pasts, strict=True)]

    def continued(this: Pair, spoiled: bool) -> tuple[Any, fm.State]:
        state = this.model.init_state(4, 32, page_size=page_size)
        _, state = advance(this, state, [row[:past] for row, past in zip(ids, pasts, strict=True)])
        batch = fm.Batch.from_lists(fed, state)
        if spoiled:
            state, batch = poison(state), batch.pad(sum(counts) + 5)
            batch = replace(batch, tokens=batch.tokens.index_fill(0, torch.arange(sum(counts), sum(counts) + 5), bad))
        out, after = this.model.forward(this.params, state, batch)
        assert after is not None
        return out, after

    assert not one.config.tie_word_embeddings
    with lowering.use(**(REFERENCES if references else {})):
        (clean, expected), (out, after) = continued(one, False), continued(broken, True)
    live = slice(0, sum(counts))
    close((out.logits[live], out.hidden[live]), (clean.logits, clean.hidden))
    assert_rows_close(after, expected)


@kinds
def test_padding_leaves_kept_steps_alone(kind: str) -> None:
    one = pair(kind, 0)
    ids = tokens(one, 6, 4, 5)
    _, state = advance(one, one.model.init_state(3, 24, page_size=4), ids)
    batch = fm.Batch.from_lists([[1, 2, 3], [], [4]], state)
    _, pending = one.model.forward(one.params, poison(fm.fork(state)), batch.pad(9), keep_steps=True)
    _, expected = advance(one, state, [[1, 2], [], [4]])
    assert_rows_close(fm.commit(pending, [2, 0, 1]), expected)


@kinds
def test_a_row_does_not_depend_on_its_mates(kind: str) -> None:
    """Up to rounding: a row alone, and in batches of 2, 3, 8 and 33 at first, middle and last place."""
    one = pair(kind, 1)
    row, *mates = tokens(one, 7, *[3, 1, 12, 5] * 9)
    alone, _ = together(one, None, [row])
    for count in (2, 3, 8, 33):
        for place in (0, count // 2, count - 1):
            ids = mates[: count - 1]
            ids.insert(place, row)
            out, _ = together(one, None, ids)
            close(per_row(out.logits, ids)[place], alone.logits)


@kinds
def test_a_batch_in_which_every_row_idles(kind: str) -> None:
    one = pair(kind, 0)
    _, state = advance(one, one.model.init_state(2, 8), tokens(one, 3, 2))
    idle = fm.Batch.from_lists([[], []], state)
    out, after = one.model.forward(one.params, state, idle.pad(3), logits="last")
    assert torch.equal(out.logits, torch.zeros(2, one.config.vocab_size))
    assert_rows_close(after, state)
    with pytest.raises(ValueError, match="every row idles; skip the call, or pad"):
        one.model.forward(one.params, state, idle)


def test_a_batch_without_counts_on_the_host() -> None:
    """Made from tensors alone: the host then knows upper bounds only, and kernels must not take them for lengths."""
    one = pair("dense", 0)
    lists = [[1, 2, 3], [4]], [[5], [6, 7, 8]]
    state = one.model.init_state(2, 16, page_size=4)
    expected = one.model.init_state(2, 16, page_size=4)
    for new in lists:
        counted = fm.Batch.from_lists(new, expected)
        bare = fm.Batch(counted.tokens, counted.query_start, max_query=3)
        out, state = one.model.forward(one.params, state, bare)
        right, expected = one.model.forward(one.params, expected, counted)
        close(out.logits, right.logits)
    assert repr(state).count("lengths<=[6, 6]") == 1
    assert_rows_close(state, expected)


# What a forward returns


@kinds
def test_logits_of_all_last_or_none(kind: str) -> None:
    one = pair(kind, 0)
    ids = tokens(one, 4, 0, 1)
    full, _ = together(one, None, ids)
    last, _ = together(one, None, ids, logits="last")
    none, _ = together(one, None, ids, logits=None)
    assert none.logits.shape == (0, one.config.vocab_size)
    close(none.hidden, full.hidden)
    assert last.logits.shape == (3, one.config.vocab_size)
    close(last.logits[[0, 2]], full.logits[[3, 4]])
    assert torch.equal(last.logits[1], torch.zeros(one.config.vocab_size))
    with refuses(ValueError, "logits='first': give 'all', 'last' or None"):
        together(one, None, ids, logits="first")


def test_taps_of_every_kind() -> None:
    one = pair("moe", 0)
    out, _ = together(one, None, tokens(one, 3, 4), outputs=("router", "layers.2.router", "layers.2"))
    routing = out.extra["router"]
    assert isinstance(routing, Routing)
    choices = one.config.num_experts_per_tok
    assert routing.ids.shape == routing.weights.shape == (4, 7, choices)
    assert torch.equal(out.extra["layers.2.router"].ids, routing.ids[2])
    assert out.extra["layers.2"].shape == (7, one.config.hidden_size)
    close(routing.weights.sum(-1), torch.ones(4, 7))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [("layers.4", "offers no such value; nearest: layers"), ("router", "nearest"), ("x", "nearest: none")],
)
def test_unknown_taps(wanted: str, message: str) -> None:
    one = pair("dense", 0)
    with pytest.raises(ValueError, match=f"outputs='{wanted}'.*{message}"):
        together(one, None, tokens(one, 2), outputs=(wanted,))


def test_a_tap_of_the_one_layer_of_experts_has_a_layer_axis() -> None:
    fields = sizes("moe", 0) | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    one = build("moe", fields)
    out, _ = together(one, None, tokens(one, 3), outputs=("router",))
    assert out.extra["router"].ids.shape == (1, 3, one.config.num_experts_per_tok)


# Transforms


@kinds
def test_mapping_over_stacked_parameters(kind: str) -> None:
    one = pair(kind, 0)
    check_stacked(one, tokens(one, 12, 2))


@kinds
def test_per_example_gradients(kind: str) -> None:
    one = pair(kind, 2)
    check_per_example(one, torch.tensor(tokens(one, 6, 6, 6)))


def test_states_and_transforms() -> None:
    one = pair("dense", 0)
    state = one.model.init_state(1, 8)
    before = params.tree_map(torch.clone, state)
    batch = fm.Batch.from_lists([[1, 2]], state)
    with pytest.raises(fm.StateError, match=r"made outside a function transform.*pass state=None"):
        torch.func.grad(lambda tree: one.model.forward(tree, state, batch)[0].logits.sum())(one.params)
    stacked = params.tree_map(lambda leaf: leaf[None], one.params)
    with pytest.raises(fm.StateError, match="vmap; pass state=None"):
        torch.func.vmap(lambda tree: one.model.forward(tree, state, batch)[0].logits)(stacked)
    assert state == before


@kinds
@pytest.mark.parametrize("checked", [False, True])
def test_a_state_made_inside_a_gradient(kind: str, checked: bool) -> None:
    """Backward through several calls that write the same pages: equal to the stateless gradient."""
    one = pair(kind, 0)
    ids = tokens(one, 9, 4)

    def loss(tree: Any) -> Tensor:
        this = replace(one, params=tree)
        logits, _ = run_schedule(
            this, one.model.init_state(2, 12, page_size=4, checked=checked), ids, [[5, 1], [1, 0], [3, 3]]
        )
        return total_loss(logits, ids)

    grads = torch.func.grad(loss)(one.params)
    assert_same_gradients(grads, torch.func.grad(lambda tree: loss_of(one, tree, ids))(one.params))


def test_autograd_does_not_reach_into_a_held_state() -> None:
    one = pair("dense", 0)
    tree = params.tree_map(lambda leaf: leaf.clone().requires_grad_(), one.params)
    held = one.model.init_state(1, 8, page_size=2)
    out, after = one.model.forward(tree, held, fm.Batch.from_lists([[1, 2, 3]], held))
    out, _ = one.model.forward(tree, after, fm.Batch.from_lists([[4]], after))
    out.logits.square().sum().backward()
    assert all(leaf.grad is not None for leaf in params.leaves(tree))
    assert not any(leaf.requires_grad for leaf in params.leaves(held))
    assert held == one.model.init_state(1, 8, page_size=2)


# Tracing: no value is read on the host


def forward_of(one: Pair, batch: fm.Batch, keep_steps: bool) -> Any:
    def step(tree: Any, state: fm.State, new: Tensor) -> tuple[Tensor, list[Tensor]]:
        out, after = one.model.forward(tree, state, replace(batch, tokens=new), keep_steps=keep_steps)
        assert after is not None
        if keep_steps:
            after = fm.commit(after, torch.ones(after.rows, dtype=torch.int32))
        return out.logits, params.leaves(after)

    return step


@pytest.mark.parametrize(
    ("kind", "new", "keep_steps", "checked"),
    [
        ("dense", [[1], [2]], False, True),
        ("moe", [[1] * 9, []], False, False),
        ("dense", [[1, 2, 3], [4]], True, False),
        ("moe", [[1, 2], [3, 4]], True, True),
    ],
    ids=["decode", "prefill", "verify", "verify_checked"],
)
def test_a_traced_forward_reads_nothing_and_replays(
    kind: str, new: list[list[int]], keep_steps: bool, checked: bool
) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    one = pair(kind, 0)
    _, state = advance(one, one.model.init_state(2, 32, page_size=4, checked=checked), tokens(one, 5, 3))
    batch = fm.Batch.from_lists(new, state).pad(sum(map(len, new)) + 2)
    step = forward_of(one, batch, keep_steps)
    spare = params.tree_map(torch.clone, state)
    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(one.params, spare, batch.tokens)
    assert spare == state, "tracing wrote the example state"
    other = (batch.tokens + 11) % one.config.vocab_size
    logits, leaves = graph(one.params, spare, other)
    expected_logits, expected = step(one.params, state, other)
    live = sum(map(len, new))
    close(logits[:live], expected_logits[:live])
    for leaf, right in zip(leaves, expected, strict=True):
        if leaf.is_floating_point():
            continue
        assert torch.equal(leaf, right)


@kinds
def test_abstract_arguments(kind: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    one = pair(kind, 0)
    batch = fm.Batch.from_lists([[1, 2, 3], []])
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = one.model.init_state(2, 32, page_size=4)
        out, after = one.model.forward(one.params, state, batch, logits="last")
    assert out.logits.shape == (2, one.config.vocab_size)
    assert after is not None and after.lengths.shape == (2,)


@kinds
def test_a_forward_on_the_meta_device(kind: str) -> None:
    one = pair(kind, 0)
    tree = params.to(one.params, device="meta")
    state = one.model.init_state(2, 32, page_size=4, device="meta")
    for new, keep_steps in (([[1, 2, 3], []], False), ([[4], [5]], False), ([[6], [7, 8]], True)):
        batch = fm.Batch.from_lists(new, state)
        out, state = one.model.forward(tree, state, batch, logits="last", keep_steps=keep_steps)
        assert out.logits.device.type == "meta"
        assert out.logits.shape == (2, one.config.vocab_size)
        assert state is not None
    assert fm.commit(state, [1, 2]).ledger.lengths == (5, 3)
