"""Argument sets of every op, for tests, benches and the device check: model shapes in small, real widths, awkward ones.

A case makes its arguments from a seed and a dtype, the same each time. Tests and `python -m lowering check` run them
all; benches run those marked `bench`, which have a model's real widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from params.quant.rounding import int4_correction, int4_weight, int8_range, int8_weight, mxfp4, mxfp8, pack_int4
from params.quant.values import (
    Int4Weight,
    Int8Weight,
    MXFP4Weight,
    MXFP8Weight,
    QuantizedWeight,
    SplitWeight,
    StaticInt8Weight,
)

from .host import HostLengths
from .layouts import LAYOUTS

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Draw:
    """Random tensors of one dtype from one seed."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal values."""
        return torch.randn(shape, generator=self._generator).to(dtype or self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Float32 values in [low, high)."""
        return low + (high - low) * torch.rand(shape, generator=self._generator)

    def ids(self, below: int, *shape: int) -> Tensor:
        """Integers in [0, below)."""
        return torch.randint(below, shape, generator=self._generator)

    def distinct(self, below: int, rows: int, columns: int) -> Tensor:
        """[rows columns] integers in [0, below), distinct within a row."""
        return torch.rand(rows, below, generator=self._generator).argsort(-1)[:, :columns]


@dataclass(frozen=True)
class Case:
    """One call of an op. `length` is that of its longest sum, for the tolerance.

    `quantized`: x is quantised as the weight is, so that nothing has a derivative.
    """

    op: str
    name: str
    make: Callable[[Draw], Arguments]
    length: int = 1
    bench: bool = False
    quantized: bool = False

    def __str__(self) -> str:
        return f"{self.op}[{self.name}]"

    def arguments(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> Arguments:
        """The positional and keyword arguments, made afresh."""
        with torch.device("cpu"):
            return self.make(Draw(dtype, seed))


@dataclass(frozen=True)
class Rows:
    """New tokens and past tokens of each row, and padding behind them."""

    name: str
    counts: tuple[int, ...]
    past: tuple[int, ...]
    padding: int = 0

    @property
    def tokens(self) -> int:
        """Length of the token axis."""
        return sum(self.counts) + self.padding

    def query_start(self) -> Tensor:
        """Where each row starts, and the end of the last."""
        return torch.tensor([0, *accumulate(self.counts)], dtype=torch.int32)

    def hints(self) -> dict[str, Any]:
        """The static facts that ops over rows take."""
        uniform = len(set(self.counts)) == 1 and not self.padding and self.counts[0] > 0
        return {"max_query": max(self.counts), "uniform": uniform}


ROWS = (
    Rows("one_token", (1,), (9,)),
    Rows("decode", (1, 1, 1), (4, 0, 11)),
    Rows("uniform", (9, 9), (0, 5)),
    Rows("ragged", (5, 0, 1, 12), (3, 7, 0, 2), padding=3),
    Rows("idle_first", (0, 4), (6, 0), padding=1),
    Rows("two_chunks_and_tail", (130, 18), (0, 1)),
)
"""Rows that every op over rows meets."""

VERIFY = Rows("verify", (4, 4, 4), (5, 2, 0))
PROMPT = Rows("prompt_512", (512,), (0,))
DECODE_8 = Rows("decode_8", (1,) * 8, (400,) * 8)
VERIFY_8 = Rows("verify_8", (4,) * 8, (400,) * 8)
DECODE_1 = Rows("decode_1", (1,), (400,))
BLOCK = Rows("block", (7, 7, 7), (5, 0, 140))
BLOCK_512 = Rows("block_512", (7,) * 8, (512,) * 8)
DECODE_4K = Rows("decode_4k", (1,), (4096,))
LONG = Rows("long_decode", (1, 1, 1), (300, 17, 129))


def _norm(*shape: int, **kwargs: Any) -> Callable[[Draw], Arguments]:
    return lambda draw: ((draw.normal(*shape), draw.normal(shape[-1])), {"eps": 1e-6, **kwargs})


def _add_norm(*shape: int) -> Callable[[Draw], Arguments]:
    return lambda draw: ((draw.normal(*shape), draw.normal(*shape), draw.normal(shape[-1])), {"eps": 1e-6})


def _gated_norm(activation: str, *shape: int) -> Callable[[Draw], Arguments]:
    kwargs = {"eps": 1e-6, "activation": activation}
    return lambda draw: ((draw.normal(*shape), draw.normal(*shape), draw.normal(shape[-1])), kwargs)


def _norms() -> list[Case]:
    shapes = {"hidden": (5, 1024), "heads": (3, 2, 256), "awkward": (7, 1, 129), "empty": (0, 64)}
    bench = {"prompt_512": (512, 1024), "decode_8": (8, 1024)}
    made = []
    for name, shape in (shapes | bench).items():
        marks: dict[str, Any] = {"length": shape[-1], "bench": name in bench}
        for op in ("rms_norm", "rms_norm_rstd", "gemma_rms_norm", "gemma_rms_norm_rstd"):
            made.append(Case(op, name, _norm(*shape), **marks))
        for op in ("add_rms_norm", "add_gemma_rms_norm"):
            made.append(Case(op, name, _add_norm(*shape), **marks))
    for name, shape in {"heads": (5, 16, 128), "awkward": (3, 6, 12), "prompt_512": (512, 16, 128)}.items():
        marks = {"length": shape[-1], "bench": name == "prompt_512"}
        for op in ("gated_rms_norm", "gated_rms_norm_fp32"):
            for activation in ("silu", "sigmoid"):
                made.append(Case(op, f"{name}_{activation}", _gated_norm(activation, *shape), **marks))

    def wide_weight(draw: Draw) -> Arguments:
        args = draw.normal(5, 6, 32), draw.normal(5, 6, 32), draw.normal(32, dtype=torch.float32)
        return args, {"eps": 1e-5, "activation": "sigmoid"}

    made.append(Case("gated_rms_norm_fp32", "wide_weight", wide_weight, 32))
    for op in ("rms_norm", "gemma_rms_norm"):
        made.append(Case(op, "large_eps", _norm(5, 12, eps=0.5), 12))
    made.append(Case("add_rms_norm", "large_eps", lambda draw: (_add_norm(5, 12)(draw)[0], {"eps": 0.5}), 12))
    made.append(Case("grouped_gemma_rms_norm", "streams", _norm(5, 4 * 256, groups=4), 256))
    made.append(Case("grouped_gemma_rms_norm", "awkward", _norm(3, 3 * 7, groups=3), 7))
    return made


def _projections() -> list[Case]:
    def linear(lead: tuple[int, ...], inputs: int, outputs: int) -> Callable[[Draw], Arguments]:
        return lambda draw: ((draw.normal(*lead, inputs), draw.normal(outputs, inputs)), {})

    def corrected(rows: int, vocab: int, rank: int, outputs: int) -> Callable[[Draw], Arguments]:
        shapes = (rows, vocab), (rows, rank), (outputs, rank), (vocab, 24)
        return lambda draw: (tuple(draw.normal(*shape) for shape in shapes), {})

    def among(make: Callable[[Draw], Arguments], *only: int) -> Callable[[Draw], Arguments]:
        return lambda draw: ((*make(draw)[0], torch.tensor(only)), {})

    shapes = {
        "decode": ((3,), 1024, 640), "one": ((1,), 256, 32), "narrow": ((5,), 96, 1), "awkward": ((7, 2), 33, 19),
        "empty": ((0,), 64, 32), "prompt_512": ((512,), 1024, 7168), "decode_8": ((8,), 1024, 7168),
        "decode_1": ((1,), 1024, 7168),
    }  # fmt: skip
    made = [
        Case("linear", name, linear(*shape), length=shape[1], bench=name.startswith(("prompt", "decode_")))
        for name, shape in shapes.items()
    ]
    made.append(Case("embedding", "ids", lambda draw: ((draw.ids(97, 5), draw.normal(97, 24)), {})))
    made += [
        Case("greedy_token", "decode", linear((3,), 1024, 640), 1024),
        Case("greedy_token", "of_a_draft", among(linear((7, 2), 33, 19), 18, 2, 7, 5), 33),
        Case("greedy_markov_token", "block", corrected(5, 97, 14, 103), 14),
        Case("greedy_markov_token", "of_a_draft", among(corrected(2, 19, 6, 4), 18, 2, 7, 5), 6),
    ]
    for name, shape, bench in (
        ("mlp", (5, 512), False),
        ("lead", (2, 3, 14), False),
        ("prompt_512", (512, 7168), True),
    ):
        for op in ("swiglu", "geglu"):
            made.append(Case(op, name, lambda draw, shape=shape: ((draw.normal(*shape),), {}), bench=bench))
    for name, shape, caps in (("caps", (5, 512), (4.0, 25.0)), ("gate_cap", (2, 3, 14), (0.5, None))):
        kwargs = {"caps": caps}
        made.append(Case("swiglu", name, lambda draw, shape=shape, kw=kwargs: ((8 * draw.normal(*shape),), kw)))
    return made


def _experts(
    tokens: int, hidden: int, experts: int, inner: int, choices: int, scheme: str | None = None, **caps: Any
) -> Callable[[Draw], Arguments]:
    def make(draw: Draw) -> Arguments:
        weights = draw.uniform(0.1, 1.0, tokens, choices).to(draw.dtype)
        both: list[Any] = [
            draw.normal(experts, 2 * inner, hidden) / hidden**0.5,
            draw.normal(experts, hidden, inner) / inner**0.5,
        ]
        if scheme is not None:
            both = [_QUANTIZED[scheme](weight.float()) for weight in both]
        return (draw.normal(tokens, hidden), weights, draw.distinct(experts, tokens, choices), *both), caps

    return make


def _static(weight: Tensor) -> StaticInt8Weight:
    """For activations from -3 to 4, with a bias, which makes the correction."""
    (values, scale), (input_scale, input_offset) = int8_weight(weight), int8_range(-3.0, 4.0)
    deq_scale, bias = input_scale * scale[:, 0], torch.linspace(-1.0, 2.0, len(weight))
    correction = (bias / deq_scale - input_offset * values.sum(-1)).round().int()
    return StaticInt8Weight(values, deq_scale, correction, input_scale, input_offset)


def _static_by_bits(weight: Tensor) -> StaticInt8Weight:
    """The scale's bits in the low half of an int64."""
    made = _static(weight)
    return replace(made, deq_scale=made.deq_scale.view(torch.int32).long() & 0xFFFFFFFF)


def _int4(weight: Tensor) -> Int4Weight:
    values, scale = int4_weight(weight)
    return Int4Weight(pack_int4(values), scale, int4_correction(values, scale, 1))


def _in_groups(weight: Tensor) -> Tensor:
    """[outputs 4 inputs/4]: the last axis has a scale of its own."""
    return weight.unflatten(-1, (4, -1))


def _int8_groups(weight: Tensor) -> Int8Weight:
    values, scale = int8_weight(_in_groups(weight))
    return Int8Weight(values.flatten(-2), scale[..., 0])


def _int4_groups(weight: Tensor) -> Int4Weight:
    values, scale = int4_weight(_in_groups(weight))
    values, largest = values.flatten(-2), scale.amax(-2)
    second = scale[..., 0] / largest
    return Int4Weight(pack_int4(values), largest, 8 * weight.sum(-1, keepdim=True), second)


_QUANTIZED: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "w8a8": _static,
    "w8a8_by_bits": _static_by_bits,
    "w8a8_dynamic": lambda weight: Int8Weight(*int8_weight(weight)),
    "w8a8_dynamic_groups": _int8_groups,
    "w4a8_dynamic": _int4,
    "w4a8_dynamic_groups": _int4_groups,
    "w8a8_mxfp8": lambda weight: MXFP8Weight(*mxfp8(weight, "half_away")),
    "w8a8_mxfp8_slice": lambda weight: MXFP8Weight(*mxfp8(F.pad(weight, (20, 8)), "half_away"), padding=(20, 8)),
    "w4a16_mxfp4": lambda weight: MXFP4Weight(*mxfp4(weight)),
    "w4a16_mxfp4_slice": lambda weight: MXFP4Weight(*mxfp4(F.pad(weight, (20, 8))), padding=(20, 8)),
    "split": lambda weight: SplitWeight((Int8Weight(*int8_weight(weight[:-6])), weight[-6:])),
}
"""Ways to quantise a float32 weight, by the scheme's word and what is particular about it."""


def _with_quantized(make: Callable[[Draw], Arguments], at: int, scheme: str) -> Callable[[Draw], Arguments]:
    """The same arguments with the one at `at` quantised."""

    def changed(draw: Draw) -> Arguments:
        args, kwargs = make(draw)
        return (*args[:at], _QUANTIZED[scheme](args[at].float()), *args[at + 1 :]), kwargs

    return changed


_REQUANTIZED = 64
"""What lies between two quantised products is rounded to steps far above those of its dtype, so a last bit may come to
such a step: the bound is that of sums so many times longer."""


def _quantized() -> list[Case]:
    def linear(scheme: str, lead: tuple[int, ...], inputs: int, outputs: int) -> Callable[[Draw], Arguments]:
        def make(draw: Draw) -> Arguments:
            x, weight = draw.normal(*lead, inputs), draw.normal(outputs, inputs).float()
            made = _QUANTIZED[scheme](weight)
            if isinstance(made, SplitWeight):
                made = SplitWeight((made.parts[0], made.parts[1].to(draw.dtype)))
            return (x, made), {}

        return make

    made = []
    shapes = {
        "decode": ((3,), 1024, 640), "lead": ((7, 2), 96, 20), "narrow": ((5,), 160, 8), "empty": ((0,), 64, 32),
        "decode_8": ((8,), 1024, 7168), "prompt_512": ((512,), 1024, 7168),
    }  # fmt: skip
    for scheme in ("w8a8", "w8a8_dynamic", "w4a8_dynamic", "w8a8_mxfp8", "w4a16_mxfp4"):
        for name, shape in shapes.items():
            bench = name in ("decode_8", "prompt_512")
            if bench and scheme != "w8a8_dynamic":
                continue
            made.append(Case("linear", f"{scheme}_{name}", linear(scheme, *shape), shape[1], bench=bench))
        if scheme != "w8a8":
            for name, sizes in {
                "tiny": (6, 64, 8, 32, 2),
                "wide": (5, 128, 4, 64, 2),
                "awkward": (5, 48, 3, 24, 1),
                "empty": (0, 64, 5, 32, 2),
            }.items():
                made.append(Case("experts", f"{scheme}_{name}", _experts(*sizes, scheme), _REQUANTIZED * sizes[1]))
            capped = _experts(3, 64, 8, 64, 2, scheme, caps=(0.5, 0.25))
            made.append(Case("experts", f"{scheme}_caps", capped, _REQUANTIZED * 64))
    wide = _experts(512, 256, 16, 64, 2, "w8a8_dynamic")
    made.append(Case("experts", "w8a8_dynamic_prompt_512", wide, _REQUANTIZED * 256, bench=True))
    for scheme in ("w8a8_by_bits", "w8a8_dynamic_groups", "w4a8_dynamic_groups", "split"):
        made.append(Case("linear", scheme, linear(scheme, (4,), 128, 22), 128))
    for scheme in ("w8a8_mxfp8_slice", "w4a16_mxfp4_slice"):
        made.append(Case("linear", scheme, linear(scheme, (4,), 100, 22), 100))
    return [replace(case, quantized=True) for case in made]


def _mixtures() -> list[Case]:
    def route(tokens: int, experts: int, top_k: int, **groups: Any) -> Callable[[Draw], Arguments]:
        # Distinct logits, so that a choice has one right answer in any dtype.
        def make(draw: Draw) -> Arguments:
            return ((draw.distinct(experts, tokens, experts) / 16).to(draw.dtype),), {"top_k": top_k, **groups}

        return make

    def grouped(*sizes: int, groups: int = 1, kept: int = 1, scale: float = 1.0) -> Callable[[Draw], Arguments]:
        return route(*sizes, groups=groups, kept_groups=kept, scale=scale)

    def sigmoid(
        tokens: int,
        experts: int,
        top_k: int,
        *,
        groups: int = 1,
        kept: int = 1,
        scale: float = 1.0,
        renorm: bool = True,
    ) -> Callable[[Draw], Arguments]:
        # Sums of score and bias are steps apart: the bias orders blocks of experts, or groups, the scores those inside.
        # The first expert of a group is lifted, so that the group with the best one is not that with the two best.
        def make(draw: Draw) -> Arguments:
            block = experts // groups if groups > 1 else 4
            step, blocks = 0.4 / (block - 1), experts // block
            order = draw.distinct(blocks, 1, blocks).T
            places, *inside = (1 + draw.distinct(block - 1, blocks, block - 1) for _ in range(1 + tokens))
            bias = block * order + torch.nn.functional.pad(places, (1, 0)).float()
            bias[:, :1] += 1.37 * block * (blocks - order) * (groups > 1)
            scores = 0.5 + step * torch.nn.functional.pad(torch.stack(inside) - places, (1, 0)).flatten(1)
            sizes = {"top_k": top_k, "groups": groups, "kept_groups": kept, "scale": scale, "renormalise": renorm}
            return (scores.logit().to(draw.dtype), (step * bias).flatten().to(draw.dtype)), sizes

        return make

    return [
        Case("route_softmax", "tiny", route(6, 8, 2), 8),
        Case("route_softmax", "wide", route(5, 128, 8), 128),
        Case("route_softmax", "all", route(3, 4, 4), 4),
        Case("route_grouped", "lite", grouped(5, 64, 6), 64),
        Case("route_grouped", "v2", grouped(7, 160, 6, groups=8, kept=3, scale=16.0), 160),
        Case("route_grouped", "narrow", grouped(3, 6, 2, groups=3, kept=1, scale=0.5), 6),
        Case("route_sigmoid", "no_groups", sigmoid(5, 64, 8, scale=2.446), 64),
        Case("route_sigmoid", "groups", sigmoid(7, 40, 6, groups=8, kept=3, scale=2.5), 40),
        Case("route_sigmoid", "narrow", sigmoid(3, 6, 2, groups=3, kept=2), 6),
        Case("route_sigmoid", "as_they_are", sigmoid(4, 9, 3, groups=3, kept=1, renorm=False), 9),
        Case("experts", "tiny", _experts(6, 32, 8, 16, 2), 32),
        Case("experts", "one_token", _experts(1, 24, 5, 7, 1), 24),
        Case("experts", "caps", _experts(6, 32, 8, 16, 2, caps=(0.5, 0.25)), 32),
        Case("experts", "gate_cap", _experts(2, 24, 7, 9, 3, caps=(0.5, None)), 24),
        Case("experts", "empty", _experts(0, 24, 5, 7, 2), 24),
        Case("experts", "many_choices", _experts(512, 512, 12, 8, 4), 512),
        Case("experts", "prompt_512", _experts(512, 256, 16, 64, 2), 256, bench=True),
    ]


def _filters() -> list[Case]:
    # Spread enough that no cut lies within rounding of a token's edge.
    def filters(vocab: int, k: Sequence[int] | None, p: Sequence[float] | None) -> Callable[[Draw], Arguments]:
        def make(draw: Draw) -> Arguments:
            rows = len(k or p or ())
            both = zip(k or [0] * rows, p or [1.0] * rows, strict=True)
            hints = {"largest_k": max(k or [0]), "p_alone": any(top == 0 and share < 1 for top, share in both)}
            ks, ps = None if k is None else torch.tensor(k), None if p is None else torch.tensor(p)
            return (6 * draw.normal(rows, vocab), ks, ps), hints

        return make

    def draws(make: Callable[[Draw], Arguments], *, min_p: bool) -> Callable[[Draw], Arguments]:
        def extended(draw: Draw) -> Arguments:
            (logits, k, p), hints = make(draw)
            rows = logits.shape[0]
            least = draw.uniform(0.0, 0.1, rows) if min_p else None
            return (logits, draw.ids(2**40, rows), draw.uniform(0.5, 2.0, rows), k, p, least), hints

        return extended

    settings: dict[str, Any] = {
        "k": ((1, 5, 0, 97), None), "p": (None, (0.9, 1.0, 0.01)), "k_and_p": ((9, 40, 3), (0.8, 0.99, 1.0)),
        "mixed": ((0, 7, 0, 30), (0.7, 0.5, 1.0, 1.0)), "mixed_p_after_k": ((0, 12), (1.0, 0.6)),
    }  # fmt: skip
    small = {name: filters(97, *given) for name, given in settings.items()} | {"one": filters(1, (1, 3), (0.5, 1.0))}
    wide = {"k_and_p": ((20,) * 8, (0.95,) * 8), "p": (None, (0.95,) * 8)}
    large = {f"vocab_248320_{name}": filters(248_320, *given) for name, given in wide.items()}
    return [
        Case(op, name, make if op == "keep_top" else draws(make, min_p=len(name) % 2 == 0), 97, bench=name in large)
        for op in ("keep_top", "draw")
        for name, make in (small | large).items()
    ]


def _rotaries() -> list[Case]:
    def turn(tokens: int, heads: int, kv_heads: int, head_dim: int, half: int) -> Callable[[Draw], Arguments]:
        def make(draw: Draw) -> Arguments:
            angles = draw.uniform(-3.0, 3.0, tokens, half)
            return (
                draw.normal(tokens, heads, head_dim),
                draw.normal(tokens, kv_heads, head_dim),
                angles.cos(),
                angles.sin(),
            ), {}

        return make

    text: dict[str, Any] = {"rotary_dim": 64, "theta": 1e7}
    shapes = {"partial": (5, 8, 2, 256, 32), "full": (3, 4, 4, 16, 8), "awkward": (7, 3, 1, 13, 3)}
    made = [Case("rotary", name, turn(*shape)) for name, shape in shapes.items()]
    for name, shape in (shapes | {"latent": (5, 16, 1, 64, 32)}).items():
        made.append(Case("rotary_interleaved", name, _without_keys(turn(*shape))))
    made.append(Case("rotary", "prompt_512", turn(512, 8, 2, 256, 32), bench=True))
    made.append(Case("rotary_angles", "text", lambda draw: ((draw.ids(3000, 9).int(),), text)))
    made.append(Case("rotary_angles", "scaled", lambda draw: ((draw.ids(3000, 9).int(),), text | {"factor": 8.0})))
    stretch: dict[str, Any] = {"theta": 1e4, "factor": 40.0, "ramp": (10.0, 23.0), "multiplier": 1.26}
    made.append(Case("yarn_angles", "lite", lambda draw: ((draw.ids(3000, 9).int(),), stretch | {"rotary_dim": 64})))
    narrow = stretch | {"rotary_dim": 6, "ramp": (0.5, 0.501), "multiplier": 1.0}
    made.append(Case("yarn_angles", "narrow", lambda draw: ((draw.ids(300, 5).int(),), narrow)))
    sections = {"sections": (11, 11, 10)}
    made.append(Case("mrope_angles", "image", lambda draw: ((draw.ids(3000, 3, 9).int(),), text | sections)))
    return made


def _without_keys(make: Callable[[Draw], Arguments]) -> Callable[[Draw], Arguments]:
    """The arguments without the second."""

    def fewer(draw: Draw) -> Arguments:
        args, kwargs = make(draw)
        return (args[0], *args[2:]), kwargs

    return fewer


def _attention(
    rows: Rows, heads: int, kv_heads: int, head_dim: int, v_dim: int, **window: int
) -> Callable[[Draw], Arguments]:
    def make(draw: Draw) -> Arguments:
        q, k, v = (
            draw.normal(rows.tokens, number, dim)
            for number, dim in ((heads, head_dim), (kv_heads, head_dim), (kv_heads, v_dim))
        )
        return (q, k, v, rows.query_start()), {**rows.hints(), "scale": head_dim**-0.5, **window}

    return make


def paged(
    rows: Rows, heads: int, kv_heads: int, head_dim: int, v_dim: int, page_size: int, *, shuffled: bool, **window: int
) -> Callable[[Draw], Arguments]:
    """Arguments of `paged_attention` with NaN in every page and slot that no row holds; `window` is passed on."""

    def make(draw: Draw) -> Arguments:
        lengths = [past + count for past, count in zip(rows.past, rows.counts, strict=True)]
        used = [-(-length // page_size) for length in lengths]
        total = sum(used) + 3
        order = draw.distinct(total - 1, 1, total - 1)[0].tolist() if shuffled else list(range(total - 1))
        ids = iter(page + 1 for page in order)
        pages = [tuple(next(ids) for _ in range(count)) for count in used]
        table = torch.zeros(len(used), max(used) + 1, dtype=torch.int32)
        pools = []
        for dim in (head_dim, v_dim):
            pool = torch.full((total, page_size, kv_heads, dim), torch.nan, dtype=draw.dtype)
            for row, (held, length) in enumerate(zip(pages, lengths, strict=True)):
                table[row, : len(held)] = torch.tensor(held, dtype=torch.int32)
                for at in range(length):
                    pool[held[at // page_size], at % page_size] = draw.normal(kv_heads, dim)
            pools.append(pool)
        host = HostLengths(rows.counts, tuple(lengths), tuple(pages), exact=True)
        q = draw.normal(rows.tokens, heads, head_dim)
        held = torch.tensor(lengths, dtype=torch.int32)
        hints = {**rows.hints(), "scale": head_dim**-0.5, **window}
        return (q, *pools, table, held, rows.query_start(), host), hints

    return make


def latent_rows(
    rows: Rows, heads: int, nope_dim: int, rope_dim: int, v_dim: int, latent_dim: int, page_size: int, *,
    layout: str = "nd", padding: float = 0.0,
) -> Callable[[Draw], Arguments]:  # fmt: skip
    """Arguments of `mla_prefix_attention`: pages in no order, NaN in every slot that no row holds.

    A `rope_dim` of 0 is attention without rope. `padding` is what padding tokens hold.
    """

    def make(draw: Draw) -> Arguments:
        lengths = [past + count for past, count in zip(rows.past, rows.counts, strict=True)]
        pages, table = _scattered(lengths, page_size)
        slots = [torch.tensor(held, dtype=torch.int64).repeat_interleave(page_size) * page_size for held in pages]
        slots = [
            (base + torch.arange(len(base)) % page_size)[:length] for base, length in zip(slots, lengths, strict=True)
        ]
        total, live = max((page for held in pages for page in held), default=0) + 2, sum(rows.counts)
        widths = [latent_dim, *([rope_dim] if rope_dim else [])]
        new, pools = [], []
        for width in widths:
            pool = LAYOUTS[layout].empty(total, page_size, width, draw.dtype, torch.device("cpu"))
            pool.values.fill_(torch.nan)
            held = [draw.normal(length, width) for length in lengths]
            pool.write(torch.cat(held), torch.cat(slots))
            tail = torch.full((rows.padding, width), padding, dtype=draw.dtype)
            new.append(torch.cat([*(x[past:] for x, past in zip(held, rows.past, strict=True)), tail]))
            pools.append(pool)
        q = draw.normal(rows.tokens, heads, nope_dim + rope_dim)
        q[live:] = padding
        up = draw.normal(heads * (nope_dim + v_dim), latent_dim) / latent_dim**0.5
        host = HostLengths(rows.counts, tuple(lengths), tuple(pages), exact=True)
        q_rope = q[..., nope_dim:] if rope_dim else None
        both = [[*found, None][:2] for found in (new, pools)]
        held = torch.tensor(lengths, dtype=torch.int32)
        args = (q[..., :nope_dim], q_rope, *both[0], *both[1], up, table, held, rows.query_start(), host)
        return args, {**rows.hints(), "scale": (nope_dim + rope_dim) ** -0.5, "v_dim": v_dim}

    return make


def _scattered(lengths: Sequence[int], page_size: int) -> tuple[list[tuple[int, ...]], Tensor]:
    """Page ids of rows, neighbours apart and page 0 left out, and the page table with a column to spare."""
    used = [-(-length // page_size) for length in lengths]
    ids = iter([*range(1, sum(used) + 1, 2), *range(2, sum(used) + 1, 2)])
    pages = [tuple(next(ids) for _ in range(count)) for count in used]
    table = torch.zeros(len(used), max(used) + 1, dtype=torch.int32)
    for row, held in enumerate(pages):
        table[row, : len(held)] = torch.tensor(held, dtype=torch.int32)
    return pages, table


def _attentions() -> list[Case]:
    made = []
    for rows in (*ROWS, VERIFY):
        made.append(Case("attention", f"{rows.name}_8_2_256", _attention(rows, 8, 2, 256, 256), 256))
        made.append(Case("attention", f"{rows.name}_3_1_24_16", _attention(rows, 3, 1, 24, 16), 130))
        made.append(Case("paged_attention", f"{rows.name}_4_2_16", paged(rows, 4, 2, 16, 16, 4, shuffled=False), 130))
        made.append(Case("paged_attention", f"{rows.name}_scattered", paged(rows, 4, 4, 8, 12, 5, shuffled=True), 130))
        for dim in (128, 256):
            whole = paged(rows, 4, 2, dim, dim, 128, shuffled=True)
            made.append(Case("paged_attention", f"{rows.name}_pages_of_128_{dim}", whole, 256))
    made += _windows()
    made.append(Case("attention", "prompt_512", _attention(PROMPT, 8, 2, 256, 256), 512, bench=True))
    for rows in (PROMPT, DECODE_1, DECODE_8):
        made.append(
            Case("paged_attention", rows.name, paged(rows, 8, 2, 256, 256, 128, shuffled=False), 512, bench=True)
        )

    made += _blocks()

    def write(draw: Draw) -> Arguments:
        pools = (draw.normal(4, 3, 2, 8), draw.normal(4, 3, 2, 5))
        return (*pools, draw.normal(6, 2, 8), draw.normal(6, 2, 5), draw.distinct(12, 1, 6)[0]), {}

    made.append(Case("write_pages", "scattered", write))
    return made


def _latent_attentions() -> list[Case]:
    made = []
    for rows in (*ROWS, VERIFY):
        for layout, page_size in (("nd", 1), ("nz", 4)):
            small = latent_rows(rows, 2, 12, 8 if layout == "nd" else 16, 10, 32, page_size, layout=layout, padding=3.0)
            made.append(Case("mla_prefix_attention", f"{rows.name}_small_{layout}_{page_size}", small, 130))
        made.append(Case("mla_prefix_attention", f"{rows.name}_no_rope", latent_rows(rows, 3, 7, 0, 5, 11, 5), 130))
    for layout, page_size, heads in (("nd", 16, 2), ("nd", 128, 16), ("nz", 128, 6)):
        for rows in (ROWS[1], ROWS[3], ROWS[4], VERIFY):
            wide = latent_rows(rows, heads, 128, 64, 128, 512, page_size, layout=layout)
            made.append(Case("mla_prefix_attention", f"{rows.name}_wide_{layout}_{page_size}", wide, 512))
    for rows, scheme in ((ROWS[3], "w8a8_dynamic"), (VERIFY, "w8a8_mxfp8")):
        wide = _with_quantized(latent_rows(rows, 2, 128, 64, 128, 512, 128), 6, scheme)
        made.append(Case("mla_prefix_attention", f"{rows.name}_{scheme}", wide, 512))
    for rows in (PROMPT, DECODE_1, DECODE_8):
        wide = latent_rows(rows, 16, 128, 64, 128, 512, 128)
        made.append(Case("mla_prefix_attention", rows.name, wide, 512, bench=True))
    for layout, sizes in (("nd", (12, 5)), ("nz", (32, 16)), ("nd", (512, 64)), ("nz", (512, 64)), ("nd", (9, 0))):
        page_size = 128 if sizes[0] == 512 else 3
        name = f"{sizes[0]}_{sizes[1]}_{layout}_{page_size}"
        made.append(Case("write_latents", name, _written(layout, page_size, *sizes)))
        if sizes[1] % 2 == 0:
            made.append(Case("latent_norm_rope_write", name, _normed(layout, page_size, *sizes), sizes[0]))
    made.append(Case("latent_norm_rope_write", "large_eps", _normed("nd", 128, 512, 64, eps=0.5), 512))
    return made


def _written(layout: str, page_size: int, latent_dim: int, rope_dim: int) -> Callable[[Draw], Arguments]:
    """Arguments of `write_latents`: 6 tokens into 4 pages; no rope where `rope_dim` is 0."""

    def make(draw: Draw) -> Arguments:
        widths = [latent_dim, *([rope_dim] if rope_dim else [])]
        pools = [LAYOUTS[layout].empty(4, page_size, width, draw.dtype, torch.device("cpu")) for width in widths]
        for pool in pools:
            pool.values.copy_(draw.normal(*pool.values.shape))
        both = [[*found, None][:2] for found in (pools, [draw.normal(6, width) for width in widths])]
        return (*both[0], *both[1], draw.distinct(4 * page_size, 1, 6)[0]), {}

    return make


def _normed(
    layout: str, page_size: int, latent_dim: int, rope_dim: int, eps: float = 1e-6
) -> Callable[[Draw], Arguments]:
    """Arguments of `latent_norm_rope_write`, from those of `write_latents`."""

    def make(draw: Draw) -> Arguments:
        (latent_pages, rope_pages, latent, rope, slots), _ = _written(layout, page_size, latent_dim, rope_dim)(draw)
        kv = latent if rope is None else torch.cat((latent, rope), -1)
        angles = draw.uniform(-3.0, 3.0, 6, rope_dim // 2)
        turned = (None, None) if rope is None else (angles.cos(), angles.sin())
        return (latent_pages, rope_pages, kv, draw.normal(latent_dim), *turned, slots), {"eps": eps}

    return make


def _block(rows: Rows, *sizes: int, **window: int) -> Callable[[Draw], Arguments]:
    """Arguments of `block_attention`, from those of `paged_attention` for rows of one count."""

    def make(draw: Draw) -> Arguments:
        (q, k_pages, v_pages, table, lengths, _, host), hints = paged(rows, *sizes, shuffled=True, **window)(draw)
        kept = {name: hints[name] for name in ("scale", *window)}
        return (q, k_pages, v_pages, table, lengths, host), kept | {"block": rows.counts[0]}

    return make


def _blocks() -> list[Case]:
    """Blocks of a draft: of one token and of several, behind nothing, less than a page and more."""
    made = []
    for rows in (ROWS[1], VERIFY, BLOCK):
        made.append(Case("block_attention", f"{rows.name}_4_2_16", _block(rows, 4, 2, 16, 12, 5), 130))
        made.append(Case("block_attention", f"{rows.name}_window_3", _block(rows, 3, 1, 8, 8, 4, window=3), 130))
        for dim in (128, 256):
            made.append(Case("block_attention", f"{rows.name}_{dim}", _block(rows, 4, 2, dim, dim, 128), 256))
            bound = _block(rows, 4, 1, dim, dim, 128, window=4)
            made.append(Case("block_attention", f"{rows.name}_window_4_{dim}", bound, 256))
    return [*made, Case("block_attention", BLOCK_512.name, _block(BLOCK_512, 8, 2, 128, 128, 128), 512, bench=True)]


def _windows() -> list[Case]:
    """Attention over the last tokens of rows: fewer than a row has, of one page and of several."""
    made = []
    for rows in (*ROWS, VERIFY):
        made.append(Case("attention", f"{rows.name}_window_4", _attention(rows, 4, 1, 128, 128, window=4), 128))
        small = paged(rows, 4, 2, 16, 16, 4, shuffled=True, window=5)
        made.append(Case("paged_attention", f"{rows.name}_window_5", small, 130))
        for dim in (128, 256):
            whole = paged(rows, 4, 1, dim, dim, 128, shuffled=True, window=3)
            made.append(Case("paged_attention", f"{rows.name}_window_3_{dim}", whole, 256))
    for page_size in (16, 128):
        name = f"long_decode_window_20_pages_of_{page_size}"
        made.append(
            Case("paged_attention", name, paged(LONG, 4, 2, 256, 256, page_size, shuffled=True, window=20), 256)
        )
    long_row = paged(DECODE_4K, 4, 1, 256, 256, 128, shuffled=False, window=512)
    return [*made, Case("paged_attention", "decode_4k_window_512", long_row, 512, bench=True)]


def _short_conv(
    rows: Rows, channels: int, width: int, *, window: bool, keep_steps: bool, **dilation: int
) -> Callable[[Draw], Arguments]:
    def make(draw: Draw) -> Arguments:
        reach = (width - 1) * dilation.get("dilation", 1)
        past = draw.normal(len(rows.counts) + 1, reach, channels) if window else None
        kwargs = {**rows.hints(), "keep_steps": keep_steps, **dilation}
        return (draw.normal(rows.tokens, channels), draw.normal(channels, width), past, rows.query_start()), kwargs

    return make


def delta(
    rows: Rows, k_heads: int, v_heads: int, k_dim: int, v_dim: int, *,
    state: bool, keep_steps: bool, recurrent: torch.dtype = torch.float32, channels: bool = False,
) -> Callable[[Draw], Arguments]:  # fmt: skip
    """Arguments of `gated_delta_rule`: unit keys and queries, nonzero gates, a random state.

    With `channels` every channel of the keys has its own gate.
    """

    def unit(draw: Draw) -> Tensor:
        return torch.nn.functional.normalize(draw.normal(rows.tokens, k_heads, k_dim), dim=-1)

    def make(draw: Draw) -> Arguments:
        q, k, v = unit(draw) * k_dim**-0.5, unit(draw), draw.normal(rows.tokens, v_heads, v_dim)
        gates = (rows.tokens, v_heads, *([k_dim] if channels else []))
        decay, beta = draw.uniform(-2.0, 0.0, *gates), draw.uniform(0.0, 1.0, rows.tokens, v_heads)
        before = draw.normal(len(rows.counts) + 1, v_heads, v_dim, k_dim, dtype=recurrent) if state else None
        return (q, k, v, decay, beta, before, rows.query_start()), {**rows.hints(), "keep_steps": keep_steps}

    return make


def faded(rows: Rows, heads: int, dim: int) -> Callable[[Draw], Arguments]:
    """Arguments of `gated_delta_rule` with a state of denormal numbers and nothing written: slow on some machines."""

    def make(draw: Draw) -> Arguments:
        (q, k, v, decay, beta, state, start), kwargs = delta(
            rows, heads, heads, dim, dim, state=True, keep_steps=False
        )(draw)
        return (q, k, v, decay * 1e-3, beta * 0, state * 1e-40, start), kwargs

    return make


def _linear_attention() -> list[Case]:
    made = []
    for rows in (*ROWS, VERIFY):
        for window, keep in ((False, False), (True, False), (True, rows is VERIFY)):
            tail = ("_window" if window else "") + ("_keep" if keep else "")
            made.append(
                Case(
                    "short_conv", f"{rows.name}_10x4{tail}", _short_conv(rows, 10, 4, window=window, keep_steps=keep), 4
                )
            )
            name = f"{rows.name}_2_6_8_12{tail}"
            made.append(Case("gated_delta_rule", name, delta(rows, 2, 6, 8, 12, state=window, keep_steps=keep), 130))
            wide = delta(rows, 2, 4, 128, 128, state=window, keep_steps=keep, recurrent=torch.bfloat16)
            made.append(Case("gated_delta_rule", f"{rows.name}_2_4_128_bf16{tail}", wide, 260))
            by_channel = delta(rows, 3, 3, 8, 12, state=window, keep_steps=keep, channels=True)
            made.append(Case("gated_delta_rule", f"{rows.name}_3_8_12_channels{tail}", by_channel, 130))
            apart = _short_conv(rows, 6, 3, window=window, keep_steps=keep, dilation=2)
            made.append(Case("short_conv", f"{rows.name}_6x3_apart{tail}", apart, 3))
        for channels, width in ((16, 2), (128, 3)):
            conv = _short_conv(rows, channels, width, window=True, keep_steps=False)
            made.append(Case("short_conv", f"{rows.name}_{channels}x{width}", conv, width))
    for rows in (PROMPT, DECODE_1, DECODE_8):
        made.append(
            Case("short_conv", rows.name, _short_conv(rows, 6144, 4, window=True, keep_steps=False), 4, bench=True)
        )
        wide = delta(rows, 16, 16, 128, 128, state=True, keep_steps=False)
        made.append(Case("gated_delta_rule", rows.name, wide, 512, bench=True))
        by_channel = delta(rows, 16, 16, 128, 128, state=True, keep_steps=False, channels=True)
        made.append(Case("gated_delta_rule", f"{rows.name}_channels", by_channel, 512, bench=True))
    for channels in (False, True):
        window = delta(VERIFY_8, 16, 16, 128, 128, state=True, keep_steps=True, channels=channels)
        name = f"{VERIFY_8.name}_keep" + ("_channels" if channels else "")
        made.append(Case("gated_delta_rule", name, window, 512, bench=True))
    made.append(Case("gated_delta_rule", "decode_8_faded", faded(DECODE_8, 16, 128), 512, bench=True))
    made.append(Case("l2_norm", "heads", lambda draw: ((draw.normal(5, 16, 128),), {"scale": 128**-0.5}), 128))
    made.append(Case("l2_norm", "awkward", lambda draw: ((draw.normal(3, 7),), {}), 7))
    made.append(Case("l2_norm", "large_eps", lambda draw: ((draw.normal(5, 12),), {"eps": 3.0}), 12))
    made.append(Case("l2_norm", "prompt_512", lambda draw: ((draw.normal(512, 16, 128),), {}), 128, bench=True))

    def gates(draw: Draw) -> Arguments:
        return (draw.normal(5, 6), draw.normal(5, 6), draw.uniform(-1.0, 3.0, 6), draw.uniform(-5.0, 1.0, 6)), {}

    def channel_gates(draw: Draw, **bound: float) -> Arguments:
        args = draw.normal(5, 6, 8), draw.normal(5, 6), draw.uniform(-1.0, 3.0, 6), draw.uniform(-5.0, 1.0, 6, 8)
        return args, bound

    def replay(draw: Draw, *channels: int) -> Arguments:
        keys, updates = draw.normal(3, 4, 6, 8, dtype=torch.float32), draw.normal(3, 4, 6, 12, dtype=torch.float32)
        before, decay = draw.normal(4, 6, 12, 8, dtype=torch.float32), draw.uniform(-2.0, 0.0, 3, 4, 6, *channels)
        return (before, keys, updates, decay, torch.tensor([0, 4, 2], dtype=torch.int32)), {}

    return [
        *made,
        Case("delta_gates", "heads", gates),
        Case("channel_gates", "channels", channel_gates),
        Case("channel_gates", "channels_from_-5_on", lambda draw: channel_gates(draw, lower_bound=-5.0)),
        Case("replay_delta", "accepted_0_4_2", replay, 4),
        Case("replay_delta", "accepted_0_4_2_channels", lambda draw: replay(draw, 8), 4),
    ]


def _mix(tokens: int, streams: int, hidden: int, rank: int, *, writes: bool) -> Callable[[Draw], Arguments]:
    def make(draw: Draw) -> Arguments:
        joined = streams * hidden
        down = draw.normal(rank + streams * writes, joined) / joined**0.5
        up = draw.normal(joined, rank) / rank**0.5
        return (draw.normal(tokens, streams, hidden), draw.normal(joined), down, up), {"eps": 1e-6}

    return make


def _inject(tokens: int, streams: int, hidden: int) -> Callable[[Draw], Arguments]:
    return lambda draw: (
        (draw.normal(tokens, streams, hidden), draw.normal(tokens, hidden), draw.uniform(0.0, 2.0, tokens, streams)),
        {},
    )


def _streams() -> list[Case]:
    made = []
    sizes = (
        ("tiny", (5, 3, 8), 6),
        ("awkward", (1, 2, 33), 1),
        ("four", (7, 4, 24), 5),
        ("decode_8", (8, 4, 2560), 320),
    )
    for name, shape, rank in sizes:
        marks: dict[str, Any] = {"length": shape[1] * shape[2], "bench": name == "decode_8"}
        made.append(Case("hyper_mix", name, _mix(*shape, rank, writes=True), **marks))
        made.append(Case("hyper_mix", f"{name}_reads", _mix(*shape, rank, writes=False), **marks))
        made.append(Case("hyper_inject", name, _inject(*shape), bench=marks["bench"]))
    for name, shape in {
        "tiny": (5, 3, 24), "first": (4, 0, 16), "awkward": (1, 8, 33), "empty": (0, 2, 8),
        "prompt_128": (128, 8, 7168), "decode_8": (8, 8, 7168),
    }.items():  # fmt: skip
        marks = {"length": shape[2], "bench": shape[2] == 7168}
        made.append(Case("attention_residual", name, _residual(*shape), **marks))
    return made


def _residual(tokens: int, snapshots: int, hidden: int) -> Callable[[Draw], Arguments]:
    # Scores are some units apart: rows count for much and for little.
    def make(draw: Draw) -> Arguments:
        rows = draw.normal(tokens, snapshots, hidden) * 3, draw.normal(tokens, hidden)
        return (*rows, draw.normal(hidden), draw.normal(hidden) * 2 / hidden**0.5), {"eps": 1e-5}

    return make


def _hashed(rows: Rows, *, context: bool, keep_steps: bool) -> Callable[[Draw], Arguments]:
    def make(draw: Draw) -> Arguments:
        before = draw.ids(9, len(rows.counts) + 1, 2) if context else None
        places = [torch.arange(count) + past * context for past, count in zip(rows.past, rows.counts, strict=True)]
        positions = torch.cat([*places, torch.zeros(rows.padding, dtype=torch.int64)])
        kwargs = {"multipliers": (3, 2**40 + 1, 7), "sizes": (11, 13, 17, 19), "offsets": (0, 11, 24, 41), "end": 2}
        kwargs |= {**rows.hints(), "keep_steps": keep_steps}
        return (draw.ids(9, rows.tokens), before, positions, rows.query_start()), kwargs

    return make


def _ngrams() -> list[Case]:
    made = []
    for rows in (*ROWS, VERIFY):
        for context, keep in ((False, False), (True, False), (True, rows is VERIFY)):
            tail = ("_context" if context else "") + ("_keep" if keep else "")
            made.append(Case("ngram_rows", f"{rows.name}{tail}", _hashed(rows, context=context, keep_steps=keep)))
    made.append(Case("table_rows", "tiny", lambda draw: ((draw.ids(60, 5, 4), draw.normal(60, 3)), {})))

    def gate(draw: Draw) -> Arguments:
        return (draw.normal(5, 3, 8), draw.normal(5, 3, 8), draw.normal(5, 8)), {}

    made.append(Case("ngram_gate", "tiny", gate, 8))
    return made


def _pool(draw: Draw, lengths: Sequence[int], page_size: int, *shape: int) -> Tensor:
    """A pool over `_scattered` pages, NaN in every slot that no row holds."""
    pages, _ = _scattered(lengths, page_size)
    pool = torch.full((sum(map(len, pages)) + 2, page_size, *shape), torch.nan, dtype=draw.dtype)
    for held, length in zip(pages, lengths, strict=True):
        at = torch.arange(length)
        pool[torch.tensor(held, dtype=torch.int64)[at // page_size], at % page_size] = draw.normal(length, *shape)
    return pool


def index_rows(
    rows: Rows, index_heads: int, index_dim: int, ratio: int, page_size: int, top_k: int
) -> Callable[[Draw], Arguments]:
    """Arguments of `index_scores_topk`. Whole numbers, so that scores are exact in any dtype, and often equal."""

    def make(draw: Draw) -> Arguments:
        lengths = [past + count for past, count in zip(rows.past, rows.counts, strict=True)]
        q = (draw.ids(5, rows.tokens, index_heads, index_dim) - 2).to(draw.dtype)
        blocks = [length // ratio for length in lengths]
        _, table = _scattered(lengths, page_size)
        keys = torch.full((int(table.max()) + 2, page_size // ratio, index_dim), torch.nan, dtype=draw.dtype)
        for row, count in enumerate(blocks):
            at, each = torch.arange(count), page_size // ratio
            values = draw.ids(5, count, index_dim) - 2
            keys[table[row, at // each].long(), at % each] = values.to(draw.dtype)
        held = torch.tensor(lengths, dtype=torch.int32)
        return (q, keys, table, held, rows.query_start()), {**rows.hints(), "ratio": ratio, "top_k": top_k}

    return make


def selected_rows(
    rows: Rows, heads: int, kv_heads: int, head_dim: int, v_dim: int, page_size: int, selected: int
) -> Callable[[Draw], Arguments]:
    """Arguments of `sparse_attention`: places that a token may see, from none to as many as fit, in any order."""

    def make(draw: Draw) -> Arguments:
        lengths = [past + count for past, count in zip(rows.past, rows.counts, strict=True)]
        places = torch.full((rows.tokens, selected), -1, dtype=torch.int32)
        seen = (past + at + 1 for past, count in zip(rows.past, rows.counts, strict=True) for at in range(count))
        for token, visible in enumerate(seen):
            count = min(visible, selected) - token % 3 * (visible // 2)
            places[token, : max(count, 0)] = draw.distinct(visible, 1, max(count, 0))[0].int()
        q = draw.normal(rows.tokens, heads, head_dim)
        pools = (_pool(draw, lengths, page_size, kv_heads, dim) for dim in (head_dim, v_dim))
        held, (_, table) = torch.tensor(lengths, dtype=torch.int32), _scattered(lengths, page_size)
        return (q, *pools, places, table, held, rows.query_start()), {"scale": head_dim**-0.5}

    return make


def pooled_rows(rows: Rows, index_dim: int, rotary_dim: int, ratio: int, page_size: int) -> Callable[[Draw], Arguments]:
    """Arguments of `index_keys`: raw keys of the past in the pages, those of the new tokens beside them."""

    def make(draw: Draw) -> Arguments:
        lengths = [past + count for past, count in zip(rows.past, rows.counts, strict=True)]
        # Results are compared, pages and all, so nothing is NaN here.
        raw_pages = _pool(draw, lengths, page_size, index_dim).nan_to_num(7.0)
        _, table = _scattered(lengths, page_size)
        index_pages = draw.normal(raw_pages.shape[0], page_size // ratio, index_dim)
        spans = zip(rows.past, rows.counts, strict=True)
        at = [(row, past + new) for row, (past, count) in enumerate(spans) for new in range(count)]
        slots = [int(table[row, place // page_size]) * page_size + place % page_size for row, place in at]
        slots = torch.tensor([*slots, *range(rows.padding)])
        held = torch.tensor(lengths, dtype=torch.int32)
        args = (raw_pages, index_pages, draw.normal(rows.tokens, index_dim), draw.normal(index_dim), slots, table)
        return (*args, held, rows.query_start()), {"eps": 1e-6, "rotary_dim": rotary_dim, "theta": 1e4}

    return make


def _sparse() -> list[Case]:
    made = []
    for rows in (*ROWS, VERIFY, LONG):
        made.append(Case("index_keys", f"{rows.name}_12_of_4", pooled_rows(rows, 12, 6, 4, 8), 12))
        made.append(Case("index_keys", f"{rows.name}_16_of_2", pooled_rows(rows, 16, 16, 2, 4), 16))
        made.append(Case("index_scores_topk", f"{rows.name}_3x8", index_rows(rows, 3, 8, 4, 8, 2), 8))
        made.append(Case("index_scores_topk", f"{rows.name}_4x128", index_rows(rows, 4, 128, 4, 128, 3), 128))
        made.append(Case("sparse_attention", f"{rows.name}_6_2_16", selected_rows(rows, 6, 2, 16, 16, 8, 11), 16))
        made.append(Case("sparse_attention", f"{rows.name}_4_1_8_12", selected_rows(rows, 4, 1, 8, 12, 4, 7), 12))
        made.append(Case("sparse_attention", f"{rows.name}_8_2_256", selected_rows(rows, 8, 2, 256, 256, 128, 35), 256))

        def expand(draw: Draw, rows: Rows = rows) -> Arguments:
            (_, _, _, held, start), _ = index_rows(rows, 1, 8, 4, 8, 3)(draw)
            seen = [past + at + 1 for past, count in zip(rows.past, rows.counts, strict=True) for at in range(count)]
            blocks = torch.full((rows.tokens, 3), -1, dtype=torch.int32)
            for token, visible in enumerate(seen):
                blocks[token, : min(3, visible // 4)] = draw.distinct(visible // 4, 1, 3)[0].int()
            return (blocks, held, start), {"ratio": 4}

        made.append(Case("expand_blocks", rows.name, expand))
    for shape, rotary_dim in (((3, 5, 4, 12), 6), ((7, 2, 16), 16), ((0, 4, 8), 4)):
        kwargs = {"eps": 1e-6, "rotary_dim": rotary_dim, "theta": 1e4}

        def pool(draw: Draw, shape: tuple[int, ...] = shape, kwargs: dict[str, Any] = kwargs) -> Arguments:
            return (draw.normal(*shape), draw.ids(3000, *shape[:-2]), draw.normal(shape[-1])), kwargs

        made.append(Case("pool_keys", "empty" if 0 in shape else f"of_{shape[-2]}", pool, shape[-1]))
    for rows in (DECODE_4K, Rows("prompt_4k", (128,), (3968,))):
        scores, attention = index_rows(rows, 4, 128, 4, 128, 512), selected_rows(rows, 24, 2, 256, 256, 128, 2051)
        made.append(Case("index_scores_topk", rows.name, scores, 128, bench=True))
        made.append(Case("sparse_attention", rows.name, attention, 2051, bench=True))
    return made


CASES: tuple[Case, ...] = tuple(
    {
        str(case): case
        for case in (
            *_norms(),
            *_projections(),
            *_mixtures(),
            *_quantized(),
            *_filters(),
            *_rotaries(),
            *_attentions(),
            *_latent_attentions(),
            *_linear_attention(),
            *_sparse(),
            *_streams(),
            *_ngrams(),
        )
    }.values()
)
"""Every case, each under its own name."""


def cases_of(op: str) -> list[Case]:
    """The cases of one op."""
    return [case for case in CASES if case.op == op]
