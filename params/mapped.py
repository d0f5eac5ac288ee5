"""A table that stays in its files: memory-mapped, read row by row, never in memory as a whole."""

from __future__ import annotations

from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from params.errors import CheckpointError
from params.files import StoredTensor
from params.guarded import open_file
from params.tree import tree


@torch.library.custom_op("params::mapped_rows", mutates_args=(), schema="(Tensor[] shards, Tensor ids) -> Tensor")
def _rows(shards: list[Tensor], ids: Tensor) -> Tensor:
    """An operator of its own, so that a traced program holds one call instead of the shards that one example read."""
    each = shards[0].shape[0]
    flat = ids.flatten()
    home = flat // each
    found = shards[0].new_empty(flat.shape[0], shards[0].shape[1])
    for number in home.unique().tolist():
        at = (home == number).nonzero()[:, 0]
        found[at] = shards[number][flat[at] - number * each]
    return found.unflatten(0, ids.shape)


@_rows.register_fake
def _(shards: list[Tensor], ids: Tensor) -> Tensor:
    return shards[0].new_empty(*ids.shape, shards[0].shape[1])


@tree
class MappedRows:
    """A table [rows dim] in shards of equally many rows, the last perhaps of fewer: tensors mapped from their files."""

    shards: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and channels of the whole."""
        return sum(shard.shape[0] for shard in self.shards), self.shards[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the files."""
        return self.shards[0].dtype

    @property
    def device(self) -> torch.device:
        """Where rows are read: the CPU."""
        return self.shards[0].device

    def static_key(self) -> tuple[Any, ...]:
        """What a choice of kernel may depend on."""
        return self.shape, self.dtype, len(self.shards)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows at `ids` [... ] as [... dim]. Only their pages of the files are read."""
        return _rows(list(self.shards), ids)

    def __getitem__(self, region: tuple[Any, ...]) -> Tensor:
        """Rows `first:last` as a tensor; a shard that is asked for as it lies is not copied."""
        wanted = range(self.shape[0])[region[0]] if region else range(self.shape[0])
        start, parts = 0, []
        for shard in self.shards:
            first, last = max(wanted.start - start, 0), min(wanted.stop - start, shard.shape[0])
            if first < last:
                parts.append(shard[first:last])
            start += shard.shape[0]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def mapped(stored: list[StoredTensor]) -> MappedRows:
    """The tensors, one below the other, as one table. `CheckpointError` unless they can be mapped as they lie."""
    kinds = {tensor.dtype for tensor in stored}
    uneven = {tensor.shape[0] for tensor in stored[:-1]}
    if len(kinds) > 1 or len(uneven) > 1 or any(tensor.offset % tensor.dtype.itemsize for tensor in stored):
        raise CheckpointError(
            f"{stored[0].file} and its kin cannot be read in place: the parts of a table must have one dtype, equally "
            "many rows and aligned places; load the table to memory instead"
        )
    files = {tensor.file: _bytes(tensor.file) for tensor in stored}
    return MappedRows(tuple(_view(files[tensor.file], tensor) for tensor in stored))


def _bytes(file: Path) -> Tensor:
    """A file as a tensor of its bytes."""
    try:
        with open_file(file) as stream:
            return torch.frombuffer(mmap(stream.fileno(), 0, access=ACCESS_COPY), dtype=torch.uint8)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be mapped: {error}; load the table to memory instead") from error


def _view(content: Tensor, tensor: StoredTensor) -> Tensor:
    end = tensor.offset + tensor.nbytes
    if len(content) < end:
        raise CheckpointError(f"{tensor.file} became shorter while it was read; load again")
    return content[tensor.offset : end].view(tensor.dtype).view(tensor.shape)
