"""Checkpoints to parameter trees and back.

`load` checks a whole checkpoint against a spec tree before it reads a value, then reads every tensor once, straight
into the leaf it belongs to. `save` writes what transformers loads. `to_checkpoint` and `from_checkpoint` are the same
maps between values in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from params.errors import CheckpointError
from params.files import StoredTensor, resolve, tensor_names
from params.matching import match, shown
from params.names.rules import Names
from params.tree import describe, dotted, items

T = TypeVar("T")

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
) -> T:
    """The parameters of a checkpoint, in a tree like `spec`.

    Floating-point leaves get the dtype their spec pins, else `dtype`, else (`None`) the one they are stored in; other
    dtypes are never converted. `tensors` is an earlier `tensor_names(path)`, to read the headers once. `progress`
    shows a bar when standard error is a terminal.

    One `CheckpointError` lists every missing, unexpected, misshapen, wrongly typed or doubled tensor; nothing is
    loaded in part. Memory: the result and about a megabyte. The result shares nothing with the files.
    """
    directory = resolve(path)
    stored = tensor_names(directory) if tensors is None else tensors
    plan = match(spec, names, stored, dtype)
    plan.check(directory)
    for name, source in plan.repeats:
        if not _same_bytes(stored[name], stored[source]):
            raise CheckpointError(f"{directory}: {_untied(name, source)}")
    leaves = _allocate(spec, plan.dtypes, device)
    jobs = [(stored[name], part.of(leaves[path])) for name, path, part in plan.placements]
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
    leaves = _allocate(spec, plan.dtypes, device)
    for name, path, part in plan.placements:
        part.of(leaves[path]).copy_(tensors[name].detach().reshape(part.shape))
    return _rebuild(spec, leaves)


def to_checkpoint(tree: Any, spec: Any, names: Names) -> dict[str, Tensor]:
    """A tree of values (parameters, gradients) as a state dict under the names of the text-only transformers class.

    Merged leaves are split into views. `CheckpointError` lists the leaves that do not have the spec's shape.
    """
    leaves, specs = dict(items(tree)), dict(items(spec))
    wrong = [
        f"{path} is {describe(leaves[path]) if path in leaves else 'missing'}, expected {shown(leaf.shape)}"
        for path, leaf in specs.items()
        if not isinstance(leaves.get(path), Tensor) or tuple(leaves[path].shape) != leaf.shape
    ]
    wrong += [f"{path} is not in the spec" for path in leaves if path not in specs]
    if wrong:
        raise CheckpointError("the tree does not fit its spec:\n  " + "\n  ".join(wrong))
    layouts = {path: names.layouts(path, leaf, specs)[0] for path, leaf in specs.items()}
    return {part.name: part.of(leaves[path]) for path, layout in layouts.items() for part in layout}


def _allocate(spec: Any, dtypes: Mapping[str, torch.dtype], device: torch.device | str) -> dict[str, Tensor]:
    return {path: torch.empty(leaf.shape, dtype=dtypes[path], device=device) for path, leaf in items(spec)}


def _rebuild(spec: T, leaves: Mapping[str, Tensor]) -> T:
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
