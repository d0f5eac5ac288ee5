"""Writing a checkpoint directory that transformers, and `load`, read; a quantised tree as ModelSlim writes it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from params.checkpoint import to_checkpoint
from params.errors import CheckpointError, ConfigError
from params.files import listed
from params.names.rules import Names
from params.quant.description import FILE, written
from params.quant.packed import SECTION, written_section
from params.quant.stored import QuantizedNames, group_sizes, of_tree
from params.tree import items

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", FILE)
"""What counts as weights of a model when a directory is not empty."""


FLOAT_STEM, QUANTIZED_STEM = "model", "quant_model_weights"
"""How the files of weights are called."""
INDEX = f"{FLOAT_STEM}.safetensors.index.json"


def save(
    tree: Any, path: str | Path, spec: Any, names: Names, config: dict[str, Any], *, max_shard_bytes: int = 5 * 10**9,
    beside: Mapping[str, bytes] | None = None,
) -> Path:  # fmt: skip
    """Write a parameter tree as a Hugging Face checkpoint; returns the directory.

    A tree with quantised weights becomes a ModelSlim checkpoint: files named after it, a `quant_model_description.json`
    that names every tensor's scheme, and no `quantization_config`. One with MXFP4 weights becomes one of
    compressed-tensors, which has only such a section.

    `config.json` is `config` with the dtype that is saved. With a nested `text_config` the tensors get the wrapper's
    names, else the text-only class's. More than `max_shard_bytes` becomes several files and an index. `beside` are
    further files of the directory, such as a tokenizer's: `funcmodels.save` brings those along.

    A directory with other weights is refused: only files of the very names that are written are replaced. Everything
    is written under hidden temporary names first, then renamed: a link there is replaced, not followed. Raises
    `CheckpointError`, before anything is written, for what is refused and for tensors without values.
    """
    tensors = to_checkpoint(tree, spec, names)
    _refuse_meta(tensors)
    spec, names = of_tree(tree, spec, names)
    words = names.words(tensors) if isinstance(names, QuantizedNames) else None
    dtype, tied = _model_dtype(tree, spec), _tied(names, tensors)
    if isinstance(config.get("text_config"), dict):
        tensors = {names.wrapped(name): tensor for name, tensor in tensors.items()}
        words = None if words is None else {names.wrapped(name): word for name, word in words.items()}
    section = None
    if words is not None and isinstance(names, QuantizedNames) and names.is_packed:
        section, words = written_section(tensors), None
    settings = _settings(config, dtype, tied, section)
    stem = FLOAT_STEM if words is None else QUANTIZED_STEM
    shards = _shards(tensors, max_shard_bytes, stem)
    directory = Path(path)
    writers = {file: _weights(shard) for file, shard in shards.items()}
    if len(shards) > 1:
        writers[f"{stem}.safetensors.index.json"] = _text(_index(shards))
    if words is not None:
        writers[FILE] = _text(written(words, group_sizes(tree)))
    weights = set(writers)
    writers |= {name: _bytes(content) for name, content in (beside or {}).items()}
    writers["config.json"] = _text(settings)
    try:
        _refuse_others(directory, weights)
        _refuse_directories(directory, writers)
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory, writers)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory} cannot be written: {error}") from error
    return directory


def _model_dtype(tree: Any, spec: Any) -> torch.dtype:
    """The dtype of the largest leaf that follows the model."""
    free = {path for path, leaf in items(spec) if leaf.dtype is None}
    return max((leaf for path, leaf in items(tree) if path in free), key=Tensor.numel).dtype


def _tied(names: Names, tensors: dict[str, Tensor]) -> bool | None:
    """Whether the tree shares its tied leaves; `None` for a family that has none."""
    return all(name not in tensors for name in names.tied) if names.tied else None


_REPLACED = ("torch_dtype", "quantization_config")
"""What a config says of weights that are not the ones beside it."""


def _settings(
    config: dict[str, Any], dtype: torch.dtype, tied: bool | None, quantization: dict[str, Any] | None
) -> str:
    """`config.json`, made to agree with the weights beside it."""
    word = str(dtype).removeprefix("torch.")
    settings: dict[str, Any] = {key: value for key, value in config.items() if key not in _REPLACED} | {"dtype": word}
    text = config.get("text_config")
    if isinstance(text, dict):
        settings["text_config"] = {key: value for key, value in text.items() if key not in _REPLACED} | {"dtype": word}
    if quantization is not None:
        (settings["text_config"] if isinstance(text, dict) else settings)[SECTION] = quantization
    if tied is not None:
        said = config.get("tie_word_embeddings", (text or {}).get("tie_word_embeddings", tied))
        if said != tied:
            raise ConfigError(
                f"config says tie_word_embeddings={said}, the tree has {'no' if tied else 'a'} head of its own"
            )
        settings["tie_word_embeddings"] = tied
    try:
        return json.dumps(settings, indent=2, sort_keys=True) + "\n"
    except TypeError as error:
        raise ConfigError(f"config is not plain JSON data: {error}") from error


def _shards(tensors: dict[str, Tensor], limit: int, stem: str) -> dict[str, dict[str, Tensor]]:
    """File name to its tensors, filled in order; a tensor above the limit gets a file of its own."""
    groups: list[dict[str, Tensor]] = [{}]
    room = limit
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > room and groups[-1]:
            groups.append({})
            room = limit
        groups[-1][name] = tensor
        room -= size
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {f"{stem}-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, 1)}


def _index(shards: dict[str, dict[str, Tensor]]) -> str:
    total = sum(tensor.numel() * tensor.element_size() for group in shards.values() for tensor in group.values())
    places = {name: file for file, group in shards.items() for name in group}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2, sort_keys=True) + "\n"


def _refuse_meta(tensors: dict[str, Tensor]) -> None:
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        raise CheckpointError(
            f"tensors on the meta device have no values to save: {listed(empty, 3)}; load the parameters, or make them "
            "on another device"
        )


def _refuse_directories(directory: Path, names: Iterable[str]) -> None:
    taken = sorted(name for name in names if (directory / name).is_dir())
    if taken:
        raise CheckpointError(
            f"{directory}: {listed(taken)} would be files and are directories there; remove them, or save elsewhere"
        )


def _refuse_others(directory: Path, ours: set[str]) -> None:
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; give a directory to save to")
    others = {path.name for pattern in WEIGHTS for path in directory.glob(pattern)} - ours
    others = {name for name in others if not name.startswith(".")}
    if others:
        raise CheckpointError(
            f"{directory} has other weights ({', '.join(sorted(others))}), which would be read together with "
            f"{', '.join(sorted(ours))}; save to an empty directory, or remove them"
        )


def _weights(shard: dict[str, Tensor]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        values: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in shard.items():
            value = tensor.detach().cpu().contiguous()
            # the format refuses two names for one piece of memory; parts of a merged leaf are different pieces
            values[name] = value.clone() if value.data_ptr() in seen else value
            seen.add(value.data_ptr())
        path.touch()
        mode = path.stat().st_mode
        save_file(values, path, metadata={"format": "pt"})
        path.chmod(mode)  # as the umask asks; safetensors makes its files readable by their owner alone

    return write


def _text(text: str) -> Callable[[Path], None]:
    return _bytes(text.encode())


def _bytes(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def _write(directory: Path, writers: dict[str, Callable[[Path], None]]) -> None:
    """Write all files under hidden names, then rename them; on failure nothing visible has changed."""
    hidden = {directory / f".{name}.{os.getpid()}.part": directory / name for name in writers}
    try:
        for temporary, final in hidden.items():
            writers[final.name](temporary)
        for temporary, final in hidden.items():
            temporary.replace(final)
    finally:
        for temporary in hidden:
            temporary.unlink(missing_ok=True)
