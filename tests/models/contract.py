"""The families that `test_contract` holds to what every family must satisfy, and what is each one's own there.

A family enters by one `Subject` in `SUBJECTS`. Its oracle, a module of `tests.oracle`, makes random models (`pair`) and
says what transformers, or a transcription of the formulas, computes and remembers for one row (`run`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import cycle, islice, product
from typing import Any

import pytest
import torch

import funcmodels as fm
import params
from funcmodels.models.gemma3 import rounded
from tests.oracle import deepseek_v2, gemma3, kimi_k3, kimi_linear, qwen3, qwen3_5, qwen3_8_flash_next
from tests.oracle.qwen3_5 import Pair, Remembered
from tests.typechecker import HOOKED

Kernels = Mapping[str, Any]


def _in_float32(one: Pair) -> None:
    one.theirs.float()


@dataclass(frozen=True)
class Subject:
    """A family as the contract sees it."""

    name: str
    pair: Callable[[str, int, bool], Pair]
    """The random model of a kind and a seed; with True, one whose latents fill the tiles of NZ pages."""
    run: Callable[..., Remembered]
    """One row's tokens through the oracle, on top of the `cache` that an earlier call remembers."""
    half: Callable[[str, int], Pair] | None = None
    """A model in bfloat16 that chooses nothing, since a choice among equals would turn on the last bit.

    None where the oracle is not transformers.
    """
    truth: Callable[[Pair], None] = _in_float32
    """Makes such a model of transformers one of float32, with the same values."""
    kinds: tuple[str, ...] = ("",)
    """What configs have; the first are those that tests of one or two kinds take."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """Likewise."""
    kernels: Mapping[str, Kernels] = field(default_factory=lambda: {"chosen": {}})
    """The ways to run: which kernels are asked for by name."""
    layouts: tuple[str | None, ...] = (None,)
    tokens: Callable[..., list[list[int]]] = qwen3_5.tokens
    unit: Callable[[Pair], int] = lambda one: 1
    """What sizes of pages are multiples of."""
    exact: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around transformers' own forwards."""
    unlearned: str = r"(?!)"
    """Of a checkpoint's names: those on which no loss depends."""
    silent: Callable[[str], bool] = lambda path: False
    """The same of our paths."""
    leaves: tuple[str, ...] = ("layers.0.input_norm.weight",)
    """Leaves that bring a gradient into a layer by ways of their own."""
    kept: str = r"(?!)"
    """Paths of the leaves that stay float32 whatever a checkpoint is loaded in."""
    axes: int = 0
    """Of positions that a caller may give; 0 where they turn nothing, or are tested with images."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Drawn:
    """A random model of a family, and how it is to run."""

    subject: Subject
    kind: str
    seed: int
    kernels: Kernels
    layout: str | None

    @property
    def one(self) -> Pair:
        return self.subject.pair(self.kind, self.seed, self.layout is not None)

    @property
    def depth(self) -> int:
        return self.one.config.num_hidden_layers

    @property
    def layers(self) -> list[str]:
        """The names by which a forward gives what is behind each layer."""
        return [f"layers.{index}" for index in range(self.depth)]

    def tokens(self, *counts: int, seed: int | None = None) -> list[list[int]]:
        return self.subject.tokens(self.one, *counts, seed=self.seed if seed is None else seed)

    def size(self, least: int) -> int:
        """The size of pages of at least so many tokens that the model takes."""
        unit = self.subject.unit(self.one)
        return -(-least // unit) * unit

    def empty(self, rows: int, length: int, page: int = 4, **options: Any) -> fm.State:
        """A state of empty rows, in the dtype of the parameters."""
        dtype = self.one.params.embed.weight.dtype
        given = {"dtype": dtype, "recurrent_dtype": torch.promote_types(dtype, torch.float32), "layout": self.layout}
        return self.one.model.init_state(rows, length, page_size=self.size(page), **given | options)

    def run(self, ids: list[int], cache: Any = None) -> Remembered:
        return self.subject.run(self.one, ids, cache)


def _drawn(kinds: int, seeds: int, ways: bool, layouts: bool, only: Callable[[Subject], bool]) -> Iterator[Any]:
    for subject in filter(only, SUBJECTS):
        ran = list(subject.kernels.items())[: None if ways else 1]
        laid = subject.layouts if layouts else (None,)
        runs, drawn = [*product(ran, laid)], subject.seeds[:seeds]
        if HOOKED:  # Shapes alone are checked: one seed, and each way and layout once.
            most = max(len(ran), len(laid))
            runs, drawn = [*islice(zip(cycle(ran), cycle(laid), strict=False), most)], drawn[:1]
        for kind, seed, ((way, kernels), layout) in product(subject.kinds[:kinds], drawn, runs):
            parts = (str(subject), kind, str(seed), way if ways else "", layout or "")
            yield pytest.param(Drawn(subject, kind, seed, kernels, layout), id=" ".join(filter(None, parts)))


def models(
    kinds: int = 9, seeds: int = 1, ways: bool = False, layouts: bool = False,
    only: Callable[[Subject], bool] = lambda subject: True,
) -> pytest.MarkDecorator:  # fmt: skip
    """The test runs over models of every family: of its first kinds and seeds, in all ways and layouts if asked."""
    return pytest.mark.parametrize("case", [*_drawn(kinds, seeds, ways, layouts, only)])


def _references(*names: str) -> dict[str, Kernels]:
    return {"chosen": {}, "references": dict.fromkeys(("attention", *names), "torch")}


def _of_seed(oracle: Any) -> Callable[[str, int, bool], Pair]:
    return lambda kind, seed, tiled: oracle.pair(seed)


# The families


def _qwen_half(kind: str, seed: int) -> Pair:
    fields = qwen3_5.sizes(kind, seed)
    if kind == "moe":
        fields["num_experts_per_tok"] = fields["num_experts"]
    return qwen3_5.build(kind, fields, seed, torch.bfloat16)


def _deepseek_half(kind: str, seed: int) -> Pair:
    fields = deepseek_v2.sizes(kind, seed)
    fields |= {"num_experts_per_tok": fields["n_routed_experts"], "topk_group": fields["n_group"]}
    return deepseek_v2.build(fields, seed, torch.bfloat16)


def _kimi_half(kind: str, seed: int) -> Pair:
    fields = kimi_linear.sizes(kind, seed)
    fields |= {"num_experts_per_tok": fields["num_local_experts"], "topk_group": fields["n_group"]}
    return kimi_linear.build(fields, seed, torch.bfloat16)


def _flash_half(kind: str, seed: int) -> Pair:
    fields = qwen3_8_flash_next.sizes(seed)
    fields |= {"num_experts_per_tok": fields["num_experts"], "indexer_budget": 40 * fields["indexer_compress_ratio"]}
    return qwen3_8_flash_next.build(fields, seed, torch.bfloat16)


def _gemma_half(kind: str, seed: int) -> Pair:
    return gemma3.build(gemma3.sizes(seed), seed, torch.bfloat16)


def _gemma_truth(one: Pair) -> None:
    """In float32 the scale of the embedding would not be rounded to bfloat16."""
    _in_float32(one)
    one.theirs.model.embed_tokens.embed_scale.fill_(rounded(one.config.hidden_size**0.5, torch.bfloat16))


@functools.cache
def _kimi_k3(kind: str, seed: int, tiled: bool) -> Pair:
    """Every leaf in float64.

    Norms of small sums, and a softmax over what layers have added up, make much of a rounding of float32.
    """
    changes = {"kv_lora_rank": 32, "qk_rope_head_dim": 16} if tiled else {}
    one = kimi_k3.build(kimi_k3.sizes(seed, **changes), seed)
    return replace(one, params=params.tree_map(torch.Tensor.double, one.params))


ABSORBING = ("torch", "torch_absorbed_rows", "torch_absorbed", "torch_concat", "torch_two_pass")
TILES = ("nd", "nz")

SUBJECTS = (
    Subject(
        "qwen3", _of_seed(qwen3), qwen3.run, lambda kind, seed: qwen3.made(seed, torch.bfloat16), seeds=(0, 2, 1, 3),
        axes=1, kernels=_references("paged_attention"),
        leaves=tuple(f"layers.0.attn.{name}.weight" for name in ("q_norm", "k_norm", "out")),
    ),
    Subject(
        "qwen3_5", lambda kind, seed, tiled: qwen3_5.pair(kind, seed),
        lambda one, ids, cache: qwen3_5.run(one, ids, cache=cache), _qwen_half, kinds=("moe", "dense"),
        seeds=(0, 4, 1, 2, 3, 5), kernels=_references("paged_attention", "gated_delta_rule", "experts"),
        kept=r"(a_log|dt_bias)$",
    ),
    Subject(
        "gemma3", _of_seed(gemma3), gemma3.run, _gemma_half, _gemma_truth, seeds=(0, 1, 2, 3, 4, 5, 6, 7),
        kernels=_references("paged_attention"), axes=1,
        leaves=tuple(f"layers.0.attn.{name}.weight" for name in ("q_norm", "k_norm", "out")),
    ),
    Subject(
        "deepseek_v2", lambda kind, seed, tiled: deepseek_v2.pair(kind, seed, tiled=tiled), deepseek_v2.run,
        _deepseek_half, kinds=("full", "lite", "plain", "dense"), layouts=TILES, axes=1, kept=r"router\.",
        kernels={"chosen": {}, **{name: {"mla_prefix_attention": name} for name in ABSORBING}},
        leaves=tuple(f"layers.0.attn.{name}.weight" for name in ("latent_norm", "up", "q_up", "q_norm", "out")),
    ),
    Subject(
        "kimi_linear", lambda kind, seed, tiled: kimi_linear.pair(kind, seed, tiled=tiled), kimi_linear.run, _kimi_half,
        kinds=("published", "grouped", "dense"), layouts=TILES, kept=r"(a_log|dt_bias|router\.(weight|bias))$",
        kernels=_references("mla_prefix_attention", "gated_delta_rule", "experts"),
        unlearned=r"e_score_correction_bias$", silent=lambda path: path.endswith("router.bias"),
    ),
    # The first layer reads the embedding, whatever its query.
    Subject(
        "kimi_k3", _kimi_k3, kimi_k3.run, seeds=(0, 2, 1, 3), layouts=TILES,
        kernels=_references("mla_prefix_attention", "gated_delta_rule", "experts", "attention_residual"),
        silent=lambda path: path.endswith("router.bias") or path.startswith("layers.0.attn_residual"),
        leaves=("layers.1.mlp_residual.proj",),
    ),
    Subject(
        "flash_next", _of_seed(qwen3_8_flash_next), qwen3_8_flash_next.run, _flash_half,
        seeds=(0, 4, 5, 1, 2, 3, 6, 7, 8), tokens=qwen3_8_flash_next.tokens,
        unit=lambda one: one.config.indexer_compress_ratio, exact=qwen3_8_flash_next.first_of_equals,
        unlearned=r"\.indexer\.", silent=lambda path: "index_" in path,
        leaves=("layers.0.attn_streams.norm.weight",), kept=r"(a_log|dt_bias)$",
    ),
)  # fmt: skip
