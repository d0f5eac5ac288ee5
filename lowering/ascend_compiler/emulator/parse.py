"""The text of a compiled program as operations: MLIR as BiSheng prints it, one operation a line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .errors import Unknown


@dataclass
class Operation:
    """`results = name text`, and the operations of its regions: a loop's body, the branches of a condition."""

    line: int
    name: str
    results: tuple[str, ...]
    text: str
    regions: list[list[Operation]] = field(default_factory=list)


@dataclass(frozen=True)
class Function:
    """A function with `hacc.entry`: the cores it is for (AIC cube, AIV vector), names and types of arguments, body."""

    name: str
    unit: str
    arguments: tuple[tuple[str, str], ...]
    body: list[Operation]


@dataclass(frozen=True)
class ParsedProgram:
    """Entries by name, vector functions, affine maps, and the bytes of workspace that a block has.

    A map is a function of dimensions and symbols, and gives all results.
    """

    entries: dict[str, Function]
    functions: dict[str, Function]
    maps: dict[str, Callable[..., tuple[int, ...]]]
    workspace: int


def matched(form: str, operation: Operation) -> re.Match[str]:
    """The operation's text by a form from its beginning. `Unknown` for another form."""
    found = re.match(form, operation.text)
    if found is None:
        raise Unknown(
            f"line {operation.line}: {operation.name} is written in a form that is not known: {operation.text}"
        )
    return found


_MAP = re.compile(r"^(#map\d*) = affine_map<\(([^)]*)\)(?:\[([^\]]*)\])? -> \((.*)\)>$")
_HEAD = re.compile(r"^func\.func @(\w+)\((.*)\) (?:-> .*? )?attributes \{(.*)\} \{$")
_ARGUMENT = re.compile(r"(%\w+): (memref<[^{]*?>(?=[ ,)]|$)|[\w]+)")
_OPERATION = re.compile(r"^(?:(%[\w:, %#-]+?) = )?\"?(\^?[\w.]+)\"?(.*)$")


def parse(text: str) -> ParsedProgram:
    """The program of a text. `Unknown` for an affine map that is not sums, products and remainders."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    maps = {found[1]: _affine(found) for _, line in lines if (found := _MAP.match(line))}
    entries: dict[str, Function] = {}
    functions: dict[str, Function] = {}
    workspace = 0
    rest = iter(lines)
    for _, line in rest:
        head = _HEAD.match(line)
        if head is None:
            continue
        body, _ = _block(rest)
        kind = entries if "hacc.entry" in head[3] else functions
        kind[head[1]] = Function(head[1], _unit(head[3]), tuple(_ARGUMENT.findall(head[2])), body)
        if "infer_workspace_shape_function" in head[3]:
            workspace = _number(body)
    return ParsedProgram(entries, functions, maps, workspace)


def _unit(attributes: str) -> str:
    found = re.search(r"hivm\.func_core_type = #hivm\.func_core_type<(\w+)>", attributes)
    return found[1] if found else ""


def _number(body: list[Operation]) -> int:
    """What a function returns that knows a number and nothing else."""
    if [operation.name for operation in body] != ["arith.constant", "return"]:
        raise Unknown(f"line {body[0].line}: a size that is worked out is not known")
    return int(matched(r"(\d+) : index", body[0])[1])


def _block(lines: Iterator[tuple[int, str]]) -> tuple[list[Operation], str]:
    """Operations up to the brace that ends them, and the line of that brace."""
    found: list[Operation] = []
    for number, line in lines:
        if line.startswith("}"):
            return found, line
        parts = _OPERATION.match(line)
        if parts is None:
            raise Unknown(f"line {number} is no operation: {line}")
        results = tuple(name.strip() for name in (parts[1] or "").split(",") if name.strip())
        operation = Operation(number, parts[2], results, parts[3].strip())
        found.append(operation)
        if line.endswith("{"):
            _regions(operation, lines)
    return found, "}"


def _regions(operation: Operation, lines: Iterator[tuple[int, str]]) -> None:
    end = "} else {"
    while end.endswith("else {"):
        inner, end = _block(lines)
        operation.regions.append(inner)


def _affine(found: re.Match[str]) -> Callable[..., tuple[int, ...]]:
    """The function of an affine map: of dimensions, then symbols. Quotients are rounded down, as Python's are."""
    names = [name.strip() for part in (found[2], found[3] or "") for name in part.split(",") if name.strip()]
    formula = re.sub(r"\(([^()]*)\) ceildiv (\w+)", r"(-(-(\1) // \2))", found[4])
    formula = formula.replace("floordiv", "//").replace(" mod ", " % ")
    if not re.fullmatch(r"[\s\dsd+\-*/%(),]*", formula):
        raise Unknown(f"affine map {found[0]} has more than sums, products, quotients and remainders")
    return eval(f"lambda {', '.join(names)}: ({formula},)", {"__builtins__": {}})
