"""The config of Kimi-K3: what shapes its text model, read from `config.json` and checked.

The text model's fields stand in a section `text_config`, or alone; they are those of Kimi Linear and some more. Whether
a field of the delta attention stands in the section `linear_attn_config` or beside it is all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lowering.ops.mlp import Caps

from .. import config as configs
from .kimi_linear_config import KimiLinearConfig, read_fields


@dataclass(frozen=True, kw_only=True)
class KimiK3Config(KimiLinearConfig):
    """Fields of Kimi Linear, and those of what is new.

    A snapshot of the sum of sublayers' outputs is taken every `attn_res_block_size` layers. Routed experts are as wide
    as `routed_expert_hidden_size`. `activation_situ_linear_beta` 0 stands for null: nothing bounds the part without a
    gate. `gate_lower_bound` is that of the log decay of a step.
    """

    num_shared_experts: int = 2
    moe_intermediate_size: int = 3072
    routed_scaling_factor: float = 1.0
    attn_res_block_size: int
    routed_expert_hidden_size: int
    activation_situ_beta: float = 1.0
    activation_situ_linear_beta: float = 0.0
    gate_lower_bound: float

    @property
    def caps(self) -> Caps:
        """Caps of the activation, as `ops.swiglu` takes them."""
        return float(self.activation_situ_beta), float(self.activation_situ_linear_beta) or None


def read_config(given: Mapping[str, Any]) -> KimiK3Config:
    """The config of a `config.json`, whole or the text model's section. Raises `ConfigError` that names the fields."""
    text = configs.section(given, "text_config") or given
    tied = {configs.TIED: configs.text_fields(given).get(configs.TIED)}
    return read_fields(KimiK3Config, {**text, **tied}, ("q_lora_rank",), _rules)


def is_kimi_k3(given: Mapping[str, Any]) -> bool:
    """Whether a config that calls itself kimi_linear is Kimi-K3's text section standing alone: both have that type."""
    return given.get("model_type") == "kimi_linear" and bool(given.get("attn_res_block_size"))


def _rules(config: KimiK3Config, given: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    yield from configs.positive(config, ("q_lora_rank",))
    cap, bound = config.activation_situ_linear_beta, config.gate_lower_bound
    yield cap >= 0, f"activation_situ_linear_beta must be positive or null, found {cap}"
    yield bound < 0, f"gate_lower_bound must be negative, as log decays are; found {bound}"
    act = given.get("hidden_act")
    yield act in (None, "situ"), f"hidden_act {act!r} is not supported; only situ is"
    for name in ("use_full_rank_gate", "mla_use_output_gate", "latent_moe_use_norm"):
        found = given.get(name)
        yield found in (None, True), f"{name} {found!r} is not supported: every published Kimi-K3 has it"
    yield not config.attention_bias, "attention_bias True is not supported: projections of Kimi-K3 have none"
