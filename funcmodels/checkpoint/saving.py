"""`save`: a model and its parameters as a checkpoint directory that `load` and transformers read.

What such a directory holds beside the parameters follows one rule. Where the model was loaded from a directory, the
tensors there that no model here reads (a vision tower, its projector) go along as they are, under their own names, and
so do the files beside them (`files_beside`); `config.json` stays the one that promises all this. Where there are no
such tensors, or no directory, a config with a `text_config` would promise more than the files hold: what is written is
the text model's.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import params as checkpoints
from params.errors import CheckpointError, ConfigError
from params.guarded import place

from ..config import TIED, text_fields
from ..model import Model
from ..models import FAMILIES

WITH_WEIGHTS = (
    "*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx",
    "*.np[yz]", "*.pkl", "config.json", "adapter_config.json", "quant_model_description*.json", "*.md",
)  # fmt: skip
"""Files that are weights or speak of the weights they came with: indices, configs, descriptions, cards."""

TEMPLATES = "additional_chat_templates"
"""Where transformers keeps chat templates with names; the one without stands at the top."""

LARGEST = 128 * 2**20
"""Bytes of a file that is copied; the largest tokenizers have 40 MB."""


def save(model: Model, params: Any, path: str | Path, *, max_shard_bytes: int = 5 * 10**9) -> Path:
    """Write parameters, quantised or not, with the config, and what the model's own directory has beside them.

    That is, where it was loaded from one: tensors that no model here reads, copied from their files, and the files of
    tokenizer, processors, chat template and generation. Otherwise the config of a wrapper becomes its text model's.

    More than `max_shard_bytes` of weights becomes several files and an index. Returns the directory. Raises as
    `params.save`, `ConfigError` for one rank's part of a model, and `CheckpointError` where the directory that the
    model came from is gone, cannot be read, or holds other weights by now; then nothing is written. Warns of files
    there that are not copied: links out of it, and what is larger than any tokenizer.
    """
    if model.ranks is not None:
        raise ConfigError(
            f"save: these are the parameters of rank {model.ranks.rank} of {model.ranks.size}; load the model without "
            "a mesh to write all of it"
        )
    path = place("the directory to save to", path)
    beside = {} if model.tokenizer is None else files_beside(model.tokenizer.directory, path)
    whole = model.unread is not None and bool(model.unread.tensors)
    return checkpoints.save(
        params,
        path,
        model.whole_spec(),
        model.family.names,
        dict(model.config_json) if whole else text_model(model.config_json),
        max_shard_bytes=max_shard_bytes,
        beside=beside,
        unread=model.unread,
    )


def text_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model alone, of one that may be a wrapper's."""
    if not isinstance(config.get("text_config"), Mapping):
        return dict(config)
    inner = config["text_config"]
    wrappers = {key for key in config if key.endswith("_config")} | {"architectures", "auto_map", "model_type"}
    kind = config["model_type"]
    named = {"model_type": f"{kind}_text" if f"{kind}_text" in FAMILIES else kind}
    fields = text_fields(config)
    if config.get(TIED) is None:  # `params.save` says what holds
        fields.pop(TIED, None)
    return named | {key: value for key, value in fields.items() if key in inner or key not in wrappers}


def files_beside(source: Path, target: Path) -> dict[str, Path]:
    """The files of a checkpoint directory that a copy of it elsewhere needs beside weights and config, by name.

    All at its top, the code that configs name too (it is copied, never run), but for hidden files, those that go with
    the weights (`WITH_WEIGHTS`), larger ones than `LARGEST`, and whatever is no plain file; and chat templates in their
    own folder. Links are followed inside of the directory and of the hub's cache.
    """
    try:
        if source.resolve() == target.resolve():
            return {}
        if not source.is_dir():
            raise CheckpointError(
                f"{source}, which the tokenizer came from, is gone; put it back, or save weights and config alone with "
                "params.save"
            )
        every = sorted([*source.iterdir(), *source.glob(f"{TEMPLATES}/*.jinja")])
        found = {str(file.relative_to(source)): file for file in every if file.is_file() and not _stays(file.name)}
        inside = _roots(source)
        left = [
            name
            for name, file in found.items()
            if not any(map(file.resolve().is_relative_to, inside)) or file.stat().st_size > LARGEST
        ]
    except OSError as error:
        raise CheckpointError(f"the files in {source} cannot be read: {error}") from error
    if left:
        warnings.warn(
            f"save: not copied from {source}, as links out of it or larger than {LARGEST} bytes: {', '.join(left)}",
            stacklevel=3,
        )
    return {name: file for name, file in found.items() if name not in left}


def _stays(name: str) -> bool:
    return name.startswith(".") or any(fnmatchcase(name, pattern) for pattern in WITH_WEIGHTS)


def _roots(source: Path) -> list[Path]:
    """Where a file of this directory may lie: in the hub's cache it is a link to one of the repository's blobs."""
    directory = source.resolve()
    return [directory, *([directory.parent.parent / "blobs"] if directory.parent.name == "snapshots" else [])]
