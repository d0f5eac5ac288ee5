"""Every kernel against its op's reference, on every case; a refused case shows the kernel's own reason."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch

import lowering
from lowering import OPS, LoweringError, Policy
from lowering.check import comparison
from lowering.kernel import REFERENCE, Kernel
from lowering.target import TARGETS
from params import tree
from params.shards import AddendWeight, SomeExperts, VocabularyWeight
from tests.cases import CASES, Arguments, Case, live
from tests.each import each
from tests.tolerances import assert_close

SHARED = (AddendWeight, VocabularyWeight, SomeExperts)
"""Weights of several ranks, and below the ops that exchange between them: tests/sharding runs these on ranks."""
COLLECTIVES = ("all_gather", "all_reduce", "from_first")
KERNELS = [
    kernel
    for op in OPS.values()
    for kernel in op.kernels.values()
    if kernel.name != REFERENCE and not any(kind in SHARED for kind in kernel.weights)
]
CALLS = [
    (case, dtype, kernel)
    for case in CASES
    for dtype in (torch.float32, torch.bfloat16)
    for kernel in OPS[case.op].serving("cpu")
    if kernel.name != REFERENCE and str(case) != "sparse_attention[prompt_4k]"  # its reference holds 2.5 GB
]


def laid_out(kernel: Kernel, case: Case, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The case's arguments, its weights in the kernel's layout where it makes one."""
    args, kwargs = copy.deepcopy(drawn(case, dtype))
    return comparison.laid_out(OPS[case.op], kernel, args), kwargs


@lru_cache(maxsize=1)
def drawn(case: Case, dtype: torch.dtype) -> Arguments:
    """Of the case that was met last: its kernels follow each other, and drawing takes longer than most of them."""
    return case.arguments(dtype)


@lru_cache(maxsize=1)
def expected(case: Case, dtype: torch.dtype) -> Any:
    """What the reference gives."""
    args, kwargs = copy.deepcopy(drawn(case, dtype))
    return live(case.op, OPS[case.op].body(*args, **kwargs))


@pytest.mark.plain  # test_types runs the same pairs with checks
@each(CALLS, by=lambda case, dtype, kernel: f"{case.op}-{dtype}".replace("torch.", ""))
def test_a_kernel_equals_the_reference(case: Case, dtype: torch.dtype, kernel: Kernel) -> None:
    """Or refuses the case with one sentence, which asking for it by name then raises."""
    op = OPS[case.op]
    args, kwargs = laid_out(kernel, case, dtype)
    reason = kernel.refuse(*args, **kwargs) if kernel.refuse else None
    with lowering.use(Policy({case.op: kernel.name})):
        if reason is not None:
            # Kept by name, the error and this frame would hold each other, and the case's tensors.
            with pytest.raises(LoweringError, match=re.escape(reason)):
                op(*args, **kwargs)
            return
        actual = op(*args, **kwargs)
    assert_close(live(case.op, actual), expected(case, dtype), length=case.length)


@pytest.fixture
def poisoned() -> Iterator[Callable[[], None]]:
    """Called, makes Torch fill all memory that it hands out, with NaN or the largest integer."""
    yield lambda: torch.use_deterministic_algorithms(True, warn_only=True)
    torch.use_deterministic_algorithms(False)


@pytest.mark.plain
@pytest.mark.parametrize("name", sorted({case.op for case in CASES}))
def test_nothing_that_is_returned_was_never_written(name: str, poisoned: Callable[[], None]) -> None:
    """Every kernel gives the same in memory full of NaN: padding, scratch rows and scratch pages too."""
    calls = []
    for kernel in OPS[name].serving("cpu"):
        cases = [case for case in CASES if case.op == name and not case.bench]
        each = [(case, kernel, *laid_out(kernel, case, torch.float32)) for case in cases[:: max(1, len(cases) // 8)]]
        taken = [call for call in each if kernel.refuse is None or kernel.refuse(*call[2], **call[3]) is None]
        calls += [(case, kernel, kernel.run(*args, **kwargs)) for case, kernel, args, kwargs in taken]
    poisoned()
    for case, kernel, expected in calls:
        args, kwargs = laid_out(kernel, case, torch.float32)
        assert tree.equal(kernel.run(*args, **kwargs), expected), f"{case} {kernel.name}"


@each(KERNELS)
def test_a_kernel_takes_at_least_one_case(kernel: Kernel) -> None:
    """A kernel that no case reaches is not tested."""
    (name,) = [op.name for op in OPS.values() if kernel in op.kernels.values()]

    def takes(case: Case, dtype: torch.dtype) -> bool:
        args, kwargs = case.arguments(dtype) if kernel.operators else laid_out(kernel, case, dtype)
        return kernel.refuse is None or kernel.refuse(*args, **kwargs) is None

    small_first = sorted((case for case in CASES if case.op == name), key=lambda case: case.bench)
    assert any(takes(case, dtype) for case in small_first for dtype in (torch.float32, torch.bfloat16))


def test_every_op_has_cases() -> None:
    """No op is left out, and no case names an op that does not exist."""
    assert {case.op for case in CASES} == set(OPS) - set(COLLECTIVES)


def test_the_table_lists_every_kernel() -> None:
    """One row an op, one column a target that is not refused."""
    lines = lowering.table().splitlines()
    assert len(lines) == 2 + len(OPS)
    assert "ascend310p" not in lines[0] and all(name in lines[0] for name, t in TARGETS.items() if not t.refused)
    for op in OPS.values():
        (row,) = [line for line in lines if line.startswith(f"| `{op.name}` |")]
        assert all(f"`{name}`" in row for name, kernel in op.kernels.items() if not kernel.only_by_name)
