"""Tiny checkpoints of every family, quantised ones, and drafts: what hostile ones are made of."""

from __future__ import annotations

import functools
import json
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors.torch import save_file

import funcmodels as fm
import params
from tests.models import test_qwen3
from tests.oracle import block_drafts, deepseek_v2, gemma3, kimi_k3, kimi_linear, mtp, qwen3_5, qwen3_8_flash_next

CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "qwen3_5": lambda: {**mtp.sizes("dense", 0), "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1},
    "qwen3_5_moe": lambda: {**qwen3_5.sizes("moe", 1), "model_type": "qwen3_5_moe_text"},
    "gemma3": lambda: {**gemma3.sizes(0), "model_type": "gemma3_text"},
    "qwen3": lambda: test_qwen3.sizes(0),
    "deepseek_v2": lambda: {**deepseek_v2.sizes("full", 0), "model_type": "deepseek_v2"},
    "kimi_linear": lambda: {**kimi_linear.sizes("grouped", 0), "model_type": "kimi_linear"},
    "kimi_k3": lambda: kimi_k3.sizes(0, routed_expert_hidden_size=12),
    "flash_next": lambda: {**qwen3_8_flash_next.sizes(0), "model_type": "qwen4_exp_text"},
}
QUANTISED: dict[str, tuple[str, Any]] = {
    "modelslim": ("qwen3_5_moe", "W8A8_DYNAMIC"),
    "packed": ("kimi_k3", {"**.experts.*": "W4A16_MXFP4"}),
}
DRAFTS = ("dflash", "gated")
"""Block drafts for the checkpoint `qwen3_5`."""

REFUSALS = (fm.CheckpointError, fm.ConfigError)
"""What a directory that cannot be loaded raises, and nothing else."""

_ROOT = tempfile.TemporaryDirectory()


@functools.cache
def written(name: str) -> Path:
    """The directory of a family's checkpoint, of a quantised one, or of a draft."""
    directory = Path(_ROOT.name) / name
    if name in DRAFTS:
        return _write_draft(directory, name)
    family, scheme = QUANTISED.get(name, (name, None))
    model = fm.build(CONFIGS[family]())
    tree = model.init_params(seed=1)
    return fm.save(model, tree if scheme is None else params.quantize(tree, scheme), directory, max_shard_bytes=100_000)


def _write_draft(directory: Path, variant: str) -> Path:
    one: Any = SimpleNamespace(config=fm.build(CONFIGS["qwen3_5"]()).config)
    fields = block_drafts.config_of(one, variant, 0)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields))
    save_file(block_drafts.random_tensors(fields, 0), directory / "model.safetensors")
    return directory


@contextmanager
def bounded(seconds: float, megabytes: int) -> Iterator[None]:
    """Fails what waits for ever, takes more processor time than it may, or more memory than is there to take."""
    with open("/proc/self/statm") as file:
        room = int(file.read().split()[0]) * resource.getpagesize() + megabytes * 2**20
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, _overdue)
    resource.setrlimit(resource.RLIMIT_AS, (room, hard))
    signal.alarm(100)
    began = time.process_time()
    try:
        yield
        assert time.process_time() - began < seconds
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _overdue(*_: Any) -> None:
    raise AssertionError("it does not end")
