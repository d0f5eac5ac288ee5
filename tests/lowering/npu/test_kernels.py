"""Every Ascend kernel against its op's reference on every case, through the CPU references of the operators.

Those references raise where the documentation forbids a call and put NaN where it leaves a value undefined, so a kernel
that runs here and agrees makes only documented calls and reads only defined values.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import lowering
from lowering import OPS, LoweringError, Policy, npu_reference
from lowering.kernel import Kernel
from lowering.target import Target
from tests.cases import CASES, Arguments, Case, Draw, RowCounts, delta, paged
from tests.each import each

from .agreement import MACHINES, OLDER, arguments, check, refusal, served

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CALLS = [
    (case, dtype, target, kernel)
    for case in CASES
    for dtype in DTYPES
    for target in (MACHINES + OLDER if dtype == torch.bfloat16 else MACHINES)
    for kernel in served(case.op, target)
    if not case.bench
]
"""Older CANNs in bfloat16 alone, which is what their limits are about."""


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    """The namespace `npu`, on the CPU."""
    npu_reference.load()


@each(
    CALLS,
    by=lambda case, dtype, target, kernel: f"{case.op}-{dtype}".replace("torch.", ""),
    hooked=lambda case, dtype, target, kernel: [(case, kernel.name), (case.op, kernel.name, dtype, target)],
)
def test_a_kernel_equals_the_reference(case: Case, dtype: torch.dtype, target: Target, kernel: Kernel) -> None:
    """Or refuses the case with one sentence, which asking for it by name then raises."""
    reason = refusal(kernel, case, target, dtype)
    if reason is None:
        check(case, kernel.name, target, dtype)
        return
    args, kwargs = arguments(case, dtype)
    with lowering.use(Policy({case.op: kernel.name}), target=target), pytest.raises(LoweringError) as error:
        OPS[case.op](*args, **kwargs)
    assert reason in str(error.value)


@pytest.mark.parametrize("target", MACHINES, ids=str)
def test_every_kernel_meets_a_case_in_half_precision(target: Target) -> None:
    """A kernel that no case reaches is not tested."""
    for name in OPS:
        cases = [case for case in CASES if case.op == name and not case.bench]
        for kernel in served(name, target):
            assert any(refusal(kernel, case, target, torch.bfloat16) is None for case in cases), kernel


PADDED = RowCounts("padded", (5, 0, 2), (3, 7, 150), padding=300)
"""More padding than a page holds, behind rows that idle, fill a page and cross one."""
LONG = RowCounts("padded_long", (9, 0, 131), (3, 7, 0), padding=40)


@pytest.mark.parametrize(
    ("op", "kernel", "make"),
    [
        ("paged_attention", "npu_fia_tnd", paged(PADDED, 4, 2, 128, 128, 128, shuffled=True)),
        ("paged_attention", "npu_fia_bsnd", paged(PADDED, 4, 2, 256, 256, 128, shuffled=True)),
        (
            "gated_delta_rule",
            "npu_recurrent_gated_delta_rule",
            delta(PADDED, 2, 4, 128, 128, state=True, keep_steps=True, recurrent=torch.bfloat16),
        ),
        (
            "gated_delta_rule",
            "npu_chunk_gated_delta_rule",
            delta(LONG, 2, 4, 128, 128, state=True, keep_steps=False, recurrent=torch.bfloat16),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_padding_and_idle_rows(op: str, kernel: str, make: Callable[[Draw], Arguments]) -> None:
    """Padding tokens and the scratch slot may hold NaN without any live value changing."""
    rows = LONG if kernel == "npu_chunk_gated_delta_rule" else PADDED

    def poisoned(draw: Draw) -> Arguments:
        args, kwargs = make(draw)
        for x in args:
            if isinstance(x, Tensor) and x.shape[0] == rows.tokens:
                x[sum(rows.counts) :] = torch.nan
            if (
                isinstance(x, Tensor)
                and op == "gated_delta_rule"
                and x.shape[0] == len(rows.counts) + 1
                and x.ndim == 4
            ):
                x[-1] = torch.nan
        return args, kwargs

    check(Case(op, "padded", poisoned, 260), kernel, "ascend910b", torch.bfloat16, tokens=sum(rows.counts))


def strided(case: Case) -> Case:
    """The same arguments, those with several axes as every second element of something larger. Pages stay whole."""

    def make(draw: object) -> object:
        args, kwargs = case.make(draw)  # type: ignore[arg-type]
        return tuple(_spread(x) if isinstance(x, Tensor) and x.ndim <= 3 else x for x in args), kwargs

    return Case(case.op, f"{case.name}_strided", make, case.length)  # type: ignore[arg-type]


def _spread(x: Tensor) -> Tensor:
    wide = x.new_zeros([2 * size for size in x.shape])
    view = wide[tuple(slice(None, None, 2) for _ in x.shape)]
    view.copy_(x)
    return view


@pytest.mark.plain
@each(
    [
        (case, target, kernel)
        for case in [strided(case) for case in CASES if not case.bench and case.op != "write_pages"]
        for target in MACHINES[::2]
        for kernel in served(case.op, target)
    ],
    by=lambda case, target, kernel: case.op,
)
def test_strided_arguments(case: Case, target: Target, kernel: Kernel) -> None:
    """Operators are documented for contiguous tensors; ours may be views, which kernels must copy."""
    if refusal(kernel, case, target, torch.bfloat16) is None:
        check(case, kernel.name, target, torch.bfloat16)
