"""What an operator call costs: floating-point operations and bytes moved, from shapes alone.

FLOPs are those of products (a multiply and an add count two), as Torch counts them; elementwise work counts none.
Bytes are those of each input read once and each output written once, as if nothing stayed in a cache; look-ups and
scattered writes count what they touch, not the table. Views cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Cost:
    """Floating-point operations and bytes moved."""

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def times(self, count: int) -> Cost:
        """The cost of `count` such calls."""
        return Cost(self.flops * count, self.bytes * count)


Formula = Callable[[Arguments, Any], int]
"""From an operator's arguments by name, defaults included, and its result."""


@dataclass(frozen=True)
class Formulas:
    """Operators, by name, that cost other than products of matrices and whole tensors."""

    flops: Mapping[str, Formula]
    bytes: Mapping[str, Formula]


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors in a tree; an expanded axis counts once."""
    return sum(_bytes(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _bytes(x: Tensor) -> int:
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or not size)
    return x.element_size() * math.prod(sizes)


def _looked_up(a: Arguments, out: Any) -> int:
    return 2 * tensor_bytes(out) + tensor_bytes(a.get("indices", a.get("index")))


def _written(a: Arguments, out: Any) -> int:
    source = a.get("values", a.get("source", a.get("src")))
    return 2 * tensor_bytes(source) + tensor_bytes(a.get("indices", a.get("index")))


def _nothing(a: Arguments, out: Any) -> int:
    return 0


def _product(a: Arguments, out: Any) -> int:
    """Scores and weighted values of fused attention, query [batch heads queries dim]; a causal mask saves none."""
    batch, heads, queries, dim = a["query"].shape
    keys, v_dim = a["value"].shape[-2:]
    return 2 * batch * heads * queries * keys * (dim + v_dim)


def _projected(a: Arguments, out: Any) -> int:
    """Rows [... inputs] times a weight, by any of the names that operators have for rows."""
    rows = next(a[name] for name in ("x", "rows", "self") if name in a)
    return 2 * out.numel() * rows.shape[-1]


def _told(a: Arguments, out: Any) -> int:
    """A launch of ours says what its products count."""
    return a["flops"]


def _chosen(a: Arguments, out: Any) -> int:
    """Rows, results, and of the weights [experts outputs inputs] one for each row."""
    weight = a["values"].element_size() * math.prod(a["values"].shape[1:])
    return tensor_bytes((a["rows"], a["expert"], out)) + weight * a["rows"].shape[0]


def _selected(a: Arguments, out: Any) -> int:
    """A launch of sparse attention: of the pages, the keys and values that each token selects, read for itself."""
    q, k_pages, v_pages, selected, *rest = a["read"]
    each = sum(pages.element_size() * math.prod(pages.shape[2:]) for pages in (k_pages, v_pages))
    return tensor_bytes((q, selected, rest, a["written"])) + each * selected.numel()


_PRODUCTS = (
    "aten::_int_mm",
    "funcmodels::choice_products",
    "funcmodels::int8_product",
    "funcmodels::packed_int8_product",
    "funcmodels::packed_linear",
)
_CPU_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
ATEN = Formulas(
    flops={
        _CPU_ATTENTION: _product,
        "aten::_scaled_dot_product_fused_attention_overrideable": _product,
        **dict.fromkeys(_PRODUCTS, _projected),
        **dict.fromkeys(("triton_kernels::gated_delta_rule", "triton_kernels::sparse_attention"), _told),
    },
    bytes={
        "funcmodels::choice_products": _chosen,
        **dict.fromkeys(("aten::embedding", "aten::index", "aten::index_select", "aten::gather"), _looked_up),
        **dict.fromkeys(("aten::index_put_", "aten::index_copy_", "aten::index_add_", "aten::scatter_"), _written),
        "triton_kernels::sparse_attention": _selected,
        **dict.fromkeys(("aten::empty", "aten::empty_strided", "aten::new_empty", "aten::empty_like"), _nothing),
        **dict.fromkeys(("aten::_unsafe_view", "aten::lift_fresh"), _nothing),
    },
)


def has_flops(operator: OpOverload, formulas: Formulas) -> bool:
    """Whether the operator's FLOPs are known as they are, so that it need not be taken apart."""
    return operator._overloadpacket in flop_registry or operator._schema.name in formulas.flops


def cost(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, formulas: Formulas) -> Cost:
    """The cost of one call."""
    named = arguments(operator._schema, args, kwargs)
    name = operator._schema.name
    flops = 0
    if name in formulas.flops:
        flops = formulas.flops[name](named, out)
    elif operator._overloadpacket in flop_registry:
        flops = flop_registry[operator._overloadpacket](*args, **kwargs, out_val=out)
    moved = formulas.bytes[name](named, out) if name in formulas.bytes else tensor_bytes((args, kwargs, out))
    return Cost(int(flops), 0 if operator.is_view else int(moved))


def arguments(schema: torch.FunctionSchema, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with the schema's defaults for those left out."""
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    return {**defaults, **given, **kwargs}
