"""Tiny random models of transformers of every kind that a directory may hold, those that see images too among them."""

from __future__ import annotations

from typing import Any

import torch

from tests import tiny
from tests.oracle import deepseek_v2, gemma3, kimi_linear, qwen3_8_flash_next

EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
}  # fmt: skip
TOWER = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", tiny.SIZES),
    "qwen3_5_moe": ("Qwen3_5Moe", tiny.SIZES | EXPERTS),
    "gemma3": ("Gemma3", gemma3.sizes(1) | {"pad_token_id": 0, "final_logit_softcapping": None}),
    "qwen4_exp": ("Qwen4Exp", qwen3_8_flash_next.sizes(1)),
    "deepseek_v2": ("DeepseekV2", deepseek_v2.sizes("lite", 1)),
    "kimi_linear": ("KimiLinear", kimi_linear.sizes("published", 1)),
}
"""Family to the name of its classes and the fields of its text model. No logits are capped, as wrappers cap none."""
WRAPPERS = tuple(FAMILIES)[:4]


def wrapper_config(family: str, outer: bool, nested: bool) -> Any:
    """The config of a model that sees images, with what it and its text part say of tying."""
    import transformers

    name, text = FAMILIES[family]
    vision = SIGLIP if name == "Gemma3" else TOWER | {"out_hidden_size": text["hidden_size"]}
    pictures = {"mm_tokens_per_image": 4} if name == "Gemma3" else {}
    kind = getattr(transformers, f"{name}Config")
    text = text | {"tie_word_embeddings": nested}
    return kind(text_config=text, vision_config=vision, tie_word_embeddings=outer, **pictures)


def text_config(family: str, **changes: Any) -> Any:
    """The config of a text model."""
    import transformers

    name, text = FAMILIES[family]
    kind = f"{name}TextConfig" if family in WRAPPERS else f"{name}Config"
    return getattr(transformers, kind)(**text | changes)


def named(family: str, ending: str) -> Any:
    """The class of transformers, such as the one that ends in `ForCausalLM`."""
    import transformers

    return getattr(transformers, FAMILIES[family][0] + ending)


def filled(kind: Any, config: Any) -> Any:
    """A model with every parameter random."""
    for part in (config, config.get_text_config()):
        part._attn_implementation = part._experts_implementation = "eager"
    model, generator = kind(config).eval().requires_grad_(False), torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model
