"""Model families, one file each: parameters, layers, forward, and at its end the `FAMILY` that names them."""

from __future__ import annotations

from importlib import import_module

from ..family import by_model_type

FILES = ("deepseek_v2", "gemma3", "kimi_k3", "kimi_linear", "qwen3", "qwen3_5", "qwen3_8_flash_next")
"""Where the families stand. A new one is one word more."""

FAMILIES = by_model_type(import_module(f".{name}", __name__).FAMILY for name in FILES)
"""Family by `model_type` of the config."""
