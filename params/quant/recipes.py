"""Float weights to quantised ones and back, over a whole tree."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from params.modes import lasting
from params.names.rules import Ignore
from params.quant.description import FLOAT
from params.quant.rounding import (
    int4_correction,
    int4_weight,
    int8_range,
    int8_weight,
    mxfp4,
    mxfp8,
    pack_int4,
)
from params.quant.schemes import DRAFT, FOR_EXPERTS, FOR_LINEARS, SLICES
from params.quant.stored import has_projections, is_quantized, projections
from params.quant.values import (
    Int4Weight,
    Int8Weight,
    MXFP4Weight,
    MXFP8Weight,
    QuantizedWeight,
    SplitWeight,
    StaticInt8Weight,
    dequantized,
)
from params.tree import at, put

T = TypeVar("T")
Ranges = Mapping[str, tuple[float, float]]

KEPT = ("head.weight", "**.router.weight", "**.shared_gate.weight", "**.attn.up.weight", f"{DRAFT}.**")
"""Leaves that a usual recipe leaves alone: output projection, routers, what makes keys and values of latents, draft
head. Patterns as of `params.names.rules.Ignore`."""

_SLICED = ("**.mlp.**.down", "**.mlp.**.down.weight", "**.attn.out.weight")
"""Leaves whose inputs a mesh splits: the correction of int4 comes in 16 partial sums there."""


@lasting
def quantize(
    tree: T, scheme: str | Mapping[str, str], *, keep: Collection[str] = KEPT, input_ranges: Ranges | None = None
) -> T:
    """The tree with its projections quantised, rounding as ModelSlim's exporter does; MXFP4 as compressed-tensors does.

    `scheme` is one of `params.quant.schemes.FOR_LINEARS`, or a mapping from patterns of leaf paths to such words, of
    which the first that fits counts. What fits `keep`, or no pattern, stays as it is. "W8A8" needs `input_ranges`: to
    the path of each of its leaves the smallest and largest input that the projection meets. A bias of such a
    projection moves into its weight's correction, and is zeros in the tree. `ValueError` for an unknown scheme, a
    pattern that fits nothing, and all shapes and ranges that do not do, before anything is computed. A tree of meta
    tensors gives one of these.
    """
    words = _words(tree, {"**": scheme} if isinstance(scheme, str) else scheme, keep)
    ranges = input_ranges or {}
    wrong = [text for path, word in words.items() for text in _unfit(at(tree, path), path, word, ranges)]
    wrong += _partly(tree, words)
    if wrong:
        raise ValueError("quantize: nothing was quantised:\n  " + "\n  ".join(wrong))
    for path, word in words.items():
        tree = _quantized(tree, path, word, ranges)
    return tree


@lasting
def dequantize(tree: T, dtype: torch.dtype) -> T:
    """The tree with plain weights of `dtype` in place of quantised ones, and biases taken out of their corrections.

    `ValueError` for a bias in a correction whose projection has no place for one.
    """
    return pytree.tree_map(
        lambda node: _dequantized(node, dtype), tree, is_leaf=lambda node: has_projections(node) or is_quantized(node)
    )


def _words(tree: Any, schemes: Mapping[str, str], keep: Collection[str]) -> dict[str, str]:
    """The scheme of each projection that gets one."""
    unknown = sorted(set(schemes.values()) - set(FOR_LINEARS))
    if unknown:
        raise ValueError(f"quantize: unknown scheme {', '.join(unknown):.100}; give one of {', '.join(FOR_LINEARS)}")
    paths = [f"{node}.{name}" if node else name for node, names in projections(tree) for name in names]
    free = [path for path in paths if not _fits_any(keep, path)]
    idle = [pattern for pattern in schemes if not any(_fits_any((pattern,), path) for path in free)]
    if idle:
        raise ValueError(
            f"quantize: no projection fits {', '.join(idle)}, apart from those to keep; the tree has "
            f"{', '.join(paths[:20]) or 'none'}{' and more' if len(paths) > 20 else ''}"
        )
    first = {path: next((word for key, word in schemes.items() if _fits_any((key,), path)), FLOAT) for path in free}
    return {path: word for path, word in first.items() if word != FLOAT}


def _fits_any(patterns: Collection[str], path: str) -> bool:
    return any(Ignore(pattern, "").matches(path) for pattern in patterns)


def _unfit(weight: Any, path: str, word: str, ranges: Ranges) -> list[str]:
    """Why a weight cannot have the scheme."""
    if not isinstance(weight, Tensor):
        return [f"{path} is a {type(weight).__name__}, expected a tensor; quantise the plain tree"]
    found = []
    if weight.ndim == 3 and word not in FOR_EXPERTS:
        found.append(f"{path} holds experts, which can be {', '.join(FOR_EXPERTS)}, not {word}")
    elif word == StaticInt8Weight.scheme and path not in ranges:
        found.append(f"{path}: {word} needs the range of its inputs; give input_ranges[{path!r}] = (smallest, largest)")
    elif word == StaticInt8Weight.scheme and not -torch.inf < min(ranges[path]) <= max(ranges[path]) < torch.inf:
        found.append(f"{path}: its inputs range over {ranges[path]}, expected two finite numbers")
    if word == Int4Weight.scheme and weight.shape[-2] % 2:
        found.append(f"{path} has {weight.shape[-2]} outputs, and {word} packs two in a byte; expected an even number")
    if word == MXFP4Weight.scheme and weight.shape[-1] % 2:
        found.append(f"{path} has {weight.shape[-1]} inputs, and {word} packs two in a byte; expected an even number")
    return found


def _partly(tree: Any, words: Mapping[str, str]) -> list[str]:
    """Experts and draft heads of which a part would be quantised, which no checkpoint may be."""
    found = []
    draft: list[str] = []
    for node, names in projections(tree):
        paths = [f"{node}.{name}" if node else name for name in names]
        draft += paths if node.startswith(f"{DRAFT}.") else []
        if len({path in words for path in paths}) > 1:
            found.append(f"{node}: give all of {', '.join(names)} a scheme, or none")
    if len({path in words for path in draft}) > 1:
        plain = [path for path in draft if path not in words]
        found.append(f"the draft head must be quantised as a whole or not at all, and {', '.join(plain)} would not be")
    return found


def _quantized(tree: T, path: str, word: str, ranges: Ranges) -> T:
    """The tree with one projection quantised."""
    weight = at(tree, path).detach()
    if word != StaticInt8Weight.scheme:
        return put(tree, path, _weight(weight, path, word))
    node = path.rpartition(".")[0]
    bias = getattr(at(tree, node) if node else tree, "bias", None)
    tree = put(tree, path, _static(weight, bias, path, ranges[path]))
    return tree if bias is None else put(tree, f"{node}.bias" if node else "bias", torch.zeros_like(bias))


def _weight(weight: Tensor, path: str, word: str) -> QuantizedWeight:
    if word == Int8Weight.scheme:
        return Int8Weight(*int8_weight(weight))
    if word == MXFP8Weight.scheme:
        return MXFP8Weight(*mxfp8(weight, "half_away"))
    if word == MXFP4Weight.scheme:
        return MXFP4Weight(*mxfp4(weight))
    values, scale = int4_weight(weight)
    one, many = SLICES
    slices = many if _fits_any(_SLICED, path) and weight.shape[-1] % many == 0 else one
    return Int4Weight(pack_int4(values), scale, int4_correction(values, scale, slices))


def _static(weight: Tensor, bias: Tensor | None, path: str, limits: tuple[float, float]) -> StaticInt8Weight:
    values, scale = int8_weight(weight)
    input_scale, offset = (number.to(weight.device) for number in int8_range(*limits))
    deq_scale = input_scale * scale[:, 0]
    correction = -offset.double() * values.sum(-1)
    if bias is not None:
        correction = correction + bias.detach().double() / deq_scale.double()
    if not correction.is_meta and correction.abs().max() >= 2**31:
        raise ValueError(f"quantize: {path}: a bias over its row's scale does not fit 32 bits; keep this projection")
    return StaticInt8Weight(values, deq_scale, correction.round().to(torch.int32), input_scale, offset)


def _dequantized(node: Any, dtype: torch.dtype) -> Any:
    if is_quantized(node):
        return _plain(node, "a weight", dtype, False)[0]
    if not has_projections(node):
        return node
    for name in node.projections:
        weight = getattr(node, name)
        if is_quantized(weight):
            bias = getattr(node, "bias", None)
            plain, folded = _plain(weight, f"{type(node).__name__}.{name}", dtype, bias is not None)
            node = put(node, name, plain)
            node = node if bias is None else put(node, "bias", (bias + folded).to(bias.dtype))
    return node


def _plain(weight: QuantizedWeight, what: str, dtype: torch.dtype, has_bias: bool) -> tuple[Tensor, Tensor | float]:
    """A weight and the bias inside it."""
    parts = weight.parts if isinstance(weight, SplitWeight) else (weight,)
    if not any(isinstance(part, StaticInt8Weight) for part in parts):
        return dequantized(weight, dtype), 0.0
    folded = torch.cat(
        [
            part.bias()
            if isinstance(part, StaticInt8Weight)
            else torch.zeros(part.shape[0], dtype=torch.float32, device=part.device)
            for part in parts
        ]
    )
    if folded.any() and not has_bias:
        raise ValueError(
            f"dequantize: {what} has a bias in its correction, and its projection none; the bias would be lost"
        )
    return dequantized(weight, dtype), folded
