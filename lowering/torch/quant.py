"""Quantised weights on CPUs and GPUs: Torch's own product of int8, and MX products in floating point.

int4 is unpacked to int8, which has a product. An MX number is exact in bfloat16 down to 2^-133, so that for bfloat16
activations products of MX weights are those of bfloat16. The kernels for CUDA have not been measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from params.quant.rounding import int8_tokens, mxfp8, static_int8
from params.quant.values import (
    Int4Weight,
    Int8Weight,
    MXFP8Weight,
    QuantizedWeight,
    SplitWeight,
    StaticInt8Weight,
    mx_values,
)
from params.tree import static, tree

from ..ops.linear import linear
from ..ops.mlp import swiglu
from ..ops.moe import experts
from ..ops.widen import wide_dtype
from ..policy import MODE, Policy, use
from ..target import EVERY
from ..weights import PreparedWeight

INT8 = (Int8Weight, StaticInt8Weight, Int4Weight)
OF_EXPERTS = (Int8Weight, Int4Weight, MXFP8Weight)
FEWEST_ROWS = 17
"""Rows that CUDA's product of int8 needs."""


@linear.kernel("split", targets=EVERY, weights=(SplitWeight,))
def _split(x, weight):
    """Each part by the kernel that is best for it."""
    policy = MODE.get().policy
    if linear.name not in policy.prefer:
        return torch.cat([linear(x, part) for part in weight.parts], -1)
    others = {name: kernel for name, kernel in policy.prefer.items() if name != linear.name}
    with use(Policy(others, policy.strict)):
        return torch.cat([linear(x, part) for part in weight.parts], -1)


# int8


def _lacking_on_cpu(weight: Any) -> str | None:
    if not torch.cpu._is_vnni_supported():
        return "needs AVX512-VNNI, without which oneDNN's sums of int8 products may saturate"
    # Torch 2.13 leaves the product of one input unset.
    return "takes weights of 2 inputs or more" if weight.shape[-1] < 2 else _wrong_groups(weight)


def _lacking_on_cuda(weight: Any) -> str | None:
    outputs, inputs = weight.shape[-2:]
    if inputs % 8 or outputs % 8:
        return f"takes inputs and outputs in multiples of 8; the weight has {inputs} and {outputs}"
    return _wrong_groups(weight)


def _wrong_groups(weight: Any) -> str | None:
    scale = weight.second_scale if isinstance(weight, Int4Weight) else getattr(weight, "scale", None)
    groups = 1 if scale is None else scale.shape[-1]
    return None if groups == 1 else f"takes one scale for each output; this weight has {groups}"


def _wrong_width(x: Tensor, weight: Any) -> str | None:
    return None if x.shape[-1] == weight.shape[-1] else f"takes x of {weight.shape[-1]} inputs; x has {x.shape[-1]}"


def _refuse_int8(x, weight) -> str | None:
    return _wrong_width(x, weight) or _lacking_on_cpu(weight)


def _refuse_int8_on_cuda(x, weight) -> str | None:
    return _wrong_width(x, weight) or _lacking_on_cuda(weight)


def _int8_form(weight: Any) -> QuantizedWeight | None:
    """What the product reads: int8 for int4, in twice its bytes, and float32 for a scale's bits; None for any other."""
    if isinstance(weight, Int4Weight):
        scale = weight.scale if weight.second_scale is None else weight.second_scale * weight.scale
        return Int8Weight(weight.values(), scale)
    by_bits = isinstance(weight, StaticInt8Weight) and weight.deq_scale.dtype != torch.float32
    return replace(weight, deq_scale=weight.product_scale()) if by_bits else None


def _int8_product(rows: Tensor, values: Tensor) -> Tensor:
    """rows @ values.T in int32."""
    if not rows.is_cuda:
        return torch._int_mm(rows, values.T)
    padding = max(0, FEWEST_ROWS - rows.shape[0])
    return torch._int_mm(F.pad(rows, (0, 0, 0, padding)), values.T)[: rows.shape[0]]


@linear.kernel(
    "cuda_int8", targets=("cuda",), refuse=_refuse_int8_on_cuda, batches=False, differentiable=False,
    prepare=_int8_form, weights=INT8,
)  # fmt: skip
@linear.kernel(
    "torch_int8", targets=("cpu",), refuse=_refuse_int8, batches=False, differentiable=False,
    prepare=_int8_form, weights=INT8,
)  # fmt: skip
def _int8(x, weight):
    weight = _int8_form(weight) or weight
    rows, dtype = x.reshape(-1, x.shape[-1]), wide_dtype(x)
    if isinstance(weight, StaticInt8Weight):
        rows = static_int8(rows, weight.input_scale, weight.input_offset)
        y = (_int8_product(rows, weight.values) + weight.correction).to(dtype) * weight.product_scale()
    else:
        rows, scale = int8_tokens(rows)
        y = _int8_product(rows, weight.values).to(dtype) * weight.scale[:, 0] * scale
    return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


# MX


@tree
class MXMatrix(PreparedWeight):
    """An MX weight in bfloat16 [*experts outputs inputs]: twice its bytes, and nothing to decode.

    `padding` as in `MXFP8Weight`.
    """

    kernels = ("torch_mxfp8", "torch_quantized_grouped", "torch_quantized_gathered", "cuda_quantized_gathered")

    values: Tensor
    padding: tuple[int, int] = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the plain weight."""
        return (*self.values.shape[:-1], self.values.shape[-1] - sum(self.padding))

    @property
    def device(self) -> torch.device:
        """Where the weight lies."""
        return self.values.device

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return MXMatrix, self.values.shape, self.padding


def _matrix(weight: Any) -> MXMatrix | None:
    """An MX weight decoded; None for others."""
    if not isinstance(weight, MXFP8Weight):
        return None
    return MXMatrix(mx_values(weight.values, weight.scale).to(torch.bfloat16), weight.padding)


_PRODUCTS = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
"""Dtype of MX products by that of x: what is summed must be finer than what it is rounded to."""


def _mx_rows(x: Tensor, padding: tuple[int, int]) -> Tensor:
    """x as MX numbers, in the dtype of the product."""
    numbers = mx_values(*mxfp8(F.pad(x, padding), "half_even"))
    return numbers.to(_PRODUCTS.get(x.dtype, torch.float64))


@linear.kernel(
    "torch_mxfp8", targets=EVERY, refuse=_wrong_width, differentiable=False, prepare=_matrix, weights=(MXFP8Weight,)
)
def _mxfp8(x, weight):
    matrix = _matrix(weight) or weight
    rows = _mx_rows(x, matrix.padding)
    return F.linear(rows, matrix.values.to(rows.dtype)).to(x.dtype)


# Experts


def _expert_form(weight: Any) -> Any:
    """What the kernels of experts read; None for a weight that they read as it is."""
    return _int8_form(weight) or _matrix(weight)


def _wrong_experts(lacking: Callable[[Any], str | None], gate_up: Any, down: Any) -> str | None:
    for weight in (gate_up, down):
        if isinstance(weight, Tensor):
            return "takes two quantised weights; one of this call's is plain"
        wrong = lacking(weight) if isinstance(weight, INT8) else None
        if wrong is not None:
            return wrong
    return None


def _refuse_grouped(x, weights, ids, gate_up, down) -> str | None:
    return _wrong_experts(_lacking_on_cpu, gate_up, down)


def _refuse_gathered(x, weights, ids, gate_up, down) -> str | None:
    return _too_many(ids, gate_up) or _wrong_experts(_lacking_on_cpu, gate_up, down)


def _refuse_gathered_on_cuda(x, weights, ids, gate_up, down) -> str | None:
    return _too_many(ids, gate_up) or _wrong_experts(_lacking_on_cuda, gate_up, down)


def _too_many(ids: Tensor, gate_up: Any) -> str | None:
    wanted, held = ids.numel(), gate_up.shape[0]
    if wanted <= held:
        return None
    return f"reads an expert for each choice, which pays up to as many as there are experts; {wanted} choices of {held}"


Products = Callable[[Tensor, Tensor], Tensor]
"""From quantised rows [choices inputs] and a weight's values [experts outputs inputs] to each row's own product."""


@experts.kernel(
    "torch_quantized_grouped", targets=("cpu",), refuse=_refuse_grouped, host_reads=True, batches=False,
    differentiable=False, prepare=_expert_form, weights=OF_EXPERTS,
)  # fmt: skip
def _grouped(x, weights, ids, gate_up, down):
    """Each expert once, over the tokens that chose it."""
    if not ids.numel():
        return torch.zeros_like(x)
    choices, experts_of = ids.shape[1], ids.flatten()
    order = experts_of.argsort(stable=True)
    token, expert = order // choices, experts_of[order]
    counts = torch.bincount(expert, minlength=gate_up.shape[0]).tolist()
    busy = [(at, count) for at, count in enumerate(counts) if count]

    def products(rows: Tensor, values: Tensor) -> Tensor:
        parts = zip(busy, rows.split([count for _, count in busy]), strict=True)
        return torch.cat([_one_product(part, values[at]) for (at, _), part in parts])

    y = _feed_forward(x, token, expert, gate_up, down, products)
    return torch.zeros_like(x).index_add(0, token, y * weights.flatten()[order, None])


@experts.kernel(
    "cuda_quantized_gathered", targets=("cuda",), refuse=_refuse_gathered_on_cuda, batches=False,
    differentiable=False, prepare=_expert_form, weights=OF_EXPERTS,
)  # fmt: skip
@experts.kernel(
    "torch_quantized_gathered", targets=("cpu",), refuse=_refuse_gathered, batches=False,
    differentiable=False, prepare=_expert_form, weights=OF_EXPERTS,
)  # fmt: skip
def _gathered(x, weights, ids, gate_up, down):
    """For few tokens: nothing is read on the host, and of the weights only what was chosen."""
    if not ids.numel():
        return torch.zeros_like(x)
    expert = ids.flatten()
    token = torch.arange(x.shape[0], device=x.device).repeat_interleave(ids.shape[1])

    def products(rows: Tensor, values: Tensor) -> Tensor:
        pairs = zip(rows.split(1), expert.split(1), strict=True)
        return torch.cat([_one_product(row, values.index_select(0, chosen)[0]) for row, chosen in pairs])

    y = _feed_forward(x, token, expert, gate_up, down, products).unflatten(0, ids.shape)
    return (y * weights[..., None]).sum(1).to(x.dtype)


def _feed_forward(x: Tensor, token: Tensor, expert: Tensor, gate_up: Any, down: Any, products: Products) -> Tensor:
    """Of each choice [choices hidden], in the dtype of x; `token` and `expert` are its token and its expert."""
    gate_up, down = (_expert_form(weight) or weight for weight in (gate_up, down))
    rows, scale = _quantized_rows(x, gate_up)
    sums = products(rows[token], gate_up.values)
    inner = swiglu.body(_values(sums, expert, gate_up, None if scale is None else scale[token], x.dtype))
    rows, scale = _quantized_rows(inner, down)
    return _values(products(rows, down.values), expert, down, scale, x.dtype)


def _quantized_rows(x: Tensor, weight: Any) -> tuple[Tensor, Tensor | None]:
    """Rows as the weight's product takes them, and the scale of each, if there is one."""
    return int8_tokens(x) if isinstance(weight, Int8Weight) else (_mx_rows(x, weight.padding), None)


def _one_product(rows: Tensor, values: Tensor) -> Tensor:
    return _int8_product(rows, values) if values.dtype == torch.int8 else F.linear(rows, values.to(rows.dtype))


def _values(sums: Tensor, expert: Tensor, weight: Any, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What sums of products with experts' weights stand for."""
    if scale is None:
        return sums.to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (sums.to(wide) * weight.scale[expert, :, 0] * scale).to(dtype)
