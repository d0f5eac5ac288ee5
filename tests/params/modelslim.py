"""ModelSlim checkpoints, and packed ones, by a writer of our own: tensor after tensor, in NumPy, without `params`.

It rounds by tables and loops, so that what the library rounds by bits has something to be compared with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

FILE = "quant_model_description.json"
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
)
E4M3 = E4M3[:-1]
"""The float8 e4m3 numbers of bytes 0x00 to 0x7e."""

Tensors = dict[str, Tensor]


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Bytes of the nearest e4m3 numbers, of two equally near the one away from zero, at most 448."""
    above = np.searchsorted(E4M3, np.abs(x)).clip(1, len(E4M3) - 1)
    low, high = E4M3[above - 1], E4M3[above]
    code = np.where(np.abs(x) - low < high - np.abs(x), above - 1, above)
    return (code + 128 * np.signbit(x)).astype(np.uint8)


def mxfp8(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of values and of scales, block by block."""
    values, scales = np.zeros(w.shape, np.uint8), np.zeros((len(w), -(-w.shape[1] // 32)), np.uint8)
    for row in range(len(w)):
        for block in range(scales.shape[1]):
            piece = w[row, 32 * block : 32 * block + 32]
            power = max(int(np.frexp(np.abs(piece).max())[1]) - 9, -127) if np.abs(piece).max() else -127
            values[row, 32 * block : 32 * block + 32] = to_e4m3(piece * 2.0**-power)
            scales[row, block] = power + 127
    return values, scales


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""The float4 e2m1 numbers of codes 0 to 7."""


def mxfp4(w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Packed codes and bytes of scales as compressed-tensors stores them, and the float weight that they stand for.

    The largest number of a block is at most 7 of its power of two; ties go to even codes.
    """
    codes, scales = np.zeros(w.shape, np.uint8), np.zeros((len(w), -(-w.shape[1] // 32)), np.uint8)
    for row, block in np.ndindex(scales.shape):
        piece = w[row, 32 * block : 32 * block + 32].astype(float)
        fraction, power = np.frexp(np.abs(piece).max())
        power = max(int(power) - (3 if fraction < 0.875 else 2), -127) if fraction else -127
        gaps = np.abs(np.abs(piece)[:, None] / 2.0**power - E2M1)
        # Of equally near codes the even one is looked at first.
        order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
        codes[row, 32 * block : 32 * block + 32] = order[gaps[:, order].argmin(1)] + 8 * np.signbit(piece)
        scales[row, block] = power + 127
    whole = (
        np.concatenate([E2M1, -E2M1])[codes] * np.repeat(2.0 ** (scales.astype(float) - 127), 32, 1)[:, : w.shape[1]]
    )
    return {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales}, whole


def integers(w: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric integers and the scale of each row [rows 1]."""
    scale = np.maximum(np.abs(w).max(1, keepdims=True) / np.float32(top), np.finfo(np.float32).eps).astype(np.float32)
    return np.rint(w / scale).clip(-top - 1, top).astype(np.int8), scale


def grouped(w: np.ndarray, top: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric integers with a scale for each group of inputs [rows groups]."""
    pieces = w.reshape(len(w) * groups, -1)
    values, scale = integers(pieces, top)
    return values.reshape(w.shape), scale.reshape(len(w), groups)


def pack(values: np.ndarray) -> np.ndarray:
    """Two rows in one of bytes."""
    return ((values[1::2].astype(np.int32) << 4) | (values[0::2].astype(np.int32) & 15)).astype(np.uint8).view(np.int8)


def quantise(word: str, w: np.ndarray, **how: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What is stored beside each other under a module's name, and the float weight that it stands for."""
    return {"W8A8_DYNAMIC": _dynamic, "W8A8": _static, "W4A8_DYNAMIC": _int4, "W8A8_MXFP8": _mx}[word](w, **how)


def _dynamic(w: np.ndarray, groups: int = 1) -> tuple[dict[str, np.ndarray], np.ndarray]:
    values, scale = grouped(w, 127, groups)
    stored = {"weight": values, "weight_scale": scale, "weight_offset": np.zeros_like(scale)}
    return stored, values * np.repeat(scale, w.shape[1] // groups, 1)


def _static(
    w: np.ndarray, scale: float = 0.025, offset: float = -8.0, long: bool = False, bias: Any = 0.0, old: bool = False
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    values, weight_scale = integers(w, 127)
    deq = (np.float32(scale) * weight_scale[:, 0]).astype(np.float32)
    correction = np.rint(bias / deq.astype(np.float64) - offset * values.sum(1, dtype=np.int64)).astype(np.int32)
    stored = {
        "weight": values, "deq_scale": deq.view(np.int32).astype(np.int64) if long else deq, "quant_bias": correction,
        "input_scale": np.array([scale], np.float32), "input_offset": np.array([offset], np.float32),
    }  # fmt: skip
    extra = {"weight_scale": weight_scale, "weight_offset": np.zeros_like(weight_scale)} if old else {}
    return stored | extra, values * (deq / np.float32(scale))[:, None]


def _int4(w: np.ndarray, slices: int = 1, groups: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    values, scale = grouped(w, 7, groups or 1)
    first = scale.max(1, keepdims=True) if groups else scale
    whole = values * np.repeat(scale, w.shape[1] // scale.shape[1], 1)
    stored = {
        "weight": pack(values), "weight_scale": first, "weight_offset": np.zeros_like(first),
        "scale_bias": (8 * whole.reshape(len(w), slices, -1).sum(2)).astype(np.float32),
    }  # fmt: skip
    if groups:
        stored |= {"weight_scale_second": scale / first, "weight_offset_second": np.zeros_like(scale)}
    return stored, whole


def _mx(w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    values, scale = mxfp8(w)
    whole = np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]])[values]
    return {"weight": values, "weight_scale": scale}, whole * np.repeat(2.0 ** (scale.astype(float) - 127), 32, 1)[
        :, : w.shape[1]
    ]


def export(
    state: Mapping[str, Tensor], scheme: Callable[[str], str], how: Callable[[str], dict[str, Any]] = lambda name: {}
) -> tuple[Tensors, dict[str, str], Tensors]:
    """Tensors, description, and the float weights that the quantised ones stand for, of a state dict.

    `scheme` and `how` are asked for each matrix's module.
    """
    tensors: Tensors = {}
    words: dict[str, str] = {}
    floats: Tensors = {}
    for name, value in state.items():
        module, _, last = name.rpartition(".")
        word = scheme(module) if last == "weight" and value.ndim == 2 else "FLOAT"
        if word == "FLOAT":
            found, floats[name] = {name: value}, value
        else:
            stored, whole = quantise(word, value.float().numpy(), **how(module))
            found = {f"{module}.{suffix}": torch.from_numpy(array.copy()) for suffix, array in stored.items()}
            if word == "W8A8_MXFP8":
                found[name] = found[name].view(torch.float8_e4m3fn)
            floats[name] = torch.from_numpy(whole).float()
        tensors |= found
        words |= dict.fromkeys(found, word)
    return tensors, words, floats


def write(directory: Path, tensors: Tensors, words: Mapping[str, Any], shards: int = 1, **settings: Any) -> Path:
    """A checkpoint directory; `settings` are entries that name no tensor."""
    directory.mkdir(exist_ok=True)
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    base = {"model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0", "metadata": {}, "group_size": 0, "optional": {}}
    (directory / FILE).write_text(json.dumps(base | settings | dict(words)))
    (directory / "config.json").write_text('{"model_type": "qwen3_5_text"}')
    stem, names = "quant_model_weights", list(tensors)
    if shards == 1:
        save_file({name: value.contiguous() for name, value in tensors.items()}, directory / f"{stem}.safetensors")
        return directory
    places = {name: f"{stem}-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name].contiguous() for name in names if places[name] == file}, directory / file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (directory / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return directory


def unstacked(state: Mapping[str, Tensor]) -> Tensors:
    """A transformers state dict with one tensor an expert and projection."""
    found: Tensors = {}
    for name, value in state.items():
        root = name.rpartition(".experts.")[0]
        if name.endswith(".experts.gate_up_proj"):
            for expert, both in enumerate(value):
                for half, part in zip(("gate", "up"), both.chunk(2), strict=True):
                    found[f"{root}.experts.{expert}.{half}_proj.weight"] = part
        elif name.endswith(".experts.down_proj"):
            found |= {f"{root}.experts.{expert}.down_proj.weight": each for expert, each in enumerate(value)}
        else:
            found[name] = value
    return found
