"""Quantising a float tree, saving and loading it, and what it costs in precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import params
from params.names.qwen3_5 import NAMES
from params.names.rules import Merged, Names, Plain
from params.quant import rounding
from params.quant.values import Int4Weight, Int8Weight, MXFP8Weight, QuantizedWeight, SplitWeight, StaticInt8Weight
from params.tree import tree, unchecked
from tests.params.modelslim import quantise
from tests.params.test_quant_load import weights

WORDS = ["W8A8_DYNAMIC", "W4A8_DYNAMIC", "W8A8_MXFP8"]


def random_tree(oracle: Any, spec_of: Any, kind: str = "moe", **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A float tree, its spec, its config."""
    model = oracle(kind)
    spec = spec_of(model.config, **options)
    return params.init(spec, seed=7), spec, model.config.to_dict()


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("limit", [5 * 10**9, 30_000])
def test_quantised_trees_are_saved_and_loaded(oracle: Any, spec_of: Any, tmp_path: Path, word: str, limit: int) -> None:
    """Bit for bit, in one file or many, with a draft head that stays FLOAT, and every tensor in the description."""
    whole, spec, config = random_tree(oracle, spec_of, mtp=True)
    quantised = params.quantize(whole, word)
    directory = params.save(quantised, tmp_path, spec, NAMES, config, max_shard_bytes=limit)
    files = sorted(path.name for path in directory.glob("*safetensors*"))
    assert files[0].startswith("quant_model_weights") and (len(files) == 1) == (limit > 30_000)
    assert (directory / "quant_model_weights.safetensors.index.json").exists() == (len(files) > 1)
    assert params.load(directory, spec, NAMES, dtype=None) == quantised
    stored = params.tensor_names(directory)
    entries = json.loads((directory / "quant_model_description.json").read_text())
    assert stored.keys() <= entries.keys() and entries["group_size"] == (32 if word == "W8A8_MXFP8" else 0)
    scaled = {name.rpartition(".")[0] for name in stored if name.endswith(".weight_scale")}
    assert {name for name in stored if entries[name] == word} == {
        name for name in stored if name.rpartition(".")[0] in scaled
    }
    assert {entries[name] for name in stored} == {word, "FLOAT"}
    expert = "model.layers.3.mlp.experts.5.down_proj"
    suffixes = {name.removeprefix(f"{expert}.") for name in stored if name.startswith(expert)}
    assert suffixes == {"weight", "weight_scale"} | {
        "W8A8_DYNAMIC": {"weight_offset"}, "W4A8_DYNAMIC": {"weight_offset", "scale_bias"}, "W8A8_MXFP8": set(),
    }[word]  # fmt: skip
    assert entries["mtp.layers.0.mlp.experts.5.down_proj.weight"] == "FLOAT"
    found = params.inspect(directory, spec, NAMES, dtype=None)
    assert found.ok and found.draft == "draft head: unquantised (FLOAT)"


@pytest.mark.parametrize("word", WORDS)
def test_weights_are_the_exporters(oracle: Any, spec_of: Any, tmp_path: Path, word: str) -> None:
    """What is written for a module is what the writer of these tests writes; bfloat16 weights have ties to break."""
    whole, spec, config = random_tree(oracle, spec_of)
    whole = params.to(whole, dtype=torch.bfloat16)
    directory = params.save(params.quantize(whole, word), tmp_path, spec, NAMES, config)
    stored = load_file(directory / "quant_model_weights.safetensors")
    for module, weight, slices in (
        ("layers.2.mlp.experts.4.up_proj", whole.layers[2].mlp.experts.gate_up[4, 16:], 1),
        ("layers.2.mlp.experts.4.down_proj", whole.layers[2].mlp.experts.down[4], 16),
        ("layers.3.self_attn.k_proj", whole.layers[3].attn.qkv.weight[128:160], 1),
        ("layers.3.self_attn.o_proj", whole.layers[3].attn.out.weight, 16),
        ("layers.3.mlp.shared_expert.down_proj", whole.layers[3].mlp.shared.down.weight, 1),
    ):
        how = {"slices": slices} if word == "W4A8_DYNAMIC" else {}
        expected, _ = quantise(word, weight.float().numpy(), **how)
        for suffix, array in expected.items():
            tensor = stored[f"model.{module}.{suffix}"]
            raw = (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor).numpy()
            if suffix == "scale_bias":
                np.testing.assert_allclose(raw, array, rtol=1e-5, atol=1e-6)
            else:
                assert np.array_equal(np.where(raw == 128, 0, raw), np.where(array == 128, 0, array)), (module, suffix)


def test_a_nested_config(wrapper: Any, spec_of: Any, tmp_path: Path) -> None:
    """Beside a wrapper's config tensors and description get the wrapper's names."""
    config = wrapper(True)
    spec = spec_of(config.text_config)
    whole = params.quantize(params.init(spec), "W8A8_DYNAMIC")
    given = config.to_dict() | {"quantization_config": {"bits": 8}}
    given["text_config"]["quantization_config"] = {"bits": 8}
    params.save(whole, tmp_path, spec, NAMES, given)
    entries = json.loads((tmp_path / "quant_model_description.json").read_text())
    assert entries["model.language_model.layers.3.self_attn.q_proj.weight_scale"] == "W8A8_DYNAMIC"
    assert not any(name.startswith("model.layers") for name in entries)
    saved = params.read_config(tmp_path)
    assert "quantization_config" not in saved and "quantization_config" not in saved["text_config"]
    assert params.load(tmp_path, spec, NAMES, dtype=None) == whole


def test_what_is_kept(oracle: Any, spec_of: Any) -> None:
    """A usual recipe leaves head, routers and draft head alone; `keep=()` nothing; a mapping chooses by leaf."""
    whole, *_ = random_tree(oracle, spec_of, mtp=True)
    found = weights(params.quantize(whole, "W8A8_DYNAMIC"))
    plain = {path for path, weight in found.items() if not isinstance(weight, QuantizedWeight)}
    assert plain == {
        path for path in found if path.startswith("mtp.") or path.split(".")[-2] in ("head", "router", "shared_gate")
    }
    every = weights(params.quantize(whole, "W8A8_DYNAMIC", keep=()))
    assert all(isinstance(weight, Int8Weight) for weight in every.values())
    mixed = {"layers.2.**": "FLOAT", "**.experts.down": "W4A8_DYNAMIC", "**": "W8A8_MXFP8"}
    found = weights(params.quantize(whole, mixed))
    assert isinstance(found["layers.1.mlp.experts.down"], Int4Weight)
    assert isinstance(found["layers.1.mlp.experts.gate_up"], MXFP8Weight)
    assert not any(
        isinstance(weight, QuantizedWeight) for path, weight in found.items() if path.startswith("layers.2.")
    )


def test_quantising_leaves_the_tree_alone(oracle: Any, spec_of: Any) -> None:
    """The old tree is as it was and shares what was not quantised; gradients do not follow."""
    whole, *_ = random_tree(oracle, spec_of)
    whole = params.tree_map(lambda leaf: leaf.requires_grad_(), whole)
    before = params.tree_map(lambda leaf: leaf.detach().clone(), whole)
    quantised = params.quantize(whole, "W8A8_DYNAMIC")
    assert whole == before and quantised.embed.weight is whole.embed.weight
    assert not any(leaf.requires_grad for leaf in params.leaves(quantised.layers[0].mlp.experts))


def test_dequantised_trees(oracle: Any, spec_of: Any) -> None:
    """The same paths and shapes, near the float values, in the dtype asked for."""
    whole, *_ = random_tree(oracle, spec_of)
    for word, bound in (("W8A8_DYNAMIC", 0.01), ("W8A8_MXFP8", 0.04), ("W4A8_DYNAMIC", 0.15), ("W4A16_MXFP4", 0.15)):
        back = params.dequantize(params.quantize(whole, word), torch.bfloat16)
        assert [path for path, _ in params.items(back)] == [path for path, _ in params.items(whole)]
        for path, weight in weights(whole).items():
            other = params.at(back, path)
            error = ((other.float() - weight).norm() / weight.norm()).item()
            kept = path.split(".")[-2] in ("head", "router", "shared_gate")
            assert (error == 0) if kept else (1e-4 < error < bound), path
            assert other.dtype == (torch.float32 if kept else torch.bfloat16)


def test_packed_trees_are_saved_and_loaded(wrapper: Any, spec_of: Any, tmp_path: Path) -> None:
    """As compressed-tensors: merged members apart, no description, and a section in the config that says how."""
    config = wrapper(False)
    spec = spec_of(config.text_config)
    whole = params.init(spec, seed=7)
    quantised = params.quantize(whole, {"**.mlp.**": "W4A16_MXFP4"})
    directory = params.save(quantised, tmp_path, spec, NAMES, config.to_dict(), max_shard_bytes=30_000)
    assert not (directory / "quant_model_description.json").exists()
    section = params.read_config(directory)["text_config"]["quantization_config"]
    root = "model.language_model.layers.3"
    assert f"{root}.self_attn.q_proj" in section["ignore"] and f"{root}.mlp.up_proj" not in section["ignore"]
    stored = params.tensor_names(directory)
    assert stored[f"{root}.mlp.up_proj.weight_packed"].shape == (40, 16)
    assert params.load(directory, spec, NAMES, dtype=None) == quantised
    found = params.inspect(directory, spec, NAMES, dtype=None)
    assert found.ok and found.schemes == {"FLOAT": found.schemes["FLOAT"], "W4A16_MXFP4": 12}
    down, bias = params.load_projection(directory, f"{root}.mlp.down_proj")
    assert bias is None and down == quantised.layers[3].mlp.down.weight
    both = params.quantize(quantised, {"**.attn.**": "W8A8_DYNAMIC"}, keep=("**.mlp.**", "head.weight"))
    with pytest.raises(
        params.CheckpointError, match=r"no checkpoint holds W4A16_MXFP4.*the tree has W4A16_MXFP4, W8A8"
    ):
        params.save(both, tmp_path / "both", spec, NAMES, config.to_dict())


def test_packing_needs_an_even_number_of_inputs() -> None:
    narrow = unchecked(Biased, weight=torch.ones(4, 33), bias=None)
    with pytest.raises(ValueError, match=r"weight has 33 inputs, and W4A16_MXFP4 packs two in a byte"):
        params.quantize(narrow, "W4A16_MXFP4")


BOUNDS = {
    "W4A16_MXFP4": (0.118, None),
    "W8A8_DYNAMIC": (0.0105, torch.float32),
    "W8A8_MXFP8": (0.041, torch.float32),
    "W4A8_DYNAMIC": (0.135, None),
}


@pytest.mark.parametrize("word", BOUNDS)
def test_errors_of_products(word: str) -> None:
    """Of Gaussian inputs and weights, quantised as the scheme has it: its published figure, 30 % to either side."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 512, generator=generator), torch.randn(256, 512, generator=generator)
    weight = params.quantize(unchecked(Biased, weight=w, bias=None), word).weight
    if word == "W4A16_MXFP4":
        rounded = x
    elif word == "W8A8_MXFP8":
        rounded = MXFP8Weight(*rounding.mxfp8(x, "half_even")).dequantized()
    else:
        rounded = Int8Weight(*rounding.int8_tokens(x)).dequantized()
    exact = x.double() @ w.double().T
    error = ((rounded @ weight.dequantized().T - exact).norm() / exact.norm()).item()
    assert 0.7 * BOUNDS[word][0] < error < 1.3 * BOUNDS[word][0]


@tree
class Biased:
    """A projection that may have a bias."""

    projections: ClassVar[tuple[str, ...]] = ("weight",)

    weight: Any
    bias: Any


BIASED = Names(
    "biased",
    {
        "qk.weight": Merged(("q.weight", "k.weight")), "qk.bias": Merged(("q.bias", "k.bias")),
        "out.weight": Plain("o.weight"), "out.bias": Plain("o.bias"),
    },
)  # fmt: skip


def biased_spec(inputs: int = 24) -> Any:
    """Two projections with biases, one merged of two members."""
    weight, bias = (params.TensorSpec((10, *rest), parts=(4, 6)) for rest in ((inputs,), ()))
    return {
        "qk": unchecked(Biased, weight=weight, bias=bias),
        "out": unchecked(Biased, weight=params.TensorSpec((8, inputs)), bias=params.TensorSpec((8,))),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_static_scales_and_biases(tmp_path: Path, dtype: torch.dtype) -> None:
    """A bias moves into the correction, is not stored, and comes back when the tree is dequantised."""
    spec = biased_spec()
    whole = params.tree_map(lambda leaf: leaf + 0.5, params.init(spec, seed=3, dtype=dtype))
    ranges = {"qk.weight": (-1.0, 3.0), "out.weight": (-2.0, 0.5)}
    quantised = params.quantize(whole, "W8A8", input_ranges=ranges)
    weight = quantised["qk"].weight
    assert isinstance(weight, StaticInt8Weight) and not quantised["qk"].bias.any()
    assert (weight.input_scale.item(), weight.input_offset.item()) == (pytest.approx(4 / 255), -64)
    expected, _ = quantise(
        "W8A8", whole["qk"].weight.float().numpy(), scale=weight.input_scale.item(), offset=-64.0,
        bias=whole["qk"].bias.float().numpy(),
    )  # fmt: skip
    assert np.array_equal(weight.correction.numpy(), expected["quant_bias"])
    assert np.array_equal(weight.deq_scale.numpy(), expected["deq_scale"])
    back = params.dequantize(quantised, dtype)
    step = weight.deq_scale.max().item()
    torch.testing.assert_close(back["qk"].bias, whole["qk"].bias, atol=step, rtol=0.01)
    directory = params.save(quantised, tmp_path, spec, BIASED, {})
    assert not any(name.endswith(".bias") for name in params.tensor_names(directory))
    again = params.load(directory, spec, BIASED, dtype=None)
    assert again == quantised or dtype == torch.bfloat16
    assert params.load(directory, spec, BIASED, dtype=dtype) == quantised


def test_a_bias_that_is_stored_beside_the_correction_counts_once(tmp_path: Path) -> None:
    """Of a static module it is passed over; of its FLOAT neighbour in the same leaf it is read."""
    spec = biased_spec()
    whole = params.tree_map(lambda leaf: leaf + 0.5, params.init(spec, seed=3))
    ranges = {"qk.weight": (-1.0, 3.0)}
    quantised = params.quantize(whole, {"qk.weight": "W8A8"}, input_ranges=ranges)
    weight = quantised["qk"].weight
    first = weight.values[:4], weight.deq_scale[:4], weight.correction[:4]
    part = StaticInt8Weight(*first, weight.input_scale, weight.input_offset)
    split = SplitWeight((part, whole["qk"].weight[4:]))
    half = torch.cat((torch.zeros(4), whole["qk"].bias[4:]))
    mixed = {"qk": unchecked(Biased, weight=split, bias=half), "out": whole["out"]}
    directory = params.save(mixed, tmp_path, spec, BIASED, {})
    tensors = load_file(directory / "quant_model_weights.safetensors")
    assert "q.bias" not in tensors and torch.equal(tensors["k.bias"], whole["qk"].bias[4:])
    entries = json.loads((directory / "quant_model_description.json").read_text())
    assert entries["k.weight"] == "FLOAT" and entries["q.input_scale"] == "W8A8"
    save_file(tensors | {"q.bias": torch.full((4,), 9.0)}, directory / "quant_model_weights.safetensors")
    (directory / "quant_model_description.json").write_text(json.dumps(entries | {"q.bias": "FLOAT"}))
    loaded = params.load(directory, spec, BIASED, dtype=None)
    assert loaded == mixed
    torch.testing.assert_close(params.dequantize(loaded, torch.float32)["qk"].bias, whole["qk"].bias, atol=1e-3, rtol=0)
    spoilt = params.put(mixed, "qk.bias", whole["qk"].bias)
    with pytest.raises(params.CheckpointError, match=r"q\.bias: a W8A8 projection has its bias in its weight's"):
        params.save(spoilt, tmp_path / "y", spec, BIASED, {})


def test_a_bias_without_a_place(tmp_path: Path) -> None:
    spec = biased_spec()
    whole = params.init(spec, seed=3)
    whole = params.put(whole, "out.bias", torch.ones(8))
    quantised = params.quantize(whole, {"out.weight": "W8A8"}, input_ranges={"out.weight": (-1, 1)})
    lone = unchecked(Biased, weight=quantised["out"].weight, bias=None)
    with pytest.raises(ValueError, match=r"Biased.weight has a bias in its correction, and its projection none"):
        params.dequantize(lone, torch.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "W8A8_MXFP"}, "unknown scheme W8A8_MXFP; give one of FLOAT, W8A8_DYNAMIC, W8A8, W4A8_DYN"),
        ({"scheme": {"layers.9.**": "W8A8_DYNAMIC"}}, r"no projection fits layers\.9\.\*\*.*the tree has layers\.0"),
        ({"scheme": {"head.weight": "W8A8_DYNAMIC"}}, r"no projection fits head\.weight, apart from those to keep"),
        ({"scheme": "W8A8"}, r"layers\.0\.mlp\.experts\.gate_up holds experts, which can be FLOAT, W8A8_DYNAMIC, W4A8"),
        ({"scheme": {"**.out.weight": "W8A8"}}, r"layers\.0\.attn\.out\.weight: W8A8 needs the range of its inputs"),
        (
            {"scheme": {"layers.0.attn.out.weight": "W8A8"}, "input_ranges": {"layers.0.attn.out.weight": (0, np.inf)}},
            "its inputs range over .* expected two finite numbers",
        ),
        ({"scheme": "W4A8_DYNAMIC", "keep": ()}, r"shared_gate\.weight has 1 outputs, and W4A8_DYNAMIC packs two"),
        ({"scheme": {"layers.0.**": "W8A16_MXFP4"}}, "unknown scheme W8A16_MXFP4; give one of .*, W4A16_MXFP4"),
        ({"scheme": {"**.experts.down": "W8A8_DYNAMIC"}}, r"layers\.0\.mlp\.experts: give all of gate_up, down "),
        ({"scheme": {"**.out.weight": "W8A8_DYNAMIC"}, "keep": ()}, "the draft head must be quantised as a whole"),
    ],
)  # fmt: skip
def test_refusals(oracle: Any, spec_of: Any, arguments: dict[str, Any], message: str) -> None:
    """Before anything is computed, and all at once."""
    whole, *_ = random_tree(oracle, spec_of, mtp=True)
    with pytest.raises(ValueError, match=message):
        params.quantize(whole, **arguments)


def test_a_quantised_tree_is_not_quantised_again(oracle: Any, spec_of: Any) -> None:
    whole, *_ = random_tree(oracle, spec_of)
    with pytest.raises(ValueError, match=r"is a Int8Weight, expected a tensor; quantise the plain tree"):
        params.quantize(params.quantize(whole, "W8A8_DYNAMIC"), "W8A8_DYNAMIC")


def cut(weight: MXFP8Weight, start: int, stop: int) -> MXFP8Weight:
    """Some rows."""
    return MXFP8Weight(weight.values[start:stop], weight.scale[start:stop])


def test_trees_that_no_checkpoint_can_hold(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    """Parts that end inside a tensor, slices, other shapes, odd members of a packed weight: nothing is written."""
    whole, spec, config = random_tree(oracle, spec_of, "dense")
    quantised = params.quantize(whole, "W8A8_MXFP8")
    wide = MXFP8Weight(*rounding.mxfp8(torch.randn(192, 64), "half_away"))
    qkv = quantised.layers[3].attn.qkv.weight
    packed = Int4Weight(torch.zeros(5, 24, dtype=torch.int8), torch.ones(10, 1), torch.zeros(10, 1))
    odd = {"qk": unchecked(Biased, weight=packed, bias=torch.zeros(10)), "out": params.init(biased_spec())["out"]}
    odd_spec = params.put(biased_spec(), "qk.weight", params.TensorSpec((10, 24), parts=(3, 7)))
    odd_spec = params.put(odd_spec, "qk.bias", params.TensorSpec((10,), parts=(3, 7)))
    for value, message in (
        (SplitWeight((cut(qkv, 0, 99), cut(qkv, 99, 192))), r"part has 99 rows, and .* end at \[128, 160, 192\]"),
        (cut(qkv, 0, 96), r"qkv\.weight is a MXFP8Weight \[96, 32\], the spec has \[192, 32\]"),
        (MXFP8Weight(wide.values, wide.scale, (8, 24)), "is a slice that begins or ends inside a block of 32"),
    ):
        spoilt = params.put(quantised, "layers.3.attn.qkv.weight", value)
        with pytest.raises(params.CheckpointError, match=message):
            params.save(spoilt, tmp_path / "x", spec, NAMES, config)
    with pytest.raises(params.CheckpointError, match=r"q\.weight, k\.weight would have an odd number of rows"):
        params.save(odd, tmp_path / "x", odd_spec, BIASED, {})
    assert not (tmp_path / "x").exists()
