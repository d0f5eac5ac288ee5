"""Starting ranks as processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(size: int, command: Sequence[str], limit: float = 240, **variables: str) -> list[tuple[int, str]]:
    """Exit code and output of `python COMMAND` on each of `size` ranks."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = os.environ | {
        "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **variables,
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, *command], env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=limit)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]
