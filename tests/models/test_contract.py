"""What every family must satisfy: it computes what its oracle does, however the tokens come, and is a pure function."""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from torch import Tensor

import funcmodels as fm
import lowering
import params
from funcmodels.attention.mla import LatentPages
from lowering.layouts import NdPages, NzPages
from tests.models.contract import Drawn, Subject, models
from tests.oracle.families import (
    assert_as_near,
    assert_bitwise,
    assert_same_gradients,
    check_drawn_drafts,
    check_one_leaf,
    check_per_example,
    check_shared_prefix,
    check_stacked,
    check_unread_places,
    close,
    loss_of,
    schedules,
    their_gradients,
    together,
    total_loss,
)
from tests.oracle.qwen3_5 import Remembered
from tests.oracle.states import advance, assert_rows_close, per_row, poison, refuses, run_schedule
from tests.tolerances import assert_close

SPLITS = ([11], [8, 3], [8, 1, 1, 1], [1, 10], [2, 9], [3, 8], [1] * 11, [4, 4, 3])
AROUND = ([64, 6], [6, 64], [67, 3], [33, 37], [31, 1, 38], [1, 69], [35, 35], [3, 63, 4])
"""Splits around the chunks of 32 and 64 tokens of delta rules."""
BACKWARD = "a backward sums over tokens, layers and rows, in another order"


def beside_transformers(subject: Subject) -> bool:
    return subject.half is not None


def tiled(subject: Subject) -> bool:
    return None not in subject.layouts


# Beside the oracle


def assert_remembered(state: fm.State, row: int, theirs: Remembered) -> None:
    found = fm.logical(state, row)
    assert found.keys() == theirs.entries.keys()
    close(found, theirs.entries)


@models(seeds=9)
def test_outputs_layers_and_entries_are_those_of_the_oracle(case: Drawn) -> None:
    """Of ragged rows, with and without a state."""
    one, ids = case.one, case.tokens(1, 13, 2, 30)
    truth = [case.run(row) for row in ids]
    routed = ("router",) if truth[0].chosen else ()
    state = case.empty(4, 40, (1, 3, 8, 128)[case.seed % 4])
    out, state = together(one, state, ids, outputs=(*case.layers, *routed))
    plain, _ = together(one, None, ids)
    for row, theirs in enumerate(truth):
        assert_remembered(state, row, theirs)
        close(per_row(out.logits, ids)[row], theirs.logits)
        close(per_row(plain.logits, ids)[row], theirs.logits)
        close(per_row(out.hidden, ids)[row], theirs.hidden)
        close([per_row(out.extra[layer], ids)[row].flatten(1) for layer in case.layers], theirs.layers)
        if routed:
            chosen = torch.stack([per_row(layer, ids)[row] for layer in out.extra["router"].ids])
            assert torch.equal(chosen.sort(-1).values, torch.stack(theirs.chosen).sort(-1).values)


@models(seeds=2, ways=True)
def test_a_conversation_of_several_calls_is_that_of_the_oracle(case: Drawn) -> None:
    """Prompts on prefixes, windows and single tokens."""
    state, cache = case.empty(1, 96), None
    with lowering.use(**case.kernels):
        for part in case.tokens(5, 1, 1, 2, 70, 1, 9):
            out, state = advance(case.one, state, [part])
            theirs = case.run(part, cache)
            cache = theirs.cache
            close(out.logits, theirs.logits)
            assert_remembered(state, 0, theirs)


@models(seeds=3, only=beside_transformers)
def test_bfloat16_is_as_near_the_truth_as_transformers(case: Drawn) -> None:
    """Root mean square distance to float32 on the same rounded weights: at most twice transformers', plus 0.5%."""
    half = case.subject.half
    assert half is not None
    low, high = half(case.kind, case.seed), half(case.kind, case.seed)
    case.subject.truth(high)
    ids = case.tokens(33)
    state = low.model.init_state(1, 40, dtype=torch.bfloat16, page_size=case.size(128))
    out, state = together(low, state, ids, outputs=case.layers)
    layers = {name: out.extra[name].flatten(1) for name in case.layers}
    ours = {"logits": out.logits, "hidden": out.hidden, **layers, **fm.logical(state, 0)}
    assert_as_near(ours, case.subject.run(low, ids[0], None), case.subject.run(high, ids[0], None))


@models(seeds=2, only=beside_transformers)
def test_gradients_are_those_of_transformers(case: Drawn) -> None:
    """Of every parameter; nothing but a choice depends on those that are not learned."""
    one, ids = case.one, case.tokens(40, 5)
    with case.subject.exact():
        loss, theirs = their_gradients(one, ids)
    saved = one.theirs.state_dict()
    held = (*one.theirs.named_parameters(), *one.theirs.named_buffers())
    leaves = {name: leaf for name, leaf in held if name in saved and leaf.is_floating_point()}
    theirs = {name: torch.zeros_like(v) if theirs.get(name) is None else theirs[name] for name, v in leaves.items()}
    for name, grad in theirs.items():
        assert bool(grad.any()) != bool(re.search(case.subject.unlearned, name)), f"{name}: no gradient to compare"
    expected = params.from_checkpoint(theirs, one.model.param_spec(), one.model.family.names)
    found, value = torch.func.grad_and_value(lambda tree: loss_of(one, tree, ids))(one.params)
    close(value, loss)
    assert_close(found, expected, looser=20, reason=BACKWARD)


@models(only=beside_transformers)
def test_greedy_tokens_are_those_of_transformers(case: Drawn) -> None:
    one, prompts = case.one, case.tokens(3, 15, 1, 8)
    found = fm.generate(one.model, one.params, prompts, 20, eos=(), rows=2, chunk=6, page_size=case.size(4))
    assert {result.rounds for result in found} == {19}
    one.theirs.generation_config.eos_token_id = None
    for prompt, result in zip(prompts, found, strict=True):
        given = torch.tensor([prompt])
        options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
        with case.subject.exact():
            theirs = one.theirs.generate(given, attention_mask=torch.ones_like(given), **options)
        assert result.tokens == theirs[0, len(prompt) :].tolist()


@models(seeds=2, only=beside_transformers)
def test_checkpoints_load_and_save(case: Drawn, tmp_path: Path) -> None:
    """What transformers saves loads, what we save loads there, and some leaves stay float32."""
    one = case.one
    one.theirs.save_pretrained(tmp_path / "theirs")
    model, loaded = fm.load(tmp_path / "theirs", dtype=torch.float32)
    assert model.config == one.config
    assert_bitwise(loaded, one.params)
    assert not params.inspect(tmp_path / "theirs", model.param_spec(), model.family.names).problems
    params.save(loaded, tmp_path / "ours", model.param_spec(), model.family.names, dict(model.config_json))
    again = type(one.theirs).from_pretrained(tmp_path / "ours", dtype=torch.float32).state_dict()
    assert again.keys() == one.theirs.state_dict().keys()
    assert all(torch.equal(again[name], value) for name, value in one.theirs.state_dict().items())
    _, half = fm.load(tmp_path / "theirs", dtype=torch.bfloat16)
    for path, leaf in params.items(half):
        assert leaf.dtype == (torch.float32 if re.search(case.subject.kept, path) else torch.bfloat16), path


# Any split, any rollback gives the same


@models(kinds=2, seeds=2, ways=True)
def test_chunks_of_one_row(case: Drawn) -> None:
    one, ids = case.one, case.tokens(11)
    with lowering.use(**case.kernels):
        whole, expected = advance(one, case.empty(1, 11, 3), ids)
        close(together(one, None, ids)[0].logits, whole.logits)
        for split in SPLITS:
            logits, state = run_schedule(one, case.empty(1, 11, 3), ids, [[n] for n in split])
            close(logits[0], whole.logits)
            assert_rows_close(state, expected)


@models(kinds=2)
def test_chunks_around_those_of_kernels(case: Drawn) -> None:
    one, ids = case.one, case.tokens(70)
    whole, expected = advance(one, case.empty(1, 72, 8), ids)
    for split in AROUND:
        logits, state = run_schedule(one, case.empty(1, 72, 8), ids, [[n] for n in split])
        close(logits[0], whole.logits)
        assert_rows_close(state, expected)


@models(kinds=2)
@given(drawn=schedules(), page=st.sampled_from((1, 3, 8, 128)), seed=st.integers(0, 3))
@example(drawn=([11, 3, 7], [[5, 0, 2], [0, 3, 1], [1, 0, 1], [2, 0, 3], [3, 0, 0]]), page=4, seed=0)
@example(drawn=([9, 8], [[9, 0], [0, 7], [0, 1]]), page=8, seed=1)
@example(drawn=([8, 16], [[8, 8], [0, 8]]), page=8, seed=2)
def test_mixed_and_interleaved_rows(
    case: Drawn, drawn: tuple[list[int], list[list[int]]], page: int, seed: int
) -> None:
    case, (lengths, schedule) = replace(case, seed=seed), drawn
    one, ids = case.one, case.tokens(*lengths)
    logits, state = run_schedule(one, case.empty(len(ids), 16, page, pages=64), ids, schedule)
    for row, row_ids in enumerate(ids):
        whole, expected = advance(one, case.empty(1, 16, 16), [row_ids])
        close(logits[row], whole.logits)
        assert_rows_close(state, expected, [(row, 0)])


@models(layouts=True)
def test_any_number_of_drawn_drafts_can_be_kept(case: Drawn) -> None:
    """A draft of random tokens behind the root: after 0..n of them count, the state is that of a plain run."""
    one, prompts, drafts = case.one, case.tokens(7, 4, 9), case.tokens(4, 4, 4, seed=5)
    _, state = advance(one, case.empty(3, 24), prompts)
    before = [fm.logical(state, row) for row in range(3)]
    for accepted in itertools.product(range(5), (0, 3), (4, 1)):
        out, pending = advance(one, state, drafts, keep_steps=True)
        kept = fm.commit(pending, list(accepted))
        _, expected = advance(one, case.empty(3, 24), prompts)
        taken = [row[:count] for row, count in zip(drafts, accepted, strict=True)]
        plain, expected = advance(one, expected, taken)
        assert_rows_close(kept, expected)
        for row, right in enumerate(per_row(plain.logits, taken)):
            close(per_row(out.logits, drafts)[row][: accepted[row]], right)
    assert_bitwise([fm.logical(state, row) for row in range(3)], before)


@models(kinds=1, seeds=3)
def test_speculation_with_drawn_drafts_continues_as_a_plain_run(case: Drawn) -> None:
    check_drawn_drafts(case.one, case.seed, case.size(4))


# Layouts, prefixes, and rows that move


@models(kinds=1, only=tiled)
@pytest.mark.parametrize("page", [1, 3, 16, 128])
def test_layouts_are_bitwise_equal(case: Drawn, page: int) -> None:
    """Prompts, prefixes, windows and single tokens; logits and every entry."""
    schedule = [[9, 0, 4], [1, 1, 1], [0, 20, 0], [4, 4, 4], [1, 0, 130]]
    ids = case.tokens(*(sum(counts) for counts in zip(*schedule, strict=True)))
    found = {}
    for layout, kind in (("nd", NdPages), ("nz", NzPages)):
        laid = replace(case, layout=layout)
        state = laid.empty(3, 160, page)
        latents = [entry for entry in state.layers if isinstance(entry, LatentPages)]
        assert latents and all(type(entry.latent) is type(entry.rope) is kind for entry in latents)
        logits, state = run_schedule(laid.one, state, ids, schedule)
        found[layout] = [*logits, *(fm.logical(state, row) for row in range(3))]
    assert_bitwise(found["nz"], found["nd"])


@models(kinds=1, layouts=True)
def test_a_prefix_is_shared(case: Drawn) -> None:
    check_shared_prefix(case.one, case.run, case.empty(1, 48, 8, pages=24))


@models(kinds=1, layouts=True)
@pytest.mark.parametrize("owned", [True, False])
def test_rows_that_fork_move_and_start_anew(case: Drawn, owned: bool) -> None:
    """An emptied row remembers nothing: its next text is that of a fresh row."""
    one = case.one
    _, state = advance(one, case.empty(2, 24, 4, pages=None if owned else 60), case.tokens(13, 6, seed=3))
    forked = fm.fork(state, [1, 0, 1])
    assert_rows_close(forked, state, [(0, 1), (1, 0), (2, 1)])
    _, forked = advance(one, forked, [[4], [5, 6], [7]])
    _, state = advance(one, state, [[5, 6], [4]])
    assert_rows_close(forked, state, [(1, 0), (0, 1)])
    moved, (new,) = fm.select(forked, [-1, 1, 0]), case.tokens(3, seed=8)
    _, moved = advance(one, moved, [new, [], [9]])
    _, fresh = advance(one, case.empty(1, 24), [new])
    assert_rows_close(moved, fresh, [(0, 0)])
    assert_rows_close(moved, state, [(1, 0)])
    assert fm.release(moved, [0]).ledger.lengths[0] == 0


# Padding and what nobody may read


@models(kinds=2, ways=True, layouts=True)
def test_padding_and_unread_places_may_hold_nan(case: Drawn) -> None:
    for pages, counts in (((8, 1), (3, 0, 1, 8)), ((8, 3), (1, 1, 1, 1)), ((8, 128), (0, 0, 9, 0))):
        for page in pages:
            check_unread_places(case.one, case.empty(4, 32, page), counts, case.tokens, **case.kernels)


@models(kinds=2)
def test_padding_leaves_kept_steps_alone(case: Drawn) -> None:
    one = case.one
    _, state = advance(one, case.empty(3, 24), case.tokens(16, 4, 5))
    batch = fm.Batch.from_lists([[1, 2, 3], [], [4]], state)
    _, pending = one.model.forward(one.params, poison(fm.fork(state)), batch.pad(9), keep_steps=True)
    _, expected = advance(one, state, [[1, 2], [], [4]])
    assert_rows_close(fm.commit(pending, [2, 0, 1]), expected)


@models(kinds=2)
def test_a_row_does_not_depend_on_its_mates(case: Drawn) -> None:
    """Up to rounding: a row alone, and in batches of 2, 3, 8 and 33 at first, middle and last place."""
    row, *mates = case.tokens(7, *[3, 1, 12, 5] * 9)
    alone, _ = together(case.one, None, [row])
    for count in (2, 3, 8, 33):
        for place in (0, count // 2, count - 1):
            ids = mates[: count - 1]
            ids.insert(place, row)
            out, _ = together(case.one, None, ids)
            close(per_row(out.logits, ids)[place], alone.logits)


@models(kinds=2)
def test_a_batch_in_which_every_row_idles(case: Drawn) -> None:
    one = case.one
    _, state = advance(one, case.empty(2, 8), case.tokens(3, 2))
    idle = fm.Batch.from_lists([[], []], state)
    out, after = one.model.forward(one.params, state, idle.pad(3), logits="last")
    assert not out.logits.any() and out.logits.shape == (2, one.config.vocab_size)
    assert_rows_close(after, state)
    with pytest.raises(ValueError, match="every row idles; skip the call, or pad"):
        one.model.forward(one.params, state, idle)


@models(kinds=1)
def test_a_batch_without_counts_on_the_host(case: Drawn) -> None:
    """Made from tensors alone: the host then knows upper bounds only, and kernels must not take them for lengths."""
    one, state, expected = case.one, case.empty(2, 16), case.empty(2, 16)
    for new in ([[1, 2, 3], [4]], [[5], [6, 7, 8]]):
        counted = fm.Batch.from_lists(new, expected)
        bare = fm.Batch(counted.tokens, counted.query_start, max_query=3)
        out, state = one.model.forward(one.params, state, bare)
        right, expected = one.model.forward(one.params, expected, counted)
        close(out.logits, right.logits)
    assert repr(state).count("lengths<=[6, 6]") == 1
    assert_rows_close(state, expected)


# What a forward reads and returns


@models(kinds=2)
def test_logits_of_all_last_or_none(case: Drawn) -> None:
    one, ids = case.one, case.tokens(4, 0, 1)
    full, last, none = (together(one, None, ids, logits=of)[0] for of in ("all", "last", None))
    assert none.logits.shape == (0, one.config.vocab_size) and last.logits.shape == (3, one.config.vocab_size)
    close(none.hidden, full.hidden)
    close(last.logits[[0, 2]], full.logits[[3, 4]])
    assert not last.logits[1].any()
    with refuses(ValueError, "logits='first': give 'all', 'last' or None"):
        together(one, None, ids, logits="first")


@models()
def test_taps_are_named(case: Drawn) -> None:
    """The choices of all routers together are those of each; a name that is none is refused with the nearest."""
    one, ids = case.one, case.tokens(3, 4)
    routed = [path.removesuffix(".mlp.router.weight") for path, _ in params.items(one.params)
              if re.fullmatch(r"layers\.\d+\.mlp\.router\.weight", path)]  # fmt: skip
    names = ("router", *(f"{layer}.router" for layer in routed)) if routed else ()
    out, _ = together(one, None, ids, outputs=(*names, *case.layers))
    assert all(out.extra[layer].shape[0] == 7 for layer in case.layers)
    for index, layer in enumerate(routed):
        chosen = out.extra["router"].ids[index], out.extra["router"].weights[index]
        assert torch.equal(out.extra[f"{layer}.router"].ids, chosen[0]) and chosen[0].shape == chosen[1].shape
    dense = [f"{layer}.router" for layer in case.layers if layer not in routed]
    for wanted, nearest in ((f"layers.{case.depth}", "layers"), *((name, "") for name in dense), ("x", "none")):
        with pytest.raises(ValueError, match=f"outputs='{wanted}'.*offers no such value; nearest: {nearest}"):
            together(one, None, ids, outputs=(wanted,))


@models(kinds=1, only=lambda subject: subject.axes == 1)
@torch.no_grad()
def test_one_axis_of_positions_turns_queries_and_keys(case: Drawn) -> None:
    """As far as they are apart: the first places shifted change nothing, spread ones do; images have more axes."""
    one = case.one
    batch = fm.Batch.from_lists(case.tokens(6))

    def logits(*places: int) -> Tensor:
        return one.model.forward(one.params, None, replace(batch, positions=torch.tensor([places])))[0].logits

    plain = one.model.forward(one.params, None, batch)[0].logits
    assert torch.equal(logits(*range(6)), plain)
    assert_close(logits(*range(7, 13)), plain, looser=10, reason="angles of other places are rounded otherwise")
    assert (logits(0, 5, 9, 20, 21, 40) - plain).abs().max() > 1e-3
    with pytest.raises(ValueError, match="positions have 3 axes, and this model takes those of text"):
        one.model.forward(one.params, None, replace(batch, positions=torch.zeros(3, 6, dtype=torch.int64)))


# Transforms


@models(kinds=2)
def test_mapping_over_stacked_parameters(case: Drawn) -> None:
    check_stacked(case.one, case.tokens(12, 2))


@models(kinds=2)
def test_per_example_gradients(case: Drawn) -> None:
    check_per_example(case.one, torch.tensor(case.tokens(9, 9, 9)), case.subject.silent)


@models(kinds=1)
def test_a_state_made_outside_a_transform_is_refused(case: Drawn) -> None:
    one, state = case.one, case.empty(1, 8)
    before = params.tree_map(torch.clone, state)
    batch = fm.Batch.from_lists([[1, 2]], state)
    with pytest.raises(fm.StateError, match=r"made outside a function transform.*pass state=None"):
        torch.func.grad(lambda tree: one.model.forward(tree, state, batch)[0].logits.sum())(one.params)
    stacked = params.tree_map(lambda leaf: leaf[None], one.params)
    with pytest.raises(fm.StateError, match="vmap; pass state=None"):
        torch.func.vmap(lambda tree: one.model.forward(tree, state, batch)[0].logits)(stacked)
    assert state == before


@models(kinds=2)
@pytest.mark.parametrize("checked", [False, True])
def test_a_state_made_inside_a_gradient(case: Drawn, checked: bool) -> None:
    """Backward through several calls that write the same pages: equal to the stateless gradient."""
    one, ids = case.one, case.tokens(9, 4)

    def loss(tree: Any) -> Tensor:
        state = case.empty(2, 12, checked=checked)
        return total_loss(run_schedule(replace(one, params=tree), state, ids, [[5, 1], [1, 0], [3, 3]])[0], ids)

    expected = torch.func.grad(lambda tree: loss_of(one, tree, ids))(one.params)
    assert_same_gradients(torch.func.grad(loss)(one.params), expected, case.subject.silent)


@models(kinds=2)
def test_gradients_through_a_state_are_those_without_one(case: Drawn) -> None:
    """Autograd writes nothing in place, every part of a prompt gets its share, and a held state stays as it was."""
    one, (ids,) = case.one, case.tokens(30)
    tree = params.tree_map(lambda leaf: leaf.clone().requires_grad_(), one.params)
    held = state = case.empty(1, 32)
    logits = []
    for part in (ids[:19], ids[19:20], ids[20:]):
        out, state = one.model.forward(tree, state, fm.Batch.from_lists([part], state))
        logits.append(out.logits)
    total_loss([torch.cat(logits)], [ids]).backward()
    assert not any(leaf.requires_grad for leaf in params.leaves(held)) and held == case.empty(1, 32)
    found = params.tree_map(lambda leaf: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, tree)
    expected = torch.func.grad(lambda weights: loss_of(one, weights, [ids]))(one.params)
    assert_close(found, expected, looser=20, reason=BACKWARD)


@models(kinds=1)
def test_a_gradient_of_one_leaf_alone_goes_through_a_state(case: Drawn) -> None:
    """Whichever tensor brings it into a layer."""
    for leaf in case.subject.leaves:
        check_one_leaf(case.one, leaf, case.tokens(9)[0], case.empty(1, 16))


# Tracing and programs: no value is read on the host


@models(kinds=1)
@pytest.mark.parametrize(
    ("new", "keep_steps", "checked"),
    [
        ([[1], [2]], False, True), ([[1] * 9, []], False, False), ([[1, 2, 3], [4]], True, False),
        ([[1, 2], [3, 4]], True, True),
    ],
    ids=["decode", "prefill", "verify", "verify_checked"],
)  # fmt: skip
def test_a_traced_forward_reads_nothing_and_replays(
    case: Drawn, new: list[list[int]], keep_steps: bool, checked: bool
) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    one = case.one
    _, state = advance(one, case.empty(2, 40, checked=checked), case.tokens(25, 3))
    batch = fm.Batch.from_lists(new, state).pad(sum(map(len, new)) + 2)

    def step(tree: Any, state: fm.State, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        out, after = one.model.forward(tree, state, replace(batch, tokens=ids), keep_steps=keep_steps)
        after = fm.commit(after, torch.ones(2, dtype=torch.int32)) if keep_steps else after
        return out.logits, params.leaves(after)

    spare = params.tree_map(torch.clone, state)
    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(one.params, spare, batch.tokens)
    assert spare == state, "tracing wrote the example state"
    other = (batch.tokens + 11) % one.config.vocab_size
    (logits, leaves), (expected_logits, expected) = graph(one.params, spare, other), step(one.params, state, other)
    live = sum(map(len, new))
    close(logits[:live], expected_logits[:live])
    for leaf, right in zip(leaves, expected, strict=True):
        assert leaf.is_floating_point() or torch.equal(leaf, right)


@models(kinds=1, layouts=True)
@pytest.mark.parametrize("counts", [(1, 1, 1), (4, 4, 4), (9, 0, 1)], ids=["decode", "verify", "ragged"])
def test_captured_steps_are_the_eager_ones(case: Drawn, counts: tuple[int, ...]) -> None:
    one = case.one
    _, state = advance(one, case.empty(3, 48, 8), case.tokens(5, 2, 11))
    other = copy.deepcopy(state)
    step = lowering.jit(one.model.forward, donate=("state",), backend="fx")
    for seed in (3, 4):
        new = case.tokens(*counts, seed=seed)
        out, other = step(one.params, other, fm.Batch.from_lists(new, other))
        with lowering.use(mla_prefix_attention="torch_absorbed"):
            expected, state = advance(one, state, new)
        close(out.logits, expected.logits)
    assert_rows_close(other, state)


@models()
def test_a_forward_on_the_meta_device(case: Drawn) -> None:
    """Where reading a value raises."""
    one = case.one
    tree, state = params.to(one.params, device="meta"), case.empty(2, 32, device="meta")
    for new, keep_steps in (([[1] * 9, []], False), ([[4], [5]], False), ([[6], [7, 8]], True)):
        batch = fm.Batch.from_lists(new, state)
        out, state = one.model.forward(tree, state, batch, logits="last", keep_steps=keep_steps)
        assert out.logits.shape == (2, one.config.vocab_size) and out.logits.device.type == "meta"
    assert fm.commit(state, [1, 2]).ledger.lengths == (11, 3)


@models(kinds=2)
def test_abstract_arguments(case: Drawn) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    one = case.one  # made here: it is kept for other tests, which need its values
    batch = fm.Batch.from_lists([[1, 2, 3], []])
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = case.empty(2, 32)
        out, after = one.model.forward(one.params, state, batch, logits="last")
    assert out.logits.shape == (2, one.config.vocab_size)
    assert after is not None and after.lengths.shape == (2,)
