"""Kimi-K3 by itself: any split and any rollback give the same, padding is inert, what is returned and what is written.

`test_kimi_k3_oracle` compares it with its formulas, over mixed and interleaved rows too.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import funcmodels as fm
import lowering
import params
from funcmodels.attention.mla import LatentPages
from funcmodels.blocks.mlp import Routing
from lowering import ops
from lowering.layouts import NdPages, NzPages
from params.sharding import Ranks
from tests.models.test_qwen3_5 import SPLITS
from tests.oracle.families import (
    assert_bitwise,
    check_drawn_drafts,
    check_one_leaf,
    check_per_example,
    check_stacked,
    check_unread_places,
    close,
)
from tests.oracle.kimi_k3 import build, pair, random_tensors, sizes
from tests.oracle.qwen3_5 import Pair, tokens
from tests.oracle.states import advance, assert_rows_close, per_row, run_schedule

REFERENCES: dict[str, Any] = dict.fromkeys(
    ("mla_prefix_attention", "attention", "gated_delta_rule", "experts", "attention_residual"), "torch"
)  # fmt: skip


@functools.cache
def small(seed: int, **changes: Any) -> Pair:
    """The random model of a seed, with `changes` of its config; every leaf in float64.

    Norms of small sums, and a softmax over what layers have added up, make much of a rounding of float32.
    """
    one = build(sizes(seed, **changes), seed)
    return replace(one, params=params.tree_map(torch.Tensor.double, one.params))


def empty(one: Pair, rows: int, length: int, **pages: Any) -> fm.State:
    """A state in float64."""
    return one.model.init_state(rows, length, torch.float64, torch.float64, **pages)


def tiled(seed: int) -> Pair:
    """A model whose latents fill the tiles of NZ pages."""
    return small(seed, kv_lora_rank=32, qk_rope_head_dim=16)


def silent(path: str) -> bool:
    """Leaves that no loss depends on: nothing but its choice on a router's bias, and nothing on the first query.

    The first layer reads the embedding, whatever the query.
    """
    return path.endswith("router.bias") or path.startswith("layers.0.attn_residual")


# Any split, any rollback gives the same


@pytest.mark.parametrize("references", [False, True], ids=["kernels", "references"])
@pytest.mark.parametrize("seed", [0, 2])
def test_chunks_of_one_row(seed: int, references: bool) -> None:
    one = small(seed)
    ids = tokens(one, 11)
    with lowering.use(**(REFERENCES if references else {})):
        whole, expected = advance(one, empty(one, 1, 11, page_size=3), ids)
        plain, _ = one.model.forward(one.params, None, fm.Batch.from_lists(ids))
        close(plain.logits, whole.logits)
        for split in SPLITS:
            logits, state = run_schedule(one, empty(one, 1, 11, page_size=3), ids, [[n] for n in split])
            close(logits[0], whole.logits)
            assert_rows_close(state, expected)


def test_any_number_of_drawn_drafts_can_be_kept() -> None:
    """A draft of random tokens behind the root: after 0..n of them count, the state is that of a plain run."""
    one = tiled(0)
    prompts, drafts = tokens(one, 7, 4, 9), tokens(one, 4, 4, 4, seed=5)
    _, state = advance(one, empty(one, 3, 24, page_size=4, layout="nz"), prompts)
    before = [fm.logical(state, row) for row in range(3)]
    for accepted in itertools.product((0, 2, 4), (0, 3), (4, 1)):
        out, pending = advance(one, state, drafts, keep_steps=True)
        kept = fm.commit(pending, list(accepted))
        _, expected = advance(one, empty(one, 3, 24, page_size=4, layout="nz"), prompts)
        taken = [row[:count] for row, count in zip(drafts, accepted, strict=True)]
        plain, expected = advance(one, expected, taken)
        assert_rows_close(kept, expected)
        for row, right in enumerate(per_row(plain.logits, taken)):
            close(per_row(out.logits, drafts)[row][: accepted[row]], right)
    assert_bitwise([fm.logical(state, row) for row in range(3)], before)


def test_speculation_with_a_sampled_draft_continues_as_a_plain_run() -> None:
    check_drawn_drafts(small(1), 1)


def test_layouts_are_bitwise_equal() -> None:
    """Prompts, prefixes, windows and single tokens; logits and every entry."""
    one = tiled(1)
    schedule = [[9, 0, 4], [1, 1, 1], [0, 20, 0], [4, 4, 4], [1, 0, 130]]
    ids = tokens(one, *(sum(counts) for counts in zip(*schedule, strict=True)))
    found = {}
    for layout, kind in (("nd", NdPages), ("nz", NzPages)):
        state = empty(one, 3, 160, page_size=16, layout=layout)
        latents = [entry for entry in state.layers if isinstance(entry, LatentPages)]
        assert latents and all(type(entry.latent) is type(entry.rope) is kind for entry in latents)
        logits, state = run_schedule(one, state, ids, schedule)
        found[layout] = [*logits, *(fm.logical(state, row) for row in range(3))]
    assert_bitwise(found["nz"], found["nd"])


# Padding and what nobody may read


@pytest.mark.parametrize(("layout", "references"), [("nd", False), ("nz", True)])
@pytest.mark.parametrize("counts", [(3, 0, 1, 8), (1, 1, 1, 1)], ids=str)
def test_padding_and_unread_places_may_hold_nan(layout: str, references: bool, counts: tuple[int, ...]) -> None:
    one = tiled(0)
    check_unread_places(
        one, empty(one, 4, 32, page_size=8, layout=layout), counts, **(REFERENCES if references else {})
    )


# What a forward reads and returns


def test_taps_are_what_is_read_next() -> None:
    """After a layer there is no stream: its value is what the next norm takes, the last one's what gives `hidden`."""
    one = small(2)
    batch, depth = fm.Batch.from_lists(tokens(one, 3, 4)), one.config.num_hidden_layers
    wanted = ("router", "layers.2.router", "layers.1", f"layers.{depth - 1}")
    out, _ = one.model.forward(one.params, None, batch, outputs=wanted)
    last = ops.rms_norm(out.extra[f"layers.{depth - 1}"], one.params.norm.weight, eps=one.config.rms_norm_eps)
    close(out.hidden, last)
    close(out.logits, out.hidden @ one.params.head.weight.T)
    changed = params.put(one.params, "layers.2.attn_residual.proj", -one.params.layers[2].attn_residual.proj)
    other, _ = one.model.forward(changed, None, batch, outputs=("layers.1",))
    assert (other.extra["layers.1"] - out.extra["layers.1"]).abs().max() > 1e-3
    routing = out.extra["router"]
    assert isinstance(routing, Routing)
    assert routing.ids.shape == routing.weights.shape == (depth - 1, 7, one.config.num_experts_per_token)
    assert torch.equal(out.extra["layers.2.router"].ids, routing.ids[1])
    with pytest.raises(ValueError, match=r"outputs='layers\.0\.router'.*offers no such value"):
        one.model.forward(one.params, None, batch, outputs=("layers.0.router",))


def test_projections_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """One projection of x a layer: the convolution, the decay's latent, write strength and gates are views of it."""
    one = pair(0, torch.bfloat16)
    seen: dict[str, list[Tensor]] = {}

    def watch(name: str, *arguments: int) -> None:
        real = getattr(ops, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            seen.setdefault(name, []).extend([*(args[at] for at in arguments), result])
            return result

        monkeypatch.setattr(ops, name, watched)

    for name, at in (("linear", 0), ("short_conv", 0), ("channel_gates", 1), ("gated_rms_norm_fp32", 1)):
        watch(name, at)
    one.model.forward(one.params, None, fm.Batch.from_lists(tokens(one, 9, 2)))
    made = {x.untyped_storage().data_ptr() for x in seen["linear"][1::2]}
    deltas = one.config.layer_types.count("linear_attention")
    for name in ("short_conv", "channel_gates", "gated_rms_norm_fp32"):
        read = seen[name][0::2]
        assert len(read) == deltas and not any(x.is_contiguous() for x in read)
        assert all(x.untyped_storage().data_ptr() in made and x.dtype == torch.bfloat16 for x in read)
    decay, beta = seen["channel_gates"][1]
    assert decay.dtype == beta.dtype == torch.float32
    assert one.config.gate_lower_bound <= float(decay.min()) and float(decay.max()) <= 0


def test_nothing_of_the_sums_outlives_a_forward() -> None:
    """The state holds what attention needs, and no snapshot."""
    one = small(0)
    _, state = advance(one, empty(one, 1, 8, page_size=4), tokens(one, 5))
    kinds = {name.rpartition(".")[2] for name in fm.logical(state, 0)}
    assert kinds == {"window", "delta", "latent", "rope"}


# Transforms


def test_gradients() -> None:
    """Example by example, and through a state; the first query alone changes nothing, and gets none."""
    one = small(3)
    check_per_example(one, torch.tensor(tokens(one, 9, 9)), silent)
    check_one_leaf(pair(3, torch.float32), "layers.1.mlp_residual.proj", tokens(one, 9)[0])


def test_mapped_over_stacked_parameters() -> None:
    one = small(1)
    check_stacked(one, tokens(one, 5, 3))


# Programs


def test_captured_steps_are_the_eager_ones() -> None:
    one = tiled(2)
    _, state = advance(one, empty(one, 3, 48, page_size=8, layout="nz"), tokens(one, 5, 2, 11))
    other = copy.deepcopy(state)
    step = lowering.jit(one.model.forward, donate=("state",), backend="fx")
    for seed in (3, 4):
        new = tokens(one, 1, 1, 1, seed=seed)
        out, other = step(one.params, other, fm.Batch.from_lists(new, other))
        with lowering.use(mla_prefix_attention="torch_absorbed"):
            expected, state = advance(one, state, new)
        close(out.logits, expected.logits)
    assert_rows_close(other, state)


def test_random_parameters_make_a_model() -> None:
    """Those of `init_params`, which set the leaves that stay float32."""
    one = small(0)
    made = one.model.init_params(seed=3, dtype=torch.bfloat16)
    out, _ = one.model.forward(made, None, fm.Batch.from_lists(tokens(one, 6, 1)))
    assert out.logits.dtype == torch.bfloat16 and bool(out.logits.isfinite().all())
    kept = {path.split(".", 2)[2] for path, leaf in params.items(made) if leaf.dtype == torch.float32}
    delta = {f"attn.{name}" for name in ("a_log", "dt_bias", "conv", "norm.weight")}
    assert kept == delta | {"mlp.router.weight", "mlp.router.bias"}


@pytest.mark.parametrize(("axes", "count"), [((-1,), 7), ((1, 1, -1, 1), 7), ((1, 1, -1, 1), 4)])
def test_ranks_read_their_heads_of_padded_numbers(axes: tuple[int, ...], count: int, tmp_path: Path) -> None:
    """A checkpoint may have more rates of decay than heads, and axes; a rank's are those of its own heads alone."""
    fields = sizes(0, num_attention_heads=4, num_key_value_heads=4, intermediate_size=24, moe_intermediate_size=10)
    fields["text_config"]["linear_attn_config"]["num_heads"] = 4
    tensors = random_tensors(fields, 0)
    assert {len(leaf) for name, leaf in tensors.items() if name.endswith("A_log")} == {7}
    rates = {name: leaf for name, leaf in tensors.items() if name.endswith("A_log")}
    stored = tensors | {name: leaf[:count].reshape(axes) for name, leaf in rates.items()}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(stored, tmp_path / "model.safetensors")
    model, whole = fm.load(tmp_path, dtype=torch.float32)
    for name, leaf in rates.items():
        layer = int(name.split("layers.")[1].split(".")[0])
        assert torch.equal(whole.layers[layer].attn.a_log, leaf[:4])
    for rank in range(2):
        ranks = Ranks(rank, 2, "g")
        mine, held = fm.load(tmp_path, dtype=torch.float32, mesh=ranks)
        assert mine.local.linear_num_heads == 2
        assert params.equal(held, params.shard(whole, model.whole_spec(), ranks))
