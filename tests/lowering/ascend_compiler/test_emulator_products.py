"""Programs of cube cores, alone and with vector cores: products as Torch has them, and planted faults."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowering import Compiled, TritonSource, compile_for
from lowering.ascend_compiler.emulator import EmulationError, Hang, OutOfBounds, Race, Unknown, emulate
from lowering.triton.launch import TYPES
from tests.lowering.triton import interpreter

pytestmark = pytest.mark.plain  # programs have no axes to check
SOURCE = Path(__file__).with_name("products.py")
Arguments = dict[str, Any]


def signature(arguments: Mapping[str, Any]) -> dict[str, str]:
    plain = {int: "i32", float: "fp32"}
    return {name: TYPES[x.dtype] if isinstance(x, Tensor) else plain[type(x)] for name, x in arguments.items()}


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def plain(rows: int, columns: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Arguments, Tensor]:
    a, b = noise(rows, depth, dtype=dtype), noise(depth, columns, dtype=dtype)
    sizes = {"rows": rows, "columns": columns, "depth": depth}
    return {"a": a, "b": b, "out": torch.full((rows, columns), 7.0), **sizes}, a.double() @ b.double()


def gated(rows: int, columns: int, depth: int) -> tuple[Arguments, Tensor]:
    given, expected = plain(rows, columns, depth)
    gate = noise(rows, columns)
    given = {"a": given["a"], "b": given["b"], "gate": gate, "out": given["out"].bfloat16(), **_numbers(given)}
    return given, expected * torch.nn.functional.silu(gate.double())


def _numbers(given: Arguments) -> Arguments:
    return {name: value for name, value in given.items() if not isinstance(value, Tensor)}


def attended(heads: int, rows: int, length: int) -> tuple[Arguments, Tensor]:
    q, k, v = noise(heads, rows, 64), noise(heads, length, 64), noise(heads, length, 64)
    given = {"q": q, "k": k, "v": v, "out": torch.zeros_like(q), "heads": heads, "rows": rows, "length": length}
    expected = torch.softmax(q.double() @ k.double().mT * 0.125, -1) @ v.double()
    return {**given, "scale": 0.125}, expected


def batched(batch: int, steps: int) -> tuple[Arguments, Tensor]:
    a, b = (noise(batch, steps, 16, 16, dtype=torch.float32) for _ in range(2))
    given = {"a": a, "b": b, "out": torch.zeros(batch, 16, 16), "batch": batch, "steps": steps}
    return given, (a.double() @ b.double()).sum(1)


def summed(lengths: list[int]) -> tuple[Arguments, Tensor]:
    a, b = noise(len(lengths), 32, 64), noise(2 + len(lengths), 32, 64)[2:].clone()
    products = a.double() @ b.double().mT
    expected = torch.zeros(len(lengths), 32, dtype=torch.float64)
    for at, length in enumerate(lengths):
        expected[at, :length] = products[at, :length, :length].sum(0)
    given = {"a": a, "b": b, "out": torch.zeros(len(lengths), 32), "lengths": torch.tensor(lengths)}
    return {**given, "batch": len(lengths)}, expected


TILES = {"M": 32, "N": 64, "K": 32}
CASES: dict[str, tuple[str, Callable[[], tuple[Arguments, Tensor]], dict[str, Any], int]] = {
    "plain": ("plain", lambda: plain(64, 128, 64), TILES, 2),
    "plain ragged": ("plain", lambda: plain(75, 100, 90), TILES, 2),
    "plain of one row": ("plain", lambda: plain(1, 70, 33), TILES, 2),
    "plain float16": ("plain", lambda: plain(40, 40, 40, torch.float16), TILES, 1),
    "plain float32": ("plain", lambda: plain(40, 40, 40, torch.float32), TILES, 1),
    "gated ragged": ("gated", lambda: gated(150, 100, 90), TILES, 2),
    "gated of five rows": ("gated", lambda: gated(5, 64, 32), TILES, 2),
    "attended ragged": ("attended", lambda: attended(2, 45, 77), {"M": 32, "N": 32, "D": 64}, 3),
    "batched": ("batched", lambda: batched(5, 3), {"M": 16}, 2),
    "summed ragged": ("summed", lambda: summed([32, 20, 7, 16]), {"M": 32, "D": 64, "SELECT": True}, 2),
}


@functools.cache
def compiled(name: str, target: str) -> Compiled:
    kernel, made, constants, _ = CASES[name]
    found = compile_for(TritonSource(SOURCE, kernel), signature(made()[0]), constants, target)
    assert isinstance(found, Compiled), str(found)
    return found


def emulated(name: str, program: str | None = None, *, seed: int = 0, target: str = "ascend910b") -> Tensor:
    """What a run of the case's program writes, or of another text in its place."""
    _, made, _, programs = CASES[name]
    given, outcome = made()[0], compiled(name, target)
    emulate(outcome if program is None else replace(outcome, program=program), given, programs, seed=seed)
    return given["out"]


@pytest.mark.parametrize("target", ["ascend910b", "ascend910_93"])
@pytest.mark.parametrize("name", CASES)
def test_products_are_what_they_are(name: str, target: str) -> None:
    """Against products in float64: exact but for sums in float32, and for the rounding of what is stored."""
    expected = CASES[name][1]()[1]
    found = emulated(name, target=target)
    bound = 1e-5 if found.dtype == torch.float32 else 2**-7
    assert (found.double() - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_as_in_tritons_interpreter(name: str) -> None:
    kernel, made, constants, programs = CASES[name]
    given, found = made()[0], emulated(name)
    interpreter.runner(str(SOURCE.with_suffix("")), kernel, programs, given, constants, programs)
    bound = 1e-5 if found.dtype == torch.float32 else 2**-7
    assert (found.double() - given["out"].double()).abs().max() <= bound * given["out"].double().abs().max()


@pytest.mark.parametrize("name", ["gated ragged", "attended ragged"])
def test_cores_in_any_order(name: str) -> None:
    first = emulated(name)
    assert all(torch.equal(first, emulated(name, seed=seed)) for seed in range(1, 4))


# Planted faults

PLANTED = pytest.mark.parametrize("name", ["plain ragged", "gated ragged", "attended ragged", "batched"])


def noticed(name: str, program: str) -> bool:
    """Whether a changed program is refused, or gives other numbers."""
    try:
        return not torch.equal(emulated(name, program), emulated(name))
    except EmulationError:
        return True


def without(program: str, *words: str) -> str:
    """The program without lines that have all of these words."""
    return "\n".join(line for line in program.splitlines() if not all(word in line for word in words))


@PLANTED
def test_a_flag_that_is_gone_is_missed(name: str) -> None:
    """Half of those of pipes and of blocks, one at a time."""
    lines = compiled(name, "ascend910b").program.splitlines()
    flags = [at for at, line in enumerate(lines) if re.search(r"hivm\.hir\.(set_flag|wait_flag|sync_block_)", line)]
    assert len(flags) > 9
    silent = [at for at in flags[::2] if not noticed(name, "\n".join([*lines[:at], *lines[at + 1 :]]))]
    assert not silent, [lines[at].strip() for at in silent]


@pytest.mark.parametrize(
    ("name", "words", "race"),
    [
        ("plain ragged", ["<PIPE_M>, <PIPE_FIX>"], r"PIPE_FIX .* reads what line \d+ \(PIPE_M .* wrote in L0C"),
        ("plain ragged", ["<PIPE_FIX>, <PIPE_M>"], r"PIPE_M .* writes what line \d+ \(PIPE_FIX .* read in L0C"),
        (
            "plain ragged",
            ["pipe_barrier[<PIPE_MTE2>]"],
            r"PIPE_MTE2 .* writes what line \d+ \(PIPE_MTE2 .* wrote in L1",
        ),
        ("gated ragged", ["sync_block_", "<PIPE_FIX>"], "(?=.*FIX of cube core)(?=.*MTE2 of vector core).*workspace"),
        ("gated ragged", ["sync_block_", "<PIPE_MTE2>"], "(?=.*FIX of cube core)(?=.*MTE2 of vector core).*workspace"),
        (
            "attended ragged",
            ["sync_block_", "<PIPE_MTE3>"],
            "(?=.*MTE3 of vector core)(?=.*MTE2 of cube core).*workspace",
        ),
    ],
)
def test_pairs_of_flags_that_are_gone_are_races(name: str, words: list[str], race: str) -> None:
    """Both sides of them, so that no wait is left that hangs. It shows whichever core goes first."""
    program = without(compiled(name, "ascend910b").program, *words)
    for seed in range(3):
        with pytest.raises(Race, match=race):
            emulated(name, program, seed=seed)


def test_the_products_own_flags() -> None:
    """Operands that it does not wait for are races; places that it does not free leave the next transfer hanging."""
    program = compiled("plain ragged", "ascend910b").program
    call = re.search(r"call @mma_tile\w+\((.*?)\) :", program)
    assert call is not None
    names = call[1].split(", ")
    for at, event in ((7, 0), (8, 1)):
        silent = call[0].replace(call[1], ", ".join([*names[:at], "%c-1_i64", *names[at + 1 :]]))
        unset = without(program.replace(call[0], silent), "set_flag[<PIPE_MTE2>, <PIPE_MTE1>", f"ID{event}>")
        with pytest.raises(Race, match=r"PIPE_MTE1 .* reads what line \d+ \(PIPE_MTE2 .* wrote in L1"):
            emulated("plain ragged", unset)
    for at in (9, 10):
        kept = call[0].replace(call[1], ", ".join([*names[:at], "%c-1_i64", *names[at + 1 :]]))
        with pytest.raises(Hang, match=r"waits for flag PIPE_MTE1 -> PIPE_MTE2 \d, which nobody has set"):
            emulated("plain ragged", program.replace(call[0], kept))


@PLANTED
def test_buffers_that_are_moved_by_32_bytes_are_noticed(name: str) -> None:
    """In L1 and in the unified buffer each lies close to the next, and L0C ends where a result is moved to its end."""
    program = compiled(name, "ascend910b").program
    places = dict.fromkeys(
        re.findall(r"pointer_cast\((%c\d+_i64)\) : memref<[1-9][\dx]*\w+, #hivm.address_space<cbuf>", program)
    )
    moved = []
    for place in places:
        number = int(re.findall(r"\d+", place)[0])
        for by in (-32, 32):
            cast = rf"pointer_cast\({place}\)( : memref<[1-9][\dx]*\w+, #hivm.address_space<cbuf>)"
            constant = f"    %moved = arith.constant {number + by} : i64\n    %false"
            entry = re.sub(cast, r"pointer_cast(%moved)\1", program).replace("    %false", constant)
            moved.append(noticed(name, entry))
    assert sum(moved) > len(moved) / 2, moved


def test_results_that_are_moved_by_32_bytes() -> None:
    """A sum of the loop that begins elsewhere in L0C than where it is taken from; a place in the workspace."""
    program = compiled("plain ragged", "ascend910b").program
    cast = re.search(r"pointer_cast\(%c0_i64\) : memref<4x2x16x16xf32, #hivm.address_space<cc>>", program)
    assert cast is not None
    last = program.replace("    %false", "    %moved = arith.constant 131072 : i64\n    %false", 1)
    with pytest.raises(OutOfBounds, match=r"line \d+ writes elements 32768 to \d+ of L0C, which has 32768"):
        emulated("plain ragged", last.replace(cast[0], cast[0].replace("%c0_i64", "%moved")))
    mixed = compiled("gated ragged", "ascend910b").program
    offset = re.search(r"#map\d* = affine_map<\(\)\[s0\] -> \(s0 \* (32768)\)>", mixed)
    assert offset is not None
    with pytest.raises((OutOfBounds, Race)):
        emulated("gated ragged", mixed.replace(offset[0], offset[0].replace("s0 * 32768", "s0 * 32768 + 32")))


@pytest.mark.parametrize("name", ["plain ragged", "gated ragged"])
def test_a_wider_mask_and_a_shorter_copy(name: str) -> None:
    program = compiled(name, "ascend910b").program
    bounds = re.findall(r"affine_map<\(\)\[s0, s1\] -> \(\d+, s0 - s1\)>", program)
    assert bounds
    for bound in bounds:
        assert noticed(name, program.replace(bound, bound.replace("s0 - s1)", "s0 - s1 + 1)")))
        assert noticed(name, program.replace(bound, bound.replace("s0 - s1)", "s0 - s1 - 1)")))


def test_halves_of_the_vector_cores() -> None:
    """If both do the first half, nobody writes the second."""
    program = compiled("gated ragged", "ascend910b").program
    index = re.search(r"(%\d+) = hivm.hir.get_sub_block_idx -> i64", program)
    assert index is not None
    assert noticed("gated ragged", program.replace(index[0], f"{index[1]} = arith.constant 0 : i64"))


def test_what_is_left_beside_a_ragged_product_is_noticed() -> None:
    """Rows that nobody computed and that are multiplied by 0 are no number; those that are not selected do no harm."""
    given, expected = summed([32, 20, 7, 16])
    outcome = compile_for(
        TritonSource(SOURCE, "summed"), signature(given), {"M": 32, "D": 64, "SELECT": False}, "ascend910b"
    )
    assert isinstance(outcome, Compiled)
    emulate(outcome, given, 1)
    assert not given["out"][1:].isfinite().all()
    assert (emulated("summed ragged").double() - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_what_is_not_known_of_products_is_refused_by_name() -> None:
    program, mixed = (compiled(name, "ascend910b").program for name in ("plain ragged", "gated ragged"))
    call = re.search(r"call @mma_tile\w+\(.*?\) :", program)
    assert call is not None
    for name, text, before, after, message in (
        (
            "plain ragged",
            program,
            "@mma_tile_bfloat16_t_to_float(",
            "@mma_bias_float(",
            "the library call mma_bias_float is",
        ),
        ("plain ragged", program, call[0], call[0].replace("%c0_i8", "%c2_i64"), "is called with a unit flag"),
        ("plain ragged", program, "space<cbuf>", "space<l2>", "memory l2 is not known"),
        ("plain ragged", program, "%c0_i64, %c0_i64, %false", "%c1_i64, %c0_i64, %false", "with a rounding"),
        (
            "gated ragged",
            mixed,
            "[<CUBE>, <PIPE_FIX>, <PIPE_S>]",
            "[<ALL_CUBE>]",
            "sync_block_set is written in a form",
        ),
        ("gated ragged", mixed, "func_core_type<AIV>, hivm.part", "func_core_type<AIX>, hivm.part", "is for AIX"),
    ):
        with pytest.raises(Unknown, match=message):
            emulated(name, text.replace(before, after))


def test_products_of_950_are_refused_by_name() -> None:
    """There results go straight to the unified buffer."""
    with pytest.raises(Unknown, match=r"line \d+: the library call fixpipe_nz2nd_float_to_float_4d_to_2d_ubuf is not"):
        emulated("gated ragged", target="ascend950")


def test_cores_that_wait_for_each_other_hang() -> None:
    program = compiled("gated ragged", "ascend910b").program
    late = program.replace("[<CUBE>, <PIPE_FIX>, <PIPE_S>] flag = 4", "[<CUBE>, <PIPE_FIX>, <PIPE_S>] flag = 5")
    with pytest.raises(
        Hang, match=r"the cores wait for each other: line \d+ on \w+ core.* of block \d for block flag \d"
    ):
        emulated("gated ragged", late)
