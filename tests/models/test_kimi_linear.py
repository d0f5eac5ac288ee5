"""What Kimi Linear has of its own: views, and spellings of a checkpoint. `test_contract` holds it to its oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import funcmodels as fm
import params
from funcmodels.blocks.mlp import Routing
from tests.oracle.families import assert_bitwise, close, watch_ops
from tests.oracle.kimi_linear import KINDS, build, pair, sizes
from tests.oracle.qwen3_5 import tokens


def test_the_random_models_are_of_every_kind() -> None:
    configs = [pair(kind, seed).config for kind in KINDS for seed in range(4)]
    assert {bool(config.q_lora_rank) for config in configs} == {False, True}
    assert {config.attention_bias for config in configs} == {False, True}
    assert {config.moe_renormalize for config in configs} == {False, True}
    assert len({config.layer_types for config in configs}) >= 4
    assert {("dense" in config.mlp_layer_types, "sparse" in config.mlp_layer_types) for config in configs} >= {
        (True, True), (True, False),
    }  # fmt: skip
    assert {config.num_expert_group > config.topk_group for config in configs} == {False, True}


def test_projections_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """One projection a layer; the convolution, both gates' latents and the write strength are views of it."""
    one = build(sizes("published", 0), 0, torch.bfloat16)
    seen = watch_ops(monkeypatch, linear=0, short_conv=0, channel_gates=1)
    one.model.forward(one.params, None, fm.Batch.from_lists(tokens(one, 9, 2)))
    made = {x.untyped_storage().data_ptr() for x in seen["linear"][1]}
    strided = [x for read, _ in seen.values() for x in read if not x.is_contiguous()]
    deltas = one.config.layer_types.count("linear_attention")
    assert len(strided) == 4 * deltas and all(x.untyped_storage().data_ptr() in made for x in strided)
    assert len({x.untyped_storage().data_ptr() for x in strided}) <= deltas
    assert {x.dtype for x in strided} == {torch.bfloat16}
    decay, beta = seen["channel_gates"][1][0]
    assert decay.dtype == beta.dtype == torch.float32


def test_choices_of_experts_are_given() -> None:
    one = pair("published", 2)
    out, _ = one.model.forward(one.params, None, fm.Batch.from_lists(tokens(one, 3, 4)), outputs=("router",))
    routing = out.extra["router"]
    assert isinstance(routing, Routing)
    assert routing.ids.shape == routing.weights.shape == (3, 7, one.config.num_experts_per_token)
    close(routing.weights.sum(-1), torch.full((3, 7), one.config.routed_scaling_factor))


def test_every_spelling_is_read_and_the_published_one_is_written(tmp_path: Path) -> None:
    """The first, dense layer as `mlp` or as transformers saves it; convolutions apart or as one; experts likewise."""
    one = pair("published", 0)
    spec, names = one.model.param_spec(), one.model.family.names
    written = params.to_checkpoint(one.params, spec, names)
    one.theirs.save_pretrained(tmp_path)
    theirs = load_file(tmp_path / "model.safetensors")
    renamed = {name for name in theirs if name not in written}
    assert renamed == {f"model.layers.0.block_sparse_moe.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert {name.replace("block_sparse_moe", "mlp") for name in renamed} == set(written) - set(theirs)
    loaded = one.theirs.state_dict()
    delta = one.config.layer_types.index("linear_attention")
    assert f"model.layers.{delta}.self_attn.conv1d.weight" in loaded
    assert written[f"model.layers.{delta}.self_attn.A_log"].shape == (1, 1, one.config.linear_num_heads, 1)
    for spelling in (written, theirs, loaded):
        assert_bitwise(params.from_checkpoint(spelling, spec, names), one.params)


def test_a_missing_convolution_is_named(tmp_path: Path) -> None:
    one = pair("published", 0)
    one.theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    delta = one.config.layer_types.index("linear_attention")
    lost = f"model.layers.{delta}.self_attn.k_conv1d.weight"
    save_file({name: x for name, x in tensors.items() if name != lost}, tmp_path / "model.safetensors")
    with pytest.raises(fm.CheckpointError, match=rf"missing \(1\):\n  {lost}, for layers\.{delta}\.attn\.conv"):
        fm.load(tmp_path)
