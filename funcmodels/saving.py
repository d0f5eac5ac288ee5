"""`save`: a model and its parameters as a checkpoint directory that `load` and transformers read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import params as checkpoints
from params.errors import ConfigError

from .model import Model

TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
"""What a checkpoint has beside weights and config for texts to go in and come out."""


def save(model: Model, params: Any, path: str | Path, *, max_shard_bytes: int = 5 * 10**9) -> Path:
    """Write parameters, quantised or not, with the config and the files of the tokenizer that the model came with.

    More than `max_shard_bytes` of weights becomes several files and an index. Returns the directory. Raises as
    `params.save`, and `ConfigError` for one rank's part of a model.
    """
    if model.ranks is not None:
        raise ConfigError(
            f"save: these are the parameters of rank {model.ranks.rank} of {model.ranks.size}; load the model without "
            "a mesh to write all of it"
        )
    config = dict(model.config_json)
    directory = checkpoints.save(
        params, path, model.whole_spec(), model.family.names, config, max_shard_bytes=max_shard_bytes
    )
    if model.tokenizer is not None and model.tokenizer.directory.resolve() != directory.resolve():
        for file in (model.tokenizer.directory / name for name in TEXT_FILES):
            if file.is_file():
                shutil.copyfile(file, directory / file.name)
    return directory
