"""The user's cache directory, and what is kept there of this machine: which operators its probe has run.

The directory is `FUNCMODELS_CACHE`, or the platform's for caches.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = "FUNCMODELS_CACHE"
"""Environment variable that names the cache directory."""


def cache_directory() -> Path:
    """Where fetched and generated files are kept."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "funcmodels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "funcmodels"


@dataclass(frozen=True)
class Probed:
    """What the probe of a machine found: operators that ran and held, and others with what went wrong."""

    seen: frozenset[str] = frozenset()
    failed: tuple[tuple[str, str], ...] = ()


def probed(soc: str, torch_npu: str, cann: str) -> Probed:
    """What was kept of a machine of this SoC with these versions; nothing before its probe."""
    path = probe_file(soc, torch_npu, cann)
    if not path.is_file():
        return Probed()
    kept = json.loads(path.read_text(encoding="utf-8"))
    return Probed(frozenset(kept["seen"]), tuple(sorted(kept["failed"].items())))


def keep(found: Probed, soc: str, torch_npu: str, cann: str) -> Path:
    """Keep what a probe found, in place of what one found before; the file."""
    path = probe_file(soc, torch_npu, cann)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"seen": sorted(found.seen), "failed": dict(found.failed)}, indent=1)
    # Renaming last, so that nobody reads half of it.
    half = path.with_suffix(f".{os.getpid()}")
    half.write_text(text, encoding="utf-8")
    half.replace(path)
    return path


def probe_file(soc: str, torch_npu: str, cann: str) -> Path:
    """Where it is kept: another SoC or version is another machine."""
    return cache_directory() / "probes" / f"{soc}-torch_npu-{torch_npu}-CANN-{cann}.json"
