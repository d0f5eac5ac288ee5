"""Another index for a model of Qwen3.8-Flash-Next, to see what its budget is worth."""

from __future__ import annotations

from dataclasses import replace

from ..model import Model
from .qwen3_8_flash_next_rules import indexed_by, read_config


def with_index(model: Model, *, budget: int | None = None, ratio: int | None = None) -> Model:
    """The model with another index: `budget` tokens of selected blocks a query, `ratio` tokens a block.

    Weights stay as they are, and a budget is free to choose; of another ratio than theirs they have seen no block keys,
    which is warned about. States have a block key every `ratio` tokens: another ratio needs another state. Raises
    `ConfigError` for a budget that is not a multiple of the ratio.
    """
    return replace(model, config=indexed_by(model.config, read_config(model.config_json), budget=budget, ratio=ratio))
