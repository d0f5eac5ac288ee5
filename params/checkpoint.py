"""Checkpoints to parameter trees and back.

`load` checks a whole checkpoint against a spec tree before it reads a value, then reads every tensor once, straight
into the leaf it belongs to. `save` writes what transformers loads. `to_checkpoint` and `from_checkpoint` are the same
maps between values in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from params.errors import CheckpointError
from params.files import StoredTensor, resolve, tensor_names
from params.mapped import MappedRows, mapped
from params.matching import Plan, match, shown
from params.names.rules import Names
from params.spec import Constant, constants
from params.tree import describe, dotted, items

T = TypeVar("T")

Tables = Literal["device", "host", "file"]
"""Where `load` puts tables: beside the other leaves, on the CPU, or nowhere (`MappedRows`)."""

CHUNK = 2**20
"""Bytes read at a time; with a conversion or another device, the memory a load takes beyond its result."""


def load(
    path: str | Path,
    spec: T,
    names: Names,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    device: torch.device | str = "cpu",
    progress: bool = True,
    tensors: Mapping[str, StoredTensor] | None = None,
    tables: Tables = "device",
) -> T:
    """The parameters of a checkpoint, in a tree like `spec`.

    Floating-point leaves get the dtype their spec pins, else `dtype`, else (`None`) the one they are stored in; other
    dtypes are never converted. `tensors` is an earlier `tensor_names(path)`, to read the headers once. `progress`
    shows a bar when standard error is a terminal. `tables` says where the leaves go that are read by rows: with "file"
    they are mapped and keep the dtype they are stored in.

    One `CheckpointError` lists every missing, unexpected, misshapen, wrongly typed or doubled tensor; nothing is
    loaded in part. Memory: the result and about a megabyte. The result shares nothing with the files, but for mapped
    tables: their files must stay as they are.
    """
    if tables not in ("device", "host", "file"):
        raise ValueError(f"tables={tables!r}: give 'device', 'host' or 'file'")
    directory = resolve(path)
    stored = tensor_names(directory) if tensors is None else tensors
    plan = match(spec, names, stored, dtype)
    plan.check(directory)
    for name, source in plan.repeats:
        if not _same_bytes(stored[name], stored[source]):
            raise CheckpointError(f"{directory}: {_untied(name, source)}")
    for name, constant in plan.constants:
        _check_constant(directory, name, constant, _small(stored[name]))
    apart = {path for path, leaf in items(spec) if leaf.table and tables != "device"}
    leaves: dict[str, Any] = _mapped_tables(plan, stored, apart) if tables == "file" else {}
    leaves |= _allocate(
        spec, plan.dtypes, {path: "cpu" if path in apart else device for path, _ in items(spec) if path not in leaves}
    )
    jobs = [
        (stored[name], part.of(leaves[path]))
        for name, path, part in plan.placements
        if isinstance(leaves[path], Tensor)
    ]
    with _bar(sum(source.nbytes for source, _ in jobs), progress) as advance:
        _read_all(jobs, advance)
    return _rebuild(spec, leaves)


def from_checkpoint(
    tensors: Mapping[str, Tensor],
    spec: T,
    names: Names,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> T:
    """The tree of a state dict, with the checks and dtype rules of `load`. Values are copied and detached."""
    plan = match(spec, names, tensors, dtype)
    plan.check("state dict")
    for name, source in plan.repeats:
        if not torch.equal(_bytes(tensors[name]), _bytes(tensors[source])):
            raise CheckpointError(f"state dict: {_untied(name, source)}")
    for name, constant in plan.constants:
        _check_constant("state dict", name, constant, tensors[name])
    leaves = _allocate(spec, plan.dtypes, {path: device for path, _ in items(spec)})
    for name, path, part in plan.placements:
        part.of(leaves[path]).copy_(tensors[name].detach().reshape(part.shape))
    return _rebuild(spec, leaves)


def to_checkpoint(tree: Any, spec: Any, names: Names) -> dict[str, Tensor]:
    """A tree of values (parameters, gradients) as a state dict under the names of the text-only transformers class.

    Merged leaves are split into views. `CheckpointError` lists the leaves that do not have the spec's shape.
    """
    leaves, specs = dict(items(tree, is_leaf=_is_mapped)), dict(items(spec))
    wrong = [
        f"{path} is {describe(leaves[path]) if path in leaves else 'missing'}, expected {shown(leaf.shape)}"
        for path, leaf in specs.items()
        if not isinstance(leaves.get(path), (Tensor, MappedRows)) or tuple(leaves[path].shape) != leaf.shape
    ]
    wrong += [f"{path} is not in the spec" for path in leaves if path not in specs]
    if wrong:
        raise CheckpointError("the tree does not fit its spec:\n  " + "\n  ".join(wrong))
    layouts = {path: names.layouts(path, leaf, specs)[0] for path, leaf in specs.items()}
    found = {part.name: part.of(leaves[path]) for path, layout in layouts.items() for part in layout}
    fixed = {names.constant(path): constant for path, constant in constants(spec).items() if constant.saved}
    return found | {name: constant.tensor() for name, constant in fixed.items()}


def _is_mapped(node: Any) -> bool:
    return isinstance(node, MappedRows)


def _allocate(
    spec: Any, dtypes: Mapping[str, torch.dtype], devices: Mapping[str, torch.device | str]
) -> dict[str, Tensor]:
    """Empty leaves for the paths that `devices` names."""
    leaves = dict(items(spec))
    return {path: torch.empty(leaves[path].shape, dtype=dtypes[path], device=at) for path, at in devices.items()}


def _mapped_tables(plan: Plan, stored: Mapping[str, StoredTensor], paths: Collection[str]) -> dict[str, MappedRows]:
    """The tables at `paths` in their files, part after part."""
    parts = {path: [stored[name] for name, home, _ in plan.placements if home == path] for path in paths}
    return {path: mapped(tensors) for path, tensors in parts.items()}


def _small(source: StoredTensor) -> Tensor:
    """A tensor of a few numbers, read into memory."""
    found = torch.empty(source.shape, dtype=source.dtype)
    _read_all([(source, found)], lambda done: None)
    return found


def _check_constant(where: str | Path, name: str, constant: Constant, found: Tensor) -> None:
    if not constant.equals(found):
        raise CheckpointError(
            f"{where}: {name} holds {found.flatten()[:20].tolist()}, the config gives {list(constant.values)[:20]}; "
            "the weights were made with another config, or hold a number that this model does not apply"
        )


def _rebuild(spec: T, leaves: Mapping[str, Tensor | MappedRows]) -> T:
    return pytree.tree_map_with_path(lambda path, leaf: None if leaf is None else leaves[dotted(path)], spec)


def _untied(name: str, source: str) -> str:
    return (
        f"the config ties {name} to {source}, and the two differ; set tie_word_embeddings to false to load both, "
        f"or remove {name}"
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _same_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two tensors of the same shape and dtype hold the same bits."""
    try:
        with first.file.open("rb") as one, second.file.open("rb") as two:
            one.seek(first.offset)
            two.seek(second.offset)
            sizes = [min(CHUNK, first.nbytes - start) for start in range(0, first.nbytes, CHUNK)]
            return all(one.read(size) == two.read(size) for size in sizes)
    except OSError as error:
        raise CheckpointError(f"{first.file} or {second.file} cannot be read: {error}") from error


def _read_all(jobs: list[tuple[StoredTensor, Tensor]], advance: Callable[[int], None]) -> None:
    """Fill every target from its place, file by file and front to back."""
    by_file: dict[Path, list[tuple[StoredTensor, Tensor]]] = {}
    for job in jobs:
        by_file.setdefault(job[0].file, []).append(job)
    for file, inside in by_file.items():
        inside.sort(key=lambda job: job[0].offset)
        try:
            _read_file(file, inside, advance)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error


def _read_file(file: Path, jobs: list[tuple[StoredTensor, Tensor]], advance: Callable[[int], None]) -> None:
    with file.open("rb", buffering=0) as stream:
        for source, target in jobs:
            _read(stream, source, target, advance)


def _read(stream: BinaryIO, source: StoredTensor, target: Tensor, advance: Callable[[int], None]) -> None:
    """Read a tensor into `target`, which has its size: in place when it can be, else converted chunk by chunk."""
    flat = target.view(-1)
    direct = flat.dtype == source.dtype and flat.device.type == "cpu"
    count = CHUNK // source.dtype.itemsize
    buffer = torch.empty(0 if direct else min(count, flat.numel()), dtype=source.dtype)
    stream.seek(source.offset)
    for piece in flat.split(count) if flat.numel() else ():
        landing = piece if direct else buffer[: piece.numel()]
        _fill(stream, landing, source.file)
        if not direct:
            piece.copy_(landing)
        advance(landing.numel() * landing.element_size())


def _fill(stream: BinaryIO, landing: Tensor, file: Path) -> None:
    """Read until the tensor is full. Reading, unlike mapping, survives a file that someone cuts short meanwhile."""
    room = landing.view(torch.uint8).numpy().data
    while room:
        done = stream.readinto(room)  # type: ignore[attr-defined]
        if not done:
            raise CheckpointError(f"{file} became shorter while it was read; load again")
        room = room[done:]


@contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes on a terminal's standard error, nothing elsewhere."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("load", total=total)
        yield lambda done: bar.advance(task, done)
