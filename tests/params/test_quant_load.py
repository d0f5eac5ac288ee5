"""Loading ModelSlim checkpoints: every number where it belongs, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import params
from params.names.qwen3_5 import NAMES
from params.names.rules import Names, Plain
from params.quant.stored import projections
from params.quant.values import (
    Int4Weight,
    Int8Weight,
    MXFP8Weight,
    QuantizedWeight,
    SplitWeight,
    StaticInt8Weight,
)
from tests.params.conftest import Node, linear
from tests.params.conftest import weight as norm_weight
from tests.params.modelslim import FILE, Tensors, export, unstacked, write

KINDS = {kind.scheme: kind for kind in (Int8Weight, StaticInt8Weight, Int4Weight, MXFP8Weight)}
USUAL = ("lm_head", "gate", "shared_expert_gate", "embed_tokens", "norm", "layernorm", "q_norm", "k_norm")
"""Last words of modules that a usual recipe leaves alone."""


def usual(word: str, also: tuple[str, ...] = ()) -> Callable[[str], str]:
    """Every projection but those of a usual recipe gets the scheme."""
    return lambda module: "FLOAT" if module.split(".")[-1].endswith((*USUAL, *also)) else word


def loaded(directory: Path, model: Any, spec_of: Any, **options: Any) -> Any:
    """The tree of a directory."""
    return params.load(directory, spec_of(model.config, **options), NAMES, dtype=None)


def weights(tree: Any) -> dict[str, Any]:
    """All projections of a tree, by path."""
    paths = [f"{node}.{name}" for node, names in projections(tree) for name in names]
    return {path: params.at(tree, path) for path in paths}


def float_tree(floats: Tensors, model: Any, spec_of: Any) -> Any:
    """The tree of the float weights that the quantised ones stand for."""
    return params.from_checkpoint(floats, spec_of(model.config), NAMES)


@pytest.mark.parametrize("word", KINDS)
def test_every_scheme(oracle: Any, spec_of: Any, tmp_path: Path, word: str) -> None:
    """Values stand for the writer's weights, keep the stored bits, and go back under the stored names."""
    kind = "moe" if word != "W8A8" else "dense"
    model = oracle(kind)
    tensors, words, floats = export(unstacked(model.state_dict()), usual(word, also=("in_proj_b", "in_proj_a")))
    tree = loaded(write(tmp_path / "x", tensors, words), model, spec_of)
    expected = weights(float_tree(floats, model, spec_of))
    found = weights(tree)
    quantised = {path for path, weight in found.items() if isinstance(weight, QuantizedWeight)}
    assert found.keys() - quantised == {
        path for path in found if path.endswith(("head.weight", "router.weight", "shared_gate.weight"))
    }
    for path in quantised:
        assert found[path].shape == tuple(expected[path].shape), path
        if not path.endswith("in_proj.weight"):
            assert type(found[path]) is KINDS[word]
        torch.testing.assert_close(found[path].dequantized(), expected[path], rtol=1e-6, atol=0, msg=path)
    assert torch.equal(tree.embed.weight, floats["model.embed_tokens.weight"])
    back = params.to_checkpoint(tree, spec_of(model.config), NAMES)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        raw = back[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
        assert back[name].dtype == tensor.dtype and torch.equal(*raw), name


def test_neighbours_that_differ_stay_apart(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    """Of a delta net's input projection two members are quantised and two are not."""
    model = oracle("dense")
    scheme = usual("W8A8_DYNAMIC", also=("in_proj_b", "in_proj_a"))
    tensors, words, floats = export(model.state_dict(), scheme)
    tree = loaded(write(tmp_path / "x", tensors, words), model, spec_of)
    weight = tree.layers[1].attn.in_proj.weight
    assert isinstance(weight, SplitWeight) and [type(part).__name__ for part in weight.parts] == [
        "Int8Weight",
        "Tensor",
    ]
    assert [part.shape[0] for part in weight.parts] == [96, 8] and weight.shape == (104, 32)
    whole = float_tree(floats, model, spec_of).layers[1].attn.in_proj.weight
    torch.testing.assert_close(weight.dequantized(), whole, rtol=1e-6, atol=0)


def test_three_schemes_in_one_projection(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    """Only neighbours join: the first and the last of q, k, v are apart though they are alike."""
    model = oracle("dense")
    kinds = {"q_proj": "W8A8_MXFP8", "k_proj": "W8A8_DYNAMIC", "v_proj": "W8A8_MXFP8"}
    tensors, words, floats = export(model.state_dict(), lambda module: kinds.get(module.split(".")[-1], "FLOAT"))
    tree = loaded(write(tmp_path / "x", tensors, words), model, spec_of)
    weight = tree.layers[3].attn.qkv.weight
    assert [type(part) for part in weight.parts] == [MXFP8Weight, Int8Weight, MXFP8Weight]
    whole = float_tree(floats, model, spec_of).layers[3].attn.qkv.weight
    torch.testing.assert_close(weight.dequantized(), whole, rtol=1e-6, atol=0)
    back = params.to_checkpoint(tree, spec_of(model.config), NAMES)
    assert back.keys() == tensors.keys()


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("old", [False, True])
def test_static_scales(oracle: Any, spec_of: Any, tmp_path: Path, long: bool, old: bool) -> None:
    """Members join where their inputs have one scale; `deq_scale` stays as stored, what is optional is passed over."""
    model = oracle("dense")
    scales = {"q_proj": 0.5, "k_proj": 0.25, "v_proj": 0.25}

    def how(module: str) -> dict[str, Any]:
        return {"scale": scales.get(module.split(".")[-1], 0.125), "offset": 3.0, "long": long, "old": old}

    tensors, words, floats = export(model.state_dict(), usual("W8A8"), how)
    tree = loaded(write(tmp_path / "x", tensors, words), model, spec_of)
    parts = tree.layers[3].attn.qkv.weight.parts
    assert [(part.input_scale.item(), part.shape[0]) for part in parts] == [(0.5, 128), (0.25, 64)]
    whole = tree.layers[3].mlp.gate_up.weight
    assert type(whole) is StaticInt8Weight and whole.input_scale.tolist() == [0.125]
    assert whole.deq_scale.dtype == (torch.int64 if long else torch.float32)
    expected = weights(float_tree(floats, model, spec_of))
    for path, weight in weights(tree).items():
        if isinstance(weight, QuantizedWeight):
            torch.testing.assert_close(weight.dequantized(), expected[path], rtol=1e-5, atol=0)
    found = params.inspect(tmp_path / "x", spec_of(model.config), NAMES)
    assert found.ok and bool(found.ignored) == old


def test_offsets_apart_keep_static_members_apart(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    model = oracle("dense")

    def how(module: str) -> dict[str, Any]:
        return {"offset": 5.0 if module.endswith("up_proj") else 4.0}

    tensors, words, _ = export(model.state_dict(), usual("W8A8"), how)
    tree = loaded(write(tmp_path / "x", tensors, words), model, spec_of)
    assert [part.input_offset.item() for part in tree.layers[0].mlp.gate_up.weight.parts] == [4, 5]


@pytest.mark.parametrize(("word", "how"), [("W8A8_DYNAMIC", {"groups": 4}), ("W4A8_DYNAMIC", {"groups": 2}),
                                           ("W4A8_DYNAMIC", {"slices": 16})])  # fmt: skip
def test_groups_and_slices(oracle: Any, spec_of: Any, tmp_path: Path, word: str, how: dict[str, int]) -> None:
    """Scales for groups of inputs, second scales, and corrections in partial sums."""
    model = oracle("moe")
    tensors, words, floats = export(
        unstacked(model.state_dict()),
        lambda module: word if ".experts." in module else "FLOAT",
        lambda module: how if ".experts." in module else {},
    )
    tree = loaded(write(tmp_path / "x", tensors, words), model, spec_of)
    expected = float_tree(floats, model, spec_of)
    for index in range(4):
        ours, theirs = tree.layers[index].mlp.experts, expected.layers[index].mlp.experts
        torch.testing.assert_close(ours.gate_up.dequantized(), theirs.gate_up, rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(ours.down.dequantized(), theirs.down, rtol=1e-5, atol=1e-9)
    back = params.to_checkpoint(tree, spec_of(model.config), NAMES)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("word", "inputs", "groups", "size"),
    [(word, *sizes) for word in ("W8A8_DYNAMIC", "W4A8_DYNAMIC")
     for sizes in [(48, 2, 24), (48, 2, 0), (48, 1, 32), (48, 2, 32), (48, 3, 32), (96, 4, 24), (96, 4, 32)]]
    + [("W8A8_DYNAMIC", 48, 2, wrong) for wrong in (-24, "24", 24.0, None, True, 10**400)],
)  # fmt: skip
def test_the_descriptions_group_size_is_that_of_the_scales(
    tmp_path: Path, word: str, inputs: int, groups: int, size: Any
) -> None:
    """Scales of other groups are refused; 0 says nothing; and what is saved again says the same."""
    names = Names("", {"qkv.weight": Plain("w.weight"), "norm.weight": Plain("norm.weight")})
    spec = Node(qkv=linear(6, inputs), norm=norm_weight(3))
    floats = {
        "w.weight": torch.randn(6, inputs, generator=torch.Generator().manual_seed(0)),
        "norm.weight": torch.ones(3),
    }
    tensors, words, floats = export(
        floats,
        lambda module: word if module == "w" else "FLOAT",
        lambda module: {"groups": groups} if groups > 1 and module == "w" else {},
    )
    directory = write(tmp_path / "x", tensors, words, group_size=size)
    if type(size) is not int or size < 0 or (size and groups > 1 and groups * size != inputs):
        with pytest.raises(params.CheckpointError, match="group_size"):
            params.load(directory, spec, names)
        return
    tree = params.load(directory, spec, names)
    torch.testing.assert_close(tree.qkv.weight.dequantized(), floats["w.weight"], rtol=1e-5, atol=1e-9)
    again = params.save(tree, tmp_path / "y", spec, names, {"model_type": "qwen3_5_text"})
    entries = json.loads((again / FILE).read_text())
    assert entries["group_size"] == (inputs // groups if groups > 1 else 0) and params.load(again, spec, names) == tree


def renamed(layout: str) -> Callable[[str], str]:
    """How a tensor is called in one of the layouts that mean the same model."""
    short = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

    def rename(name: str) -> str:
        if layout == "w1":
            words = name.split(".")
            return ".".join(short.get(word, word) for word in words) if "experts" in words else name
        outer, head = {"new": ("model.language_model.", ""), "old": ("language_model.model.", "language_model.")}[
            layout
        ]
        return outer + name.removeprefix("model.") if name.startswith("model.") else head + name

    return rename


@pytest.mark.parametrize("layout", ["w1", "new", "old"])
def test_spellings(oracle: Any, spec_of: Any, tmp_path: Path, layout: str) -> None:
    """Wrappers' prefixes and both words for an expert's projections give one tree, in tensors and description."""
    model = oracle("moe")
    tensors, words, _ = export(unstacked(model.state_dict()), usual("W8A8_DYNAMIC"))
    plain = loaded(write(tmp_path / "x", tensors, words), model, spec_of)
    rename = renamed(layout)
    again = {rename(name): value for name, value in tensors.items()}
    assert again.keys() != tensors.keys()
    other = write(tmp_path / "y", again, {rename(name): word for name, word in words.items()})
    assert loaded(other, model, spec_of) == plain
    mixed = {rename(name): word for name, word in words.items() if "experts" in name} | words
    if layout != "w1":
        with pytest.raises(params.CheckpointError, match=r"mean the same tensor; keep one of the two entries"):
            loaded(write(tmp_path / "z", tensors, mixed), model, spec_of)


def with_draft(tensors: Tensors, kind: Callable[[str], str]) -> tuple[Tensors, dict[str, str]]:
    """The draft head of a checkpoint, made of its last layer, by a recipe of its own."""
    source = "model.layers.3."
    draft = {name.replace(source, "mtp.layers.0."): value.clone() for name, value in tensors.items() if source in name}
    draft |= {f"mtp.{name}.weight": torch.ones(32) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    draft["mtp.fc.weight"] = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    found, words, _ = export(draft, kind)
    return found, words


def everything(module: str) -> str:
    """All matrices of a draft head."""
    return "W8A8_DYNAMIC"


@pytest.mark.parametrize("kind", ["FLOAT", "W8A8_DYNAMIC"])
def test_a_draft_head_of_its_own(oracle: Any, spec_of: Any, tmp_path: Path, kind: str) -> None:
    """FLOAT as a whole it stays plain without being told to, experts and all, and the main model does not."""
    model = oracle("moe")
    state = unstacked(model.state_dict())
    tensors, words, _ = export(state, usual("W8A8_DYNAMIC"))
    draft, more = with_draft(state, lambda module: kind)
    directory = write(tmp_path / "x", tensors | draft, words | more)
    tree = loaded(directory, model, spec_of, mtp=True)
    inside = {path: weight for path, weight in weights(tree).items() if path.startswith("mtp.")}
    wanted = torch.Tensor if kind == "FLOAT" else Int8Weight
    assert len(inside) == 9 and all(isinstance(weight, wanted) for weight in inside.values())
    assert isinstance(tree.layers[3].mlp.experts.down, Int8Weight)
    text = str(params.inspect(directory, spec_of(model.config, mtp=True), NAMES))
    said = "unquantised (FLOAT)" if kind == "FLOAT" else "W8A8_DYNAMIC"
    assert text.splitlines()[2] == f"draft head: {said}"
    assert loaded(directory, model, spec_of).mtp is None


def test_inspection_shows_schemes(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    model = oracle("moe")
    tensors, words, _ = export(unstacked(model.state_dict()), usual("W8A8_DYNAMIC", also=("in_proj_b", "in_proj_a")))
    found = params.inspect(write(tmp_path / "x", tensors, words), spec_of(model.config), NAMES)
    assert found.ok, found.problems
    rows = {row.name: row for row in found.rows}
    scale = rows["model.layers.0.mlp.experts.4.up_proj.weight_scale"]
    assert (scale.tensor, scale.leaf, scale.part) == (
        "f32[16,1]", "layers.0.mlp.experts.gate_up.scale", "expert 4, rows 16:32",
    )  # fmt: skip
    assert rows["model.layers.0.mlp.experts.4.up_proj.weight"].note == "W8A8_DYNAMIC"
    plain = rows["model.layers.0.linear_attn.in_proj_a.weight"]
    assert plain[3:] == ("layers.0.attn.in_proj.weight.parts.1", "rows 4:8", "FLOAT")
    assert rows["model.layers.0.mlp.gate.weight"].note == "FLOAT" and rows["model.norm.weight"].note == ""
    quantised = sum(word == "W8A8_DYNAMIC" for name, word in words.items() if name.endswith(".weight"))
    assert found.schemes == {"W8A8_DYNAMIC": quantised, "FLOAT": 1 + 4 * 2 + 3 * 2} and found.draft == ""
    assert str(found).splitlines()[1] == f"projections: {quantised} W8A8_DYNAMIC, 15 FLOAT"


def test_loading_changes_nothing_and_repeats(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    """Two loads are equal, shards load like one file, casts leave the encoding alone, and nothing carries gradients."""
    model = oracle("moe")
    tensors, words, _ = export(unstacked(model.state_dict()), usual("W8A8_MXFP8"))
    first = loaded(write(tmp_path / "x", tensors, words), model, spec_of)
    again = loaded(write(tmp_path / "y", tensors, words, shards=5), model, spec_of)
    assert first == again == loaded(tmp_path / "x", model, spec_of)
    assert not any(leaf.requires_grad for leaf in params.leaves(first))
    other = params.put(first, "layers.3.attn.out.weight.values", first.layers[3].attn.out.weight.values.flip(0))
    assert first != other
    half = params.to(first, dtype=torch.bfloat16)
    assert half.embed.weight.dtype == torch.bfloat16
    assert half.layers[0].mlp.experts.down == first.layers[0].mlp.experts.down
    cast = params.load(tmp_path / "x", spec_of(model.config), NAMES, dtype=torch.bfloat16)
    assert all(params.equal(weight, weights(half)[path]) for path, weight in weights(cast).items() if "experts" in path)


def test_a_split_weight_is_cast_where_it_is_plain(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    model = oracle("dense")
    tensors, words, _ = export(model.state_dict(), usual("W8A8_DYNAMIC", also=("in_proj_b", "in_proj_a")))
    tree = loaded(write(tmp_path / "x", tensors, words), model, spec_of)
    parts = params.to(tree, dtype=torch.bfloat16).layers[0].attn.in_proj.weight.parts
    assert parts[0].scale.dtype == torch.float32 and parts[1].dtype == torch.bfloat16


def test_every_module_alone(oracle: Any, tmp_path: Path) -> None:
    """`load_projection` reads one module of any kind, of a tower that the model itself passes over."""
    random = np.random.default_rng(zlib.crc32(b"tower"))
    matrix = random.standard_normal((6, 4304)).astype(np.float32)
    state = {
        f"model.visual.blocks.0.mlp.{name}.weight": torch.from_numpy(matrix) for name in ("fc1", "fc2", "fc3", "fc4")
    }
    state["model.visual.blocks.0.mlp.fc4.bias"] = torch.from_numpy(random.standard_normal(6).astype(np.float32))
    kinds = {"fc1": "W8A8_MXFP8", "fc2": "W4A8_DYNAMIC", "fc3": "W8A8", "fc4": "FLOAT"}
    tensors, words, floats = export(state, lambda module: kinds[module.split(".")[-1]])
    directory = write(tmp_path / "x", tensors, words)
    for name, word in kinds.items():
        module = f"model.visual.blocks.0.mlp.{name}"
        weight, bias = params.load_projection(directory, module)
        assert weight.shape == (6, 4304) and (bias is not None) == (name == "fc4")
        if isinstance(weight, QuantizedWeight):
            assert weight.scheme == word
            weight = weight.dequantized()
        torch.testing.assert_close(weight, floats[f"{module}.weight"], rtol=1e-5, atol=0)
    scales, _ = params.load_projection(directory, "model.visual.blocks.0.mlp.fc1")
    assert isinstance(scales, MXFP8Weight) and scales.scale.shape == (6, 135)
    with pytest.raises(params.CheckpointError, match=r"no matrix model.visual.blocks.0.mlp.fc5.weight; the nearest is"):
        params.load_projection(directory, "model.visual.blocks.0.mlp.fc5")
    words.pop("model.visual.blocks.0.mlp.fc2.weight_scale")
    write(directory, tensors, words)
    with pytest.raises(params.CheckpointError, match=r"fc2\.weight_scale has no entry"):
        params.load_projection(directory, "model.visual.blocks.0.mlp.fc2")


def test_a_projection_without_a_description(model: Any, saved: Path) -> None:
    name = "model.layers.3.self_attn.k_proj"
    weight, bias = params.load_projection(saved, name)
    assert bias is None and torch.equal(weight, model.state_dict()[f"{name}.weight"])  # type: ignore[arg-type]


def test_what_is_written_is_what_a_writer_of_our_own_writes(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    """Saving what was loaded gives the same tensors and the same description."""
    model = oracle("moe")
    tensors, words, _ = export(unstacked(model.state_dict()), usual("W8A8_DYNAMIC", also=("in_proj_b", "in_proj_a")))
    spec = spec_of(model.config)
    tree = params.load(write(tmp_path / "x", tensors, words), spec, NAMES, dtype=None)
    config = model.config.to_dict() | {"quantization_config": {"quant_method": "ascend"}}
    saved = params.save(tree, tmp_path / "y", spec, NAMES, config)
    assert {path.name for path in saved.iterdir()} == {
        "config.json", "quant_model_description.json", "quant_model_weights.safetensors",
    }  # fmt: skip
    assert "quantization_config" not in params.read_config(saved)
    again = load_file(saved / "quant_model_weights.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)
    entries = json.loads((saved / "quant_model_description.json").read_text())
    assert {name: word for name, word in entries.items() if name in tensors} == words
    assert entries.keys() - words.keys() == {"model_quant_type", "version", "metadata", "group_size", "optional"}


MEMORY = """
import re, sys
import torch
import params
from params.names.rules import ExpertStack, Names
from params.tree import tree, unchecked
@tree
class Node:
    projections = ("down",)
    down: object
def load(name, experts, rows, columns):
    spec = unchecked(Node, down=params.TensorSpec((experts, rows, columns)))
    names = Names("big", {"down": ExpertStack("stacked", ("x.{e}.down_proj.weight",))})
    return params.load(sys.argv[1] + name, spec, names)
load("/small", 2, 2, 2)
def resident(word):
    return int(re.search(word + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
open("/proc/self/clear_refs", "w").write("5")
before = resident("VmRSS")
kept = load("/big", 24, 2048, 1024)
print(resident("VmHWM") - before, params.num_bytes(kept))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel does not report peaks")
def test_peak_memory_is_the_result(tmp_path: Path) -> None:
    """A quantised checkpoint in shards takes no more than its tensors while it is loaded."""
    for name, experts, rows, inputs in (("small", 2, 2, 2), ("big", 24, 2048, 1024)):
        tensors: Tensors = {}
        for expert in range(experts):
            own = f"x.{expert}.down_proj"
            tensors |= {f"{own}.weight": torch.ones(rows, inputs, dtype=torch.int8)}
            tensors |= {f"{own}.weight_scale": torch.ones(rows, 1), f"{own}.weight_offset": torch.zeros(rows, 1)}
        write(tmp_path / name, tensors, dict.fromkeys(tensors, "W8A8_DYNAMIC"), shards=3)
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(params.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    peak, kept = (int(word) for word in out.split())
    assert kept == 24 * 2048 * 1028 and 0.95 * kept <= peak <= 1.05 * kept
