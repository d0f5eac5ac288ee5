"""Quantised checkpoints of Kimi-K3: a ModelSlim export with int4 experts, published MXFP4 experts, and their drafts."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import funcmodels as fm
import lowering
import params
from params.quant.values import Int4Weight, Int8Weight, MXFP4Weight, SplitWeight
from tests.checkpoint.test_quantized import BOUNDS
from tests.oracle import block_drafts
from tests.oracle.families import assert_bitwise, close
from tests.oracle.kimi_k3 import PREFIX, VISION, build, random_tensors, sizes
from tests.oracle.kimi_k3 import run as transcribed
from tests.oracle.qwen3_5 import Pair, tokens
from tests.params.modelslim import export, mxfp4, write

Tensors = dict[str, Tensor]
FIELDS = sizes(2, routed_expert_hidden_size=14)
"""int4 packs two rows in a byte, so that experts' widths are even."""
KEPT = ("embed_tokens", "gate", "kv_b_proj", "lm_head", "res_proj")
"""How the last words of modules end that a recipe leaves as FLOAT."""


def scheme(module: str) -> str:
    """Experts in int4, every other projection in int8: in the linear attention but for what makes its gates."""
    last = module.rpartition(".")[2]
    if ".experts." in module:
        return "W4A8_DYNAMIC"
    return "FLOAT" if last.endswith(KEPT) or last in ("b_proj", "f_a_proj") else "W8A8_DYNAMIC"


@functools.cache
def exported() -> tuple[Tensors, dict[str, str], Tensors]:
    """Tensors, description, and the float weights that they stand for, written one by one."""
    text = {name: tensor for name, tensor in random_tensors(FIELDS, 2).items() if name not in VISION}
    return export(text, scheme)


@functools.cache
def float_model() -> Pair:
    """The model with the float weights."""
    return build(FIELDS, 2, torch.float32)


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


SPELLINGS = {
    "as the files": lambda name: name,
    "mlp": lambda name: name.replace(".block_sparse_moe.", ".mlp."),
    "without the wrapper": lambda name: name.removeprefix("language_model."),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_export_of_modelslim(spelling: str, tmp_path: Path) -> None:
    """Its weights are those that the writer meant, whatever its description calls a mixture; products are quantised."""
    tensors, words, floats = exported()
    described = {SPELLINGS[spelling](name): word for name, word in words.items()}
    directory = write_config(write(tmp_path / "export", tensors, described), FIELDS)
    model, tree = fm.load(directory, torch.float32)
    sparse, delta = tree.layers[1].mlp, tree.layers[0].attn
    assert isinstance(sparse.experts.gate_up, Int4Weight) and isinstance(sparse.experts.down, Int4Weight)
    assert isinstance(sparse.down.weight, Int8Weight) and isinstance(sparse.router.weight, Tensor)
    assert isinstance(delta.in_proj.weight, SplitWeight)
    assert [type(part).__name__ for part in delta.in_proj.weight.parts] == ["Int8Weight", "Tensor", "Int8Weight"]
    (ids,) = tokens(float_model(), 11)
    meant = transcribed(Pair((FIELDS, floats), model, None), ids).logits
    plain = params.to(params.dequantize(tree, torch.float64), dtype=torch.float64)
    batch = fm.Batch.from_lists([ids])
    close(model.forward(plain, None, batch)[0].logits, meant)
    found = model.forward(tree, None, batch)[0].logits.double()
    assert 0 < (found - meant).norm() < BOUNDS["W4A8_DYNAMIC"] * meant.norm()
    params.save(tree, tmp_path / "again", model.whole_spec(), model.family.names, dict(model.config_json))
    again = json.loads((tmp_path / "again" / "quant_model_description.json").read_text())
    assert {name: again[name] for name in words} == words
    assert_bitwise(fm.load(tmp_path / "again", torch.float32)[1], tree)


def test_two_entries_for_one_tensor(tmp_path: Path) -> None:
    """An entry under each of the two names of a mixture says one thing or the other."""
    tensors, words, _ = exported()
    name = f"{PREFIX}layers.1.block_sparse_moe.experts.0.w1.weight"
    twice = words | {name.replace("block_sparse_moe", "mlp"): "FLOAT"}
    directory = write_config(write(tmp_path / "export", tensors, twice), FIELDS)
    with pytest.raises(fm.CheckpointError, match=r"mlp\.experts\.0\.w1\.weight and .* mean the same tensor; keep one"):
        fm.load(directory)


# Published experts


SECTION = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {
        "format": "mxfp4-pack-quantized", "targets": ["Linear"], "input_activations": None, "output_activations": None,
        "weights": {
            "num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True, "dynamic": False,
            "scale_dtype": "torch.uint8", "actorder": None, "observer": None, "observer_kwargs": {},
        },
    }},
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip
PACKED_FIELDS = sizes(2, routed_expert_hidden_size=70, moe_intermediate_size=36, quantization_config=SECTION)
"""Blocks of 32, then of fewer."""


@functools.cache
def packed() -> tuple[Tensors, Tensors]:
    """The tensors of a checkpoint as published, and with the float weights that its experts stand for."""
    tensors: Tensors = {}
    floats: Tensors = {}
    for name, tensor in random_tensors(PACKED_FIELDS, 2).items():
        if ".experts." in name:
            stored, whole = mxfp4(tensor.numpy())
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{suffix}": torch.from_numpy(array.copy()) for suffix, array in stored.items()}
            floats[name] = torch.from_numpy(whole)
        else:
            tensors[name] = floats[name] = tensor
    return tensors, floats


def write_packed(directory: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return write_config(directory, config)


def test_published_experts(tmp_path: Path) -> None:
    """Bit for bit as they are stored, computing what they stand for, and saved under the same names."""
    tensors, floats = packed()
    directory = write_packed(tmp_path / "published", tensors, PACKED_FIELDS)
    model, tree = fm.load(directory, torch.float32)
    experts = tree.layers[1].mlp.experts
    assert isinstance(experts.gate_up, MXFP4Weight) and isinstance(experts.down, MXFP4Weight)
    assert params.inspect(directory, model.param_spec(), model.family.names).schemes["W4A16_MXFP4"] == 96
    (ids,) = tokens(build(PACKED_FIELDS, 2), 11)
    meant = transcribed(Pair((PACKED_FIELDS, floats), model, None), ids).logits
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        found = model.forward(params.to(tree, dtype=dtype), None, fm.Batch.from_lists([ids]))[0].logits
        assert (found.double() - meant).norm() < bound * meant.norm()
    text = {name: tensor for name, tensor in tensors.items() if name not in VISION}
    alone = {name.removeprefix("language_model.").replace("block_sparse_moe", "mlp"): text[name] for name in text}
    directory = write_packed(tmp_path / "alone", alone, PACKED_FIELDS["text_config"])
    assert_bitwise(fm.load(directory, torch.float32)[1], tree)
    fm.save(model, tree, tmp_path / "again")
    ours = load_file(tmp_path / "again" / "model.safetensors")
    assert ours.keys() == tensors.keys()
    assert all(torch.equal(ours[name], tensors[name]) for name in ours if "weight_" in name or name in VISION)
    config = json.loads((tmp_path / "again" / "config.json").read_text())["text_config"]["quantization_config"]
    assert config["format"] == "mxfp4-pack-quantized"
    assert {f"{PREFIX}layers.1.block_sparse_moe.gate", "mm_projector.proj.0"} < set(config["ignore"])
    assert not any(".experts." in name for name in config["ignore"])
    assert_bitwise(fm.load(tmp_path / "again", torch.float32)[1], tree)


def grouped(**changes: Any) -> dict[str, Any]:
    return {**SECTION, "config_groups": {"group_0": {**SECTION["config_groups"]["group_0"], **changes}}}


def spoilt(**weights: Any) -> dict[str, Any]:
    return grouped(weights={**SECTION["config_groups"]["group_0"]["weights"], **weights})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (None, r"no quantization_config, and tensors are packed: model\.layers\.1\.block_sparse_moe\.experts\.0\.w1, "),
        ({**SECTION, "quant_method": "mxfp4"}, "quant_method is 'mxfp4', expected 'compressed-tensors'"),
        ({**SECTION, "format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized', expected 'mxfp4-pack-quant"),
        ("x", "quantization_config is 'x', which is no section of fields, and tensors are packed: model"),
        ([], r"quantization_config is \[\], which is no section of fields, and tensors are packed: model"),
        ({**SECTION, "format": ["x"]}, r"quantization_config.format is \['x'\], expected 'mxfp4-pack-quantized'"),
        (grouped(format={"a": 1}), r"config_groups.format is \{'a': 1\}, expected 'mxfp4-pack-quantized'"),
        (grouped(format="nvfp4-pack-quantized"), "config_groups.format is 'nvfp4-pack-quantized', expected 'mxfp4-"),
        (
            {**grouped(format=None), "format": {}},
            r"quantization_config.format is \{\}, expected 'mxfp4-pack-quantized'",
        ),
        ({**SECTION, "config_groups": {}}, r"config_groups is \{\}, expected a section for each group"),
        ({**SECTION, "kv_cache_scheme": {"num_bits": 8}}, r"kv_cache_scheme is \{'num_bits': 8\}, expected None"),
        (spoilt(group_size=16), "weights.group_size is 16, expected 32"),
        (spoilt(num_bits=8), "weights.num_bits is 8, expected 4"),
        (spoilt(symmetric=False), "weights.symmetric is False, expected True"),
        (spoilt(scale_dtype="torch.bfloat16"), "weights.scale_dtype is 'torch.bfloat16', expected 'torch.uint8'"),
        (grouped(input_activations={"a": 1}), r"input_activations is \{'a': 1\}, expected None"),
    ],
)  # fmt: skip
def test_what_a_config_says_otherwise(section: Any, message: str, tmp_path: Path) -> None:
    fields = sizes(2, routed_expert_hidden_size=70, moe_intermediate_size=36, quantization_config=section)
    directory = write_packed(tmp_path / "other", packed()[0], fields)
    with pytest.raises(fm.CheckpointError, match=message) as raised:
        fm.load(directory)
    assert str(raised.value).splitlines()[0].endswith("config.json and the tensors do not fit")


def test_experts_that_are_packed_in_part(tmp_path: Path) -> None:
    """One expert of the last layer; or a scale that is missing."""
    tensors, floats = packed()
    module = f"{PREFIX}layers.4.block_sparse_moe.experts.3.w2"
    one = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{module}.")}
    directory = write_packed(
        tmp_path / "part", one | {f"{module}.weight": floats[f"{module}.weight"].float()}, PACKED_FIELDS
    )
    with pytest.raises(
        fm.CheckpointError, match=r"layers\.4\.mlp\.experts\.down: FLOAT \(.*3\.w2\.weight\); W4A16_MXFP4"
    ):
        fm.load(directory)
    lost = {name: tensor for name, tensor in tensors.items() if name != f"{module}.weight_scale"}
    with pytest.raises(fm.CheckpointError, match=r"missing \(1\):\n  model.*experts\.3\.w2\.weight_scale, for layers"):
        fm.load(write_packed(tmp_path / "part", lost, PACKED_FIELDS))


# Drafts and kernels


@functools.cache
def drafted(layers: int) -> block_drafts.Drafter:
    """A random draft for a model of so many layers, one of them latent attention."""
    linear = FIELDS["text_config"]["linear_attn_config"]
    kinds = {"kda_layers": [*range(1, layers)], "full_attn_layers": [layers]}
    fields = sizes(2, routed_expert_hidden_size=14, num_hidden_layers=layers, linear_attn_config=linear | kinds)
    return block_drafts.build(build(fields, 2, torch.float32), "vanilla", 1)


def quantized(one: block_drafts.Drafter, word: str) -> block_drafts.Drafter:
    """The same draft for the model with quantised experts. In float64, where no rounding hangs on a sum."""
    schemes = {"**.experts.*": word} | ({"**": "W8A8_DYNAMIC"} if word == "W4A8_DYNAMIC" else {})
    small = params.to(params.quantize(one.one.params, schemes), dtype=torch.float64)
    return replace(one, one=replace(one.one, params=small))


@pytest.mark.parametrize("word", ["W4A8_DYNAMIC", "W4A16_MXFP4"])
def test_a_block_draft_of_float_weights(word: str) -> None:
    """What a quantised model says with a DSpark draft is what it says without, greedy and sampled."""
    one = quantized(drafted(5), word)
    options: dict[str, Any] = {"sampling": [fm.Sampling(), fm.Sampling(0.9, seed=3)], "recurrent_dtype": torch.float64}
    model, tree, prompts = one.one.model, one.one.params, tokens(one.one, 7, 3)
    plain = fm.generate(model, tree, prompts, 10, **options)
    found = fm.generate(model, tree, prompts, 10, draft=one.draft, **options)
    assert [result.tokens for result in found] == [result.tokens for result in plain]


@pytest.mark.plain
@torch.no_grad()
def test_a_captured_round() -> None:
    """Replayed with fx, a round says what it does eagerly."""
    one = quantized(drafted(2), "W4A8_DYNAMIC")
    plainly: Any = fm.Round(one.one.model, one.draft).run
    step = lowering.jit(plainly, donate=("state", "drafted"), backend="fx")
    common = fm.RowSampling.of([fm.Sampling()]), torch.tensor([4]), torch.tensor([3])
    mine, right = (
        block_drafts.begun(one, [[5, 6, 7]], dtype=torch.float64, recurrent_dtype=torch.float64)[:3] for _ in range(2)
    )
    both = one.draft.joined(one.one.params)
    for _ in range(2):
        found, *mine = step(both, *mine, *common, steps=2, drawn=False)
        expected, *right = plainly(one.one.params, *right, *common, steps=2, drawn=False)
        assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.accepted, expected.accepted)


@pytest.mark.parametrize(
    ("word", "target", "kernel", "refused"),
    [
        ("W4A8_DYNAMIC", "ascend910b", "npu_grouped_experts_int_apart", "npu_grouped_experts"),
        ("W4A16_MXFP4", "ascend910b", "torch", "npu_grouped_experts_int"),
        ("W4A16_MXFP4", "ascend950", "npu_grouped_experts_mx4", "npu_grouped_experts_mx"),
        ("W4A16_MXFP4", "cpu", "torch_quantized_grouped", "torch_grouped"),
    ],
)  # fmt: skip
def test_kernels_of_experts(word: str, target: str, kernel: str, refused: str) -> None:
    """int4 ones have an operator on 910, float4 ones on 950, each with the activation between its products."""
    model = fm.build(sizes(2, routed_expert_hidden_size=64, moe_intermediate_size=64))
    tree = params.quantize(model.init_params(dtype=torch.bfloat16, device="meta"), {"**.experts.*": word})
    report = lowering.explain(model.forward, tree, None, fm.Batch.from_lists([[1, 2, 3]]), target=target)
    (row,) = (row for row in report.rows if row.op == "experts")
    assert row.kernel == kernel and row.refused[refused].startswith("takes no ")
