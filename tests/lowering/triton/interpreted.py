"""The other side of `interpreter.py`: Triton's interpreter in a process of its own, as a script.

The interpreter cuts float32 off where it makes bfloat16 of it, and multiplies matrices of bfloat16 by their bits (known
faults); here it rounds to the nearest, as the compilers do, and multiplies the numbers.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import traceback
from types import ModuleType
from typing import Any


def main() -> None:
    """Answer calls until there are no more: arguments with what the kernel has written, or a traceback."""
    sys.path[:0] = sys.argv[1:]
    os.environ["TRITON_INTERPRET"] = "1"
    sys.modules["pybind11"] = ModuleType("pybind11")
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    mend()
    from triton.runtime.interpreter import InterpreterError

    kernels: dict[str, ModuleType] = {}
    while True:
        try:
            path, name, grid, arguments, constants = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if path not in kernels:
            kernels[path] = loaded(path)
        try:
            getattr(kernels[path], name)[(grid,)](**arguments, **constants)
            answer: Any = arguments
        except InterpreterError:
            answer = traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


def mend() -> None:
    """Rounding of float32 to bfloat16, products of it, and gathering in a tile, which the interpreter lacks."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    before = interpreter.InterpreterBuilder.cast_impl

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return before(self, src, dst_type)
        bits = np.ascontiguousarray(src.data, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        whole = np.where(np.isnan(src.data), bits >> 16 | 0x40, rounded).astype(np.uint16)
        return interpreter.TensorHandle(whole, dst_type.scalar)

    multiply = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(
            self, *(cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *rest
        )

    def gather(self: Any, source: Any, index: Any, axis: int) -> Any:
        return interpreter.TensorHandle(np.take_along_axis(source.data, index.data, axis), source.dtype.scalar)

    interpreter.InterpreterBuilder.create_gather = gather
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.InterpreterBuilder.cast_impl = cast
    for name in ("fp_ext", "fp_trunc", "si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui"):
        setattr(
            interpreter.InterpreterBuilder, f"create_{name}", lambda self, src, dst_type: self.cast_impl(src, dst_type)
        )


def loaded(path: str) -> ModuleType:
    name = f"kernels_{abs(hash(path))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
