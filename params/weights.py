"""What may stand in a parameter tree where a plain weight tensor would: a value that the ops know by its type."""

from __future__ import annotations

from typing import ClassVar

import torch

from params.tree import leaves


class WeightValue:
    """A weight [*experts outputs inputs] that is more than one tensor. `scheme` says in a few words what it is."""

    scheme: ClassVar[str]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the plain weight: experts if there are any, outputs, inputs."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the weight lies."""
        return leaves(self)[0].device

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return type(self), *((leaf.shape, leaf.dtype) for leaf in leaves(self))
