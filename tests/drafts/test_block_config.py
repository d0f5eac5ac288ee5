"""Loading block drafts: where fields stand, what is refused in words, and which tensors a directory must hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import funcmodels as fm
from funcmodels.drafts.block_config import default_layers
from funcmodels.drafts.named import DFlashDraft, DSparkDraft, read_config
from tests.oracle import block_drafts, qwen3_5
from tests.oracle.block_drafts import flattened

BASE: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "vocab_size": 90, "hidden_size": 24,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
OWN = {"block_size": 5, "mask_token_id": 7, "target_layer_ids": [0, 3], "markov_rank": 4, "markov_head_type": "gated"}


@pytest.mark.parametrize(
    "given",
    [
        BASE | OWN,
        BASE | {"dspark_config": OWN},
        BASE | {"dflash_config": OWN},
        BASE | {"block_size": 99, "dspark_config": OWN},
        BASE | {f"dspark_{name}": value for name, value in OWN.items()},
        BASE | {("dspark_noise_token_id" if name == "mask_token_id" else name): value for name, value in OWN.items()},
    ],
    ids=["top", "dspark_config", "dflash_config", "both", "prefixed", "noise"],
)
def test_fields_may_stand_in_several_places(given: dict[str, Any]) -> None:
    config = read_config(given, 4)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (5, 7, (0, 3))
    assert (config.markov_rank, config.markov_head_type, config.sample_from_anchor) == (4, "gated", True)
    assert (config.block, config.drafts) == (5, 5)


def test_what_a_config_leaves_out() -> None:
    dspark = read_config(BASE | {"mask_token_id": 1}, 36)
    dflash = read_config(BASE | {"mask_token_id": 1, "architectures": ["DFlashDraftModel"]}, 36)
    assert (dspark.block_size, dspark.drafts, dspark.block) == (7, 7, 7)
    assert (dflash.block_size, dflash.drafts, dflash.block) == (16, 15, 16)
    shifted = read_config(BASE | {"mask_token_id": 1, "sample_from_anchor": False}, 36)
    assert (shifted.drafts, shifted.block) == (7, 8)
    assert default_layers(36, 5) == [1, 9, 17, 25, 33]
    assert default_layers(9, 1) == [4]
    assert [dspark.causal(0), dspark.window(0)] == [False, None]


@pytest.mark.parametrize(
    ("is_causal", "causal"), [(None, [False, True]), (True, [True, True]), (False, [False, False])]
)
def test_which_layers_are_causal(is_causal: bool | None, causal: list[bool]) -> None:
    """Sliding ones, unless the config says it of all; only they have a window."""
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6, "is_causal": is_causal}
    config = read_config(BASE | OWN | kinds, 4)
    assert [config.causal(layer) for layer in range(2)] == causal
    assert [config.window(layer) for layer in range(2)] == [None, 6]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "names no block draft; known: DFlashDraftModel"),
        ({"architectures": None}, "architectures None names no block draft"),
        ({"target_layer_ids": [0, 4]}, r"target_layer_ids \[4\] are not in 0..3"),
        ({"target_layer_ids": []}, "target_layer_ids is empty"),
        ({"num_target_layers": 36}, "the draft is for a model of 36 layers, this one has 4"),
        ({"mask_token_id": 90}, r"mask_token_id must be in 0..89, found 90"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"markov_head_type": "lstm"}, "markov_head_type 'lstm' is not known; known: vanilla, gated, rnn"),
        ({"architectures": ["DFlashDraftModel"]}, "markov_rank 4 of a DFlash draft is not supported"),
        ({"architectures": ["DFlashDraftModel"], "markov_rank": 0, "block_size": 1}, "leaves no draft"),
        ({"num_key_value_heads": 4}, "must be a multiple of num_key_value_heads, found 6 and 4"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers must be at most 1000"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers is 2"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "needs a positive sliding_window, found 0"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types may hold full_attention and sliding_attention"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
        ({"output_multiplier": 0.5}, "output_multiplier 0.5 is not 1"),
        ({"selector_rank": 8, "selector_top_k": 4}, "selector_rank 8 is not supported.*selector_top_k 4"),
        ({"transformer_layer_config": {"hidden_size": 3}}, "transformer_layer_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supported"),
        ({"hidden_size": "24"}, "hidden_size must be an integer, found '24'"),
        ({"dspark_config": 3}, "dspark_config must be a section of fields, found 3"),
        ({"draft_vocab_size": 91}, "draft_vocab_size must be in 0..90, found 91"),
    ],
)
def test_mistakes_are_refused_in_words(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fm.ConfigError, match=sentence):
        read_config(BASE | OWN | change, 4)


# Directories


def written(path: Path, one: block_drafts.Drafter, rename: Any = lambda name: name, **more: torch.Tensor) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(one.fields))
    save_file({rename(name): x.contiguous() for name, x in one.tensors.items()} | more, path / "model.safetensors")
    return path


def aliased(name: str) -> str:
    """As drafts spell it that call the input projection an encoder."""
    return {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}.get(name, name)


@pytest.mark.parametrize("variant", ["dflash", "vanilla", "gated", "rnn", "narrow"])
@pytest.mark.parametrize("rename", [str, aliased, "model.{}".format], ids=["plain", "encoder", "model"])
def test_a_directory_loads(variant: str, rename: Any, tmp_path: Path) -> None:
    """Each spelling; tables of the model and a confidence head are passed over."""
    one = block_drafts.build(qwen3_5.pair("dense", 0), variant, 1)
    passed = {"embed_tokens.weight": torch.zeros(3, 2), "lm_head.weight": torch.zeros(3, 2)}
    passed |= {"confidence_head.proj.weight": torch.zeros(1, 4), "confidence_head.proj.bias": torch.zeros(1)}
    directory = written(tmp_path / "draft", one, rename, **passed)
    found = fm.draft(one.one.model, directory, dtype=torch.float32)
    assert isinstance(found, DFlashDraft if variant == "dflash" else DSparkDraft)
    again: Any = fm.draft(one.one.model, str(directory), dtype=None)
    assert again.config == found.config
    _, dstate, carry, _ = block_drafts.begun(one, [[1, 2, 3], [4]])
    steps = found.most_steps
    one_, two = (draft.propose(one.one.params, dstate, carry, steps)[0] for draft in (found, one.draft))
    assert torch.equal(one_.tokens, two.tokens)
    assert found.outputs == tuple(f"layers.{layer}" for layer in flattened(one.fields)["target_layer_ids"])


def test_tensors_that_nothing_reads_are_an_error(tmp_path: Path) -> None:
    one = block_drafts.build(qwen3_5.pair("dense", 0), "vanilla", 1)
    extra = {"layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}
    with pytest.raises(fm.CheckpointError, match=r"layers\.9\.mlp\.up_proj\.weight"):
        fm.draft(one.one.model, written(tmp_path / "more", one, **extra))
    del one.tensors["fc.weight"]
    with pytest.raises(fm.CheckpointError, match=r"fc\.weight"):
        fm.draft(one.one.model, written(tmp_path / "fewer", one))


def test_drafts_of_other_models_are_refused(tmp_path: Path) -> None:
    one = block_drafts.build(qwen3_5.pair("dense", 0), "vanilla", 1)
    directory = written(tmp_path / "draft", one)
    other = dict(one.one.model.config_json)
    hidden, vocab = other["hidden_size"], other["vocab_size"]
    with pytest.raises(fm.ConfigError, match=f"it has {hidden} channels, the model {hidden + 2}"):
        fm.draft(fm.build(other | {"hidden_size": hidden + 2}), directory)
    with pytest.raises(fm.ConfigError, match=f"it knows {vocab} tokens, the model {vocab + 1}"):
        fm.draft(fm.build(other | {"vocab_size": vocab + 1}), directory)
    layers = {"num_hidden_layers": 5, "layer_types": [*other["layer_types"], "full_attention"]}
    with pytest.raises(fm.ConfigError, match="the draft is for a model of 4 layers, this one has 5"):
        fm.draft(fm.build(other | layers), directory)
    with pytest.raises(ValueError, match="'eagle' is not a known draft; give 'mtp', 'dspark' or the directory of one"):
        fm.draft(one.one.model, "eagle")
