"""Our Triton kernels in Triton's interpreter, against the bodies of their ops, on the cases of `lowering.cases`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowering.cases import CASES
from lowering.cases.case import Case
from lowering.op import find
from lowering.ops import DeltaStates, DeltaTrail
from lowering.ops.short_conv import WindowTrail
from lowering.rows import Rows
from lowering.target import TARGETS
from lowering.triton import delta, norm, short_conv
from lowering.triton.launch import Launch
from tests.lowering.triton.interpreter import run
from tests.tolerances import assert_close

SMALL = {"gated_delta_rule": 65536, "gated_rms_norm": 40960, "gated_rms_norm_fp32": 40960}
"""Bytes of a unified buffer, 512 for other ops: tiles are then smaller than tensors, and their last one is ragged."""
LAUNCHES: dict[str, Callable[..., tuple[Launch, Any]]] = {
    "gated_delta_rule": delta.gated_delta_rule,
    "delta_gates": delta.delta_gates,
    "channel_gates": delta.channel_gates,
    "short_conv": short_conv.short_conv,
    "gated_rms_norm": lambda *args, **kwargs: norm.gated_rms_norm(*args, **kwargs, rounded=True),
    "gated_rms_norm_fp32": lambda *args, **kwargs: norm.gated_rms_norm(*args, **kwargs, rounded=False),
}
BEFORE = {"gated_delta_rule": 5, "short_conv": 2}
"""Where the state stands among an op's arguments."""


def taken(case: Case) -> bool:
    """Whether a launch takes the case: one that continues a state, by few tokens a row; wide ones by the fewest."""
    if case.op not in LAUNCHES or case.bench:
        return False
    args, _ = case.arguments()
    rows = next((arg for arg in args if isinstance(arg, Rows)), None)
    most = 4 if "128" in case.name else 5
    return rows is None or (args[BEFORE[case.op]] is not None and (rows.max_query <= most or "ragged_10" in case.name))


def with_padding_of_nan(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What belongs to no row must not be read."""
    rows = next((arg for arg in args if isinstance(arg, Rows)), None)
    for x in args:
        if rows is not None and isinstance(x, Tensor) and not rows.uniform and x.shape[0] == args[0].shape[0]:
            x[int(rows.query_start[-1]) :] = float("nan")
    return args


def filled(case: Case, dtype: torch.dtype) -> tuple[Any, Any, Rows | None]:
    """What a launch gives, what the op's body gives, and the rows."""
    args, kwargs = case.arguments(dtype)
    args = with_padding_of_nan(args)
    target = replace(TARGETS["ascend910b"], unified_buffer=SMALL.get(case.op, 512))
    launch, found = LAUNCHES[case.op](*args, **kwargs, target=target)
    run(launch)
    return found, find(case.op).body(*args, **kwargs), next((arg for arg in args if isinstance(arg, Rows)), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", [case for case in CASES if taken(case)], ids=str)
def test_a_launch_fills_what_the_op_gives(case: Case, dtype: torch.dtype) -> None:
    found, expected, rows = filled(case, dtype)
    if rows is None or found[2] is None:
        return assert_close(found, expected, length=case.length)
    assert_close(found[:2], expected[:2], length=case.length)
    for accepted in range(rows.max_query + 1):
        counts = torch.full((rows.count,), accepted, dtype=torch.int32)
        assert_close(*(_standing(trail, counts, case) for trail in (found[2], expected[2])), length=case.length)
    return None


def _standing(trail: Any, accepted: Tensor, case: Case) -> Tensor:
    if isinstance(trail, WindowTrail):
        return trail.at(accepted, trail.inputs.shape[1] - 4)
    assert isinstance(trail, (DeltaStates, DeltaTrail))
    return trail.at(accepted)


ACCEPTED = torch.tensor([0, 4, 2], dtype=torch.int32)
TINY = replace(TARGETS["ascend910b"], unified_buffer=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_committed_states_and_windows(dtype: torch.dtype) -> None:
    """Rows that accept nothing, all and some of four tokens; tiles do not divide what they go over."""
    states = DeltaStates(torch.randn(4, 2, 5, 3).to(dtype), torch.randn(3, 4, 2, 5, 3).to(dtype))
    launch, found = delta.commit(states, ACCEPTED, target=TINY)
    run(launch)
    assert launch.jobs > 3 and torch.equal(found, states.at(ACCEPTED))
    trail = WindowTrail(torch.randn(4, 3 + 4, 7).to(dtype))
    trail.inputs[3] = 0
    launch, found = short_conv.commit(trail, ACCEPTED, 3, target=TINY)
    run(launch)
    assert launch.jobs > 3 and torch.equal(found, trail.at(ACCEPTED, 3))


@pytest.mark.parametrize("programs", [1, 5])
def test_scattered_states(programs: int) -> None:
    """A slot that nothing names stays as it is; -1 names none."""
    source, out, slots = torch.randn(3, 2, 5), torch.randn(6, 2, 5), torch.tensor([4, -1, 0], dtype=torch.int32)
    expected = out.clone()
    expected[[4, 0]] = source[[0, 2]]
    launch = delta.scatter(source, slots, out, target=TINY)
    run(launch, programs)
    assert torch.equal(out, expected)


def test_the_interpreter_notices_a_wrong_convention() -> None:
    """A decay that is not applied, a tap that is left out, a gate that is not rounded: as large as they should be."""
    cases = {str(case): case for case in CASES}
    for name, changed in {
        "gated_delta_rule[verify_2_6_8_12_window]": lambda launch: launch.arguments["decay"].zero_(),
        "short_conv[ragged_10x4_window]": lambda launch: launch.arguments["taps"][0].zero_(),
        "gated_rms_norm[heads_silu]": lambda launch: launch.constants.update(SILU=False),
    }.items():
        case = cases[name]
        args, kwargs = case.arguments()
        launch, found = LAUNCHES[case.op](*args, **kwargs, target=TARGETS["ascend910b"])
        expected = find(case.op).body(*args, **kwargs)
        changed(launch)
        run(launch)
        with pytest.raises(AssertionError):
            assert_close(found, expected, length=case.length)
