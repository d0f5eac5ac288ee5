"""Running one model on several devices: a process each, started by torchrun, every one a rank of a process group."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lowering import ops
from lowering.errors import CollectiveError
from params.errors import ConfigError
from params.sharding import Ranks

TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the others before it gives up."""


def ranks_of(mesh: DeviceMesh, *, whole_experts: bool = False) -> Ranks:
    """This rank of a mesh with one axis. With `whole_experts` ranks share out routed experts, not slices of each.

    `TypeError` for what is no mesh, `ConfigError` for one with several axes.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh={mesh!r:.100}: give a DeviceMesh of one axis, or the Ranks that ranks_of makes of one")
    if mesh.ndim != 1:
        raise ConfigError(f"a mesh of {mesh.ndim} axes {mesh.mesh_dim_names}; give one axis of it, as mesh['tp']")
    return Ranks(mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name, whole_experts)


@contextmanager
def started(size: int, device: str, timeout: timedelta = TIMEOUT) -> Iterator[tuple[DeviceMesh, str]]:
    """The mesh of the `size` processes that torchrun has started, and this one's device. Ends the group at the end.

    `ConfigError` for a process that torchrun did not start so.
    """
    found = os.environ.get("WORLD_SIZE")
    if found != str(size):
        raise ConfigError(
            f"{size} ranks were asked for, and {found or 'none'} were started; begin the command with "
            f"torchrun --nproc-per-node {size} -m funcmodels"
        )
    kind, _, place = device.partition(":")
    if place:
        raise ConfigError(f"device {device!r}: each rank takes the device of its own number; give {kind!r}")
    try:
        backend = dist.get_default_backend_for_device(kind)
    except ValueError as error:
        raise ConfigError(f"ranks on device {device!r} have nothing to exchange tensors through: {error}") from error
    own = kind if kind == "cpu" else f"{kind}:{os.environ['LOCAL_RANK']}"
    if kind != "cpu":
        torch.get_device_module(kind).set_device(own)
    dist.init_process_group(backend, timeout=timeout)
    try:
        yield init_device_mesh(kind, (size,), mesh_dim_names=("tp",)), own
    finally:
        dist.destroy_process_group()


_FACTS = 24
"""Most facts that ranks compare."""


def check_same(ranks: Ranks | None, facts: Mapping[str, Any], params: Any) -> None:
    """`ValueError` on every rank unless all of them were given the same, or when one has refused what it was given.

    `facts` are named alike everywhere, and compared by their text. They are exchanged where the parameters lie.
    """
    if ranks is None or ranks.size == 1:
        return
    found = _heard(ranks, [0, *map(_digest, facts.values())], params)
    for rank, theirs in enumerate(found):
        if theirs[0]:
            raise ValueError(f"rank {rank} of {ranks.size} has refused what it was given; its own error says why")
        for name, mine, other in zip(facts, found[0][1:], theirs[1:], strict=False):
            if mine != other:
                raise ValueError(
                    f"ranks 0 and {rank} of {ranks.size} were given what differs in {name}; all of them take part in "
                    "one call, so give each the same prompts, samplings and settings"
                )


@contextmanager
def refusals_told(ranks: Ranks | None, params: Any) -> Iterator[None]:
    """What is raised inside is told the other ranks, which wait in `check_same`."""
    refused = True
    try:
        yield
        refused = False
    finally:
        if refused and ranks is not None and ranks.size > 1:
            with suppress(CollectiveError):
                _heard(ranks, [1], params)


def _heard(ranks: Ranks, mine: list[int], params: Any) -> list[list[int]]:
    """Every rank's numbers."""
    row = torch.tensor(mine + [0] * (1 + _FACTS - len(mine)), dtype=torch.int64, device="cpu")
    row = row.to(params.embed.weight.device)
    return ops.all_gather(row, group=ranks.group, ranks=ranks.size).unflatten(0, (ranks.size, -1)).tolist()


def _digest(fact: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(fact).encode(), digest_size=8).digest(), "big", signed=True)
