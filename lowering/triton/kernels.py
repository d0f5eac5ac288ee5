"""Our Triton kernels as kernels of their ops, on Ascend: tried after torch_npu's fused operators, before plain Torch.

What speaks for them is that Ascend's compiler made a program of each for the machine, and that the emulator, where it
knows the program, gave what the op's body gives (`compiled.json`, written by `python -m lowering compile-kernels
--record`), as Triton's interpreter does. On CPU tensors the body stands in for a kernel, as CPU references do for
torch_npu's operators.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Collection
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import LoweringError
from ..host import symbolic
from ..kernel import Refusal
from ..npu.features import loaded
from ..npu.kernel import FLOATS, above, empty, machine, wrong_dtype
from ..npu.sparse import GATHERED
from ..op import Op
from ..ops.attention_residual import attention_residual
from ..ops.delta import channel_gates, delta_gates, gated_delta_rule, l2_norm
from ..ops.hyper_connection import hyper_inject, hyper_mix
from ..ops.mlp import geglu, swiglu
from ..ops.norm import (
    add_gemma_rms_norm,
    add_rms_norm,
    gated_rms_norm,
    gated_rms_norm_fp32,
    gemma_rms_norm,
    gemma_rms_norm_rstd,
    grouped_gemma_rms_norm,
    rms_norm,
    rms_norm_rstd,
)
from ..ops.rotary import mrope_angles, rotary, rotary_angles, rotary_interleaved, yarn_angles
from ..ops.short_conv import short_conv
from ..ops.sparse import expand_blocks, sparse_attention
from ..policy import EVIDENCE, MODE
from ..rows import Rows
from ..target import ASCEND, Target
from . import delta, glu, launch, norm, sparse, streams
from . import rotary as rope
from . import short_conv as conv

Make = Callable[..., tuple[launch.Steps, Any]]
RECORD = Path(__file__).with_name("compiled.json")
MOST_STEPS = 16
"""Tokens a row that kernels which go token by token take: the window of a DFlash block, at its default size."""
TAKEN = (torch.float32, torch.bfloat16, torch.float16)
"""Of floats; integers are places, ids and counts, in either width that Triton's kernels are given."""
MOST_PAGES = 4096
"""Pages a row whose numbers a program of sparse attention keeps in its buffer."""


def ours(op: Op, make: Make, refuse: Refusal, strided: Collection[str] = ()) -> None:
    """Register a kernel of `op` on every Ascend target that Ascend's compiler has been shown it for.

    `make(*args, **kwargs, target=)` gives a launch, or several steps, and the result that they fill. Tensors come to
    it contiguous, but for those that it takes `strided`.
    """
    launch.operator(op.name)
    register = op.kernel(
        f"triton_{op.name}",
        targets=tuple(target for target in ASCEND if recorded(op.name, target)),
        refuse=_positional(op, partial(_refused, make, refuse)),
        batches=False,
        differentiable=False,
        remark=partial(said, op.name),
        available=_available,
        evidence=partial(evidence, op.name),
    )
    run = _positional(op, partial(_run, op, make, strided))
    run.__signature__ = op.signature
    register(run)


_GATED = "leaves the gate to Torch; ours goes over the rows once"
_GEMMA = "stands between casts to float32 and back; npu_gemma_rms_norm, and ours, go over the rows once"


def _positional(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with arguments by position where the op takes them so, however they are given."""
    kinds = [parameter.kind for parameter in op.signature.parameters.values()]
    places = sum(kind is not Parameter.KEYWORD_ONLY for kind in kinds)

    def called(*args: Any, **kwargs: Any) -> Any:
        if len(args) < places:
            bound = op.signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        return function(*args, **kwargs)

    return called


def _run(op: Op, make: Make, strided: Collection[str], *args: Any, **kwargs: Any) -> Any:
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    if device.type == "cpu" and MODE.get().dry is None and launch.RUNNER is launch.on_device:
        if not loaded(("npu_rms_norm",)):
            raise LoweringError(
                f"{op.name}: triton_{op.name} runs on an Ascend device, and these tensors are on the CPU; to see what "
                "would run, use lowering.explain or lowering.lower; to run its reference, call "
                "lowering.npu_reference.load()"
            )
        return op.body(*args, **kwargs)
    given = [
        arg.contiguous() if isinstance(arg, Tensor) and name not in strided else arg
        for name, arg in zip(op.signature.parameters, args, strict=False)
    ]
    steps, result = make(*given, **kwargs, target=machine(args[0]))
    for step in steps if isinstance(steps, tuple) else (steps,):
        step.start(op.name)
    return result


def _refused(make: Make, refuse: Refusal, *args: Any, **kwargs: Any) -> str | None:
    """What the kernel's own rule refuses, and what no tile is planned for, or this machine lacks."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    rows = [arg for arg in args if isinstance(arg, Rows)]
    if symbolic((*(size for x in tensors for size in x.shape), *(each.max_query for each in rows))):
        return "plans tiles by sizes, and one is a symbol here"
    wrong = next((x.dtype for x in tensors if x.dtype not in (*TAKEN, torch.int32, torch.int64)), None)
    if wrong is not None:
        return f"takes float32, bfloat16 and float16; one of this call's is {str(wrong).removeprefix('torch.')}"
    if tensors[0].device.type == "npu" and MODE.get().dry is None and importlib.util.find_spec("triton") is None:
        return f"needs Triton, which is not installed here; {launch.INSTALL}"
    return empty(x=tensors[0]) or refuse(*args, **kwargs) or _unplanned(make, args, kwargs)


def _unplanned(make: Make, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    target = machine(args[0])
    with _disable_current_modes():  # a trace shall not record what is planned
        shapes = [_without_values(arg) if isinstance(arg, Tensor) else arg for arg in args]
        try:
            make(*shapes, **kwargs, target=target)
        except LoweringError as error:
            return str(error)
    return None


def _without_values(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


# Evidence


@functools.cache
def record() -> dict[str, dict[str, dict[str, Any]]]:
    """By target and name in the catalogue: chip, tile, part of the buffer in use, and whether the emulator ran it."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def recorded(op: str, target: str) -> list[dict[str, Any]]:
    """What is on record of an op's kernel for a target: a row for each size in the catalogue."""
    return [row for name, row in record().get(target, {}).items() if name.partition(",")[0] == op]


def evidence(op: str, target: Target) -> str:
    """What speaks for an op's kernel on a target: "compiled", or "emulated" too, with the op's numbers."""
    return "emulated" if all(row["emulated"] for row in recorded(op, target.name)) else "compiled"


def said(op: str, target: Target) -> str:
    """What the compiler made of an op's kernel for a target, and its part of the unified buffer, for reports."""
    rows = recorded(op, target.name)
    most = max(row["used"] for row in rows)
    return f"compiled for {rows[0]['chip']}, UB at most {most:.0%}"


def _available(target: Target, wanted: str) -> str | None:
    """No documentation names a kernel of ours: who wants that gets none."""
    if wanted == EVIDENCE[0]:
        return f"is our own, compiled for {target.name}; evidence={wanted!r} asks for what documentation names"
    return None


# Refusals: what the sources in `sources/` do not compute


def _power_of_two(**sizes: int) -> str | None:
    odd = next((f"{name} is {size}" for name, size in sizes.items() if size & (size - 1)), None)
    return odd and f"takes powers of two; {odd}"


def _refuse_rule(q, k, v, decay, beta, state, rows, *, keep_steps) -> str | None:
    if state is None:
        return "continues a state; this call has none"
    if v.shape[1] % k.shape[1]:
        return f"takes v_heads in multiples of k_heads; this call has {v.shape[1]} and {k.shape[1]}"
    return above(MOST_STEPS, **{"tokens a row": rows.max_query}) or _power_of_two(k_dim=k.shape[2])


def _refuse_conv(x, weight, window, rows, *, keep_steps, dilation=1) -> str | None:
    return "continues a window; this call has none" if window is None else None


def _takes(*args: Any, **kwargs: Any) -> str | None:
    return None


def _refuse_weight(x, *others, **static) -> str | None:
    dim, weight = x.shape[-1], others[-1].numel()
    return None if weight == dim else f"takes a weight a channel; this call has {dim} channels and {weight} weights"


def _refuse_groups(x, weight, *, groups, eps) -> str | None:
    if x.shape[-1] % groups:
        return f"takes groups of one size; this call has {x.shape[-1]} channels in {groups} groups"
    return _refuse_weight(x, weight)


def _refuse_glu(gate_up, *, caps=None) -> str | None:
    return f"halves the last axis; gate_up has {gate_up.shape[-1]}" if gate_up.shape[-1] % 2 else None


def _refuse_rotary(q, k, cos, sin) -> str | None:
    return wrong_dtype(FLOATS, q=q, k=k)


def _refuse_channels(f, b, a_log, dt_bias, *, lower_bound=None) -> str | None:
    return _power_of_two(k_dim=f.shape[2])


def _refuse_sparse(q, k_pages, v_pages, selected, rows, *, scale) -> str | None:
    dims = {"head_dim": q.shape[2], "v_dim": v_pages.shape[3]}
    small = next((f"{name} is {size}" for name, size in dims.items() if size < 16), None)
    if small is not None:
        return f"takes dims from 16 on; {small}"
    if q.shape[1] % k_pages.shape[2]:
        return f"takes heads in multiples of kv_heads; this call has {q.shape[1]} and {k_pages.shape[2]}"
    many = above(MOST_PAGES, **{"pages a row": rows.paged[1].shape[1]}) or empty(selected=selected)
    return many or _power_of_two(**dims, page_size=k_pages.shape[1])


def _refuse_expand(blocks, rows, *, ratio) -> str | None:
    return _power_of_two(ratio=ratio)


ours(gated_delta_rule, delta.gated_delta_rule, _refuse_rule)
ours(delta_gates, delta.delta_gates, _takes)
ours(channel_gates, delta.channel_gates, _refuse_channels)
ours(short_conv, conv.short_conv, _refuse_conv, strided=("x",))
ours(gated_rms_norm, partial(norm.gated_rms_norm, rounded=True), _refuse_weight, strided=("x", "gate"))
ours(gated_rms_norm_fp32, partial(norm.gated_rms_norm, rounded=False), _refuse_weight, strided=("x", "gate"))
ours(rms_norm, partial(norm.rms_norm, gemma=False), _refuse_weight, strided=("x",))
ours(gemma_rms_norm, partial(norm.rms_norm, gemma=True), _refuse_weight, strided=("x",))
ours(add_rms_norm, partial(norm.add_rms_norm, gemma=False), _refuse_weight)
ours(add_gemma_rms_norm, partial(norm.add_rms_norm, gemma=True), _refuse_weight)
ours(rms_norm_rstd, partial(norm.rms_norm_rstd, gemma=False), _refuse_weight, strided=("x",))
ours(gemma_rms_norm_rstd, partial(norm.rms_norm_rstd, gemma=True), _refuse_weight, strided=("x",))
ours(grouped_gemma_rms_norm, norm.grouped_rms_norm, _refuse_groups)
ours(l2_norm, norm.l2_norm, _takes, strided=("x",))
ours(swiglu, glu.swiglu, _refuse_glu)
ours(geglu, glu.geglu, _refuse_glu)
ours(rotary, rope.rotary, _refuse_rotary, strided=("q", "k"))
ours(rotary_interleaved, rope.rotary_interleaved, _takes, strided=("x",))
ours(rotary_angles, rope.rotary_angles, _takes)
ours(yarn_angles, rope.yarn_angles, _takes)
ours(mrope_angles, rope.mrope_angles, _takes)
ours(hyper_mix, streams.hyper_mix, _takes)
ours(hyper_inject, streams.hyper_inject, _takes)
ours(attention_residual, streams.attention_residual, _takes)
ours(expand_blocks, sparse.expand_blocks, _refuse_expand)
ours(sparse_attention, sparse.sparse_attention, _refuse_sparse)


@gated_rms_norm.order_by(ASCEND)
def _gated_in_one_pass(x, gate, weight, *, eps, activation):
    return ("triton_gated_rms_norm", "npu_rms_norm_gated"), _GATED


@gated_rms_norm_fp32.order_by(ASCEND)
def _gated_fp32_in_one_pass(x, gate, weight, *, eps, activation):
    return ("triton_gated_rms_norm_fp32", "npu_rms_norm_gated_fp32"), _GATED


@gemma_rms_norm.order_by(("ascend950",))
def _gemma_in_one_pass(x, weight, *, eps):
    return ("npu_gemma_rms_norm", "triton_gemma_rms_norm", "npu_rms_norm_1p"), _GEMMA


@add_gemma_rms_norm.order_by(("ascend950",))
def _add_gemma_in_one_pass(x, residual, weight, *, eps):
    return ("npu_add_gemma_rms_norm", "triton_add_gemma_rms_norm", "npu_add_rms_norm_1p"), _GEMMA


@rotary.order_by(("ascend950",))
def _rotary_in_one_pass(q, k, cos, sin):
    why = "writes where it reads, so that heads are copied for it; a kernel of ours reads and writes them once"
    return ("triton_rotary", "npu_apply_rotary_pos_emb", "npu_rotary_mul"), why


@sparse_attention.order_by(ASCEND)
def _uncopied_first(q, k_pages, v_pages, selected, rows, *, scale):
    """Fused attention takes copies of the keys, as many at a time as memory should hold."""
    names = "npu_gather_fia", "triton_sparse_attention"
    if symbolic(q.shape[:1]) or q.shape[0] <= GATHERED:
        return names, f"up to {GATHERED} tokens copy their keys for one fused call"
    return names[::-1], f"more than {GATHERED} tokens would copy their keys in turns"
