"""Writing a checkpoint directory that transformers, and `load`, read; a quantised tree as ModelSlim writes it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from params.checkpoint import to_checkpoint
from params.errors import CheckpointError, ConfigError
from params.files import FLOAT_STEM, NAMED, QUANTIZED_STEM, StoredTensor, listed
from params.guarded import place
from params.names.rules import Names
from params.quant.description import FILE, FLOAT, written
from params.quant.packed import SECTION, written_section
from params.quant.stored import QuantizedNames, group_sizes, of_tree
from params.reading import small
from params.tree import items
from params.unread import Unread

Value = Tensor | StoredTensor
"""What a name in a file to be written stands for: a value, or one that is read when the file is written."""

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", FILE)
"""What counts as weights of a model when a directory is not empty."""


def save(
    tree: Any,
    path: str | Path,
    spec: Any,
    names: Names,
    config: dict[str, Any],
    *,
    max_shard_bytes: int = 5 * 10**9,
    beside: Mapping[str, Path] | None = None,
    unread: Unread | None = None,
) -> Path:
    """Write a parameter tree as a Hugging Face checkpoint; returns the directory.

    A tree with quantised weights becomes a ModelSlim checkpoint: files named after it, a `quant_model_description.json`
    that names every tensor's scheme, and no `quantization_config`. One with MXFP4 weights becomes one of
    compressed-tensors, which has only such a section.

    `config.json` is `config` with the dtype that is saved. With a nested `text_config` the tensors get the wrapper's
    names, else the text-only class's. More than `max_shard_bytes` becomes several files and an index. `beside` are
    further files of the directory, such as a tokenizer's, by name there, and `unread` are tensors that are copied from
    their files to this checkpoint's, a file at a time: `funcmodels.save` brings both along.

    A directory with other weights is refused: only files of the very names that are written are replaced. Everything
    is written under hidden temporary names first, then renamed: a link there is replaced, not followed. Raises, before
    anything is written, `CheckpointError` for what is refused, for no path of a file, for tensors without values and
    for `unread` ones whose files are no longer the same; `ValueError` for a limit that is no number of bytes.
    """
    directory = place("the directory to save to", path)
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, Real) or not max_shard_bytes >= 1:
        raise ValueError(f"max_shard_bytes must be a number of bytes, at least 1, found {max_shard_bytes!r:.100}")
    carried = Unread(directory, {}, {}) if unread is None else unread
    carried.check()
    tensors = to_checkpoint(tree, spec, names)
    _refuse_meta(tensors)
    spec, names = of_tree(tree, spec, names)
    dtype, tied = _model_dtype(tree, spec), _tied(names, tensors)
    words = names.words(tensors) if isinstance(names, QuantizedNames) else dict.fromkeys(tensors, FLOAT)
    spelled = names.wrapped if isinstance(config.get("text_config"), dict) else str
    content = {spelled(name): tensor for name, tensor in tensors.items()} | carried.tensors
    words = {spelled(name): word for name, word in words.items()} | carried.words()
    packed = isinstance(names, QuantizedNames) and names.is_packed
    described = not packed and (isinstance(names, QuantizedNames) or set(words.values()) > {FLOAT})
    settings = _settings(config, dtype, tied, written_section(content) if packed else None)
    stem = QUANTIZED_STEM if described else FLOAT_STEM
    shards = _shards(content, max_shard_bytes, stem)
    writers = {file: _weights(shard) for file, shard in shards.items()}
    if len(shards) > 1:
        writers[f"{stem}.safetensors.index.json"] = _text(_index(shards))
    if described:
        writers[FILE] = _text(written(words, group_sizes(tree)))
    weights = set(writers)
    writers |= {name: partial(shutil.copyfile, source) for name, source in (beside or {}).items()}
    writers["config.json"] = _text(settings)
    try:
        _refuse_others(directory, weights)
        _refuse_directories(directory, writers)
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory, writers, carried.check)
        carried.saved_to(directory)
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


_TIED = "tie_word_embeddings"
_REPLACED = ("torch_dtype", "quantization_config", NAMED)
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
        said = config.get(_TIED)  # a silent wrapper says it by its class, whatever its text section says
        if said not in (None, tied):
            raise ConfigError(f"config says {_TIED}={said}, the tree has {'no' if tied else 'a'} head of its own")
        settings[_TIED] = tied
        if isinstance(text, dict):
            settings["text_config"][_TIED] = tied  # the text-only class looks there, the wrapper's at the top
    try:
        return json.dumps(settings, indent=2, sort_keys=True) + "\n"
    except TypeError as error:
        raise ConfigError(f"config is not plain JSON data: {error}") from error


def _shards(tensors: Mapping[str, Value], limit: int, stem: str) -> dict[str, dict[str, Value]]:
    """File name to its tensors, filled in order; a tensor above the limit gets a file of its own."""
    groups: list[dict[str, Value]] = [{}]
    room = limit
    for name, tensor in tensors.items():
        size = tensor.nbytes
        if size > room and groups[-1]:
            groups.append({})
            room = limit
        groups[-1][name] = tensor
        room -= size
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {f"{stem}-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, 1)}


def _index(shards: dict[str, dict[str, Value]]) -> str:
    total = sum(tensor.nbytes for group in shards.values() for tensor in group.values())
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


def _weights(shard: dict[str, Value]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        values: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in shard.items():
            value = small(tensor) if isinstance(tensor, StoredTensor) else tensor.detach().cpu().contiguous()
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


def _write(directory: Path, writers: Mapping[str, Callable[[Path], object]], check: Callable[[], None]) -> None:
    """Write all files under hidden names, `check`, then rename them; on failure nothing visible has changed."""
    finals = {name: directory / name for name in writers}
    hidden = {name: final.with_name(f".{final.name}.{os.getpid()}.part") for name, final in finals.items()}
    try:
        for name, temporary in hidden.items():
            temporary.parent.mkdir(exist_ok=True)
            writers[name](temporary)
        check()
        for name, temporary in hidden.items():
            temporary.replace(finals[name])
    finally:
        for temporary in hidden.values():
            temporary.unlink(missing_ok=True)
