"""Our Triton kernels at published sizes, compiled: what `python -m lowering compile-kernels` shows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ascend_compiler.audit import Finding, audit
from ..ascend_compiler.outcome import Compiled, Outcome
from ..explain.sheet import Sheet
from ..ops.delta import DeltaStates
from ..ops.short_conv import WindowTrail
from ..rows import Rows
from ..target import Target
from . import delta, glu, norm, rotary, short_conv, sparse, streams
from .emulated import emulated
from .kernels import RECORD
from .launch import Launch, Steps
from .launch import launches as launched

ROWS, STEPS = 8, 4
"""A batch that verifies three drafted tokens a row."""
TOKENS = ROWS * STEPS
PROMPT = 2048
"""Tokens of one long row."""
Maker = Callable[..., Tensor]


def _wide(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _rows() -> Rows:
    starts = torch.empty(ROWS + 1, dtype=torch.int32, device="meta")
    return Rows(starts, max_query=STEPS, uniform=True)


def launches(target: Target, dtype: torch.dtype = torch.bfloat16) -> dict[str, Launch]:
    """Launches on this machine by op and sizes, of tensors without values; states and gates are in float32."""
    narrow = partial(_wide, dtype=dtype)
    accepted = torch.empty(ROWS, dtype=torch.int32, device="meta")
    states = DeltaStates(_wide(ROWS + 1, 32, 128, 128), _wide(ROWS, STEPS, 32, 128, 128))
    windows = WindowTrail(narrow(ROWS + 1, 3 + STEPS, 8192))
    made = {
        "commit of states, 32 heads": delta.commit(states, accepted, target=target)[0],
        "commit of windows, 8192 channels": short_conv.commit(windows, accepted, 3, target=target)[0],
        "scatter of states, 32 heads": delta.scatter(states.after[:, 0], accepted, states.before, target=target),
    }
    families = (
        _recurrent,
        _gates,
        _norms,
        _plain_norms,
        _activations,
        _rotary,
        _angles,
        _streams,
        _convs,
        _sparse,
    )
    return {name: launch for family in families for name, launch in family(target, narrow)} | made


def _recurrent(target: Target, narrow: Maker) -> Iterator[tuple[str, Launch]]:
    for sizes, k_heads, v_heads, channels in (
        ("16 and 32 heads", 16, 32, ()),
        ("96 heads, a decay a channel", 96, 96, (128,)),
    ):
        q, v, beta = narrow(TOKENS, k_heads, 128), narrow(TOKENS, v_heads, 128), _wide(TOKENS, v_heads)
        decay, state = _wide(TOKENS, v_heads, *channels), _wide(ROWS + 1, v_heads, 128, 128)
        for keep_steps in (False, True):
            call = delta.gated_delta_rule(q, q, v, decay, beta, state, _rows(), keep_steps=keep_steps, target=target)
            yield f"gated_delta_rule, {sizes}{', steps kept' if keep_steps else ''}", call[0]


def _gates(target: Target, narrow: Maker) -> Iterator[tuple[str, Launch]]:
    a, head = narrow(4096, 32), _wide(32)
    yield "delta_gates, 32 heads", delta.delta_gates(a, a, head, head, target=target)[0]
    for heads, bound in ((32, None), (96, -5.0)):
        f, b, rate, bias = narrow(TOKENS, heads, 128), narrow(TOKENS, heads), _wide(heads), _wide(heads, 128)
        call = delta.channel_gates(f, b, rate, bias, lower_bound=bound, target=target)
        yield f"channel_gates, {heads} heads", call[0]


def _norms(target: Target, narrow: Maker) -> Iterator[tuple[str, Launch]]:
    for name, rows, dim, rounded in (
        ("gated_rms_norm, rows of 128", 4096, 128, True),
        ("gated_rms_norm_fp32, rows of 128", 4096, 128, False),
        ("gated_rms_norm, rows of 4096", 64, 4096, True),
    ):
        x, weight = narrow(rows, dim), narrow(dim)
        call = norm.gated_rms_norm(x, x, weight, eps=1e-6, activation="silu", rounded=rounded, target=target)
        yield name, call[0]


def _plain_norms(target: Target, narrow: Maker) -> Iterator[tuple[str, Launch]]:
    for rows, dim in ((4096, 128), (64, 4096), (32, 7168)):
        x, weight, sizes = narrow(rows, dim), narrow(dim), f"rows of {dim}"
        for prefix, gemma in (("", False), ("gemma_", True)):
            yield f"{prefix}rms_norm, {sizes}", norm.rms_norm(x, weight, eps=1e-6, gemma=gemma, target=target)[0]
            added = norm.add_rms_norm(x, x, weight, eps=1e-6, gemma=gemma, target=target)[0]
            yield f"add_{prefix}rms_norm, {sizes}", added
            kept = norm.rms_norm_rstd(x, weight, eps=1e-6, gemma=gemma, target=target)[0]
            yield f"{prefix}rms_norm_rstd, {sizes}", kept
    yield "l2_norm, rows of 128", norm.l2_norm(narrow(4096, 128), target=target)[0]
    x, weight = narrow(TOKENS, 4 * 2048), narrow(4 * 2048)
    grouped = norm.grouped_rms_norm(x, weight, groups=4, eps=1e-6, target=target)[0]
    yield "grouped_gemma_rms_norm, 4 groups of 2048", grouped


def _activations(target: Target, narrow: Maker) -> Iterator[tuple[str, Launch]]:
    gate_up = narrow(TOKENS, 2 * 12288)
    yield "swiglu, 12288 channels", glu.swiglu(gate_up, target=target)[0]
    yield "swiglu, 12288 channels, capped", glu.swiglu(gate_up, caps=(4.0, 25.0), target=target)[0]
    yield "geglu, 12288 channels", glu.geglu(gate_up, target=target)[0]


def _rotary(target: Target, narrow: Maker) -> Iterator[tuple[str, Launch]]:
    for heads, dim, half in ((32, 128, 64), (16, 256, 32)):
        q, angles = narrow(TOKENS, heads, dim), _wide(TOKENS, half)
        yield f"rotary, {heads} heads of {dim}", rotary.rotary(q, q, angles, angles, target=target)[0][0]
    for heads, dim in ((1, 64), (128, 64), (128, 192)):
        x, angles = narrow(TOKENS, heads, dim), _wide(TOKENS, 32)
        turned = rotary.rotary_interleaved(x, angles, angles, target=target)[0]
        yield f"rotary_interleaved, {heads} heads of {dim}", turned


def _angles(target: Target, narrow: Maker) -> Iterator[tuple[str, Launch]]:
    places = torch.empty(PROMPT, dtype=torch.int32, device="meta")
    for dim in (64, 128):
        made = rotary.rotary_angles(places, rotary_dim=dim, theta=1e7, target=target)[0]
        yield f"rotary_angles, {dim} channels", made
    stretch: dict[str, Any] = {"factor": 40.0, "ramp": (10.0, 23.0), "multiplier": 1.26}
    made = rotary.yarn_angles(places, rotary_dim=64, theta=1e4, **stretch, target=target)[0]
    yield "yarn_angles, 64 channels", made
    places = torch.empty(3, PROMPT, dtype=torch.int32, device="meta")
    made = rotary.mrope_angles(places, rotary_dim=64, theta=1e7, sections=(11, 11, 10), target=target)[0]
    yield "mrope_angles, 64 channels", made


def _streams(target: Target, narrow: Maker) -> Iterator[tuple[str, Launch]]:
    x, joined = narrow(TOKENS, 4, 2560), 4 * 2560
    steps: Steps = streams.hyper_mix(
        x, narrow(joined), narrow(324, joined), narrow(joined, 320), eps=1e-6, target=target
    )[0]
    for part, launch in zip(("norm", "narrowed", "mixed"), launched(steps), strict=True):
        yield f"hyper_mix, 4 streams of 2560, {part}", launch
    weights = _wide(TOKENS, 4)
    yield "hyper_inject, 4 streams of 2560", streams.hyper_inject(x, x[:, 0], weights, target=target)[0]
    hidden = 7168 if x.element_size() == 2 else 4096  # the most that has room in float32
    bank, prefix, weight = narrow(TOKENS, 8, hidden), narrow(TOKENS, hidden), narrow(hidden)
    residual = streams.attention_residual(bank, prefix, weight, weight, eps=1e-6, target=target)[0]
    yield "attention_residual, 8 snapshots", residual


def _convs(target: Target, narrow: Maker) -> Iterator[tuple[str, Launch]]:
    for name, channels, dilation, keep_steps in (
        ("short_conv, 8192 channels", 8192, 1, False),
        ("short_conv, 8192 channels, steps kept", 8192, 1, True),
        ("short_conv, 2560 channels three apart", 2560, 3, False),
    ):
        x, weight, window = narrow(TOKENS, channels), narrow(channels, 4), narrow(ROWS + 1, 3 * dilation, channels)
        kept = {"keep_steps": keep_steps, "dilation": dilation}
        yield name, short_conv.short_conv(x, weight, window, _rows(), **kept, target=target)[0]
    x, weight, window = narrow(PROMPT, 8192), narrow(8192, 4), narrow(2, 3, 8192)
    starts = torch.empty(2, dtype=torch.int32, device="meta")
    prompt = Rows(starts, max_query=PROMPT, uniform=True)
    launch = short_conv.short_conv(x, weight, window, prompt, keep_steps=False, target=target)[0]
    yield "short_conv, 8192 channels, a prompt", launch


def _sparse(target: Target, narrow: Maker) -> Iterator[tuple[str, Launch]]:
    selected = torch.empty(PROMPT, 2051, dtype=torch.int32, device="meta")
    starts, table = (torch.empty(size, dtype=torch.int32, device="meta") for size in (2, (1, 32)))
    rows = Rows(starts, starts[1:], table, max_query=PROMPT, uniform=True)
    q, pages = narrow(PROMPT, 24, 256), narrow(33, 128, 2, 256)
    launch = sparse.sparse_attention(q, pages, pages, selected, rows, scale=256**-0.5, target=target)[0]
    yield "sparse_attention, 24 and 2 heads of 256, a prompt", launch
    blocks = torch.empty(PROMPT, 512, dtype=torch.int32, device="meta")
    yield "expand_blocks, 512 of 4 tokens", sparse.expand_blocks(blocks, rows, ratio=4, target=target)[0]


@dataclass(frozen=True)
class Shown:
    """One kernel of the catalogue on one machine: what the compiler made of it, and what the audit found."""

    name: str
    target: Target
    launch: Launch
    outcome: Outcome
    findings: tuple[Finding, ...]

    @property
    def good(self) -> bool:
        """Whether it compiles, and the audit finds nothing."""
        return isinstance(self.outcome, Compiled) and not self.findings


def show(target: Target, name: str, launch: Launch) -> Shown:
    """Compile and audit one launch."""
    outcome = launch.compiled(target)
    findings = audit(outcome, launch.pools) if isinstance(outcome, Compiled) else ()
    return Shown(name, target, launch, outcome, findings)


def compiled(targets: Sequence[Target]) -> list[Shown]:
    """The whole catalogue for these machines, as many at a time as there are cores."""
    asked = [(target, name, launch) for target in targets for name, launch in launches(target).items()]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(lambda one: show(*one), asked))


def record(found: Sequence[Shown]) -> None:
    """Write down what came out, by target and name, for `kernels` to register by. All of it must be good.

    Kernels of ops are run in the emulator too. Raises `EmulationError` for a fault that it finds in a program, and
    `LoweringError` for other numbers than the op's.
    """
    rows: dict[str, dict[str, Any]] = {}
    for one in found:
        assert isinstance(one.outcome, Compiled) and not one.findings
        row = {"chip": one.outcome.chip, "tile": one.launch.constants["TILE"], "used": round(one.outcome.used, 4)}
        row["emulated"] = emulated(one.name.partition(",")[0], one.target)
        rows.setdefault(one.target.name, {})[one.name] = row
    RECORD.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def sheet(found: Sequence[Shown]) -> Sheet:
    """The catalogue as a table."""
    rows = [(one.name, one.target.name, str(one.launch.constants["TILE"]), _words(one)) for one in found]
    marked = [at for at, one in enumerate(found) if not one.good]
    notes = ["compiled up to machine code, which needs CANN; run on no device"]
    return Sheet(
        "Triton kernels by Ascend's compiler",
        ("kernel", "target", "tile", "outcome"),
        rows,
        marked=marked,
        numbers=("tile",),
        notes=notes,
    )


def _words(one: Shown) -> str:
    return "\n".join(map(str, (one.outcome, *one.findings)))
