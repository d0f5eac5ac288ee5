"""What captures on Ascend and their stand-in rest on, against the Python sources of the real torch_npu."""

from __future__ import annotations

import ast
from typing import Any

from lowering.dryrun import wheel
from lowering.npu.updates import UPDATED
from tests.lowering.jit.npu_double import HANDLED, Record


def source(name: str) -> ast.Module:
    """A module of the wheel, read and not run."""
    return ast.parse((wheel.fetched() / "torch_npu" / "npu" / name).read_text(encoding="utf-8"))


def classes(module: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}


def parameters(cls: ast.ClassDef, method: str) -> list[str]:
    found = next(node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == method)
    return [argument.arg for argument in found.args.args]


def test_the_operators_and_keys_of_updates_are_those_of_the_handlers() -> None:
    specs: dict[str, Any] = {}
    for cls in classes(source("_npugraph_handlers/ifa_handler.py")).values():
        for node in cls.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "UPDATE_SPECS":
                specs |= ast.literal_eval(node.value)
    keys = {name: tuple(key for _, _, key in spec) for name, spec in specs.items()}
    assert {name: keys[f"{name}.default"] for name in UPDATED} == UPDATED and len(UPDATED) == 2
    assert {name: keys[name] for name in HANDLED} == HANDLED and len(HANDLED) == 2


def test_the_interface_of_graphs_is_as_we_call_it() -> None:
    module = source("graphs.py")
    found = classes(module)
    assert {"npu_graph", "pool", "stream", "auto_dispatch_capture"} <= set(parameters(found["graph"], "__init__"))
    assert parameters(found["NPUGraph"], "update") == ["self", "cpu_update_input"]
    fields = {
        ast.unparse(node.target) for node in found["_GraphDispatchRecord"].body if isinstance(node, ast.AnnAssign)
    }
    assert {"args", "kwargs", "op_cache_entry"} <= fields and {"args", "kwargs", "op_cache_entry"} <= vars(Record)[
        "__annotations__"
    ].keys()
    assigned = {ast.unparse(node) for node in ast.walk(module) if isinstance(node, ast.Attribute)}
    assert {"self.graph_dispatch_mode", "self.graph_dispatch_records"} <= assigned
