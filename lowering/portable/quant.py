"""Quantised weights on CPUs and GPUs: Torch's own product of int8, and MX products in floating point.

int4 is unpacked to int8, which has a product. An MX number is exact in bfloat16 down to 2^-133, so that for bfloat16
activations products of MX weights are those of bfloat16: of MXFP8 weights with x as MX numbers, of MXFP4 with x itself.
The kernels for CUDA have not been measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float32, Int
from torch import Tensor

from params.quant.rounding import int8_tokens, mxfp8, static_int8
from params.quant.values import (
    MX_BLOCK,
    Int4Weight,
    Int8Weight,
    MXFP4Weight,
    MXFP8Weight,
    MXWeight,
    QuantizedWeight,
    SplitWeight,
    StaticInt8Weight,
    e2m1_values,
    mx_powers,
    mx_values,
    times_blocks,
)
from params.tree import static, tree

from ..host import tracing
from ..ops.linear import linear
from ..ops.mlp import Caps, swiglu
from ..ops.moe import experts
from ..ops.widen import wide_dtype
from ..policy import MODE
from ..target import EVERY
from ..use import use
from ..weights import PreparedWeight

INT8 = (Int8Weight, StaticInt8Weight, Int4Weight)
OF_EXPERTS = (Int8Weight, Int4Weight, MXFP8Weight, MXFP4Weight)
FEWEST_ROWS = 17
"""Rows that CUDA's product of int8 needs."""
SMALLEST = 2**20
"""Elements from which on a packed int8 weight is faster than a plain one, but for a single row.

Source: one core of an AMD EPYC, microseconds packed / plain. 4096 x 4096: 1100 / 500 for 1 row, 1300 / 6100 for 2 to 8,
6100 / 10700 for 64, 40000 / 44000 for 512. 7168 x 1024: 149 / 110, 152 / 610 for 2, 430 / 1000 for 8, as much for 512.
1024 x 1024: 45 / 19, 45 / 92, 70 / 120, as much for 512. `tests/bench/bench_quant.py` measures them again.
"""


@linear.kernel("split", targets=EVERY, weights=(SplitWeight,))
def _split(x, weight):
    """Each part by the kernel that is best for it."""
    policy = MODE.get().policy
    if linear.name not in policy.prefer:
        return torch.cat([linear(x, part) for part in weight.parts], -1)
    others = {name: kernel for name, kernel in policy.prefer.items() if name != linear.name}
    with use(replace(policy, prefer=others)):
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


def _int8_form(weight: Any) -> Any:
    """What the product reads: int8 for int4, in twice its bytes, and float32 for a scale's bits; None for any other."""
    if isinstance(weight, Int4Weight):
        scale = weight.scale if weight.second_scale is None else weight.second_scale * weight.scale
        return Int8Weight(weight.values(), scale)
    by_bits = isinstance(weight, StaticInt8Weight) and weight.deq_scale.dtype != torch.float32
    return replace(weight, deq_scale=weight.product_scale()) if by_bits else None


def _int8_product(rows: Tensor, values: Tensor) -> Tensor:
    """rows @ values.T in int32."""
    if not rows.is_cuda:
        return _int8_operator(rows, values) if tracing() else torch.ops.aten._int_mm(_dense(rows), _dense(values).T)
    padding = max(0, FEWEST_ROWS - rows.shape[0])
    return torch.ops.aten._int_mm(F.pad(rows, (0, 0, 0, padding)), values.T)[: rows.shape[0]]


def _dense(x: Tensor) -> Tensor:
    """With the strides of its shape: the product takes any that an axis of length one has at its word."""
    return x.contiguous().as_strided(x.shape, (x.shape[1], 1))


@torch.library.custom_op("funcmodels::int8_product", mutates_args=(), schema="(Tensor rows, Tensor values) -> Tensor")
def _int8_operator(rows: Tensor, values: Tensor) -> Tensor:
    # Inductor gives axes of length one strides of its own.
    return torch.ops.aten._int_mm(_dense(rows), _dense(values).T)


@_int8_operator.register_fake
def _int8_product_of_shapes(rows: Tensor, values: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], values.shape[0]), dtype=torch.int32)


@tree
class PackedInt8(PreparedWeight):
    """An int8 weight [outputs inputs] in oneDNN's layout, which it need not make at every call, and its scales.

    `zeros` [outputs] are offsets that the weight does not have.
    """

    kernels = ("torch_int8_packed",)

    packed: Tensor
    scale: Float32[Tensor, " outputs"]
    zeros: Int[Tensor, " outputs"]
    shape: tuple[int, int] = static()

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return PackedInt8, self.shape


def _pack_int8(weight: Any) -> PackedInt8 | QuantizedWeight | None:
    """The packed weight; of one that is small, or that the product of int8 does not take, what `torch_int8` reads."""
    form = _int8_form(weight)
    weight = form or weight
    if _lacking_on_cpu(weight) or weight.values.numel() < SMALLEST or weight.device.type != "cpu":
        return form
    packed = torch.ops.onednn.qlinear_prepack(weight.values, None)
    outputs, inputs = weight.shape
    zeros = torch.zeros(outputs, dtype=torch.int64, device="cpu")
    return PackedInt8(packed, weight.scale[:, 0].contiguous(), zeros, (outputs, inputs))


def _refuse_packed(x, weight) -> str | None:
    if isinstance(weight, PackedInt8):
        return _wrong_width(x, weight)
    return f"takes a packed weight; lowering.prepare(params) packs those of {SMALLEST} elements or more"


def _packed_product(rows: Tensor, packed: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """rows @ values.T, times each output's scale, in float32."""
    # It wants activations without sign: their offset is taken out of the sums, in integers.
    unsigned = _dense(rows).view(torch.uint8) ^ 128
    return torch.ops.onednn.qlinear_pointwise(
        unsigned, 1.0, 128, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )


_packed_operator = torch.library.custom_op(
    "funcmodels::packed_int8_product",
    _packed_product,
    mutates_args=(),
    schema="(Tensor rows, Tensor packed, Tensor scale, Tensor zeros) -> Tensor",
)
_packed_operator.register_fake(
    lambda rows, packed, scale, zeros: rows.new_empty((rows.shape[0], scale.shape[0]), dtype=torch.float32)
)


@linear.kernel(
    "torch_int8_packed",
    targets=("cpu",),
    refuse=_refuse_packed,
    batches=False,
    differentiable=False,
    prepare=_pack_int8,
    weights=(Int8Weight, Int4Weight),
)
def _int8_packed(x, weight):
    rows, scale = int8_tokens(x.reshape(-1, x.shape[-1]))
    product = _packed_operator if tracing() else _packed_product
    y = product(rows, weight.packed, weight.scale, weight.zeros).to(wide_dtype(x)).mul_(scale)
    return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


@linear.kernel(
    "cuda_int8",
    targets=("cuda",),
    refuse=_refuse_int8_on_cuda,
    batches=False,
    differentiable=False,
    prepare=_int8_form,
    weights=INT8,
)
@linear.kernel(
    "torch_int8",
    targets=("cpu",),
    refuse=_refuse_int8,
    batches=False,
    differentiable=False,
    prepare=_int8_form,
    weights=INT8,
)
def _int8(x, weight):
    weight = _int8_form(weight) or weight
    rows, dtype = x.reshape(-1, x.shape[-1]), wide_dtype(x)
    if isinstance(weight, StaticInt8Weight):
        rows = static_int8(rows, weight.input_scale, weight.input_offset)
        y = (_int8_product(rows, weight.values) + weight.correction).to(dtype).mul_(weight.product_scale())
    else:
        rows, scale = int8_tokens(rows)
        y = _int8_product(rows, weight.values).to(dtype).mul_(weight.scale[:, 0]).mul_(scale)
    return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


# MX


@tree
class MXMatrix(PreparedWeight):
    """An MX weight in bfloat16 [*experts outputs inputs]: two or four times its bytes, and nothing to decode.

    `padding` as in `MXWeight`; `rounds` says whether x must be of MX numbers too.
    """

    kernels = (
        "torch_mxfp8",
        "torch_mxfp4",
        "torch_quantized_grouped",
        "torch_quantized_gathered",
        "cuda_quantized_gathered",
    )

    values: Tensor
    padding: tuple[int, int] = static()
    rounds: bool = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the plain weight."""
        return (*self.values.shape[:-1], self.values.shape[-1] - sum(self.padding))

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return *super().static_key(), self.padding, self.rounds


def _matrix(weight: Any) -> MXMatrix | None:
    """An MX weight decoded; None for others."""
    if not isinstance(weight, MXWeight):
        return None
    decoded = _decode_operator if tracing() else _decoded
    return MXMatrix(decoded(_payload(weight), weight.scale), weight.padding, isinstance(weight, MXFP8Weight))


def _payload(weight: Any) -> Tensor:
    """What a weight holds beside scales."""
    return weight.packed if isinstance(weight, MXFP4Weight) else weight.values


def _decoded(stored: Tensor, scale: Tensor) -> Tensor:
    """MX numbers, of float8 or of bytes with two float4, in bfloat16."""
    if stored.dtype != torch.uint8:
        return mx_values(stored, scale).to(torch.bfloat16)
    # Both numbers of a byte are looked up at once, as the halves of an integer.
    every = e2m1_values(torch.arange(256, device=stored.device).to(torch.uint8)[:, None]).to(torch.bfloat16)
    pairs = every.view(torch.int32).flatten().index_select(0, stored.flatten().int()).view(stored.shape)
    return times_blocks(pairs.view(torch.bfloat16), mx_powers(scale).to(torch.bfloat16), MX_BLOCK).contiguous()


_PRODUCTS = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
"""Dtype of MX products by that of x: what is summed must be finer than what it is rounded to."""


def _mx_rows(x: Tensor, weight: Any) -> Tensor:
    """x as the product takes it and in its dtype: as MX numbers, or for a float4 weight as it is."""
    x = F.pad(x, weight.padding)
    if isinstance(weight, MXFP4Weight) or (isinstance(weight, MXMatrix) and not weight.rounds):
        return x.float() if x.dtype == torch.float16 else x
    return _rows_operator(x) if tracing() else _rounded_rows(x)


def _rounded_rows(x: Tensor) -> Tensor:
    return mx_values(*mxfp8(x, "half_even")).to(_PRODUCTS.get(x.dtype, torch.float64))


# Torch 2.13's Inductor decodes some shapes of float8 wrongly, so that a captured program calls what it cannot fuse.
_decode_operator = torch.library.custom_op(
    "funcmodels::mx_matrix", _decoded, mutates_args=(), schema="(Tensor stored, Tensor scale) -> Tensor"
)
_rows_operator = torch.library.custom_op(
    "funcmodels::mx_rows", _rounded_rows, mutates_args=(), schema="(Tensor x) -> Tensor"
)
_decode_operator.register_fake(
    lambda stored, scale: stored.new_empty(
        (*stored.shape[:-1], stored.shape[-1] * (2 if stored.dtype == torch.uint8 else 1)), dtype=torch.bfloat16
    )
)
_rows_operator.register_fake(lambda x: torch.empty_like(x, dtype=_PRODUCTS.get(x.dtype, torch.float64)))


@linear.kernel(
    "torch_mxfp4",
    targets=EVERY,
    refuse=_wrong_width,
    batches=False,
    differentiable=False,
    prepare=_matrix,
    weights=(MXFP4Weight,),
)
@linear.kernel(
    "torch_mxfp8",
    targets=EVERY,
    refuse=_wrong_width,
    batches=False,
    differentiable=False,
    prepare=_matrix,
    weights=(MXFP8Weight,),
)
def _mx(x, weight):
    matrix = _matrix(weight) or weight
    rows = _mx_rows(x, matrix)
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


def _refuse_grouped(x, weights, ids, gate_up, down, *, caps=None) -> str | None:
    return _wrong_experts(_lacking_on_cpu, gate_up, down)


def _refuse_gathered(x, weights, ids, gate_up, down, *, caps=None) -> str | None:
    return _too_many(ids, gate_up) or _wrong_experts(_lacking_on_cpu, gate_up, down)


def _refuse_gathered_on_cuda(x, weights, ids, gate_up, down, *, caps=None) -> str | None:
    return _too_many(ids, gate_up) or _wrong_experts(_lacking_on_cuda, gate_up, down)


def _too_many(ids: Tensor, gate_up: Any) -> str | None:
    wanted, held = ids.numel(), gate_up.shape[0]
    if wanted <= held:
        return None
    return f"reads an expert for each choice, which pays up to as many as there are experts; {wanted} choices of {held}"


Products = Callable[[Tensor, Any], Tensor]
"""From quantised rows [choices inputs] and a weight [experts outputs inputs] to each row's own product."""


@experts.kernel(
    "torch_quantized_grouped",
    targets=("cpu",),
    refuse=_refuse_grouped,
    host_reads=True,
    batches=False,
    differentiable=False,
    prepare=_expert_form,
    weights=OF_EXPERTS,
)
def _grouped(x, weights, ids, gate_up, down, *, caps=None):
    """Each expert once, over the tokens that chose it."""
    if not ids.numel():
        return torch.zeros_like(x)
    choices, experts_of = ids.shape[1], ids.flatten()
    order = experts_of.argsort(stable=True)
    token, expert = order // choices, experts_of[order]
    counts = torch.bincount(expert, minlength=gate_up.shape[0]).tolist()
    busy = [(at, count) for at, count in enumerate(counts) if count]

    def products(rows: Tensor, weight: Any) -> Tensor:
        parts = zip(busy, rows.split([count for _, count in busy]), strict=True)
        stored, scale = _stored(weight)
        return torch.cat([_one_product(part, stored, scale, at) for (at, _), part in parts])

    y = _feed_forward(x, token, expert, gate_up, down, products, caps)
    return torch.zeros_like(x).index_add(0, token, y * weights.flatten()[order, None])


@experts.kernel(
    "cuda_quantized_gathered",
    targets=("cuda",),
    refuse=_refuse_gathered_on_cuda,
    batches=False,
    differentiable=False,
    prepare=_expert_form,
    weights=OF_EXPERTS,
)
@experts.kernel(
    "torch_quantized_gathered",
    targets=("cpu",),
    refuse=_refuse_gathered,
    batches=False,
    differentiable=False,
    prepare=_expert_form,
    weights=OF_EXPERTS,
)
def _gathered(x, weights, ids, gate_up, down, *, caps=None):
    """For few tokens: of the weights only what was chosen, and nothing is read from a device."""
    if not ids.numel():
        return torch.zeros_like(x)
    expert = ids.flatten()
    token = torch.arange(x.shape[0], device=x.device).repeat_interleave(ids.shape[1])

    def products(rows: Tensor, weight: Any) -> Tensor:
        stored, scale = _stored(weight)
        if not rows.is_cuda:
            return (_choices_operator if tracing() or rows.is_meta else _choice_products)(rows, stored, scale, expert)
        chosen = [
            (stored.index_select(0, at), None if scale is None else scale.index_select(0, at)) for at in expert.split(1)
        ]
        return torch.cat([_one_product(row, *own) for row, own in zip(rows.split(1), chosen, strict=True)])

    y = _feed_forward(x, token, expert, gate_up, down, products, caps).unflatten(0, ids.shape)
    return (y * weights[..., None]).sum(1).to(x.dtype)


def _choice_products(rows: Tensor, stored: Tensor, scale: Tensor | None, expert: Tensor) -> Tensor:
    """Each row's product with its own expert's weight, which is read where it lies."""
    pairs = zip(rows.split(1), expert.tolist(), strict=True)
    return torch.cat([_one_product(row, stored, scale, at) for row, at in pairs])


# A captured program calls it whole: taken apart, it would copy every expert that is chosen.
_choices_operator = torch.library.custom_op(
    "funcmodels::choice_products",
    _choice_products,
    mutates_args=(),
    schema="(Tensor rows, Tensor stored, Tensor? scale, Tensor expert) -> Tensor",
)
_choices_operator.register_fake(
    lambda rows, stored, scale, expert: rows.new_empty(
        (rows.shape[0], stored.shape[1]), dtype=torch.int32 if stored.dtype == torch.int8 else rows.dtype
    )
)


def _feed_forward(
    x: Tensor, token: Tensor, expert: Tensor, gate_up: Any, down: Any, products: Products, caps: Caps | None
) -> Tensor:
    """Of each choice [choices hidden], in the dtype of x; `token` and `expert` are its token and its expert."""
    gate_up, down = (_int8_form(weight) or weight for weight in (gate_up, down))
    rows, scale = _quantized_rows(x, gate_up)
    sums = products(rows[token], gate_up)
    both = _values(sums, expert, gate_up, None if scale is None else scale[token], x.dtype)
    inner = swiglu.body(both, caps=caps)
    rows, scale = _quantized_rows(inner, down)
    return _values(products(rows, down), expert, down, scale, x.dtype)


def _quantized_rows(x: Tensor, weight: Any) -> tuple[Tensor, Tensor | None]:
    """Rows as the weight's product takes them, and the scale of each, if there is one."""
    return int8_tokens(x) if isinstance(weight, Int8Weight) else (_mx_rows(x, weight), None)


def _stored(weight: Any) -> tuple[Tensor, Tensor | None]:
    """What all experts' products read, and what it must be decoded with first."""
    return _payload(weight), weight.scale if isinstance(weight, MXWeight) else None


def _one_product(rows: Tensor, stored: Tensor, scale: Tensor | None = None, at: int = 0) -> Tensor:
    """Rows times the weight of the expert `at`: of what is decoded, only that one's is."""
    if stored.dtype == torch.int8:
        return _int8_product(rows, stored[at])
    values = stored[at] if scale is None else _decoded(stored[at], scale[at])
    return F.linear(rows, values.to(rows.dtype))


def _values(sums: Tensor, expert: Tensor, weight: Any, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What sums of products with experts' weights stand for."""
    if scale is None:
        return sums.to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return sums.to(wide).mul_(weight.scale[expert, :, 0]).mul_(scale).to(dtype)
