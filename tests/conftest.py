"""Settings of every test run, and its two options.

`FUNCMODELS_HOOK=1 pytest` checks the annotated shapes of every call in the three packages: jaxtyping's import hook with
beartype, which must be in place before they are imported. Checked functions do not compile, so tests marked `compile`
are left out, as are those marked `plain`. Of a test with several lists of parameters that run takes every element of
every list once, not all of them together, and one seed: other values have the same shapes. `pytest --sweep` adds the
tests marked `sweep` and gives Hypothesis many random examples.
"""

from __future__ import annotations

import ctypes
import os

# One thread a worker: pytest-xdist fills the cores. Read when torch is loaded, so set before anything imports it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# Read by glibc when a worker starts: what is larger than this goes back to the system when it is freed. By default
# tensors of some megabytes stay with the process, and a worker grows by gigabytes over thousands of tests.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))
# oneDNN keeps the code of its last 1,024 products by size and dtype, some hundred kilobytes each: no test meets those
# of the tests before it again.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "50")

import hypothesis
import jaxtyping
import pytest

from tests.typechecker import HOOKED, check_kernels

if HOOKED:
    jaxtyping.install_import_hook(["funcmodels", "lowering", "params"], "tests.typechecker.check")
    check_kernels()

hypothesis.settings.register_profile("ci", derandomize=True, database=None, deadline=None, max_examples=20)
hypothesis.settings.register_profile("sweep", database=None, deadline=None, max_examples=500, print_blob=True)


TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Of glibc; other systems have none."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sweep", action="store_true", help="run the tests marked sweep too, with many random examples")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("sweep" if config.getoption("--sweep") else "ci")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between files, models that a file's functions have kept are let go, and freed memory goes back to the system."""
    if nextitem is None or nextitem.path == item.path:
        return
    functions = vars(getattr(item, "module", object))
    for value in functions.values():
        if hasattr(type(value), "cache_clear") and getattr(value, "__module__", None) == functions["__name__"]:
            value.cache_clear()
    if TRIM is not None:
        TRIM(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {"compile", "plain"} if HOOKED else set()
    if not config.getoption("--sweep"):
        left_out.add("sweep")
    dropped = [item for item in items if any(mark.name in left_out for mark in item.iter_markers())]
    if HOOKED:
        dropped += repeated([item for item in items if item not in dropped])
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        gone = set(dropped)
        items[:] = [item for item in items if item not in gone]


def repeated(items: list[pytest.Item]) -> list[pytest.Item]:
    """Those of whose parametrizations each gives what it gave in an item of the same test before, seeds aside."""
    seen: set[tuple[str, tuple[tuple[str, int], ...]]] = set()
    found = []
    for item in items:
        spec = getattr(item, "callspec", None)
        if spec is None:
            continue
        test, parts = item.nodeid.partition("[")[0], set()
        for mark in item.iter_markers("parametrize"):
            names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
            # The objects themselves are those of the mark, and need not be hashable.
            parts.add((test, tuple((name, id(spec.params[name])) for name in names if name != "seed")))
        if parts <= seen:
            found.append(item)
        seen |= parts
    return found
