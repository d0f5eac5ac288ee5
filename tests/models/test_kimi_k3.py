"""What Kimi-K3 has of its own: taps, views, and heads of a checkpoint. `test_contract` holds it to its formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import funcmodels as fm
import params
from funcmodels.blocks.mlp import Routing
from lowering import ops
from params.sharding import Ranks
from tests.oracle.families import close, watch_ops
from tests.oracle.kimi_k3 import SEEDS, pair, random_tensors, run, sizes
from tests.oracle.qwen3_5 import tokens
from tests.oracle.states import advance, per_row
from tests.tolerances import assert_close

NORMS = "layer after layer, and experts' sums are small before a norm makes them large"


def test_the_random_models_are_of_every_kind() -> None:
    texts = [pair(seed).theirs[0]["text_config"] for seed in SEEDS]
    assert {text["attn_res_block_size"] for text in texts} == {1, 2, 3}
    assert {text["activation_situ_linear_beta"] is None for text in texts} == {False, True}
    assert {text["num_expert_group"] for text in texts} == {1, 2}
    assert {text["linear_attn_config"]["full_attn_layers"][0] == 1 for text in texts} == {False, True}


@pytest.mark.parametrize("seed", SEEDS)
def test_float32_is_near_the_formulas(seed: int) -> None:
    one = pair(seed, torch.float32)
    ids, layers = tokens(one, 1, 13, 2, 29, seed=seed), [f"layers.{index}" for index in range(5)]
    out, after = advance(one, one.model.init_state(4, 40, page_size=8), ids, outputs=layers)
    for row, row_ids in enumerate(ids):
        theirs = run(one, row_ids)
        ours = [fm.logical(after, row), *(per_row(x, ids)[row] for x in (out.logits, out.hidden))]
        ours.append([per_row(out.extra[layer], ids)[row] for layer in layers])
        assert_close(ours, [theirs.entries, theirs.logits, theirs.hidden, theirs.layers], looser=30, reason=NORMS)


# What a forward reads and returns


def test_taps_are_what_is_read_next() -> None:
    """After a layer there is no stream: its value is what the next norm takes, the last one's what gives `hidden`."""
    one = pair(2)
    batch, depth = fm.Batch.from_lists(tokens(one, 3, 4)), one.config.num_hidden_layers
    wanted = ("router", "layers.1", f"layers.{depth - 1}")
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


def test_projections_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """One projection of x a layer: the convolution, the decay's latent, write strength and gates are views of it."""
    one = pair(0, torch.bfloat16)
    seen = watch_ops(monkeypatch, linear=0, short_conv=0, channel_gates=1, gated_rms_norm_fp32=1)
    one.model.forward(one.params, None, fm.Batch.from_lists(tokens(one, 9, 2)))
    made = {x.untyped_storage().data_ptr() for x in seen["linear"][1]}
    deltas = one.config.layer_types.count("linear_attention")
    for name in ("short_conv", "channel_gates", "gated_rms_norm_fp32"):
        read = seen[name][0]
        assert len(read) == deltas and not any(x.is_contiguous() for x in read)
        assert all(x.untyped_storage().data_ptr() in made and x.dtype == torch.bfloat16 for x in read)
    decay, beta = seen["channel_gates"][1][0]
    assert decay.dtype == beta.dtype == torch.float32
    assert one.config.gate_lower_bound <= float(decay.min()) and float(decay.max()) <= 0


def test_nothing_of_the_sums_outlives_a_forward() -> None:
    """The state holds what attention needs, and no snapshot."""
    one = pair(0)
    _, state = advance(one, one.model.init_state(1, 8, torch.float64, torch.float64, page_size=4), tokens(one, 5))
    kinds = {name.rpartition(".")[2] for name in fm.logical(state, 0)}
    assert kinds == {"window", "delta", "latent", "rope"}


# Programs


def test_random_parameters_make_a_model() -> None:
    """Those of `init_params`, which set the leaves that stay float32."""
    one = pair(0)
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
