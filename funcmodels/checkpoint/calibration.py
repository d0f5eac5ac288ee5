"""What goes into each projection of a model when it runs: the ranges that static int8 activations are scaled by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import lowering
from params.tree import items

from ..model import Model
from ..state.batch import Batch


def input_ranges(model: Model, params: Any, prompts: Sequence[Sequence[int]]) -> dict[str, tuple[float, float]]:
    """Least and greatest number that each projection reads while the model reads the prompts (token ids).

    By leaf path (`layers.0.attn.qkv.weight`), for `params.quantize(tree, "W8A8", input_ranges=...)`. Projections that
    did not run, and routed experts, which are never quantised statically, are left out. `params` must be plain.
    """
    paths = {id(leaf): path for path, leaf in items(params)}
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def see(op: str, args: tuple[Any, ...]) -> None:
        path = paths.get(id(args[1])) if op == "linear" else None
        if path is None or not args[0].numel():
            return
        least, most = args[0].aminmax()
        if path in found:
            least, most = torch.minimum(least, found[path][0]), torch.maximum(most, found[path][1])
        found[path] = least, most

    with lowering.watch(see), torch.no_grad():
        for prompt in prompts:
            model.forward(params, None, Batch.from_lists([list(prompt)]), logits="last")
    return {path: (float(least), float(most)) for path, (least, most) in found.items()}
