"""Descriptions that are wrong or ask for what is not supported: each is refused, naming module, members and schemes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import params
from params.names.qwen3_5 import NAMES
from tests.params.modelslim import FILE, Tensors, export, unstacked, write
from tests.params.test_quant_load import everything, usual, with_draft

Export = tuple[Tensors, dict[str, Any]]


@pytest.fixture(scope="module")
def mixture(oracle: Any) -> Any:
    """A transformers mixture of experts."""
    return oracle("moe")


@pytest.fixture(scope="module")
def usual_export(mixture: Any) -> Export:
    """Its usual export."""
    scheme = usual("W8A8_DYNAMIC", also=("in_proj_b", "in_proj_a"))
    return export(unstacked(mixture.state_dict()), scheme)[:2]


@pytest.fixture
def exported(usual_export: Export) -> Export:
    """The usual export, fresh for each test to spoil."""
    tensors, words = usual_export
    return {name: tensor.clone() for name, tensor in tensors.items()}, dict(words)


@pytest.fixture
def refused(mixture: Any, spec_of: Any, tmp_path: Path) -> Callable[..., str]:
    """`refused(tensors, words, mtp=False, **settings)`: what `load` says; `inspect` says the same."""

    def check(tensors: Tensors, words: dict[str, Any], mtp: bool = False, **settings: Any) -> str:
        directory = write(tmp_path / "x", tensors, words, **settings)
        spec = spec_of(mixture.config, mtp=mtp)
        with pytest.raises(params.CheckpointError) as caught:
            params.load(directory, spec, NAMES)
        found = params.inspect(directory, spec, NAMES)
        assert not found.ok
        lines = [line.strip() for line in str(caught.value).splitlines() if line.startswith("  ")]
        assert lines == [text.partition(": ")[2] for text in found.problems]
        return str(caught.value)

    return check


LAST = "model.layers.3.mlp.experts.5"
"""The last expert of the last layer: the first ones are not what every check looks at."""


def requantised(exported: Export, module: str, mixture: Any, word: str) -> Export:
    """One module by another scheme."""
    tensors, words = exported
    weight = unstacked(mixture.state_dict())[f"{module}.weight"]
    kept = {name: value for name, value in tensors.items() if not name.startswith(f"{module}.")}
    more, new, _ = export({f"{module}.weight": weight}, lambda _: word)
    return kept | more, {name: value for name, value in words.items() if name in kept} | new


@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("word", ["FLOAT", "W4A8_DYNAMIC", "W8A8_MXFP8"])
def test_one_expert_that_differs(
    exported: Export, mixture: Any, refused: Callable[..., str], projection: str, word: str
) -> None:
    """One projection of the last expert: the layer, that member and both schemes are named."""
    message = refused(*requantised(exported, f"{LAST}.{projection}", mixture, word))
    leaf = "down" if projection == "down_proj" else "gate_up"
    count = 5 if leaf == "down" else 11
    assert f"layers.3.mlp.experts.{leaf}: {word} ({LAST}.{projection}.weight); W8A8_DYNAMIC (" in message
    assert f"and {count - 3} more); all experts of a layer, gate and up, must have one scheme" in message
    assert "layers.2.mlp.experts" not in message


def test_gate_and_up_that_differ(exported: Export, mixture: Any, refused: Callable[..., str]) -> None:
    for expert in range(6):
        module = f"model.layers.3.mlp.experts.{expert}.gate_proj"
        exported = requantised(exported, module, mixture, "W4A8_DYNAMIC")
    message = refused(*exported)
    assert "layers.3.mlp.experts.gate_up: W4A8_DYNAMIC (" in message or "W8A8_DYNAMIC (" in message
    assert message.count("must have one scheme") == 1


@pytest.mark.parametrize("projections", [("down_proj",), ("gate_proj", "up_proj")])
def test_experts_that_are_quantised_by_half(
    exported: Export, mixture: Any, refused: Callable[..., str], projections: tuple[str, ...]
) -> None:
    """All experts' down projections FLOAT and the others not, or the reverse."""
    for expert in range(6):
        for name in projections:
            exported = requantised(exported, f"model.layers.2.mlp.experts.{expert}.{name}", mixture, "FLOAT")
    message = refused(*exported)
    assert "layers.2.mlp.experts: " in message and "projections must all be quantised, or none" in message


def test_both_halves_of_experts_by_schemes_of_their_own(
    exported: Export, mixture: Any, spec_of: Any, tmp_path: Path
) -> None:
    """That is allowed, and so are other schemes in other layers, and a layer whose experts are all FLOAT."""
    for expert in range(6):
        root = "model.layers.{}.mlp.experts.{}.{}_proj"
        exported = requantised(exported, root.format(1, expert, "down"), mixture, "W4A8_DYNAMIC")
        for name in ("gate", "up", "down"):
            exported = requantised(exported, root.format(2, expert, name), mixture, "FLOAT")
            exported = requantised(exported, root.format(3, expert, name), mixture, "W8A8_MXFP8")
    tree = params.load(write(tmp_path / "x", *exported), spec_of(mixture.config), NAMES)
    kinds = [type(getattr(tree.layers[i].mlp.experts, name)).__name__ for i in range(4) for name in ("gate_up", "down")]
    assert kinds == ["Int8Weight", "Int8Weight", "Int8Weight", "Int4Weight", "Tensor", "Tensor"] + ["MXFP8Weight"] * 2


@pytest.mark.parametrize(
    "name",
    [f"{LAST}.down_proj.weight", f"{LAST}.up_proj.weight_scale", "model.layers.1.linear_attn.in_proj_z.weight",
     "model.norm.weight", "lm_head.weight", "model.layers.0.linear_attn.A_log", "model.layers.3.mlp.gate.weight"],
)  # fmt: skip
def test_a_missing_entry(exported: Export, refused: Callable[..., str], name: str) -> None:
    """Nothing is unquantised for want of an entry, and an entry that is no word is none."""
    tensors, words = exported
    word = words.pop(name)
    message = refused(tensors, words)
    assert message.splitlines()[1:] == [
        "quantisation (1):", f"  {name} has no entry in {FILE}; only FLOAT says that a tensor is not quantised"
    ]  # fmt: skip
    assert f"{name} has no entry" in refused(tensors, words | {name: [word]})


UNKNOWN = ["W4A4_DYNAMIC", "W8A8_MIX", "w8a8_dynamic", "W8A8_DYNAMIC ", "float", "", "W4A8_MXFP", "NF4"]


@pytest.mark.parametrize("word", UNKNOWN)
@pytest.mark.parametrize("module", ["model.layers.3.self_attn.v_proj", f"{LAST}.down_proj"])
def test_an_unknown_scheme(exported: Export, refused: Callable[..., str], module: str, word: str) -> None:
    """Words are compared whole; the supported ones are listed."""
    tensors, words = exported
    words |= {name: word for name in words if name.startswith(f"{module}.")}
    message = refused(tensors, words)
    leaf = "layers.3.mlp.experts.down" if "experts" in module else "layers.3.attn.qkv.weight"
    assert f"{leaf}: {word} ({module}.weight); W8A8_DYNAMIC (" in message
    supported = "FLOAT, W8A8_DYNAMIC, W4A8_DYNAMIC, W8A8_MXFP8" if "experts" in module else "FLOAT, W8A8_DYNAMIC, W8A8"
    assert re.search(rf"supported for \w+: {supported}", message)


def test_static_experts_are_not_supported(exported: Export, mixture: Any, refused: Callable[..., str]) -> None:
    for expert in range(6):
        for name in ("gate", "up", "down"):
            module = f"model.layers.0.mlp.experts.{expert}.{name}_proj"
            exported = requantised(exported, module, mixture, "W8A8")
    message = refused(*exported)
    assert "layers.0.mlp.experts.down: W8A8 (model.layers.0.mlp.experts.0.down_proj.weight, " in message
    assert "supported for experts: FLOAT, W8A8_DYNAMIC, W4A8_DYNAMIC, W8A8_MXFP8" in message


@pytest.mark.parametrize("suffix", ["deq_scale", "weight_scale", "quant_bias"])
@pytest.mark.parametrize("word", ["FLOAT", "W8A8"])
def test_stray_scales_beside_float(exported: Export, refused: Callable[..., str], suffix: str, word: str) -> None:
    """A scale of a module that is FLOAT is not passed over, whatever its own entry says."""
    tensors, words = exported
    name = f"model.layers.0.mlp.gate.{suffix}"
    tensors[name] = torch.ones(6)
    words[name] = word
    clash = f"quantisation (1):\n  {name} is W8A8 and its weight is FLOAT; they must have one scheme"
    assert (f"unexpected (1):\n  {name}, float32[6]" if word == "FLOAT" else clash) in refused(tensors, words)


def test_an_entry_that_belongs_to_no_tensor(exported: Export, refused: Callable[..., str]) -> None:
    """A quantised weight that is described and not stored is missed; other extra entries are not."""
    tensors, words = exported
    extra = {"model.layers.0.mlp.experts.6.up_proj.weight": "W8A8_DYNAMIC", "model.rotation": "FLOAT"}
    message = refused(tensors, words | extra)
    assert "experts.6.up_proj.weight is W8A8_DYNAMIC in" in message and "no file holds it" in message
    assert "rotation" not in message


def test_a_missing_member(exported: Export, refused: Callable[..., str]) -> None:
    """A weight that is neither stored nor described is missing with its scale, and nothing else is wrong."""
    tensors, words = exported
    gone = [name for name in tensors if name.startswith("model.layers.3.self_attn.k_proj.")]
    for name in gone:
        del tensors[name], words[name]
    message = refused(tensors, words)
    assert [line.split(",")[0] for line in message.splitlines()[1:]] == [
        "missing (2):", "  model.layers.3.self_attn.k_proj.weight", "  model.layers.3.self_attn.k_proj.weight_scale"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "word"),
    [("model.embed_tokens.weight", "W8A8_DYNAMIC"), ("model.norm.weight", "W8A8"),
     ("model.layers.0.linear_attn.conv1d.weight", "W8A8_MXFP8"), ("model.layers.1.input_layernorm.weight", "NF4")],
)  # fmt: skip
def test_what_cannot_be_quantised(exported: Export, refused: Callable[..., str], name: str, word: str) -> None:
    tensors, words = exported
    message = refused(tensors, words | {name: word})
    assert f"  {name} (" in message and f") is {word}; only projections can be quantised" in message


def test_a_tied_head_is_not_quantised(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    """The embedding's copy may be stored, as FLOAT."""
    model = oracle("dense", tie_word_embeddings=True)
    tensors, words, _ = export(model.state_dict(), usual("W8A8_DYNAMIC"))
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
    spec = spec_of(model.config)
    assert params.load(write(tmp_path / "x", tensors, words), spec, NAMES).head is None
    words["lm_head.weight"] = "W8A8_DYNAMIC"
    with pytest.raises(
        params.CheckpointError, match=r"lm_head.weight \(tied to model.embed_tokens.weight\) is W8A8_DYNAMIC"
    ):
        params.load(write(tmp_path / "x", tensors, words), spec, NAMES)


@pytest.mark.parametrize(
    "settings",
    [{"kv_cache_type": "C8"}, {"kv_quant_type": "C8"}, {"fa_quant_type": "FAQuant"},
     {"model.layers.3.self_attn.quant_type": "INT8"}, {"model.layers.3.self_attn.k_proj.kv_cache_scale": "C8"}],
)  # fmt: skip
def test_a_quantised_cache(exported: Export, refused: Callable[..., str], settings: dict[str, str]) -> None:
    tensors, words = exported
    assert "KV-cache int8 (C8) and quantised attention are not supported" in refused(tensors, words | settings)


@pytest.mark.parametrize(
    ("name", "why"),
    [("model.layers.0.input_layernorm.bias", "a bias that outlier smoothing gave a norm"),
     ("model.norm.bias", "a bias that outlier smoothing gave a norm"),
     ("model.layers.3.self_attn.o_proj.div.mul_scale", "smoothing that divides"),
     ("model.layers.3.self_attn.o_proj.heads_rotation", "rotation while the model runs"),
     ("model.layers.3.mlp.kronecker_rotation_m", "rotation while the model runs")],
)  # fmt: skip
def test_tensors_that_change_the_model(exported: Export, refused: Callable[..., str], name: str, why: str) -> None:
    tensors, words = exported
    tensors[name] = torch.ones(32)
    assert f"{name}: {why}" in refused(tensors, words | {name: "FLOAT"})
    assert f"{name}: {why}" in refused(tensors, words)


def test_offsets_must_be_zeros(exported: Export, mixture: Any, spec_of: Any, tmp_path: Path) -> None:
    """The last number of the last expert's is looked at like the first."""
    tensors, words = exported
    name = f"{LAST}.down_proj.weight_offset"
    tensors[name][-1] = -3.0
    directory = write(tmp_path / "x", tensors, words)
    with pytest.raises(params.CheckpointError, match=rf"these offsets are not zeros: {name}; quantise"):
        params.load(directory, spec_of(mixture.config), NAMES)


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf")])
def test_scales_of_inputs_are_positive(oracle: Any, spec_of: Any, tmp_path: Path, scale: float) -> None:
    model = oracle("dense")
    tensors, words, _ = export(model.state_dict(), usual("W8A8"))
    tensors["model.layers.3.self_attn.v_proj.input_scale"].fill_(scale)
    with pytest.raises(params.CheckpointError, match=r"v_proj.input_scale is .*, expected a positive number"):
        params.load(write(tmp_path / "x", tensors, words), spec_of(model.config), NAMES)


@pytest.mark.parametrize("name", ["fc", "layers.0.mlp.experts.5.down_proj", "layers.0.self_attn.k_proj"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_draft_head_in_part(
    exported: Export, mixture: Any, refused: Callable[..., str], name: str, turned: bool
) -> None:
    """One projection unlike the others; its norms are FLOAT in any case."""
    tensors, words = exported
    one, rest = ("W8A8_DYNAMIC", "FLOAT") if turned else ("FLOAT", "W8A8_DYNAMIC")
    draft, more = with_draft(unstacked(mixture.state_dict()), lambda module: one if module == f"mtp.{name}" else rest)
    message = refused(tensors | draft, words | more, mtp=True)
    assert f"mtp: {one} (mtp.{name}.weight); {rest} (" in message
    assert "a draft head must be quantised as a whole, or FLOAT as a whole" in message


def test_a_draft_head_without_entries(exported: Export, mixture: Any, refused: Callable[..., str]) -> None:
    tensors, words = exported
    draft, _ = with_draft(unstacked(mixture.state_dict()), everything)
    assert "mtp.fc.weight has no entry" in refused(tensors | draft, words, mtp=True)


def test_names_that_merely_contain_the_draft_head(exported: Export, refused: Callable[..., str]) -> None:
    tensors, words = exported
    tensors["model.mtp.fc.weight"] = torch.ones(2, 2)
    message = refused(tensors, words | {"model.mtp.fc.weight": "FLOAT"})
    assert message.splitlines()[1:] == ["unexpected (1):", "  model.mtp.fc.weight, float32[2,2]"]


def test_stacked_experts(exported: Export, mixture: Any, refused: Callable[..., str]) -> None:
    """One tensor for all experts has one scheme only as FLOAT."""
    tensors, words = exported
    stacked = "model.layers.1.mlp.experts.down_proj"
    kept = {name: value for name, value in tensors.items() if not re.search(r"layers\.1\.mlp\.experts\.\d\.down", name)}
    kept[stacked] = torch.zeros(6, 32, 16, dtype=torch.int8)
    words = {name: word for name, word in words.items() if name in kept}
    message = refused(kept, words | {stacked: "W8A8_DYNAMIC"})
    assert f"W8A8_DYNAMIC ({stacked}); quantised experts must be stored one by one" in message


def test_an_odd_number_of_packed_rows(exported: Export, mixture: Any, refused: Callable[..., str]) -> None:
    tensors, words = exported
    module = "model.layers.1.mlp.shared_expert_gate"
    words[f"{module}.weight"] = "W4A8_DYNAMIC"
    message = refused(tensors, words)
    assert f"{module}.weight (layers.1.mlp.shared_gate.weight) has 1 rows, and W4A8_DYNAMIC packs two" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {"weight_scale": t["weight_scale"][:-1]}, "misshapen (1)"),
        (lambda t: {"weight_scale": t["weight_scale"].flatten()}, "misshapen (1)"),
        (lambda t: {"weight_scale": t["weight_scale"].expand(-1, 3).contiguous()}, "misshapen (1)"),
        (lambda t: {"weight_scale": t["weight_scale"][:, :0]}, "misshapen (1)"),
        (lambda t: {"weight": t["weight"].float()}, "wrong dtype (1)"),
        (lambda t: {"weight": t["weight"].view(torch.uint8)}, "wrong dtype (1)"),
        (lambda t: {"weight_scale": t["weight_scale"].to(torch.int32)}, "wrong dtype (1)"),
    ],
)
def test_shapes_and_dtypes(
    exported: Export, refused: Callable[..., str], change: Callable[[Tensors], Tensors], message: str
) -> None:
    """What is stored must have the scheme's form; payloads are never converted."""
    tensors, words = exported
    module = f"{LAST}.down_proj"
    own = {name.rpartition(".")[2]: value for name, value in tensors.items() if name.startswith(f"{module}.")}
    spoilt = {f"{module}.{suffix}": value for suffix, value in change(own).items()}
    found = refused(tensors | spoilt, words)
    assert message in found and f"  {next(iter(spoilt))} is " in found


@pytest.mark.parametrize(
    ("content", "message"), [("[]", "holds a list"), ("{", "is not JSON"), ("[" * 9999, "is nested too deeply")]
)
def test_broken_descriptions(
    exported: Export, mixture: Any, spec_of: Any, tmp_path: Path, content: str, message: str
) -> None:
    directory = write(tmp_path / "x", *exported)
    (directory / FILE).write_text(content)
    with pytest.raises(params.CheckpointError, match=rf"{FILE} {message}"):
        params.load(directory, spec_of(mixture.config), NAMES)


def test_without_a_description_nothing_is_quantised(
    exported: Export, mixture: Any, spec_of: Any, tmp_path: Path
) -> None:
    """Bytes are not read as floats: the tensors misfit."""
    directory = write(tmp_path / "x", *exported)
    (directory / FILE).unlink()
    with pytest.raises(params.CheckpointError, match=r"down_proj.weight is int8, expected floating point"):
        params.load(directory, spec_of(mixture.config), NAMES)


def test_settings_that_do_not_matter(exported: Export, mixture: Any, spec_of: Any, tmp_path: Path) -> None:
    """The model's own type is never a scheme; older exports have fewer settings."""
    tensors, words = exported
    one = write(tmp_path / "x", tensors, words, model_quant_type="W4A4_DYNAMIC", kv_quant_type="", metadata={"a": 1})
    two = write(tmp_path / "y", tensors, words)
    (two / FILE).write_text(json.dumps(words))
    spec = spec_of(mixture.config)
    assert params.load(one, spec, NAMES) == params.load(two, spec, NAMES)
