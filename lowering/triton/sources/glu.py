"""Gated activations: of each row gate first, then what it multiplies."""

import triton
import triton.language as tl


@triton.jit
def glu(
    gate_up,
    out,
    rows,
    inner,
    gate_cap,
    up_cap,
    TILE: tl.constexpr,
    GELU: tl.constexpr,
    CAPPED: tl.constexpr,
    UP_CAPPED: tl.constexpr,
):
    """`swiglu`, with GELU `geglu`; with CAPPED `swiglu` within caps. gate_up [rows, 2 inner], out [rows inner].

    Without caps the activated gate is rounded before it multiplies.
    """
    tiles = tl.cdiv(inner, TILE)
    for job in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = (job // tiles).to(tl.int64)
        channel = job % tiles * TILE + tl.arange(0, TILE)
        live = channel < inner
        gate = tl.load(gate_up + row * 2 * inner + channel, mask=live, other=0.0).to(tl.float32)
        up = tl.load(gate_up + (row * 2 + 1) * inner + channel, mask=live, other=0.0).to(tl.float32)
        if CAPPED:
            if UP_CAPPED:
                up = bounded(up, up_cap)
            made = bounded(gate, gate_cap) * tl.sigmoid(gate) * up
        else:
            if GELU:
                # 1 + tanh(a) is 2 sigmoid(2 a)
                gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
            else:
                gate = gate * tl.sigmoid(gate)
            made = gate.to(out.dtype.element_ty).to(tl.float32) * up
        tl.store(out + row * inner + channel, made.to(out.dtype.element_ty), mask=live)


@triton.jit
def bounded(x, cap):
    """cap * tanh(x / cap)."""
    small = tl.exp(-2.0 * tl.abs(x / cap))
    size = (1.0 - small) / (1.0 + small)
    return cap * tl.where(x < 0, -size, size)
