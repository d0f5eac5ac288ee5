"""Triton's front end, in a process of its own: reads a question as JSON on standard input, writes Triton's IR.

It runs as a script with triton-ascend in front of the path, and knows nothing of the package that it lies in.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType
from typing import Any


def main() -> None:
    """Answer one question: the IR, or the line and the reason where the language refuses the kernel."""
    question = json.load(sys.stdin)
    sys.path.insert(0, question["triton"])
    # It is imported for launchers alone, which are made on a device.
    sys.modules["pybind11"] = ModuleType("pybind11")
    from triton.compiler.errors import CompilationError
    from triton.runtime.jit import get_jit_fn_file_line

    function = getattr(_loaded(question["path"]), question["name"])
    try:
        answer = {"ttir": _ir(function, question)}
    except CompilationError as error:
        line = get_jit_fn_file_line(function)[1] + getattr(error.node, "lineno", 1) - 1
        answer = {"reason": _innermost(error), "line": line}
    json.dump(answer, sys.stdout)


def _loaded(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["kernel"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _ir(function: Any, question: dict[str, Any]) -> str:
    from triton._C.libtriton import ir
    from triton.backends.ascend.compiler import AscendBackend, make_ttir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource

    backend = AscendBackend(GPUTarget("npu", question["chip"], 0))
    options = backend.parse_options({})
    source = ASTSource(function, question["signature"], question["constants"])
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    return str(make_ttir(module, {"hash": ""}, options))


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


if __name__ == "__main__":
    main()
