"""Gemma3's config: the published sizes, every spelling of its rotary fields as transformers reads it, and mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
from funcmodels.models.gemma3 import Gemma3Config, read_config
from tests.oracle.gemma3 import GLOBAL, LOCAL

SCALED = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
PUBLISHED: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
           "head_dim": 256, "intermediate_size": 6912, "sliding_window": 512, "vocab_size": 262144},
    "4b": {"hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240, "sliding_window": 1024, **SCALED},
    "12b": {"hidden_size": 3840, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8,
            "intermediate_size": 15360, "sliding_window": 1024, **SCALED},
    "27b": {"hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
            "head_dim": 128, "intermediate_size": 21504, "sliding_window": 1024, "query_pre_attn_scalar": 168,
            **SCALED},
}  # fmt: skip
"""What config.json holds; it leaves out what transformers has as a default."""
BASE: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 90, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 5,
}  # fmt: skip


def by_transformers(fields: dict[str, Any]) -> Gemma3Config:
    """The same fields, read and written again by transformers."""
    from transformers import Gemma3TextConfig

    given = {name: value for name, value in fields.items() if name != "model_type"}
    return read_config(Gemma3TextConfig(**given).to_dict())


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes(size: str) -> None:
    fields = PUBLISHED[size]
    config = read_config(fields)
    assert config == by_transformers(fields)
    nested = {"model_type": "gemma3", "text_config": {**fields, "model_type": "gemma3_text"}, "vision_config": {}}
    assert fm.build(nested).config == config
    layers = fields["num_hidden_layers"]
    assert [config.window(layer) is None for layer in range(layers)] == [(n + 1) % 6 == 0 for n in range(layers)]
    assert config.rope_factor == (1.0 if size == "1b" else 8.0) and config.rope_local_factor == 1.0


@pytest.mark.plain
@pytest.mark.parametrize("outer", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("nested", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
def test_a_wrapper_says_whether_the_head_is_tied(outer: dict[str, Any], nested: dict[str, Any], tmp_path: Path) -> None:
    """By its default where it is silent: what its text section says ties nothing."""
    from transformers import Gemma3Config as Wrapper

    theirs = Wrapper(**outer, text_config=BASE | nested)
    given = {"model_type": "gemma3", "text_config": BASE | nested, **outer}
    model = fm.build(given)
    assert model.config.tie_word_embeddings == theirs.tie_word_embeddings
    fm.save(model, model.init_params(), tmp_path)
    assert fm.build(tmp_path).config == model.config


ROPE: list[dict[str, Any]] = [
    {}, {"sliding_window_pattern": 2}, {"sliding_window_pattern": 1}, {"layer_types": [LOCAL, GLOBAL] * 3 + [LOCAL]},
    {"rope_theta": 5e5, "rope_local_base_freq": 2e4}, {"rope_theta": 5e5, **SCALED}, SCALED,
    {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 3}, "rope_local_base_freq": 7},
    {"rope_parameters": {GLOBAL: {"type": "linear", "factor": 2.0}}},
    {"rope_parameters": {GLOBAL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e5}}},
    {"rope_parameters": {LOCAL: {"rope_type": "linear", "factor": 2.5}}, "rope_theta": 12.0},
    {"rope_parameters": {LOCAL: {"rope_type": "default", "rope_theta": 9.0},
                         GLOBAL: {"rope_type": "default", "rope_theta": 8.0}}, "rope_theta": 12.0},
    {"rope_parameters": {GLOBAL: {"rope_type": "linear", "factor": 8.0}}, **SCALED},
    {"final_logit_softcapping": 30.0, "tie_word_embeddings": False, "attention_bias": True},
]  # fmt: skip


@pytest.mark.parametrize("changes", ROPE, ids=str)
def test_every_spelling_is_read_as_transformers_reads_it(changes: dict[str, Any]) -> None:
    assert read_config({**BASE, **changes}) == by_transformers({**BASE, **changes})


def test_nulls_are_defaults() -> None:
    nulls = dict.fromkeys(("rope_scaling", "layer_types", "final_logit_softcapping", "attn_logit_softcapping"))
    assert read_config({**BASE, **nulls}) == read_config(BASE)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"num_hidden_layers": "7"}, "num_hidden_layers must be an integer, found '7'"),
    ({"num_hidden_layers": 10**30, "layer_types": None}, "num_hidden_layers must be at most 1000,"),
    ({"num_attention_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads, found 3 and 2"),
    ({"head_dim": 15}, "head_dim must be even for its channels to turn in pairs, found 15"),
    ({"sliding_window": 0}, "sliding_window must be positive, found 0"),
    ({"sliding_window": None}, "sliding_window is null and layer_types has sliding_attention layers"),
    ({"sliding_window_pattern": 0}, "sliding_window_pattern must be a positive integer, found 0"),
    ({"layer_types": [LOCAL]}, "layer_types has 1 entries, num_hidden_layers is 7"),
    ({"layer_types": [LOCAL, "chunked"] * 3 + [LOCAL]}, "layer_types may hold full_attention and sliding_attention"),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be positive, found 0"),
    ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported; only gelu_pytorch_tanh is"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
    ({"attn_logit_softcapping": 50.0},
     "attn_logit_softcapping 50.0 is not supported: transformers ignores it for Gemma3, other engines apply it"),
    ({"final_logit_softcapping": 0.0}, "final_logit_softcapping must be positive or null, found 0.0"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' of full_attention is not supported"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_type 'linear' of full_attention needs a factor"),
    ({"rope_scaling": {"factor": 8.0}}, "rope_type 'default' of full_attention takes no factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": -8.0}}, "rope_factor must be positive, found -8.0"),
    ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling has a type and no rope_type"),
    ({"rope_scaling": {"type": "linear", "rope_type": "default"}}, "rope_type 'default' and type 'linear' of full_att"),
    ({"rope_scaling": 8.0}, "rope_scaling must be a section of fields, found 8.0"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
     "rope_parameters holds sections full_attention and sliding_attention, found ['rope_theta', 'rope_type']"),
    ({"rope_parameters": {GLOBAL: {"rope_type": "linear", "factor": 4.0}}, **SCALED},
     "rope_scaling and rope_parameters['full_attention'] differ in ['factor']; remove the one not meant"),
    ({"rope_parameters": {LOCAL: {"rope_type": "default", "partial_rotary_factor": 0.5}}},
     "partial_rotary_factor 0.5 of sliding_attention is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(changes) for changes, _ in WRONG])
def test_mistakes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ConfigError) as error:
        fm.build({**BASE, **changes})
    assert message in str(error.value)


def test_several_mistakes_are_told_at_once() -> None:
    with pytest.raises(fm.ConfigError, match=r"head_dim must be even.*attn_logit_softcapping 1 is not supported"):
        fm.build({**BASE, "head_dim": 5, "attn_logit_softcapping": 1})


@pytest.mark.parametrize("size", PUBLISHED)
@pytest.mark.parametrize("target", ["cpu", "ascend910b", "ascend950"])
def test_published_sizes_lower_without_weights(size: str, target: str) -> None:
    """Decoding and a prompt, with the kernels of windows and of whole rows."""
    model = fm.build({**PUBLISHED[size], "model_type": "gemma3_text"})
    state = model.init_state(2, 4096, torch.bfloat16, device="meta")
    spec = model.param_spec(torch.bfloat16)
    for lists in ([[1], [2]], [[1] * 700, [2] * 30]):
        report = lowering.explain(model.forward, spec, state, fm.Batch.from_lists(lists), target=target)
        calls = {row.op: 0 for row in report.rows}
        for row in report.rows:
            calls[row.op] += row.count
        layers = PUBLISHED[size]["num_hidden_layers"]
        assert calls["paged_attention"] == calls["geglu"] == layers
        assert (calls["gemma_rms_norm"], calls["add_gemma_rms_norm"]) == (4 * layers + 1, 2 * layers)
        assert calls["rotary_angles"] == 2
