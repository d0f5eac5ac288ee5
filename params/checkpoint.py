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
from typing import Any, Literal, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from params.constants import Constant, constants
from params.errors import CheckpointError
from params.files import StoredTensor, listed, resolve, tensor_names
from params.mapped import MappedRows, mapped
from params.matching import Plan, match, shown, widest
from params.modes import lasting
from params.names.rules import Names
from params.quant.schemes import described
from params.quant.stored import ZEROS, of_tree, zero_offsets
from params.reading import Job, read_all, same_bytes, small
from params.sharded import sharded
from params.sharding import Ranks
from params.spec import widened
from params.tree import describe, dotted, items

T = TypeVar("T")

Tables = Literal["device", "host", "file"]
"""Where `load` puts tables: beside the other leaves, on the CPU, or nowhere (`MappedRows`)."""


@lasting
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
    ranks: Ranks | None = None,
) -> T:
    """The parameters of a checkpoint, in a tree like `spec`; of one of several `ranks` its part, and no more is read.

    Where a `quant_model_description.json` lies beside them, the projections that it calls quantised are values of
    `params.quant`, in the checkpoint's own form; and so are those that are packed as `config.json` then says.
    Floating-point leaves get `dtype` or (`None`) the one they are stored in, and no less than their spec pins (see
    `widened`); other dtypes are never converted. `tensors` is an earlier `tensor_names(path)`, to read the headers
    once. `progress` shows a bar when standard error is a terminal. `tables` says where the leaves go that are read by
    rows: with "file" they are mapped and keep the dtype they are stored in.

    One `CheckpointError` lists every missing, unexpected, misshapen, wrongly typed or doubled tensor; nothing is
    loaded in part. Memory: the result and about a megabyte. The result shares nothing with the files, but for mapped
    tables: their files must stay as they are.
    """
    if tables not in ("device", "host", "file"):
        raise ValueError(f"tables={tables!r:.100}: give 'device', 'host' or 'file'")
    directory = resolve(path)
    stored = tensor_names(directory) if tensors is None else tensors
    spec = widened(spec, dtype or widest(stored.values()))
    wholes = dict(items(spec))
    quantized = described(directory, spec, names, stored)
    quantized.check(directory)
    spec, names = quantized.spec, quantized.names
    if ranks is not None:
        spec, names = sharded(spec, names, wholes, ranks)
    plan = match(spec, names, stored, dtype)
    plan.check(directory)
    for name, source in plan.repeats:
        if not same_bytes(stored[name], stored[source]):
            raise CheckpointError(f"{directory}: {_untied(name, source)}")
    for name, constant in plan.constants:
        _check_constant(directory, name, constant, small(stored[name]))
    _check_offsets(directory, plan, stored)
    apart = {path for path, leaf in items(spec) if leaf.table and tables != "device"}
    leaves: dict[str, Any] = _mapped_tables(plan, stored, apart) if tables == "file" else {}
    leaves |= _allocate(
        spec, plan, {path: "cpu" if path in apart else device for path, _ in items(spec) if path not in leaves}
    )
    jobs = [
        Job(stored[name], part.of(leaves[path]), part.source)
        for name, path, part in plan.placements
        if isinstance(leaves[path], Tensor)
    ]
    with _bar(sum(job.nbytes for job in jobs), progress) as advance:
        read_all(jobs, advance)
    return _rebuild(spec, leaves)


@lasting
def from_checkpoint(
    tensors: Mapping[str, Tensor],
    spec: T,
    names: Names,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> T:
    """The tree of a state dict, with the checks and dtype rules of `load`. Values are copied and detached."""
    spec = widened(spec, dtype or widest(tensors.values()))
    plan = match(spec, names, tensors, dtype)
    plan.check("state dict")
    for name, source in plan.repeats:
        if not torch.equal(_bytes(tensors[name]), _bytes(tensors[source])):
            raise CheckpointError(f"state dict: {_untied(name, source)}")
    for name, constant in plan.constants:
        _check_constant("state dict", name, constant, tensors[name])
    leaves = _allocate(spec, plan, {path: device for path, _ in items(spec)})
    for name, path, part in plan.placements:
        part.of(leaves[path]).copy_(part.read(tensors[name].detach()))
    return _rebuild(spec, leaves)


def to_checkpoint(tree: Any, spec: Any, names: Names) -> dict[str, Tensor]:
    """A tree of values (parameters, gradients) as a state dict under the names of the text-only transformers class.

    Merged leaves are split into views; quantised weights give the tensors that ModelSlim stores. `CheckpointError`
    lists the leaves that do not have the spec's shape.
    """
    spec, names = of_tree(tree, spec, names)
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
    return found | zero_offsets(names, found) | {name: constant.tensor() for name, constant in fixed.items()}


def _is_mapped(node: Any) -> bool:
    return isinstance(node, MappedRows)


def _allocate(spec: Any, plan: Plan, devices: Mapping[str, torch.device | str]) -> dict[str, Tensor]:
    """Empty leaves for the paths that `devices` names, zeros where nothing will fill some region."""
    leaves = dict(items(spec))
    return {
        path: (torch.zeros if path in plan.hollow else torch.empty)(
            leaves[path].shape, dtype=plan.dtypes[path], device=at
        )
        for path, at in devices.items()
    }


def _mapped_tables(plan: Plan, stored: Mapping[str, StoredTensor], paths: Collection[str]) -> dict[str, MappedRows]:
    """The tables at `paths` in their files, part after part."""
    parts = {path: [stored[name] for name, home, _ in plan.placements if home == path] for path in paths}
    return {path: mapped(tensors) for path, tensors in parts.items()}


def _check_constant(where: str | Path, name: str, constant: Constant, found: Tensor) -> None:
    if not constant.equals(found):
        raise CheckpointError(
            f"{where}: {name} holds {found.flatten()[:20].tolist()}, the config gives {list(constant.values)[:20]}; "
            "the weights were made with another config, or hold a number that this model does not apply"
        )


def _check_offsets(directory: Path, plan: Plan, stored: Mapping[str, StoredTensor]) -> None:
    """Check that integers are symmetric which are taken to be."""
    wrong = [name for name, why in plan.ignored.items() if why == ZEROS and small(stored[name]).any()]
    if wrong:
        raise CheckpointError(
            f"{directory}: weights with an offset are not supported, and these offsets are not zeros: {listed(wrong)}; "
            "quantise the weights symmetrically"
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
