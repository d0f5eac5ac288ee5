"""A program: the output shapes that torch_npu itself gives for calls without values.

Run by test_real_shapes with the path of an unpacked wheel; reads a pickle of (operator, arguments) from standard input,
with `Hollow` for tensors, and writes one of their outputs.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode


@dataclass(frozen=True)
class Hollow:
    """A tensor without values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Any) -> Any:
        """That of a tensor; anything else as it is."""
        return cls(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x

    @staticmethod
    def made(x: Any) -> Any:
        """A tensor on the device, of the mode's kind."""
        return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="npu") if isinstance(x, Hollow) else x


def main(wheel: str) -> None:
    """Load torch_npu from `wheel` and answer."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What torch_npu prints must not mix with the answers.
    sys.path.insert(0, wheel)
    __import__("torch_npu")
    found = []
    with torch.inference_mode(), FakeTensorMode():
        for name, arguments in pickle.load(sys.stdin.buffer):
            outputs = getattr(torch.ops.npu, name)(**pytree.tree_map(Hollow.made, arguments))
            found.append(pytree.tree_map(Hollow.of, outputs))
    answers.write(pickle.dumps(found))


if __name__ == "__main__":
    # Under one name on both sides, so that the pickles find their class.
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.lowering.npu_reference import real_shapes

    real_shapes.main(sys.argv[1])
