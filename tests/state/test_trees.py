"""States, batches and parameters as values: flatten, copy, pickle, move, print."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import optree
import pytest
import torch
import torch.utils._pytree as pytree

import funcmodels as fm
import params
from tests.oracle.qwen3_5 import KINDS, Pair, build, pair, sizes, tokens
from tests.oracle.states import advance, assert_rows_close
from tests.tolerances import assert_close

kinds = pytest.mark.parametrize("kind", KINDS)


def started(one: Pair, **kwargs: Any) -> fm.State:
    state = one.model.init_state(2, 24, page_size=4, **kwargs)
    return advance(one, state, tokens(one, 9, 2))[1]


def trees(one: Pair) -> dict[str, Any]:
    state = started(one, checked=True, pages=9)
    batch = fm.Batch.from_lists([[1, 2], []], state)
    out, pending = one.model.forward(one.params, state, batch, keep_steps=True)
    bare, _ = one.model.forward(one.params, None, batch, logits=None)
    return {
        "params": one.params, "spec": one.model.param_spec(), "state": state, "pending": pending, "batch": batch,
        "output": out, "no logits": bare,
    }  # fmt: skip


PATHS = [
    ("layers.99.mlp", r"no '99' in 'layers.99.mlp': tuple has \d+ items, 0\.\.\d"),
    ("layers.0.nope", "no 'nope' in 'layers.0.nope': Layer has "), ("layers.x", "no 'x'"),
    ("embed.weight.shape", "no 'shape' in 'embed.weight.shape': Parameter|Tensor has no parts"),
    ("embed.weight.nope", "Tensor has no parts"), ("", "no ''"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "message"), PATHS)
def test_paths_that_lead_nowhere_are_named_whole(path: str, message: str) -> None:
    one = pair("dense", 0)
    with pytest.raises(KeyError, match=message):
        params.put(one.params, path, torch.zeros(1))


def test_paths_count_from_the_end_too() -> None:
    one = pair("dense", 0)
    changed = params.put(one.params, "layers.-1.input_norm.weight", torch.zeros(1))
    assert params.at(changed, "layers.-1.input_norm.weight").shape == (1,)
    assert all(old is new for old, new in zip(one.params.layers[:-1], changed.layers[:-1], strict=True))


@kinds
@pytest.mark.parametrize("name", ["params", "spec", "state", "pending", "batch", "output", "no logits"])
def test_a_tree_survives_flattening_copying_and_pickling(kind: str, name: str) -> None:
    value = trees(pair(kind, 0))[name]
    leaves, structure = pytree.tree_flatten(value)
    assert pytree.tree_unflatten(leaves, structure) == value
    assert params.tree_map(lambda leaf: leaf, value) == value
    assert copy.deepcopy(value) == value
    assert pickle.loads(pickle.dumps(value)) == value


def test_paths_are_readable() -> None:
    dense, moe = pair("dense", 0), pair("moe", 0)
    soft = dense.config.layer_types.index("full_attention")
    paths = dict(params.items(dense.params))
    assert {"embed.weight", "norm.weight", f"layers.{soft}.attn.qkv.weight"} <= paths.keys()
    assert {"layers.0.mlp.experts.down", "layers.0.mlp.router.weight"} <= dict(params.items(moe.params)).keys()
    assert {"lengths", "page_table", f"layers.{soft}.k"} <= dict(params.items(started(dense))).keys()
    assert all(params.at(dense.params, path) is leaf for path, leaf in paths.items())


def test_a_tied_tensor_is_one_leaf_and_replacing_it_changes_both_uses() -> None:
    one = pair("dense", 1)
    assert one.config.tie_word_embeddings
    assert not any("head" in path for path, _ in params.items(one.params))
    batch = fm.Batch.from_lists([[3, 4]])
    swap = params.put(one.params, "embed.weight", one.params.embed.weight.roll(1, 0))
    rolled, _ = one.model.forward(swap, None, fm.Batch.from_lists([[4, 5]]))
    plain, _ = one.model.forward(one.params, None, batch)
    assert_close(rolled.logits, plain.logits.roll(1, 1))
    grads = torch.func.grad(lambda tree: one.model.forward(tree, None, batch)[0].logits[:, 7].sum())(one.params)
    moved = grads.embed.weight.abs().sum(-1).nonzero().flatten().tolist()
    assert moved == [3, 4, 7], "read as embedding and as head"


def test_a_gradient_of_one_leaf() -> None:
    one = pair("dense", 0)

    def loss(weight: torch.Tensor) -> torch.Tensor:
        tree = params.put(one.params, "norm.weight", weight)
        return one.model.forward(tree, None, fm.Batch.from_lists([[1, 2]]))[0].logits.sum()

    whole = torch.func.grad(lambda tree: one.model.forward(tree, None, fm.Batch.from_lists([[1, 2]]))[0].logits.sum())
    assert_close(torch.func.grad(loss)(one.params.norm.weight), whole(one.params).norm.weight)


@kinds
def test_a_state_moved_and_back_continues_exactly(kind: str) -> None:
    one = pair(kind, 0)
    state = started(one)
    wide = params.to(state, dtype=torch.float64)
    assert {value.dtype for value in fm.logical(wide, 0).values()} == {torch.float64}
    assert wide.lengths.dtype == state.lengths.dtype
    back = params.to(wide, device="cpu", dtype=torch.float32)
    assert back == state
    out, after = advance(one, back, [[5], [6, 7]])
    right, expected = advance(one, state, [[5], [6, 7]])
    assert torch.equal(out.logits, right.logits)
    assert after == expected


def saved_and_loaded(state: fm.State) -> fm.State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)  # without trust in who wrote it


WAYS = {
    "deep copy": copy.deepcopy, "pickle": lambda state: pickle.loads(pickle.dumps(state)), "torch": saved_and_loaded,
    "map": lambda state: params.tree_map(torch.clone, state),
    "optree": lambda state: optree.tree_map(torch.clone, state),
    "dtypes": lambda state: params.to(params.to(state, dtype=torch.float64), dtype=torch.float32),
}  # fmt: skip


@kinds
@pytest.mark.parametrize("duplicate", WAYS.values(), ids=WAYS)
def test_a_copy_is_independent_and_holds_only_its_own_pages(kind: str, duplicate: Any) -> None:
    one = pair(kind, 0)
    state = started(one, pages=12, checked=True)
    other = fm.fork(state)
    assert state.ledger.leases[0].pool.free == 12 - 4 - 2
    twin = duplicate(state)
    pool = twin.ledger.leases[0].pool
    assert pool.free == 12 - 4, "the fork was not copied, so its pages are free in the copy"
    before = params.tree_map(torch.clone, state)
    out, _ = advance(one, twin, [[5, 5, 5, 5], [6]])
    assert state == before
    right, _ = advance(one, other, [[5, 5, 5, 5], [6]])
    assert_close(out.logits, right.logits)
    fm.release(twin)
    assert pool.free == 12
    advance(one, state, [[1], []])


@pytest.mark.parametrize("duplicate", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("pages", [None, 12])
@pytest.mark.parametrize("keep_steps", [False, True])
def test_a_copy_and_its_original_go_different_ways(duplicate: Any, pages: int | None, keep_steps: bool) -> None:
    """Turn by turn, and each is what it would be alone; what one has released the other still has."""
    one = pair("dense", 0)
    state = advance(one, started(one, pages=pages), [[1, 2], [3]], keep_steps=keep_steps)[1]
    twin = duplicate(state)
    if keep_steps:
        state, twin = fm.commit(state, [1, 1]), fm.commit(twin, [2, 0])
    lines = [(state, [[5], [6]]), (twin, [[7], [8]])]
    alone = [advance(one, advance(one, fm.fork(branch), ids)[1], ids)[1] for branch, ids in lines]
    for _ in range(2):
        lines = [(advance(one, branch, ids)[1], ids) for branch, ids in lines]
    for (branch, _), right in zip(lines, alone, strict=True):
        assert_rows_close(branch, right)
    fm.release(lines[0][0])
    advance(one, lines[1][0], [[1], []])
    with pytest.raises(fm.StateError, match="released"):
        advance(one, state, [[1], []])


def test_another_name_for_a_state_is_no_copy() -> None:
    """Its tensors are the same, so one continuation makes the other stale."""
    one = pair("dense", 0)
    for same in (copy.copy, replace, lambda state: params.tree_map(lambda leaf: leaf, state)):
        state = started(one)
        _, after = advance(one, state, [[1], []])
        advance(one, same(state), [[2], []])
        with pytest.raises(fm.StaleStateError, match="row 0 of this state is stale"):
            advance(one, after, [[3], []])


def test_a_copy_of_a_released_state_is_released() -> None:
    one = pair("dense", 0)
    for duplicate in WAYS.values():
        with pytest.raises(fm.StateError, match="released"):
            advance(one, duplicate(fm.release(started(one))), [[1], []])


def test_states_may_be_stacked_and_told_apart_again() -> None:
    """What a map makes of them need not be a state."""
    one = pair("dense", 0)
    state = started(one)
    two = params.tree_map(lambda *parts: torch.stack(parts), state, params.tree_map(torch.clone, state))
    assert two.lengths.shape == (2, 2)
    with pytest.raises(fm.StateError, match="made by a map"):
        advance(one, two, [[1], [2]])
    assert params.tree_map(lambda part: list(part.shape), state).lengths == [2]


def test_a_map_that_makes_another_state_is_refused_where_it_is_used() -> None:
    one = pair("dense", 0)
    empty, state = one.model.init_state(2, 24, page_size=4), started(one)
    for value in (empty, state):
        zeros = params.tree_map(torch.zeros_like, value)
        with pytest.raises(fm.StateError, match=r"made by a map that changed its lengths or its page.*init_state"):
            advance(one, zeros, [[1], [2]])


PARTS = [
    (lambda state: {"lengths": state.lengths - 1}, r"lengths are \[8, 1\], and by its ledger it holds \[9, 2\]"),
    (lambda state: {"max_len": 99}, r"page table is \[2, 6\], and 2 rows of max_len=99 in pages of 4 take \[2, 25\]"),
    (lambda state: {"page_size": 8}, r"max_len=24 in pages of 8 take \[2, 3\]"),
    (
        lambda state: {"layers": params.tree_map(torch.clone, state.layers)},
        "pools of pages are not those of its ledger",
    ),
]


@pytest.mark.parametrize(("parts", "message"), PARTS)
def test_parts_of_a_state_that_do_not_belong_together(parts: Any, message: str) -> None:
    one = pair("dense", 0)
    state = started(one)
    wrong = replace(state, **parts(state))
    for use in (lambda: advance(one, wrong, [[1], []]), lambda: fm.fork(wrong), lambda: fm.select(wrong, [0])):
        with pytest.raises(fm.StateError, match=message):
            use()


def test_a_state_whose_pools_autograd_copied_is_one_value_under_every_name() -> None:
    one = pair("dense", 0)
    tree = params.tree_map(lambda leaf: leaf.detach().requires_grad_(), one.params)
    batch = fm.Batch.from_lists([[5], [6]])
    with torch.enable_grad():
        _, state = one.model.forward(tree, started(one), batch)
    same = params.tree_map(lambda leaf: leaf, state)
    with torch.no_grad():
        _, after = advance(one, state, [[1], []])
        advance(one, same, [[2], []])
        with pytest.raises(fm.StaleStateError, match="row 0"):
            advance(one, after, [[3], []])


def test_states_copied_together_share_a_pool() -> None:
    one = pair("dense", 0)
    state = started(one, pages=12)
    first, second = copy.deepcopy((state, fm.fork(state)))
    pool = first.ledger.leases[0].pool
    assert second.ledger.leases[0].pool is pool
    assert pool.free == 12 - 4 - 2
    del first
    assert pool.free == 12 - 4


def test_states_of_different_history_map_together() -> None:
    """Host bookkeeping takes no part in the structure: a step may be compared with, or copied over, another."""
    one = pair("dense", 0)
    first = started(one)
    _, second = advance(one, first, [[1], [2]])
    total = params.tree_map(lambda a, b: a + b, first, second)
    assert total.lengths.tolist() == [9 + 10, 2 + 3]
    assert pytree.tree_structure(first) == pytree.tree_structure(second)


def test_printed_values_are_short_and_hold_no_contents() -> None:
    one = pair("moe", 0)
    state = started(one, pages=9)
    batch = fm.Batch.from_lists([[1], []], state)
    out, pending = one.model.forward(one.params, state, batch, keep_steps=True)
    for value in (one.params, one.model.param_spec(), state, pending, batch, out):
        assert len(repr(value)) < 300
        assert "tensor(" not in repr(value)
    assert repr(state).startswith("State(rows=2, lengths=[9, 2], max_len=24, page_size=4, ")
    assert repr(pending).endswith(" kB, pending)")
    assert repr(fm.release(state)).endswith(" kB, released)")


@pytest.mark.parametrize("absent", ["head", "mtp"])
def test_absent_parts_are_structure(absent: str) -> None:
    one = build("dense", sizes("dense", 1))
    assert getattr(one.params, absent) is None
    assert getattr(params.tree_map(torch.clone, one.params), absent) is None


def test_prefix_and_three_branches() -> None:
    """A prefix of 6 tokens, continued three times by 13: each branch equals its own run, and the prefix stays."""
    one = pair("moe", 0)
    prefix_ids, *rest = tokens(one, 6, 13, 13, 13)
    fresh = one.model.init_state(1, 24, page_size=4, pages=30, checked=True)
    _, prefix = advance(one, fresh, [prefix_ids])
    kept = fm.logical(prefix, 0)
    branches = [fm.fork(prefix) for _ in rest]
    ends = []
    for part in (slice(0, 5), slice(5, 13)):
        ends = [advance(one, state, [ids[part]]) for state, ids in zip(branches, rest, strict=True)]
        branches = [state for _, state in ends]
    for branch, ids in zip(branches, rest, strict=True):
        _, whole = advance(one, one.model.init_state(1, 24), [prefix_ids + ids])
        assert_rows_close(branch, whole)
    assert prefix.lengths.tolist() == [6]
    assert all(torch.equal(value, kept[name]) for name, value in fm.logical(prefix, 0).items())
