"""Operators of a graph that take row lengths from the host, and what computes their lists anew for a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import SymBool, SymFloat, SymInt
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..errors import CaptureError

Keys = Mapping[str, tuple[str, ...]]
"""By operator, the arguments whose lists can be updated."""

Lists = dict[str, list[int]]


@dataclass(frozen=True)
class Record:
    """An operator that a captured graph waits for an update of; `keys` of its arguments get new lists."""

    operator: str
    keys: tuple[str, ...]


def operator_of(target: Any) -> str:
    """The name of an operator without its overload."""
    return target.__name__.partition(".")[0]


def check_frozen(graph: GraphModule, updated: Keys) -> None:
    """`CaptureError` for an operator that takes row lengths where no update reaches them."""
    host = _host_nodes(graph.graph)
    for node in graph.graph.nodes:
        if node.op != "call_function" or node in host:
            continue
        keys = updated.get(operator_of(node.target), ())
        rest = {name: value for name, value in node.kwargs.items() if name not in keys}
        if host & set(_nodes((node.args, rest))):
            known = ", ".join(updated) or "none"
            raise CaptureError(
                f"capture: {node.target} takes row lengths from the host, and a graph keeps those it was captured "
                f"with; operators that can be given new ones: {known}. Ask for another kernel (lowering.use)"
            )


def records(graph: GraphModule, updated: Keys) -> list[Record]:
    """The operators that can be updated, in the order they run; with the lists that were passed to each."""
    found = []
    for node in graph.graph.nodes:
        if node.op == "call_function" and operator_of(node.target) in updated:
            name = operator_of(node.target)
            found.append(Record(name, tuple(key for key in updated[name] if node.kwargs.get(key) is not None)))
    return found


def list_maker(graph: GraphModule, updated: Keys) -> GraphModule:
    """From the host integers that `graph` takes to the lists of each of its records, in the order they run."""
    host, made = _host_nodes(graph.graph), Graph()
    copies: dict[Node, Node] = {}
    lists: list[dict[str, Any]] = []
    for node in graph.graph.nodes:
        if node in host:
            copies[node] = made.node_copy(node, lambda x: copies[x])
        elif node.op == "call_function" and operator_of(node.target) in updated:
            keys = updated[operator_of(node.target)]
            lists.append({key: node.kwargs[key] for key in keys if node.kwargs.get(key) is not None})
    made.output(map_arg(lists, lambda node: copies[node]))
    return GraphModule({}, made)


def _host_nodes(graph: Graph) -> set[Node]:
    """The integers that a graph is given, and what is computed from them alone."""
    return {node for node in graph.nodes if isinstance(node.meta.get("val"), (SymInt, SymFloat, SymBool))}


def _nodes(value: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(value, found.append)
    return found
