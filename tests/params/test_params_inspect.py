"""Inspecting: every tensor of a checkpoint, where it goes, and what is wrong, without reading values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import params
from params.names.qwen3_5 import NAMES
from params.names.rules import Ignore


def test_a_whole_checkpoint(model: Any, saved: Path, spec_of: Any) -> None:
    """Every tensor has a row with its leaf and region, and the table shows them."""
    found = params.inspect(saved, spec_of(model.config), NAMES)
    assert found.ok and found.config == params.read_config(saved) and not found.ignored
    assert {row.name for row in found.rows} == set(params.tensor_names(saved))
    rows = {row.name: row for row in found.rows}
    key = rows["model.layers.3.self_attn.k_proj.weight"]
    assert key[1:] == ("f32[32,32]", "model.safetensors", "layers.3.attn.qkv.weight", "rows 128:160", "")
    if hasattr(model.config, "num_experts"):
        up = rows["model.layers.2.mlp.experts.4.up_proj.weight"]
        assert (up.leaf, up.part) == ("layers.2.mlp.experts.gate_up", "expert 4, rows 16:32")
    text = str(found)
    assert len(text.splitlines()) == 1 + len(rows) and "layers.3.attn.qkv.weight rows 128:160" in text
    assert found.num_bytes == sum(value.numel() * 4 for value in model.state_dict().values())


def test_misfits_are_rows_too(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    """Missing, unexpected, misshapen, repeated and ignored tensors are told apart."""
    model = oracle("dense", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.linear_attn.in_proj_b.weight"]
    tensors |= {"model.norm.weight": torch.zeros(3), "extra": torch.zeros(2), "mtp.fc.weight": torch.zeros(1)}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    found = params.inspect(tmp_path, spec_of(model.config), NAMES)
    notes = {row.name: row.note for row in found.rows if row.note}
    assert notes == {
        "model.layers.1.linear_attn.in_proj_b.weight": "missing",
        "model.norm.weight": "misshapen",
        "extra": "unexpected",
        "mtp.fc.weight": "ignored: draft head, not asked for",
        "lm_head.weight": "same as model.embed_tokens.weight",
    }
    assert not found.ok and len(found.problems) == 3 and found.ignored.keys() == {"mtp.fc.weight"}
    gone = next(row for row in found.rows if row.note == "missing")
    assert gone[1:5] == ("[4,32]", "", "layers.1.attn.in_proj.weight", "rows 96:100")
    assert str(found).splitlines()[-4] == "3 problems:"


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("a.**", "a.b.c", True),
        ("a.**", "a", True),
        ("a.**", "ab.c", False),
        ("a.**", "x.a.b", False),
        ("**.b", "a.x.b", True),
        ("**.b", "b", True),
        ("**.b", "a.b.c", False),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.b.c", False),
        ("a.**.d", "a.b.c.d", True),
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.b.c", "a.b", False),
    ],
)
def test_patterns(pattern: str, name: str, fits: bool) -> None:
    """Patterns cover whole names, component by component."""
    assert Ignore(pattern, "").matches(name) is fits


def test_a_leaf_without_a_rule(oracle: Any, spec_of: Any) -> None:
    """A tree with a leaf the table does not know is a mistake in the program, named as such."""
    spec = {"layers": ({"attn": {"kqv": params.TensorSpec((1,))}},)}
    with pytest.raises(KeyError, match=r"qwen3_5: no checkpoint name for the leaf layers\.0\.attn\.kqv"):
        params.from_checkpoint({}, spec, NAMES)


def test_parts_and_members_must_agree() -> None:
    """A merged leaf whose spec does not say where its parts end is refused."""
    spec = {"layers": ({"mlp": {"gate_up": {"weight": params.TensorSpec((4, 2))}}},)}
    with pytest.raises(ValueError, match=r"merges 2 tensors .*the spec has parts"):
        params.from_checkpoint({}, spec, NAMES)
