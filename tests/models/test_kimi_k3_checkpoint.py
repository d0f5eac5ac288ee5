"""Checkpoints of Kimi-K3: every spelling is read, the published one is written, and what is wrong is said in words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import funcmodels as fm
import params
from tests.oracle.families import assert_bitwise
from tests.oracle.kimi_k3 import HEAD, PREFIX, VISION, pair, random_tensors, sizes

Tensors = dict[str, Tensor]


def write(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """A directory with these tensors."""
    directory.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def published(tmp_path: Path) -> tuple[dict[str, Any], Tensors, Path]:
    """Config, tensors and directory of a whole checkpoint."""
    config, tensors = sizes(1), random_tensors(sizes(1), 1)
    return config, tensors, write(tmp_path / "published", config, tensors)


def test_a_published_checkpoint(published: tuple[dict[str, Any], Tensors, Path], tmp_path: Path) -> None:
    """Loaded, saved and loaded again: tensors under their own names, the tower's too; of A_log what is read."""
    config, tensors, directory = published
    model, tree = fm.load(directory, torch.float32)
    assert_bitwise(tree, pair(1, torch.float32).params)
    found = params.inspect(directory, model.param_spec(), model.family.names)
    assert found.ok and found.ignored.keys() == VISION.keys()
    assert all("this model reads text" in why for why in found.ignored.values())
    fm.save(model, tree, tmp_path / "ours")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == tensors.keys()
    heads = config["text_config"]["linear_attn_config"]["num_heads"]
    for name, tensor in ours.items():
        assert torch.equal(tensor, tensors[name][:heads] if name.endswith("A_log") else tensors[name]), name
    again, loaded = fm.load(tmp_path / "ours", torch.float32)
    assert again.config == model.config
    assert_bitwise(loaded, tree)


def test_half_precision_keeps_what_is_float32(published: tuple[dict[str, Any], Tensors, Path]) -> None:
    _, tree = fm.load(published[2], torch.bfloat16)
    kept = {path for path, leaf in params.items(tree) if leaf.dtype == torch.float32}
    assert {path.split(".", 2)[2] for path in kept} == {
        "attn.conv", "attn.norm.weight", "attn.a_log", "attn.dt_bias", "mlp.router.weight", "mlp.router.bias",
    }  # fmt: skip


SPELLINGS: dict[str, Callable[[str], str]] = {
    "text model": lambda name: name.replace(PREFIX, "model.").replace(HEAD, "lm_head.weight"),
    "without model": lambda name: name.replace(PREFIX, "language_model."),
    "inside": lambda name: name.replace(PREFIX, "model.language_model.").replace(HEAD, "lm_head.weight"),
    "long names of experts": lambda name: re.sub(
        r"experts\.(\d+)\.(w[123])",
        lambda found: f"experts.{found[1]}." + {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[found[2]],
        name,
    ),
    "mlp": lambda name: name.replace("block_sparse_moe", "mlp"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling(published: tuple[dict[str, Any], Tensors, Path], tmp_path: Path, spelling: str) -> None:
    config, tensors, _ = published
    named = {SPELLINGS[spelling](name): tensor for name, tensor in tensors.items() if name not in VISION}
    assert named.keys() != tensors.keys() - VISION.keys()
    alone = config["text_config"] if spelling == "text model" else config
    _, tree = fm.load(write(tmp_path / "other", alone, named), torch.float32)
    assert_bitwise(tree, pair(1, torch.float32).params)


def layer_of(config: dict[str, Any], kind: str) -> int:
    return config["text_config"]["linear_attn_config"][kind][0] - 1


CHANGES: dict[str, tuple[Callable[[dict[str, Any], Tensors], object], str]] = {
    "missing": (
        lambda config, given: given.pop(f"{PREFIX}layers.1.block_sparse_moe.experts.3.w2.weight"),
        r"missing \(1\):\n  model\.layers\.1\.block_sparse_moe\.experts\.3\.w2\.weight, for layers\.1\.mlp\.experts",
    ),
    "unknown": (
        lambda config, given: given.update({f"{PREFIX}layers.1.mlp_res_gate.weight": torch.ones(2)}),
        r"unexpected \(1\):\n  language_model\.model\.layers\.1\.mlp_res_gate\.weight, float32\[2\]",
    ),
    "too few heads": (
        lambda config, given: given.update(
            {f"{PREFIX}layers.{layer_of(config, 'kda_layers')}.self_attn.A_log": torch.ones(1)}
        ),
        r"misshapen \(1\):\n  language_model\.model\.layers\.\d\.self_attn\.A_log is float32\[1\], expected",
    ),
    "another shape": (
        lambda config, given: given.update({f"{PREFIX}layers.1.mlp_res_proj.weight": torch.ones(2, 3)}),
        r"misshapen \(1\):\n  language_model\.model\.layers\.1\.mlp_res_proj\.weight is float32\[2,3\], expected \[1,",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_wrong_is_named(published: tuple[dict[str, Any], Tensors, Path], tmp_path: Path, change: str) -> None:
    """And nothing else: one tensor of each kind."""
    config, tensors, _ = published
    spoil, message = CHANGES[change]
    given = dict(tensors)
    spoil(config, given)
    with pytest.raises(fm.CheckpointError, match=message) as raised:
        fm.load(write(tmp_path / "spoilt", config, given))
    assert len(str(raised.value).splitlines()) == 3
