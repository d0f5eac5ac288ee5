"""Quantised checkpoints from end to end: a ModelSlim directory, generation, drafts, capture, lowering."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import funcmodels as fm
import lowering
import params as trees
from funcmodels.cli import main
from params.quant.values import Int8Weight
from tests.sharding.kinds import EXPERTS, HEADS, KINDS, whole

SCHEMES: dict[str, dict[str, str]] = {
    "W8A8": {"**.experts.*": "W8A8_DYNAMIC", "**": "W8A8"},
    "W8A8_DYNAMIC": {"**": "W8A8_DYNAMIC"},
    "W4A8_DYNAMIC": {"**.experts.*": "W4A8_DYNAMIC", "**": "W8A8_DYNAMIC"},
    "W8A8_MXFP8": {"**": "W8A8_MXFP8"},
}
BOUNDS = {"W8A8": 0.2, "W8A8_DYNAMIC": 0.15, "W4A8_DYNAMIC": 0.45, "W8A8_MXFP8": 0.5}
"""Of logits, in units of their norm, which would be 1.4 for logits of nothing. These models are narrow and random, so
that errors of 1 % a product (13.5 of int4, 4 of MX) add up; tests/lowering holds products to formulas."""
PROMPTS = [[3, 5, 7, 9, 11, 2, 6], [4, 8]]
PAIRS = [(kind, scheme) for kind in KINDS for scheme in SCHEMES if kind in EXPERTS or scheme != "W4A8_DYNAMIC"]


def quantised(kind: str, scheme: str) -> tuple[fm.Model, Any, Any]:
    """The model, its float parameters, and the same quantised."""
    model, params = whole(kind)
    known = {word: pattern for pattern, word in SCHEMES[scheme].items()}
    schemes = {pattern: word for word, pattern in known.items() if kind in EXPERTS or pattern == "**"}
    if kind == "deepseek_v2" and "W8A8" in known:
        # Its biases are leaves of their own, which a static scheme's files have no place for.
        schemes = {"**.attn.down.weight": "W8A8_DYNAMIC", **schemes}
    ranges = fm.input_ranges(model, params, [[*range(1, 40)], [*range(40, 69)]]) if "W8A8" in known else None
    return model, params, trees.quantize(params, schemes, input_ranges=ranges)


def scored(model: fm.Model, params: Any) -> Tensor:
    """Logits of every prompt's every token."""
    with torch.no_grad():
        return model.forward(params, None, fm.Batch.from_lists(PROMPTS))[0].logits


@pytest.mark.parametrize(("kind", "scheme"), PAIRS)
def test_a_saved_checkpoint_computes_what_it_did(kind: str, scheme: str, tmp_path: Path) -> None:
    """Through a directory as ModelSlim writes it, to the last bit, and near the float model."""
    model, params, small = quantised(kind, scheme)
    trees.save(small, tmp_path, model.whole_spec(), model.family.names, dict(model.config_json))
    assert not list(tmp_path.glob("model*.safetensors"))
    assert json.loads((tmp_path / "quant_model_description.json").read_text())["model_quant_type"]
    again, loaded = fm.load(tmp_path, torch.float32)
    assert trees.equal(loaded, small)
    expected, found = scored(model, params), scored(again, loaded)
    assert torch.equal(found, scored(model, small))
    assert 0 < (found - expected).norm() < BOUNDS[scheme] * expected.norm()


@pytest.mark.parametrize(("kind", "scheme"), [pair for pair in PAIRS if pair[0] in HEADS])
def test_a_float_draft_head_drafts_for_a_quantised_model(kind: str, scheme: str) -> None:
    """What comes out is what comes out without it, greedy and sampled. In float64, where no rounding hangs on a sum."""
    model, _, small = quantised(kind, scheme)
    small = trees.to(small, dtype=torch.float64)
    sampling = [fm.Sampling(), fm.Sampling(1.0, top_k=20, seed=3)]
    runs = {
        draft: fm.generate(model, small, PROMPTS, max_new_tokens=12, draft=draft, sampling=sampling)
        for draft in ("none", "mtp")
    }
    for plain, drafted in zip(runs["none"], runs["mtp"], strict=True):
        assert drafted.tokens == plain.tokens
        assert drafted.rounds <= len(plain.tokens)


def test_each_module_runs_by_its_own_weights() -> None:
    """Experts of the model in int8, those of the draft head in float, in one round."""
    model, _, small = quantised("qwen_moe", "W8A8_DYNAMIC")
    assert isinstance(small.layers[0].mlp.experts.down, Int8Weight)
    assert isinstance(small.mtp.layers[0].mlp.experts.down, Tensor)
    with lowering.record() as report:
        fm.generate(model, small, PROMPTS, max_new_tokens=3, draft="mtp")
    kernels = {row.kernel for row in report.rows if row.op == "experts"}
    assert any("quantized" in kernel for kernel in kernels)
    assert any("quantized" not in kernel for kernel in kernels)


@pytest.mark.plain
@pytest.mark.parametrize("scheme", ["W8A8_DYNAMIC", "W8A8_MXFP8"])
def test_a_captured_round_of_a_quantised_model(scheme: str) -> None:
    """Replayed with fx, tokens are those of the plain run; in float64, as above."""
    model, _, small = quantised("qwen_moe", scheme)
    small = trees.to(small, dtype=torch.float64)
    options: dict[str, Any] = {"max_new_tokens": 5, "draft": "mtp", "recurrent_dtype": torch.float64}
    plain = fm.generate(model, small, PROMPTS[:1], **options)
    captured = fm.generate(model, small, PROMPTS[:1], **options, backend="fx")
    assert [one.tokens for one in captured] == [one.tokens for one in plain]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_prepared_weights_compute_the_same(scheme: str) -> None:
    """`lowering.prepare` is for speed."""
    model, _, small = quantised("deepseek_v2", scheme)
    prepared = lowering.prepare(small)
    found, expected = scored(model, prepared), scored(model, small)
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("scheme", ["W8A8_DYNAMIC", "W8A8_MXFP8"])
@pytest.mark.parametrize("kind", ["deepseek_v2", "kimi_linear"])
def test_latent_attention_reads_a_quantised_up_projection_dequantised(kind: str, scheme: str) -> None:
    """With and without a state, in any split of the prompt, it is attention with the weight that the integers are."""
    model, params = whole(kind)
    small = trees.quantize(params, {"**.attn.up.weight": scheme}, keep=())
    plain = trees.dequantize(small, torch.float32)
    assert not trees.equal(plain, params)
    for split in ([[7, 2]], [[3, 1], [4, 1]], [[5, 0], [1, 2], [1, 0]]):
        found, expected = (run_in_parts(model, tree, split) for tree in (small, plain))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scored(model, small), scored(model, plain), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", ["W8A8_DYNAMIC", "W8A8_MXFP8"])
@pytest.mark.parametrize("kind", sorted(EXPERTS))
def test_a_router_may_be_quantised(kind: str, scheme: str, tmp_path: Path) -> None:
    """Exports of some models do so; it is saved, loaded, and scores experts nearly as the float one."""
    model, params = whole(kind)
    small = trees.quantize(params, {"**.router.weight": scheme}, keep=("mtp.**",))
    trees.save(small, tmp_path, model.whole_spec(), model.family.names, dict(model.config_json))
    again, loaded = fm.load(tmp_path, torch.float32)
    assert trees.equal(loaded, small)
    batch = fm.Batch.from_lists(PROMPTS)
    with torch.no_grad():
        chosen = [again.forward(tree, None, batch, outputs=("router",))[0].extra["router"] for tree in (loaded, params)]
    assert not torch.equal(chosen[0].weights, chosen[1].weights)
    assert (chosen[0].ids == chosen[1].ids).float().mean() > 0.7


@torch.no_grad()
def run_in_parts(model: fm.Model, params: Any, split: list[list[int]]) -> Tensor:
    """Logits of all tokens of the prompts, so many of each at a time."""
    state = model.init_state(2, 16, page_size=4)
    found, left = [], [list(prompt) for prompt in PROMPTS]
    for counts in split:
        lists = [tokens[:count] for tokens, count in zip(left, counts, strict=True)]
        left = [tokens[count:] for tokens, count in zip(left, counts, strict=True)]
        out, state = model.forward(params, state, fm.Batch.from_lists(lists, state))
        found.append(out.logits)
    return torch.cat(found)


def test_the_command_line_says_what_is_quantised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`inspect` names schemes and the draft head's, `lower` the kernels of the stored weights."""
    model, _, small = quantised("qwen_moe", "W8A8_DYNAMIC")
    trees.save(small, tmp_path, model.whole_spec(), model.family.names, dict(model.config_json))
    assert main(["inspect", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "draft head: unquantised (FLOAT)" in said
    assert "W8A8_DYNAMIC" in said
    assert main(["lower", "--model", str(tmp_path), "--target", "ascend910b", "--tokens", "16"]) == 0
    stored = capsys.readouterr().out
    assert "npu_quant_matmul" in stored


@pytest.mark.parametrize(
    ("scheme", "kernel"), [("W8A8", "npu_quant_matmul_static"), ("**.mlp.**=W8A8_DYNAMIC", "npu_quant_matmul ")]
)
def test_lowering_as_if_quantised(scheme: str, kernel: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without weights, and which kernels its projections would get."""
    assert main(["lower", "--target", "ascend910b", "--quantize", scheme]) == 0
    assert kernel in capsys.readouterr().out


def test_more_tokens_than_the_model_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before anything is traced."""
    assert main(["lower", "--target", "ascend910b", "--tokens", "10000000"]) == 2
    assert "at most" in capsys.readouterr().err
