"""A model's forwards over one schedule of prompts, decoding and a verified window, exactly and as lowered.

Lowered forwards are held to the Torch forward in float32: they may be `FURTHER` times as far from it as the Torch
forward of their own dtype is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import funcmodels as fm
import params as trees

PAGE = 128
SCHEDULE = [[131, 20, 0], [0, 121, 3], [1, 1, 1], [4, 4, 4], [1, 1, 1], [9, 0, 140]]
"""New tokens of each row a forward: prompts, a chunk, decoding, a window to verify, an idle row, page boundaries."""
VERIFY, ACCEPTED = 3, [4, 0, 2]
FURTHER = 3.0


@dataclass(frozen=True, eq=False)
class Lowered:
    """A model and random float32 parameters."""

    model: fm.Model
    params: Any

    @staticmethod
    def of(config: dict[str, Any]) -> Lowered:
        """The model of a config, with every parameter random, the same each time, and heads that can be told apart."""
        model, draw = fm.build(config), torch.Generator().manual_seed(2)

        def random(leaf: torch.Tensor) -> torch.Tensor:
            return torch.randn(leaf.shape, generator=draw) * leaf.shape[-1] ** -0.5

        return Lowered(model, _sharp(trees.tree_map(random, model.init_params())))

    def typed(self, dtype: torch.dtype) -> Any:
        """The parameters in `dtype`, but for those that the spec pins."""
        return trees.tree_map(lambda spec, value: value.to(spec.dtype or dtype), self.model.param_spec(), self.params)

    @torch.no_grad()
    def outcome(self, dtype: torch.dtype, layout: str) -> list[torch.Tensor]:
        """Logits of every forward of the schedule, then every logical entry of the state."""
        params, draw, found = self.typed(dtype), torch.Generator().manual_seed(8), []
        state = self.model.init_state(3, 4 * PAGE, dtype, page_size=PAGE, layout=layout)
        for at, counts in enumerate(SCHEDULE):
            ids = torch.randint(self.model.config.vocab_size, (sum(counts),), generator=draw)
            batch = fm.Batch.from_tokens(ids, counts, state)
            out, state = self.model.forward(params, state, batch, keep_steps=at == VERIFY)
            state = fm.commit(state, ACCEPTED) if at == VERIFY else state
            found.append(out.logits)
        found += [value for row in range(3) for value in fm.logical(state, row).values()]
        return [value.float() for value in found]


def _sharp(params: Any) -> Any:
    """With latent attention that sees few places, and counts: a mean of hundreds would hide heads that are mixed up."""
    leaves = dict(trees.items(params))
    for root in (path.removesuffix(".latent_norm.weight") for path in leaves if path.endswith(".latent_norm.weight")):
        queries = f"{root}.q_up.weight" if f"{root}.q_up.weight" in leaves else f"{root}.down.weight"
        for leaf, factor in ((queries, 6), (f"{root}.out.weight", 8)):
            params = trees.put(params, leaf, leaves[leaf] * factor)
    return params


@functools.cache
def usual(one: Lowered, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The exact outcome, and that of Torch in `dtype`."""
    return one.outcome(torch.float32, "nd"), one.outcome(dtype, "nd")


def assert_near(lowered: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> None:
    """Each of the `lowered` values is finite, and about as near to the `exact` one as the `plain` one is."""
    for index, (x, z, y) in enumerate(zip(lowered, exact, plain, strict=True)):
        assert torch.isfinite(x).all(), f"output {index} is not finite"
        error, most = ((value - z).norm() / z.norm().clamp(min=1e-9) for value in (x, y))
        assert error <= FURTHER * most + 1e-6, f"output {index}: {error:.2e} from float32, Torch {most:.2e}"
