"""Values of stored tensors: read straight into the tensors that they are to fill, file by file and front to back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from params.errors import CheckpointError
from params.files import StoredTensor
from params.guarded import open_file
from params.names.rules import Source

CHUNK = 2**20
"""Bytes read at a time; with a conversion or another device, the memory a load takes beyond its result."""


def small(source: StoredTensor) -> Tensor:
    """A tensor of a few numbers, read into memory."""
    found = torch.empty(source.shape, dtype=source.dtype, device="cpu")
    read_all([Job(source, found)], lambda done: None)
    return found


def same_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two tensors of the same shape and dtype hold the same bits."""
    try:
        with open_file(first.file) as one, open_file(second.file) as two:
            one.seek(first.offset)
            two.seek(second.offset)
            sizes = [min(CHUNK, first.nbytes - start) for start in range(0, first.nbytes, CHUNK)]
            return all(one.read(size) == two.read(size) for size in sizes)
    except OSError as error:
        raise CheckpointError(f"{first.file} or {second.file} cannot be read: {error}") from error


class Job(NamedTuple):
    """A tensor to fill from a stored one, or from a slice of it."""

    stored: StoredTensor
    target: Tensor
    source: Source | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are wanted of the file."""
        return self.target.numel() * self.stored.dtype.itemsize


def read_all(jobs: Iterable[Job], advance: Callable[[int], None]) -> None:
    """Fill every target from its place, file by file and front to back."""
    by_file: dict[Path, list[Job]] = {}
    for job in jobs:
        by_file.setdefault(job.stored.file, []).append(job)
    for file, inside in by_file.items():
        try:
            _read_file(file, sorted(inside, key=lambda job: job.stored.offset), advance)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error


def _read_file(file: Path, jobs: Iterable[Job], advance: Callable[[int], None]) -> None:
    with open_file(file, buffering=0) as stream:
        for job in jobs:
            _read(stream, job, advance)


def _read(stream: BinaryIO, job: Job, advance: Callable[[int], None]) -> None:
    stored, target, source = job
    if source is None:
        _read_run(stream, stored, 0, target, advance)
        return
    inner = math.prod(source.shape[source.axis + 1 :])
    first = source.start * inner
    if math.prod(source.shape[: source.axis]) == 1:
        _read_run(stream, stored, first, target, advance)
        return
    whole, wanted = source.shape[source.axis] * inner, (source.stop - source.start) * inner
    # A slice of inputs has a short piece in each row; of stacked experts, a long one in each expert.
    rows = target.view(-1, wanted) if target.is_contiguous() else target
    if 2 * whole * stored.dtype.itemsize > CHUNK:
        for index, row in enumerate(rows.unbind(0)):
            _read_run(stream, stored, index * whole + first, row, advance)
    else:
        _read_pieces(stream, stored, whole, slice(first, first + wanted), rows, advance)


def _read_run(
    stream: BinaryIO, stored: StoredTensor, first: int, target: Tensor, advance: Callable[[int], None]
) -> None:
    """Fill `target` with the elements from `first` on: in place when it can be, else converted chunk by chunk."""
    flat = target.view(-1)
    direct = flat.dtype == stored.dtype and flat.device.type == "cpu"
    count = CHUNK // stored.dtype.itemsize
    buffer = torch.empty(0 if direct else min(count, flat.numel()), dtype=stored.dtype, device="cpu")
    stream.seek(stored.offset + first * stored.dtype.itemsize)
    for piece in flat.split(count) if flat.numel() else ():
        landing = piece if direct else buffer[: piece.numel()]
        _fill(stream, landing, stored.file)
        if not direct:
            piece.copy_(landing)
        advance(landing.numel() * landing.element_size())


def _read_pieces(
    stream: BinaryIO, stored: StoredTensor, whole: int, wanted: slice, rows: Tensor, advance: Callable[[int], None]
) -> None:
    """Fill each row with the elements `wanted` of `whole`. All are read: a seek for every row would take longer."""
    buffer = torch.empty(CHUNK // (whole * stored.dtype.itemsize), whole, dtype=stored.dtype, device="cpu")
    stream.seek(stored.offset)
    for some in rows.split(len(buffer)):
        landing = buffer[: len(some)]
        _fill(stream, landing, stored.file)
        some.copy_(landing[:, wanted].reshape(some.shape))
        advance(some.numel() * landing.element_size())


def _fill(stream: BinaryIO, landing: Tensor, file: Path) -> None:
    """Read until the tensor is full. Reading, unlike mapping, survives a file that someone cuts short meanwhile."""
    room = landing.view(torch.uint8).numpy().data
    while room:
        done = stream.readinto(room)  # type: ignore[attr-defined]
        if not done:
            raise CheckpointError(f"{file} became shorter while it was read; load again")
        room = room[done:]
