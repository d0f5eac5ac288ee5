"""DeepSeek-V2 against transformers: outputs, every layer, every state entry, gradients, in both layouts of pages."""

from __future__ import annotations

import copy
import itertools
import pickle
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
from tests.oracle.deepseek_v2 import KINDS, build, pair, run, sizes
from tests.oracle.families import (
    assert_bitwise,
    check_drawn_drafts,
    check_gradients,
    check_nearness,
    check_one_leaf,
    check_saved,
    check_shared_prefix,
    check_unread_places,
    close,
    loss_of,
    schedules,
    total_loss,
)
from tests.oracle.qwen3_5 import Pair, tokens
from tests.oracle.qwen3_5 import pair as dense
from tests.oracle.states import advance, assert_rows_close, per_row, refuses, run_schedule
from tests.tolerances import assert_close

KERNELS = ("torch", "torch_absorbed_rows", "torch_absorbed", "torch_concat", "torch_two_pass")

kinds = pytest.mark.parametrize("kind", KINDS)
layouts = pytest.mark.parametrize("layout", ["nd", "nz"])


def pages(state: fm.State) -> list[LatentPages]:
    """The entries of a state, which are all of one kind."""
    assert all(isinstance(entry, LatentPages) for entry in state.layers)
    return [entry for entry in state.layers if isinstance(entry, LatentPages)]


def layers_of(one: Pair) -> list[str]:
    return [f"layers.{index}" for index in range(one.config.num_hidden_layers)]


# Against transformers


@kinds
@pytest.mark.parametrize("seed", range(4))
def test_outputs_layers_and_entries_are_those_of_transformers(kind: str, seed: int) -> None:
    one = pair(kind, seed)
    layers = layers_of(one)
    ids = tokens(one, 1, 13, 2, 30, seed=seed)
    state = one.model.init_state(4, 40, page_size=(1, 3, 8, 128)[seed])
    wanted = [*layers, *(["router"] if any(one.config.experts_in_layer) else [])]
    out, after = advance(one, state, ids, outputs=wanted)
    plain, _ = one.model.forward(one.params, None, fm.Batch.from_lists(ids))
    for row, row_ids in enumerate(ids):
        theirs = run(one, row_ids)
        assert fm.logical(after, row).keys() == theirs.entries.keys()
        close(fm.logical(after, row), theirs.entries)
        close(per_row(out.logits, ids)[row], theirs.logits)
        close(per_row(plain.logits, ids)[row], theirs.logits)
        close(per_row(out.hidden, ids)[row], theirs.hidden)
        close([per_row(out.extra[layer], ids)[row] for layer in layers], theirs.layers)
        if "router" in wanted:
            chosen = torch.stack([per_row(layer, ids)[row] for layer in out.extra["router"].ids])
            assert torch.equal(chosen.sort(-1).values, torch.stack(theirs.chosen).sort(-1).values)


@kinds
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_conversation_of_several_calls_is_that_of_transformers(kind: str, kernel: str) -> None:
    """Prompts on prefixes, windows and single tokens, by every kernel."""
    one = pair(kind, 1)
    state, cache = one.model.init_state(1, 96, page_size=4), None
    with lowering.use(mla_prefix_attention=kernel):
        for part in tokens(one, 5, 1, 1, 2, 70, 1, 9):
            out, state = advance(one, state, [part])
            theirs = run(one, part, cache=cache)
            cache = theirs.cache
            close(out.logits, theirs.logits)
            close(fm.logical(state, 0), theirs.entries)


@pytest.mark.parametrize("kind", ["lite", "plain"])
@pytest.mark.parametrize("seed", range(2))
def test_bfloat16_is_as_near_the_truth_as_transformers(kind: str, seed: int) -> None:
    """Root mean square distance to float32 on the same rounded weights: at most twice transformers', plus 0.5%."""
    fields = sizes(kind, seed)
    fields["num_experts_per_tok"] = fields["n_routed_experts"]  # a choice among equals would turn on the last bit
    low, high = build(fields, seed, torch.bfloat16), build(fields, seed, torch.bfloat16)
    high.theirs.float()
    check_nearness(low, high, run, seed)


@kinds
def test_gradients_are_those_of_transformers(kind: str) -> None:
    check_gradients(pair(kind, 2), tokens(pair(kind, 2), 17, 5))


def test_gradients_through_a_state_are_those_without_one() -> None:
    """Autograd writes no page in place, and both halves of a prompt get their share."""
    one = pair("full", 1)
    (ids,) = tokens(one, 12)
    tree = params.tree_map(lambda leaf: leaf.clone().requires_grad_(), one.params)
    state = one.model.init_state(1, 16, page_size=4)
    logits = []
    for part in (ids[:7], ids[7:]):
        out, state = one.model.forward(tree, state, fm.Batch.from_lists([part], state))
        logits.append(out.logits)
    total_loss([torch.cat(logits)], [ids]).backward()
    found = params.tree_map(lambda leaf: leaf.grad, tree)
    expected = torch.func.grad(lambda weights: loss_of(one, weights, [ids]))(one.params)
    assert_close(found, expected, looser=20, reason="a backward sums over tokens and layers")


@pytest.mark.parametrize(
    "leaf", [f"layers.0.attn.{name}.weight" for name in ("latent_norm", "up", "q_up", "q_norm", "out")]
)
def test_a_gradient_of_one_leaf_alone_goes_through_a_state(leaf: str) -> None:
    """Whichever tensor brings it into a layer."""
    one = pair("full", 1)
    check_one_leaf(one, leaf, tokens(one, 9)[0])


@torch.no_grad()
def test_one_axis_of_positions_turns_queries_and_keys() -> None:
    """As far as they are apart: the first places shifted change nothing, spread ones do; images have more axes."""
    one = pair("full", 1)
    (ids,) = tokens(one, 6)
    batch = fm.Batch.from_lists([ids])

    def logits(*places: int) -> Tensor:
        return one.model.forward(one.params, None, replace(batch, positions=torch.tensor([places])))[0].logits

    plain = one.model.forward(one.params, None, batch)[0].logits
    assert torch.equal(logits(*range(6)), plain)
    assert_close(logits(*range(7, 13)), plain, looser=10, reason="angles of other places are rounded otherwise")
    assert (logits(0, 5, 9, 20, 21, 40) - plain).abs().max() > 1e-3
    with pytest.raises(ValueError, match="positions have 3 axes, and this model takes those of text"):
        one.model.forward(one.params, None, replace(batch, positions=torch.zeros(3, 6, dtype=torch.int64)))


# Any split, any rollback gives the same


@pytest.mark.parametrize("kind", ["lite", "full"])
@given(case=schedules(), page_size=st.sampled_from((1, 3, 8, 128)), seed=st.integers(0, 3))
@example(case=([11, 3, 7], [[5, 0, 2], [0, 3, 1], [1, 0, 1], [2, 0, 3], [3, 0, 0]]), page_size=4, seed=0)
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


@kinds
@layouts
def test_any_number_of_drawn_drafts_can_be_kept(kind: str, layout: str) -> None:
    """A draft of random tokens behind the root: after 0..n of them count, the state is that of a plain run."""
    one = pair(kind, 0, tiled=True)
    prompts = tokens(one, 7, 4, 9)
    drafts = tokens(one, 4, 4, 4, seed=5)
    fresh = one.model.init_state(3, 24, page_size=4, layout=layout)
    _, state = advance(one, fresh, prompts)
    for accepted in itertools.product(range(5), (0, 3), (4, 1)):
        out, pending = advance(one, state, drafts, keep_steps=True)
        kept = fm.commit(pending, list(accepted))
        plain, expected = advance(one, one.model.init_state(3, 24, page_size=4, layout=layout), prompts)
        taken = [row[:count] for row, count in zip(drafts, accepted, strict=True)]
        plain, expected = advance(one, expected, taken)
        assert_rows_close(kept, expected)
        for row, right in enumerate(per_row(plain.logits, taken)):
            close(per_row(out.logits, drafts)[row][: accepted[row]], right)


@pytest.mark.parametrize("seed", range(3))
def test_speculation_with_a_sampled_draft_continues_as_a_plain_run(seed: int) -> None:
    check_drawn_drafts(pair("full", 0), seed)


# Layouts, and moving a state


@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
def test_layouts_are_bitwise_equal(page_size: int) -> None:
    """Prompts, prefixes, windows and single tokens; logits and every entry."""
    one = pair("full", 1, tiled=True)
    schedule = [[9, 0, 4], [1, 1, 1], [0, 20, 0], [4, 4, 4], [1, 0, 130]]
    ids = tokens(one, *(sum(counts) for counts in zip(*schedule, strict=True)))
    found = {}
    for layout, kind in (("nd", NdPages), ("nz", NzPages)):
        state = one.model.init_state(3, 160, page_size=page_size, layout=layout)
        assert all(type(entry.latent) is type(entry.rope) is kind for entry in pages(state))
        logits, state = run_schedule(one, state, ids, schedule)
        found[layout] = [*logits, *(fm.logical(state, row) for row in range(3))]
    assert_bitwise(found["nz"], found["nd"])


def test_tiled_storage_read_as_plain_is_seen() -> None:
    """What a forgotten conversion would give: the same bytes in the other type change the logits."""
    one = pair("lite", 0, tiled=True)
    (ids,) = tokens(one, 40)
    _, state = advance(one, one.model.init_state(1, 48, page_size=16, layout="nz"), [ids])

    def misread(pages: Any) -> NdPages:
        return NdPages(pages.values.reshape(pages.values.shape[0], pages.page_size, pages.width))

    mistaken = tuple(LatentPages(misread(entry.latent), misread(entry.rope)) for entry in pages(state))
    right, _ = advance(one, state, [[1]])
    wrong, _ = advance(one, params.put(state, "layers", mistaken), [[1]])
    with pytest.raises(AssertionError):
        close(wrong.logits, right.logits)


@layouts
def test_a_prefix_is_shared(layout: str) -> None:
    check_shared_prefix(pair("full", 0, tiled=True), run, layout)


@layouts
def test_rows_with_pages_of_their_own_are_copied(layout: str) -> None:
    one = pair("lite", 1, tiled=True)
    ids = tokens(one, 10, 5)
    _, state = advance(one, one.model.init_state(2, 24, page_size=4, layout=layout), ids)
    copied = fm.fork(state, [1, 0, 1])
    assert_rows_close(copied, state, [(0, 1), (1, 0), (2, 1)])
    out, _ = advance(one, copied, [[3], [4], [5]])
    for row, (source, token) in enumerate(((1, 3), (0, 4), (1, 5))):
        close(out.logits[row], run(one, [*ids[source], token]).logits[-1])
    assert fm.release(copied, [0]).ledger.lengths[0] == 0


@layouts
@pytest.mark.parametrize("how", ["moved", "pickled", "deepcopied"])
def test_a_state_moved_to_the_host_and_back_continues_exactly(layout: str, how: str) -> None:
    one = pair("full", 1, tiled=True)
    _, state = advance(one, one.model.init_state(2, 40, page_size=8, layout=layout), tokens(one, 11, 3))
    ways = {
        "moved": lambda value: params.to(params.to(value, "cpu"), "cpu"),
        "pickled": lambda value: pickle.loads(pickle.dumps(value)),
        "deepcopied": copy.deepcopy,
    }
    other = ways[how](fm.fork(state) if how == "moved" else state)
    assert all(type(x.latent) is type(y.latent) for x, y in zip(pages(other), pages(state), strict=True))
    new = tokens(one, 2, 17, seed=3)
    (out, after), (expected, right) = advance(one, other, new), advance(one, state, new)
    assert_bitwise((out.logits, *(fm.logical(after, row) for row in (0, 1))),
                   (expected.logits, *(fm.logical(right, row) for row in (0, 1))))  # fmt: skip


def test_the_target_chooses_the_layout() -> None:
    """Tiled pages where operators read them, of whole tiles, blocks of 128 and half precision; else plain ones."""
    one, odd = pair("lite", 0, tiled=True).model, pair("lite", 0).model
    half = {"dtype": torch.bfloat16}

    def chosen(model: fm.Model, target: str, **kwargs: Any) -> type:
        with lowering.use(target=target):
            return type(pages(model.init_state(1, 8, **kwargs))[0].latent)

    assert chosen(one, "ascend910b", **half) is chosen(one, "ascend910_93", page_size=256, **half) is NzPages
    assert chosen(one, "cpu", **half) is chosen(odd, "ascend910b", **half) is NdPages
    assert chosen(one, "ascend950", **half) is NdPages
    assert chosen(one, "ascend910b") is chosen(one, "ascend910b", page_size=64, **half) is NdPages
    assert chosen(one, "ascend910b", layout="nd", **half) is NdPages
    with refuses(ValueError, "layout='xz'; layouts of this model's pages: nd, nz"):
        one.init_state(1, 8, layout="xz")
    with pytest.raises(ValueError, match=r"'nz' takes widths in multiples of 16, found .*; use 'nd'"):
        odd.init_state(1, 8, layout="nz")


# Padding and what nobody may read


@layouts
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("counts", [(3, 0, 1, 8), (1, 1, 1, 1), (0, 0, 9, 0)], ids=str)
def test_padding_and_unread_places_may_hold_nan(layout: str, kernel: str, counts: tuple[int, ...]) -> None:
    one = pair("full", 0, tiled=True)
    check_unread_places(
        one, one.model.init_state(4, 32, page_size=8, layout=layout), counts, mla_prefix_attention=kernel
    )


def test_a_batch_without_counts_on_the_host() -> None:
    """The host then knows upper bounds only, and the kernels that go by host lengths are refused."""
    one = pair("lite", 0)
    state, expected = (one.model.init_state(2, 16, page_size=4) for _ in range(2))
    for new in ([[1, 2, 3], [4]], [[5], [6, 7, 8]]):
        counted = fm.Batch.from_lists(new, expected)
        with lowering.record() as report:
            bare = fm.Batch(counted.tokens, counted.query_start, max_query=3)
            out, state = one.model.forward(one.params, state, bare)
        (row,) = [row for row in report.rows if row.op == "mla_prefix_attention"]
        assert row.kernel == "torch_absorbed" and "exact row lengths" in row.refused["torch_absorbed_rows"]
        right, expected = one.model.forward(one.params, expected, counted)
        close(out.logits, right.logits)
    assert_rows_close(state, expected)


# Generation, checkpoints, programs


@kinds
def test_greedy_tokens_are_those_of_transformers(kind: str) -> None:
    one = pair(kind, 1)
    prompts = tokens(one, 3, 9, 1)
    found = [result.tokens for result in fm.generate(one.model, one.params, prompts, 15, eos=())]
    for prompt, generated in zip(prompts, found, strict=True):
        theirs = one.theirs.generate(torch.tensor([prompt]), max_new_tokens=15, do_sample=False, pad_token_id=0)
        assert generated == theirs[0, len(prompt) :].tolist()


@kinds
def test_checkpoints_load_and_save(kind: str, tmp_path: Path) -> None:
    check_saved(pair(kind, 1 if kind == "plain" else 0), tmp_path)
    _, half = fm.load(tmp_path / "theirs", dtype=torch.bfloat16)
    routers = {leaf.dtype for path, leaf in params.items(half) if "router" in path}
    assert routers <= {torch.float32} and half.norm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("counts", [(1, 1, 1), (4, 4, 4), (6, 2, 3)], ids=["decode", "verify", "ragged"])
@layouts
def test_captured_steps_are_the_eager_ones(counts: tuple[int, ...], layout: str) -> None:
    one = pair("full", 1, tiled=True)
    _, state = advance(one, one.model.init_state(3, 32, page_size=8, layout=layout), tokens(one, 5, 2, 11))
    other = copy.deepcopy(state)
    step = lowering.jit(one.model.forward, donate=("state",), backend="fx")
    for seed in (3, 4):
        new = tokens(one, *counts, seed=seed)
        out, other = step(one.params, other, fm.Batch.from_lists(new, other))
        with lowering.use(mla_prefix_attention="torch_absorbed"):
            expected, state = advance(one, state, new)
        close(out.logits, expected.logits)
    assert_rows_close(other, state)


def test_wrong_shapes_are_named() -> None:
    one = pair("full", 0)
    short = params.put(one.params, "layers.0.attn.q_up.weight", one.params.layers[0].attn.q_up.weight[:-1])
    with pytest.raises(ValueError, match=r"latent_attention: queries have \d+ channels, expected \d+ \(\d heads of 12"):
        one.model.forward(short, None, fm.Batch.from_lists([[1, 2]]))
    short = params.put(one.params, "layers.0.attn.up.weight", one.params.layers[0].attn.up.weight[:-1])
    with pytest.raises(ValueError, match=r"latent_attention: up.weight has \d+ rows, expected \d+ \(\d heads with"):
        one.model.forward(short, None, fm.Batch.from_lists([[1, 2]]))
    state = build(sizes("full", 0) | {"kv_lora_rank": 18}).model.init_state(1, 8)
    with pytest.raises(fm.StateError, match=r"the state's latents have 18 channels and rope keys (\d+), .* 14 and \1;"):
        advance(one, state, [[1]])
    right = one.model.init_state(1, 8)
    with pytest.raises(fm.StateError, match="the state has entries for 1 layers"):
        advance(one, replace(right, layers=right.layers[:1]), [[1]])
    with pytest.raises(ValueError, match="layouts of this model's pages: none, since this model keeps no latents"):
        dense("dense").model.init_state(1, 8, layout="nd")
