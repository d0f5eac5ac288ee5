"""Planned tiles, held to the compiler: what is planned compiles as it was meant, and no larger tile is any better."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowering import Compiled, LoweringError, Overflow, audit
from lowering.__main__ import main
from lowering.rows import Rows
from lowering.target import ASCEND, TARGETS
from lowering.triton import catalogue, delta, norm, streams
from lowering.triton.launch import Launch
from lowering.triton.tiles import Footprint, dividing, planned

NAMES = sorted(catalogue.launches(TARGETS["ascend910b"]))
FOLDED = 1.6
"""Where twice the tile takes less than this times the buffer, the compiler has let its values share places."""


@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        *((target, torch.bfloat16) for target in ASCEND),
        ("ascend910b", torch.float32),
        ("ascend950", torch.float32),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_planned_tile(name: str, target: str, dtype: torch.dtype) -> None:
    """It compiles, with its second buffers where the machine has them, with masks that are ranges and wide addresses.

    A larger one overflows, or does without second buffers, or shares places; or there is no more to take.
    """
    machine = TARGETS[target]
    shown = catalogue.show(machine, name, catalogue.launches(machine, dtype)[name])
    assert isinstance(shown.outcome, Compiled), str(shown.outcome)
    units = {"load", "store", "vector", *(["cube"] if shown.outcome.mix else [])}
    assert shown.good and not shown.findings and set(shown.outcome.calls) <= units
    twice = replace(machine, unified_buffer=2 * (machine.unified_buffer or 0))
    larger = catalogue.launches(twice, dtype)[name]
    if target == "ascend910_93" or larger.constants["TILE"] == shown.launch.constants["TILE"]:
        return
    found = larger.compiled(target)
    assert isinstance(found, Overflow) or (
        isinstance(found, Compiled) and (audit(found) or found.bits_used < FOLDED * shown.outcome.bits_used)
    )


@pytest.mark.parametrize("target", ["ascend910b", "ascend950"])
def test_a_single_token(target: str) -> None:
    """As decoding one row has it: what a compiler makes of a tile of one row is another program."""
    machine, x = TARGETS[target], torch.empty(1, 4, 2560, dtype=torch.bfloat16, device="meta")
    weight, down, up = x.new_empty(10240), x.new_empty(324, 10240), x.new_empty(10240, 320)
    single = {"eps": 1e-6, "target": machine}
    steps = streams.hyper_mix(x, weight, down, up, **single)[0]
    made = [step for step in steps if isinstance(step, Launch)]
    made += [norm.rms_norm(x[0, :1], weight[:2560], gemma=True, **single)[0]]
    made += [norm.add_rms_norm(x[0, :1], x[0, 1:2], weight[:2560], gemma=True, **single)[0]]
    made += [norm.rms_norm_rstd(x[0, :1], weight[:2560], gemma=True, **single)[0]]
    for launch in made:
        assert isinstance(launch.compiled(target), Compiled), (launch.name, str(launch.compiled(target)))


def recurrent(v_heads: int, target: str) -> Launch:
    """A decoding step over float32 states of 128 x 128."""
    q, v = torch.empty(2, v_heads // 4, 128, device="meta"), torch.empty(2, v_heads, 128, device="meta")
    state, gate = torch.empty(3, v_heads, 128, 128, device="meta"), torch.empty(2, v_heads, device="meta")
    rows = Rows(torch.empty(3, dtype=torch.int32, device="meta"), max_query=1, uniform=True)
    q, v = q.to(torch.bfloat16), v.to(torch.bfloat16)
    return delta.gated_delta_rule(q, q, v, gate, gate, state, rows, keep_steps=False, target=TARGETS[target])[0]


def test_a_whole_state_does_not_fit_a_910() -> None:
    """The scatter of states whose tile did not fit is known to have hung servers; this is the compiler's word."""
    assert recurrent(32, "ascend910b").compiled("ascend910b", TILE=128) == Overflow(
        "Ascend910B3", "ub", 1853440, 1572864
    )
    assert isinstance(recurrent(32, "ascend950").compiled("ascend950", TILE=128), Compiled)


@pytest.mark.parametrize(("target", "tile"), [("ascend910b", 64), ("ascend910_93", 64), ("ascend950", 128)])
def test_the_planned_tile_of_a_state_is_that_of_every_number_of_heads(target: str, tile: int) -> None:
    """One program serves them: heads are no constants of it."""
    made = [recurrent(heads, target) for heads in (4, 16, 24, 32, 48, 64, 96, 128)]
    assert {(launch.constants["TILE"], launch.jobs // launch.arguments["v_heads"]) for launch in made} == {
        (tile, 2 * 128 // tile)
    }
    assert all(launch.constants == made[0].constants and launch.signature == made[0].signature for launch in made)


def test_a_plan() -> None:
    """By hand: 1 KiB holds 8192 bits, a cell of two copies and one doubled stream of two bytes takes 96."""
    machine = replace(TARGETS["ascend910b"], unified_buffer=1024)
    footprint = Footprint(copies=2.0, copies_950=1.0, streams=1)
    assert planned(machine, footprint, size=2, most=1000) == 64
    assert planned(machine, footprint, size=2, most=1000, width=3) == 16
    assert planned(machine, footprint, size=2, most=5) == 8 and planned(machine, footprint, size=2, most=1) == 1
    assert planned(machine, footprint, size=8, most=1000) == 32
    assert planned(replace(machine, name="ascend950"), footprint, size=2, most=1000) == 128
    assert [dividing(64, whole) for whole in (128, 96, 12, 7)] == [64, 32, 4, 1]
    with pytest.raises(LoweringError, match="a row of 100 cells does not fit the 1024 bytes of ascend910b"):
        planned(machine, footprint, size=2, most=4, width=100)
    with pytest.raises(
        LoweringError, match="tiles are planned for ascend910b, ascend910_93, ascend950; target is cuda"
    ):
        planned(TARGETS["cuda"], footprint, size=2, most=4)


def test_the_command_shows_the_catalogue(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And its exit code is 1 where a kernel does not compile."""
    few = {name: catalogue.launches(TARGETS["ascend910b"])[name] for name in NAMES[:2]}
    monkeypatch.setattr(catalogue, "launches", lambda _: few)
    assert main(["compile-kernels", "--target", "ascend910b"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in few) and "compiled for Ascend910B3" in said and "run on no device" in said
    wide = replace(few[NAMES[0]], constants={**few[NAMES[0]].constants, "TILE": 2**10})
    monkeypatch.setattr(catalogue, "launches", lambda _: {"wide": wide})
    assert main(["compile-kernels", "--target", "ascend910b"]) == 1
    assert "does not fit Ascend910B3" in capsys.readouterr().out
