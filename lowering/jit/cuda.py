"""CUDA graphs. Everything that changes between replays must be a tensor: a row length of the host is refused."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .device import DeviceGraphs


class CudaGraphs(DeviceGraphs):
    """Captures with `torch.cuda.CUDAGraph`."""

    name: ClassVar[str] = "cuda"
    graph_class: ClassVar[str] = "CUDAGraph"

    def __init__(self, api: Any = torch.cuda, device: str = "cuda") -> None:
        super().__init__(api, device)
