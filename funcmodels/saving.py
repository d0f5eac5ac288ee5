"""`save`: a model and its parameters as a checkpoint directory that `load` and transformers read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import params as checkpoints
from params.errors import CheckpointError, ConfigError

from .model import Model
from .text import Tokenizer

TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
"""What a checkpoint has beside weights and config for texts to go in and come out."""


def save(model: Model, params: Any, path: str | Path, *, max_shard_bytes: int = 5 * 10**9) -> Path:
    """Write parameters, quantised or not, with the config and the files of the tokenizer that the model came with.

    More than `max_shard_bytes` of weights becomes several files and an index. Returns the directory. Raises as
    `params.save`, `ConfigError` for one rank's part of a model, and `CheckpointError` where the tokenizer's files are
    gone or cannot be read; then nothing is written.
    """
    if model.ranks is not None:
        raise ConfigError(
            f"save: these are the parameters of rank {model.ranks.rank} of {model.ranks.size}; load the model without "
            "a mesh to write all of it"
        )
    beside = {} if model.tokenizer is None else _text_files(model.tokenizer, Path(path))
    return checkpoints.save(
        params, path, model.whole_spec(), model.family.names, dict(model.config_json), max_shard_bytes=max_shard_bytes,
        beside=beside,
    )  # fmt: skip


def _text_files(tokenizer: Tokenizer, target: Path) -> dict[str, bytes]:
    """What a directory that is saved to lacks of the tokenizer's files, by name."""
    source = tokenizer.directory
    try:
        if source.resolve() == target.resolve():
            return {}
        if not source.is_dir():
            raise CheckpointError(
                f"{source}, which the tokenizer came from, is gone; put it back, or save weights and config alone with "
                "params.save"
            )
        files = (source / name for name in TEXT_FILES)
        return {file.name: file.read_bytes() for file in files if file.is_file()}
    except OSError as error:
        raise CheckpointError(f"the tokenizer's files in {source} cannot be read: {error}") from error
