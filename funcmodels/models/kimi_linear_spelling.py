"""Other spellings of Kimi Linear's config: fields with two names, and kinds of layers given by numbers.

Source: `KimiLinearConfig` of transformers 5.24, and published checkpoints, which keep the fields of the delta attention
in a section `linear_attn_config` that counts layers from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import config as configs

LINEAR, FULL = "linear_attention", "full_attention"
DENSE, SPARSE = "dense", "sparse"


def one_spelling(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields under the names of `KimiLinearConfig`, and a sentence for each that two spellings give differently."""
    named, broken = dict(given), []
    inside = {name: configs.section(given, "linear_attn_config").get(old) for name, old in _SECTION.items()}
    others = {name: (other, given.get(other)) for name, other in _ALIASES.items()}
    others |= {name: (f"linear_attn_config.{_SECTION[name]}", value) for name, value in inside.items()}
    for name, (other, value) in others.items():
        if given.get(name) is None:
            named[name] = value
        elif value is not None and value != given[name]:
            broken.append(f"{name} is {given[name]!r} and {other} is {value!r}: they mean the same; keep one")
    return named, broken


def layer_kinds(
    named: Mapping[str, Any], linear: Mapping[str, Any], layers: int | None
) -> tuple[dict[str, Any], list[str]]:
    """The kinds of layers, given as they are or by numbers; and what is wrong with the numbers.

    There are none where `layers` is None, for no number of layers: then that is to be complained of, and not the kinds.
    """
    found: dict[str, Any] = {"layer_types": named.get("layer_types") or []} if layers is None else {}
    dense = _dense_layers(named)
    broken = [] if configs.is_count(dense) else [f"first_k_dense_replace must be an integer from 0, found {dense!r}"]
    if named.get("mlp_layer_types") is None:
        found["mlp_layer_types"] = [] if broken else [DENSE if at < dense else SPARSE for at in range(layers or 0)]
    numbers: dict[str, Any] = {name: linear.get(name) for name in ("kda_layers", "full_attn_layers")}
    given = named.get("layer_types")
    if layers is None or (given is not None and None in numbers.values()) or numbers == dict.fromkeys(numbers):
        return found, broken
    broken += [
        f"linear_attn_config.{name} must be a list of layers, counted from 1; found {ids!r}"
        for name, ids in numbers.items()
        if not (isinstance(ids, (list, tuple)) and all(map(configs.is_count, ids)))
    ]
    if broken:
        return found, broken
    kda, full = numbers.values()
    if sorted([*kda, *full]) != list(range(1, layers + 1)):
        return found, [
            f"linear_attn_config: kda_layers {list(kda)} and full_attn_layers {list(full)} must name each layer from 1 "
            f"to num_hidden_layers {layers} once, counted from 1"
        ]
    kinds = [LINEAR if index + 1 in kda else FULL for index in range(layers)]
    if given not in (None, kinds, tuple(kinds)):
        return found, [f"layer_types {given!r} and linear_attn_config, which says {kinds}, differ; keep one"]
    return found | {"layer_types": kinds}, []


def _dense_layers(given: Mapping[str, Any]) -> Any:
    """How many layers at the beginning are dense, where nothing names them one by one."""
    found = given.get("first_k_dense_replace")
    return 1 if found is None else found


_ALIASES = {
    "max_position_embeddings": "model_max_length",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Fields, and the other name that configs have for each."""
_SECTION = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
    "use_full_rank_gate": "use_full_rank_gate",
    "gate_lower_bound": "gate_lower_bound",
}
"""Fields, and their names in the section `linear_attn_config`."""
