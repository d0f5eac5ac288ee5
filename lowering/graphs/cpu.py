"""Backends of the host: what runs a traced graph on CPU tensors.

A backend takes the graph and example inputs (on a device: tensors at their final addresses) and returns a function of
the inputs that gives the graph's outputs, in tensors of their own, and writes to inputs what the graph writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.fx import GraphModule

Run = Callable[..., Sequence[Tensor]]


def fx(graph: GraphModule, inputs: Sequence[Tensor]) -> Run:
    """The operators of the graph, one after the other: every bit as they were traced."""
    return graph.forward


def inductor(graph: GraphModule, inputs: Sequence[Tensor]) -> Run:
    """The operators fused and compiled to C++: rounds otherwise than `fx`, within `lowering.tolerances`."""
    from torch._inductor import compile

    return compile(graph, list(inputs))  # type: ignore[return-value]


BACKENDS: dict[str, Callable[[GraphModule, Sequence[Tensor]], Run]] = {"inductor": inductor, "fx": fx}
"""By name, the default first."""
