"""Programs of Ascend's compiler, run: our kernels give what their ops give, and planted faults are found."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import lowering
from lowering import Compiled
from lowering.ascend_compiler.emulator import (
    Emulation,
    EmulationError,
    Hang,
    OutOfBounds,
    Race,
    Unknown,
    emulate,
)
from lowering.cases import CASES
from lowering.cases.case import Case
from lowering.op import find
from lowering.target import TARGETS
from lowering.triton import launch, norm
from lowering.triton.launch import Launch
from tests.lowering.triton.test_numbers import OPS, SMALL, taken, with_padding_of_nan
from tests.tolerances import assert_close

pytestmark = pytest.mark.plain  # programs have no axes to check
CORES = 3
Call = tuple[Compiled, dict[str, Any], int]


def compiled(
    file: str,
    name: str,
    jobs: int,
    arguments: Mapping[str, Any],
    constants: Mapping[str, Any],
    target: str = "ascend910b",
) -> Compiled:
    found = Launch(file, name, arguments, constants, jobs, (), ()).compiled(target)
    assert isinstance(found, Compiled), str(found)
    return found


def runner(
    target: str, file: str, name: str, jobs: int, arguments: Mapping[str, Any], constants: Mapping[str, Any]
) -> None:
    """In the place of a device: what its compiler has made, emulated."""
    emulate(compiled(file, name, jobs, arguments, constants, target), arguments, max(1, min(jobs, CORES)), seed=jobs)


def called(case: Case, dtype: torch.dtype, name: str = "ascend910b") -> tuple[Any, Any]:
    """What the registered kernel and the op's body give, but for trails."""
    args, kwargs = case.arguments(dtype)
    args = with_padding_of_nan(args)
    target = replace(TARGETS[name], unified_buffer=SMALL.get(case.op, 512))
    asked: dict[str, Any] = {case.op: f"triton_{case.op}"}
    with lowering.use(target=target, **asked):
        found = find(case.op)(*args, **kwargs)
    expected = find(case.op).body(*args, **kwargs)
    return (found[:2], expected[:2]) if isinstance(found, tuple) and len(found) == 3 else (found, expected)


ALL = [case for case in CASES if taken(case)]
FEW = [
    case
    for op in OPS
    for at, case in enumerate(one for one in ALL if one.op == op)
    if at % 4 == 0 or "awkward" in case.name
]
"""Every fourth case of an op, and those whose sizes no tile divides."""


def check(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, target: str = "ascend910b") -> None:
    monkeypatch.setattr(launch, "RUNNER", functools.partial(runner, target))
    found, expected = called(case, dtype, target)
    assert_close(found, expected, length=case.length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", FEW, ids=str)
def test_the_compilers_program_gives_what_the_op_gives(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tiles that do not divide, ragged and idle rows, NaN in padding and in all memory that nobody has written."""
    check(case, dtype, monkeypatch)


NOT_ON_950 = ("sparse_attention", "rotary_angles", "mrope_angles", "yarn_angles")
"""Ops whose programs for it multiply matrices, or look sines up in a table of constants."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", [case for case in FEW[::2] if case.op not in NOT_ON_950], ids=str)
def test_so_does_the_program_for_950(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works in registers, under masks. How it loads rows of 16 bytes is not known, nor its products and tables."""
    if (str(case), dtype) == ("hyper_mix[tiny]", torch.bfloat16):
        with pytest.raises(Unknown, match="rows that begin within a burst"):
            check(case, dtype, monkeypatch, "ascend950")
    else:
        check(case, dtype, monkeypatch, "ascend950")


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("case", ALL, ids=str)
def test_every_case(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, dtype, monkeypatch)


# Planted faults


@functools.cache
def captured(op: str, name: str) -> Call:
    """A kernel's program and arguments on a case, before it has run, and the programs to run it with."""
    calls: list[Call] = []

    def keep(file: str, kernel: str, jobs: int, arguments: Mapping[str, Any], constants: Mapping[str, Any]) -> None:
        copied = {key: value.clone() if isinstance(value, Tensor) else value for key, value in arguments.items()}
        calls.append((compiled(file, kernel, jobs, arguments, constants), copied, max(1, min(jobs, CORES))))

    case = next(case for case in ALL if str(case) == f"{op}[{name}]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "RUNNER", keep)
        called(case, torch.bfloat16)
    return calls[0]


def emulated(call: Call, program: str | None = None) -> dict[str, Any]:
    """The arguments after a run of the program, or of another text in its place."""
    outcome, arguments, programs = call
    mine = {key: value.clone() if isinstance(value, Tensor) else value for key, value in arguments.items()}
    emulate(outcome if program is None else replace(outcome, program=program), mine, programs)
    return mine


def noticed(call: Call, program: str) -> bool:
    """Whether a changed program is refused, or gives other numbers."""
    right = emulated(call)
    try:
        found = emulated(call, program)
    except EmulationError:
        return True
    tensors = [(found[key], value) for key, value in right.items() if isinstance(value, Tensor)]
    return not all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in tensors)


PLANTED = [
    ("gated_rms_norm", "heads_silu"),
    ("gated_delta_rule", "verify_2_6_8_12_window_keep"),
    ("short_conv", "ragged_10x4_window"),
]
planted = pytest.mark.parametrize(("op", "name"), PLANTED, ids=[op for op, _ in PLANTED])


def without(program: str, line: int) -> str:
    lines = program.splitlines()
    return "\n".join([*lines[:line], *lines[line + 1 :]])


@planted
def test_a_flag_that_is_gone_is_missed(op: str, name: str) -> None:
    """A third of those that are set and waited for, one at a time."""
    call = captured(op, name)
    lines = call[0].program.splitlines()
    flags = [at for at, line in enumerate(lines) if "set_flag[" in line or "wait_flag[" in line]
    run = [at for at in flags if "unlikely" not in " ".join(lines[at : at + 3])]
    assert len(run) > 9
    silent = [at for at in run[::3] if not noticed(call, without(call[0].program, at))]
    assert not silent, [lines[at].strip() for at in silent]


@planted
def test_barriers_that_are_gone_are_races(op: str, name: str) -> None:
    """But for those that nothing needs, as before the first work of a loop."""
    call = captured(op, name)
    lines = call[0].program.splitlines()
    barriers = [at for at, line in enumerate(lines) if "pipe_barrier[<PIPE_V>]" in line]
    races = 0
    for at in barriers:
        try:
            emulated(call, without(call[0].program, at))
        except Race as race:
            races += re.search(r"line \d+ .* what line \d+ .* nothing orders the two", str(race)) is not None
    assert races >= 0.7 * len(barriers) > 2


def test_buffers_that_are_moved_onto_others_are_noticed() -> None:
    """But for those whose values nobody needs any more at the time."""
    outcome, arguments, _ = captured("gated_rms_norm", "heads_silu")
    call, program = (outcome, arguments, 1), outcome.program
    names = dict.fromkeys(re.findall(r"pointer_cast\((%[\w-]+)\) : memref<(?!0x)", program))
    places = sorted((int(re.search(rf"{name} = arith\.constant (\d+)", program)[1]), name) for name in names)  # type: ignore[index]
    moved = [
        noticed(call, re.sub(rf"({name} = arith\.constant )\d+", rf"\g<1>{before}", program))
        for (before, _), (_, name) in pairwise(places)
    ]
    assert sum(moved) >= len(moved) / 3 > 4


def test_a_wider_mask_and_a_shorter_copy() -> None:
    call = captured("gated_rms_norm", "awkward_silu")
    program = call[0].program
    (bound,) = re.findall(r"affine_map<\(\)\[s0, s1\] -> \(\d+, s0 - s1\)>", program)
    wider = program.replace(bound, bound.replace("s0 - s1)", "s0 - s1 + 1)"))
    with pytest.raises(
        OutOfBounds, match=r"line \d+ (reads|writes) elements \d+ to \d+ of (x|gate|out), which has \d+"
    ):
        emulated(call, wider)
    assert noticed(call, program.replace(bound, bound.replace("s0 - s1)", "s0 - s1 - 1)")))


def test_the_race_that_was_found_in_our_kernel() -> None:
    """Without its barrier the next step overwrites a state that is still being stored."""
    call = captured("gated_delta_rule", "verify_2_6_8_12_window_keep")
    lines = call[0].program.splitlines()
    stores = [at for at, line in enumerate(lines) if "store_ubuf_to_gm" in line and "func.func" not in line]
    after = next(at for at in range(stores[-1], len(lines)) if "pipe_barrier[<PIPE_ALL>]" in lines[at])
    with pytest.raises(Race, match=r"PIPE_V of block \d+\) writes what line \d+ \(PIPE_MTE3"):
        emulated(call, without(call[0].program, after))


def test_cores_that_write_the_same_place() -> None:
    """Two programs that both go over all work: the numbers are right, and it is a race all the same."""
    outcome, arguments, _ = captured("gated_rms_norm", "heads_silu")
    index = re.search(r"(%\d+) = hivm.hir.get_block_idx -> i64", outcome.program)
    assert index is not None
    same = outcome.program.replace(index[0], f"{index[1]} = arith.constant 0 : i64")
    with pytest.raises(Race, match=r"of block 0\) writes what .* of block 1|of block 1\) writes what .* of block 0"):
        emulate(replace(outcome, program=same), {**arguments, "out": arguments["out"].clone()}, 2)


def test_blocks_in_any_order() -> None:
    call = captured("short_conv", "ragged_10x4_window")
    outcome, arguments, _ = call
    found = []
    for seed in range(3):
        mine = {key: value.clone() if isinstance(value, Tensor) else value for key, value in arguments.items()}
        assert emulate(outcome, mine, 5, seed=seed) == Emulation(5, emulate(outcome, dict(mine), 5).operations)
        found.append(mine["out"])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def wide() -> Call:
    """A gated norm for Ascend 950, and its arguments."""
    _, arguments, programs = captured("gated_rms_norm", "heads_silu")
    made, _ = norm.gated_rms_norm(
        arguments["x"], arguments["gate"], arguments["weight"], eps=1e-6, activation="silu", rounded=True,
        target=TARGETS["ascend950"],
    )  # fmt: skip
    outcome = made.compiled("ascend950")
    assert isinstance(outcome, Compiled)
    return outcome, dict(made.arguments), programs


def test_flags_that_are_gone_from_a_program_for_950_are_missed() -> None:
    call = wide()
    lines = call[0].program.splitlines()
    flags = [at for at, line in enumerate(lines) if "set_flag[" in line or "wait_flag[" in line]
    assert len(flags) > 9
    silent = [at for at in flags[::2] if not noticed(call, without(call[0].program, at))]
    assert not silent, [lines[at].strip() for at in silent]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (r"hivm\.pge\.b32", "hivm.pge.b16"),
        (r"hivm\.vmul\.s\.x", "hivm.vadd.s.x"),
    ],
    ids=["masks", "instruction"],
)
def test_other_faults_of_a_program_for_950(before: str, after: str) -> None:
    """Masks of fewer lanes, and other arithmetic."""
    call = wide()
    changed = re.sub(before, after, call[0].program)
    assert changed != call[0].program
    assert noticed(call, changed)


def test_buffers_of_950_that_are_moved_by_32_bytes() -> None:
    """Onto the next, but for the last one and those that nobody needs any more at the time."""
    call = wide()
    lines, moved = call[0].program.splitlines(), []
    for at, line in enumerate(lines):
        place = re.search(r"pointer_cast\((%\d+)\)", line)
        if place is not None:
            first = line.replace(f"({place[1]})", "(%moved)")
            added = [
                "    %by = llvm.mlir.constant(32 : i64) : i64",
                f"    %moved = llvm.add {place[1]}, %by : i64",
                first,
            ]
            moved.append(noticed(call, "\n".join([*lines[:at], *added, *lines[at + 1 :]])))
    assert sum(moved) >= len(moved) / 3 > 2, moved


def test_what_is_not_known_is_refused_by_name() -> None:
    outcome, arguments, programs = captured("gated_rms_norm", "heads_silu")
    program = outcome.program
    for before, after, message in (
        ("@vexp_1d_float(", "@vtanh_1d_float(", "the library call vtanh_1d_float is not known"),
        ("hivm.hir.set_mask_norm", "hivm.hir.set_mask", "the operation hivm.hir.set_mask is not known"),
        ("<PIPE_MTE2>, <PIPE_V>", "<PIPE_X>, <PIPE_V>", "the pipe PIPE_X is not known"),
        (" step %", " by %", "scf.for is written in a form that is not known"),
        (" to offset:", " at:", "memref.reinterpret_cast is written in a form that is not known"),
        (" : i32\n", " : i33\n", r"arith\.\w+ of i33 is not known"),
        ("arith.cmpi eq", "arith.cmpi xx", "arith.cmpi of xx is not known"),
    ):
        with pytest.raises(Unknown, match=f"line \\d+: {message}"):
            emulate(replace(outcome, program=program.replace(before, after)), arguments, programs)
    other = wide()
    for before, after, message in (
        ("hivm.vexp.x", "hivm.vtanh.x", r"the instruction vtanh\.x vector<64xf32> is not known"),
        ("cf.cond_br", "cf.switch", r"the operation cf\.switch is not known"),
        ("llvm.srem", "llvm.urem", r"the operation llvm\.urem is not known"),
    ):
        with pytest.raises(Unknown, match=f"line \\d+: {message}"):
            emulated(other, other[0].program.replace(before, after))
    with pytest.raises(EmulationError, match="gate is not given"):
        emulate(outcome, {name: value for name, value in arguments.items() if name != "gate"}, programs)
    with pytest.raises(EmulationError, match="x must be a contiguous tensor on the CPU"):
        emulate(outcome, {**arguments, "x": arguments["x"].mT}, programs)
    late = program.replace("set_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]", "set_mask_norm")
    with pytest.raises(Hang, match=r"line \d+ waits for flag PIPE_MTE2 -> PIPE_V 0, which nobody has set"):
        emulate(replace(outcome, program=late), arguments, programs)
