"""What DeepSeek-V2 has of its own: layouts of pages, and what it refuses. `test_contract` holds it to its oracle."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
import params
from funcmodels.attention.mla import LatentPages
from lowering.layouts import NdPages, NzPages
from tests.oracle.deepseek_v2 import build, pair, sizes
from tests.oracle.families import assert_bitwise, close
from tests.oracle.qwen3_5 import pair as dense
from tests.oracle.qwen3_5 import tokens
from tests.oracle.states import advance, refuses

layouts = pytest.mark.parametrize("layout", ["nd", "nz"])


def pages(state: fm.State) -> list[LatentPages]:
    """The entries of a state, which are all of one kind."""
    assert all(isinstance(entry, LatentPages) for entry in state.layers)
    return [entry for entry in state.layers if isinstance(entry, LatentPages)]


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


def test_kernels_that_go_by_host_lengths_are_refused_without_counts() -> None:
    """The host then knows upper bounds only."""
    one = pair("lite", 0)
    state, counted = one.model.init_state(2, 16, page_size=4), fm.Batch.from_lists([[1, 2, 3], [4]])
    with lowering.record() as report:
        one.model.forward(one.params, state, fm.Batch(counted.tokens, counted.query_start, max_query=3))
    (row,) = [row for row in report.rows if row.op == "mla_prefix_attention"]
    assert row.kernel == "torch_absorbed" and "exact row lengths" in row.refused["torch_absorbed_rows"]


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
