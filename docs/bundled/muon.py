"""The optimiser of the bundled model: Muon for hidden matrices, AdamW for everything else, as pure tree functions.

A hidden matrix moves along the orthogonalised momentum (Newton-Schulz, bfloat16), scaled so that its entries move about
as far as AdamW's would: one learning rate serves both. A merged projection is orthogonalised part by part. Embedding,
norms, convolutions and gates follow AdamW; only hidden matrices decay.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from params import tree
from params.spec import TensorSpec
from params.tree import tree_map

MOMENTUM = 0.95
SECOND = 0.98
EPSILON = 1e-8
DECAY = 0.1
MATRIX_SCALE = 0.2  # root mean square of an AdamW step, in learning rates
SMALLEST_PART = 16  # rows; a gate's single row has no directions to balance
QUINTIC = (3.4445, -4.7750, 2.0315)


@tree.tree
class Moments:
    """Running means of the gradient and of its square, trees like the parameters."""

    first: Any
    second: Any


def init(params: Any) -> Moments:
    """Zero moments for `params`."""
    return Moments(tree_map(torch.zeros_like, params), tree_map(torch.zeros_like, params))


def clip(grads: Any, limit: float) -> tuple[Any, Tensor]:
    """Gradients scaled to a global norm of at most `limit`, and the norm before."""
    norm = torch.stack([grad.norm() for grad in tree.leaves(grads)]).norm()
    factor = (limit / (norm + EPSILON)).clamp(max=1.0)
    return tree_map(lambda grad: grad * factor, grads), norm


def update(spec: Any, params: Any, moments: Moments, grads: Any, step: int, rate: float) -> tuple[Any, Moments]:
    """Parameters and moments after one step (`step` counts from 1) at learning rate `rate`."""
    first = tree_map(lambda mean, grad: mean.lerp(grad, 1 - MOMENTUM), moments.first, grads)
    second = tree_map(lambda mean, grad: mean.lerp(grad * grad, 1 - SECOND), moments.second, grads)
    ahead = tree_map(lambda mean, grad: mean.lerp(grad, 1 - MOMENTUM), first, grads)  # Nesterov
    steps = _orthogonal_parts(spec, ahead)

    def move(leaf: Tensor, mean: Tensor, square: Tensor, name: str) -> Tensor:
        scale = 1 / (1 - SECOND**step)
        delta = mean / (1 - MOMENTUM**step) / ((square * scale).sqrt() + EPSILON)
        for start, part in steps.get(name, ()):
            delta[start : start + len(part)] = part
        kept = 1 - rate * DECAY if name in steps else 1.0
        return leaf * kept - rate * delta

    return tree_map(move, params, first, second, _names(spec)), Moments(first, second)


def _names(spec: Any) -> Any:
    paths = iter([path for path, _ in tree.items(spec)])
    return tree_map(lambda _: next(paths), spec)


def _is_matrix(path: str, spec: TensorSpec) -> bool:
    return path.startswith(("layers.", "mtp.")) and path.endswith(".weight") and len(spec.shape) == 2


def _orthogonal_parts(spec: Any, momentum: Any) -> dict[str, list[tuple[int, Tensor]]]:
    """For each hidden matrix the row offset and the step of each of its parts; equal shapes share one batch."""
    groups: dict[tuple[int, int], list[tuple[str, int, Tensor]]] = defaultdict(list)
    for (path, leaf), (_, value) in zip(tree.items(spec), tree.items(momentum), strict=True):
        if _is_matrix(path, leaf):
            for start, part in _parts(leaf, value):
                groups[part.shape[0], part.shape[1]].append((path, start, part))
    steps: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for (rows, columns), members in groups.items():
        scale = MATRIX_SCALE * max(rows, columns) ** 0.5
        for (path, start, _), part in zip(members, orthogonalise(torch.stack([m[2] for m in members])), strict=True):
            steps[path].append((start, part * scale))
    return steps


def _parts(spec: TensorSpec, value: Tensor) -> list[tuple[int, Tensor]]:
    parts, start = [], 0
    for rows in spec.parts or (spec.shape[0],):
        if rows >= SMALLEST_PART:
            parts.append((start, value[start : start + rows]))
        start += rows
    return parts


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """`[batch rows columns]`, each matrix with its singular values brought near 1 (within about 0.7 to 1.2)."""
    a, b, c = QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()
