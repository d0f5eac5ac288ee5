"""Configs of Qwen3.5 that are wrong: every missing or contradictory field is named."""

from __future__ import annotations

import re
from typing import Any

import pytest

import funcmodels as fm
from tests.oracle.qwen3_5 import KINDS, sizes

TYPES = {"dense": "qwen3_5_text", "moe": "qwen3_5_moe_text"}


def config(kind: str = "dense", **changes: Any) -> dict[str, Any]:
    changed = {**sizes(kind, 0), "model_type": TYPES[kind], **changes}
    return {name: value for name, value in changed.items() if value is not ...}


@pytest.mark.parametrize("kind", KINDS)
def test_all_missing_fields_are_listed_at_once(kind: str) -> None:
    kept = {"model_type": TYPES[kind], "vocab_size": 9, "hidden_size": None}
    with pytest.raises(fm.ConfigError) as caught:
        fm.build(kept)
    feed_forward = {
        "dense": ["intermediate_size"],
        "moe": ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"],
    }
    expected = [
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
        *feed_forward[kind],
    ]  # fmt: skip
    assert sorted(re.findall(r"(\w+) is missing", str(caught.value))) == sorted(expected)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("dense", {"hidden_size": "32"}, "hidden_size must be an integer, found '32'"),
        ("dense", {"hidden_size": 32.0}, "hidden_size must be an integer, found 32.0"),
        ("dense", {"num_hidden_layers": True}, "num_hidden_layers must be an integer, found True"),
        ("dense", {"rms_norm_eps": "small"}, "rms_norm_eps must be a finite number, found 'small'"),
        ("dense", {"rms_norm_eps": float("inf")}, "rms_norm_eps must be a finite number, found inf"),
        ("dense", {"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, found 1"),
        ("dense", {"layer_types": "full_attention"}, "layer_types must be a list of str, found 'full_attention'"),
        ("dense", {"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers is 4"),
        ("dense", {"layer_types": ["sliding_attention"] * 4}, "found ['sliding_attention']"),
        (
            "dense",
            {"layer_types": None, "full_attention_interval": 0},
            "full_attention_interval must be a positive integer, found 0",
        ),
        (
            "dense",
            {"layer_types": None, "full_attention_interval": "4"},
            "full_attention_interval must be a positive integer",
        ),
        ("dense", {"num_hidden_layers": None, "layer_types": None}, "num_hidden_layers is missing"),
        ("dense", {"num_attention_heads": 5, "num_key_value_heads": 2}, "must be a multiple of num_key_value_heads"),
        ("dense", {"num_key_value_heads": 0}, "num_key_value_heads must be positive, found 0"),
        (
            "dense",
            {"linear_num_key_heads": 2, "linear_num_value_heads": 3},
            "must be a multiple of linear_num_key_heads, found 3 and 2",
        ),
        ("dense", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim must be positive, found 0"),
        ("dense", {"intermediate_size": 0}, "intermediate_size must be positive, found 0"),
        ("dense", {"num_experts": 4}, "model_type 'qwen3_5_text' and num_experts 4 contradict each other"),
        ("dense", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; only silu is"),
        ("dense", {"attention_bias": True}, "attention_bias true is not supported"),
        ("dense", {"attn_output_gate": False}, "attn_output_gate false is not supported"),
        ("dense", {"text_config": "none"}, "text_config must be a section of fields, found 'none'"),
        ("dense", {"rope_parameters": [1]}, "rope_parameters must be a section of fields, found [1]"),
        ("dense", {"num_hidden_layers": 10**30, "layer_types": None}, "num_hidden_layers must be at most 1000,"),
        ("dense", {"mtp_num_hidden_layers": 10**30}, "mtp_num_hidden_layers must be at most 100,"),
        ("dense", {"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers must not be negative, found -1"),
        ("moe", {"num_experts": 0}, "num_experts must be positive, found 0"),
        ("moe", {"num_experts": 3, "num_experts_per_tok": 4}, "num_experts_per_tok 4 is more than num_experts 3"),
        ("moe", {"num_experts_per_tok": 0}, "num_experts_per_tok must be positive, found 0"),
    ],
)
def test_fields_that_cannot_be(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ConfigError, match=re.escape(message)):
        fm.build(config(kind, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial_rotary_factor": 0.01}, "gives 0 rotary channels of"),
        ({"partial_rotary_factor": 1.5}, "an even number in 2..head_dim is needed"),
        ({"mrope_section": [1, 1]}, "mrope_section must have three parts, found [1, 1]"),
        ({"rope_type": "yarn"}, "rope_type 'yarn' is not supported; only default is"),
        ({"rope_theta": -1.0}, "rope_theta must be positive, found -1.0"),
        ({"rope_theta": "1e4"}, "rope_theta must be a finite number, found '1e4'"),
        ({"rope_theta": float("inf")}, "rope_theta must be a finite number, found inf"),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number, found nan"),
        ({"mrope_section": [3, -1, 0]}, "mrope_section must not have negative parts, found [3, -1, 0]"),
        ({"mrope_section": [90, 1, 1]}, "mrope_section [90, 1, 1] adds up to 92, more than half of the"),
        ({"mrope_interleaved": False}, "mrope_interleaved False is not supported; only true is"),
        ({"rope_type": "default", "type": "yarn"}, "rope_type 'yarn' is not supported; only default is"),
    ],
)
@pytest.mark.parametrize("section", ["rope_parameters", "rope_scaling"])
def test_rotary_fields_that_cannot_be(section: str, changes: dict[str, Any], message: str) -> None:
    given = config(rope_parameters=...) | {section: sizes("dense", 0)["rope_parameters"] | changes}
    with pytest.raises(fm.ConfigError, match=re.escape(message)):
        fm.build(given)


def test_an_older_spelling_of_the_rotary_kind() -> None:
    given = config(rope_parameters=..., rope_scaling={"type": "yarn", "factor": 4.0})
    with pytest.raises(fm.ConfigError, match="rope_type 'yarn' is not supported"):
        fm.build(given)


@pytest.mark.parametrize("change", [{"rope_theta": 5e5}, {"mrope_section": [1, 0, 0]}, {"rope_type": "yarn"}])
@pytest.mark.parametrize("changed", ["rope_parameters", "rope_scaling"])
def test_two_rotary_sections_must_agree(changed: str, change: dict[str, Any]) -> None:
    rope = sizes("dense", 0)["rope_parameters"]
    given = config(**{"rope_parameters": rope, "rope_scaling": rope, changed: {**rope, **change}})
    with pytest.raises(fm.ConfigError, match="rope_parameters and rope_scaling are both given and differ") as caught:
        fm.build(given)
    assert ("yarn" in change.values()) == (f"{changed}: rope_type 'yarn' is not supported" in str(caught.value))


@pytest.mark.parametrize("other", [{}, None, sizes("dense", 0)["rope_parameters"]])
def test_a_second_rotary_section_may_repeat_the_first_or_be_empty(other: Any) -> None:
    assert fm.build(config(rope_scaling=other)).config == fm.build(config()).config


@pytest.mark.parametrize("sections", [[1, 1, 1], [11, 11, 10]])
def test_mrope_sections_that_transformers_takes_as_they_are(sections: list[int]) -> None:
    given = config(head_dim=16, rope_parameters={"partial_rotary_factor": 0.5, "mrope_section": sections})
    assert fm.build(given).config.mrope_section == tuple(sections)


def test_several_contradictions_are_one_error() -> None:
    wrong = config("moe", num_experts=3, num_experts_per_tok=4, hidden_act="gelu", linear_num_value_heads=0)
    with pytest.raises(fm.ConfigError) as caught:
        fm.build(wrong)
    assert all(word in str(caught.value) for word in ("num_experts_per_tok", "gelu", "linear_num_value_heads"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_section_stands_above_what_is_beside_it(kind: str) -> None:
    text = config(kind)
    outer = {"model_type": TYPES[kind].removesuffix("_text"), "text_config": text, "vocab_size": 7, "vision_config": {}}
    assert fm.build(outer).config == fm.build(text).config


@pytest.mark.parametrize(("said", "tied"), [(False, False), (None, True)])
def test_a_wrapper_says_whether_the_head_is_tied(said: bool | None, tied: bool) -> None:
    """The text section only where the wrapper is silent."""
    outer = {"model_type": "qwen3_5", "tie_word_embeddings": said, "text_config": config(tie_word_embeddings=True)}
    assert fm.build(outer).config.tie_word_embeddings == tied


def test_defaults_of_rotary_and_layer_kinds() -> None:
    read = fm.build(config(rope_parameters=..., layer_types=..., head_dim=16, num_hidden_layers=8)).config
    assert (read.rope_theta, read.rotary_dim, read.mrope_section) == (10000.0, 4, (11, 11, 10))
    assert [index for index, kind in enumerate(read.layer_types) if kind == "full_attention"] == [3, 7]


def test_rotary_fields_of_their_own_section_win() -> None:
    given = config(rope_theta=5.0, rope_parameters={"rope_theta": 7.0, "partial_rotary_factor": 0.5})
    assert fm.build(given).config.rope_theta == 7.0


@pytest.mark.plain
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "float32"}, "init_state: dtype and recurrent_dtype must be a torch.dtype, found 'float32'"),
        ({"recurrent_dtype": "float32"}, "dtype and recurrent_dtype must be a torch.dtype, found 'float32'"),
        ({"rows": 1.5}, "init_state: rows must be an integer, found 1.5"),
        ({"page_size": None}, "init_state: page_size must be an integer, found None"),
        ({"pages": "4"}, "init_state: pages must be an integer, found '4'"),
    ],
)
def test_a_state_of_wrong_types(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        fm.build(config()).init_state(**{"rows": 1, "max_len": 8, **given})
