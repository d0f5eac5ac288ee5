"""Running one model on several devices: a process each, started by torchrun, every one a rank of a process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from params.errors import ConfigError
from params.sharding import Ranks

TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the others before it gives up."""


def ranks_of(mesh: DeviceMesh, *, whole_experts: bool = False) -> Ranks:
    """This rank of a mesh with one axis. With `whole_experts` ranks share out routed experts, not slices of each.

    `TypeError` for what is no mesh, `ConfigError` for one with several axes.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh={mesh!r}: give a DeviceMesh of one axis, or the Ranks that ranks_of makes of one")
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
    kind = device.split(":")[0]
    try:
        backend = dist.get_default_backend_for_device(kind)
    except ValueError as error:
        raise ConfigError(f"ranks on device {device!r} have nothing to exchange tensors through: {error}") from error
    own = device if kind == "cpu" else f"{kind}:{os.environ['LOCAL_RANK']}"
    if kind != "cpu":
        torch.get_device_module(kind).set_device(own)
    dist.init_process_group(backend, timeout=timeout)
    try:
        yield init_device_mesh(kind, (size,), mesh_dim_names=("tp",)), own
    finally:
        dist.destroy_process_group()
