"""Sparse attention against formulas in float64, one token at a time, and against the indexer of transformers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextQSAIndexer, Qwen4ExpTextRotaryEmbedding

import lowering
from lowering import OPS, Policy, ops
from lowering.host import HostLengths
from lowering.ops.sparse import as_pages, selects_all
from lowering.portable import sparse
from params.tree import tree_map
from tests.cases import RowCounts
from tests.tolerances import assert_close

SCORES = ("torch", "torch_rows", "torch_blocked")
"""Kernels of both `index_scores_topk` and `sparse_attention`."""
EPS, THETA = 1e-6, 1e4


@dataclass
class Sizes:
    """Of one layer; all unequal."""

    ratio: int = 4
    top_k: int = 3
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    index_heads: int = 3
    index_dim: int = 8
    rotary_dim: int = 6
    page_size: int = 16

    @property
    def width(self) -> int:
        """Tokens that a query may select."""
        return self.top_k * self.ratio + self.ratio - 1


class Fed:
    """Random rows whose tokens are fed in chunks, with pages in no order and NaN wherever nothing was written."""

    def __init__(self, sizes: Sizes, most: list[int], seed: int, whole: bool = False) -> None:
        self.sizes, self.most, self.whole = sizes, most, whole
        self.generator = torch.Generator().manual_seed(seed)
        s, each = sizes, -(-max(most) // sizes.page_size) + 1
        total = len(most) * each + 1
        order = torch.randperm(total - 1, generator=self.generator) + 1
        self.table = order.reshape(len(most), each).int()
        self.q, self.k, self.v = (
            [self.drawn(n, h, s.head_dim) for n in most] for h in (s.heads, s.kv_heads, s.kv_heads)
        )
        self.qi = [self.drawn(n, s.index_heads, s.index_dim) for n in most]
        self.raw = [self.drawn(n, s.index_dim) for n in most]
        self.weight = self.drawn(s.index_dim) / 4
        self.lengths = torch.zeros(len(most), dtype=torch.int32)
        self.pools = [torch.full((total, s.page_size, s.kv_heads, s.head_dim), torch.nan) for _ in range(2)]
        self.raw_pages = torch.full((total, s.page_size, s.index_dim), torch.nan)
        self.index_pages = torch.full((total, s.page_size // s.ratio, s.index_dim), torch.nan)

    def drawn(self, *shape: int) -> Tensor:
        if self.whole:
            return torch.randint(-2, 3, shape, generator=self.generator).float()
        return torch.randn(shape, generator=self.generator)

    def chunk(self, counts: list[int], padding: int = 0) -> dict[str, Any]:
        """The next `counts` tokens of each row, written, with `padding` of NaN behind them."""
        s, past = self.sizes, self.lengths.tolist()
        spans = [slice(old, old + new) for old, new in zip(past, counts, strict=True)]
        start = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        self.lengths = self.lengths + start.diff()

        def taken(values: list[Tensor]) -> Tensor:
            live = torch.cat([x[span] for x, span in zip(values, spans, strict=True)])
            return torch.cat((live, live.new_full((padding, *live.shape[1:]), torch.nan)))

        at = [(row, place) for row, span in enumerate(spans) for place in range(span.start, span.stop)]
        slots = [int(self.table[row, place // s.page_size]) * s.page_size + place % s.page_size for row, place in at]
        slots = torch.tensor([*slots, *(place % s.page_size for place in range(padding))])
        ops.write_pages(*self.pools, taken(self.k), taken(self.v), slots)
        uniform = len(set(counts)) == 1 and not padding
        rows = lowering.Rows(start, self.lengths, self.table, max_query=max(counts), uniform=uniform)
        pools, pooling = (self.raw_pages, self.index_pages), {"rotary_dim": s.rotary_dim, "theta": THETA}
        ops.index_keys(*pools, taken(self.raw), self.weight, slots, rows, eps=EPS, **pooling)
        return {"q": taken(self.q), "qi": taken(self.qi), "rows": rows, "at": at}

    def attended(self, chunk: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Blocks, tokens and outputs of a chunk, through the ops."""
        s, rows = self.sizes, chunk["rows"]
        found = ops.index_scores_topk(chunk["qi"], self.index_pages, rows, ratio=s.ratio, top_k=s.top_k)
        places = ops.expand_blocks(found, rows, ratio=s.ratio)
        return found, places, ops.sparse_attention(chunk["q"], *self.pools, places, rows, scale=0.3)

    def key(self, row: int, block: int) -> Tensor:
        """The block's key by the formula, in float64 but for the rounding of the mean."""
        s = self.sizes
        members = self.raw[row][block * s.ratio : (block + 1) * s.ratio]
        mean = members.double().mean(0).float().double()
        unit = mean / (mean.square().mean() + EPS).sqrt() * (1 + self.weight.double())
        half = s.rotary_dim // 2
        angles = block * s.ratio * THETA ** (-2 * torch.arange(half, dtype=torch.float64) / s.rotary_dim)
        low, high = unit[:half], unit[half : s.rotary_dim]
        turned = (low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin())
        return torch.cat((*turned, unit[s.rotary_dim :]))

    def selection(self, row: int, place: int, keys: Tensor) -> tuple[list[int], list[int]]:
        """Blocks and tokens that the token at `place` selects, given its row's block keys."""
        s, complete = self.sizes, (place + 1) // self.sizes.ratio
        scores = [
            float((self.qi[row][place] @ keys[block]).relu().sum() / s.index_dim**0.5) for block in range(complete)
        ]
        best = sorted(range(complete), key=lambda block: (-scores[block], block))[: s.top_k]
        tokens = [block * s.ratio + member for block in best for member in range(s.ratio)]
        return best, [*tokens, *range(complete * s.ratio, place + 1)]

    def output(self, row: int, place: int, tokens: list[int]) -> Tensor:
        """Attention of one token over `tokens`, in float64."""
        shared = self.sizes.heads // self.sizes.kv_heads
        k, v = (x[row][tokens].double().repeat_interleave(shared, 1) for x in (self.k, self.v))
        weights = (torch.einsum("hd,khd->hk", self.q[row][place].double(), k) * 0.3).softmax(-1)
        return torch.einsum("hk,khd->hd", weights, v)

    def keys(self, row: int) -> Tensor:
        """The row's block keys as the pages hold them."""
        s, count = self.sizes, int(self.lengths[row]) // self.sizes.ratio
        at, each = torch.arange(count), s.page_size // s.ratio
        return self.index_pages[self.table[row, at // each].long(), at % each]


def filled(line: Tensor) -> set[int]:
    """The entries before the first -1; nothing else may follow it."""
    kept = [entry for entry in line.tolist() if entry >= 0]
    assert line[: len(kept)].tolist() == kept and len(set(kept)) == len(kept)
    return set(kept)


LAYERS = {
    "ratio_4": Sizes(), "ratio_2": Sizes(ratio=2, top_k=5, page_size=4, index_dim=12, heads=4, kv_heads=4),
    "ratio_16": Sizes(ratio=16, top_k=1, page_size=16, rotary_dim=8, index_heads=1, kv_heads=1),
}  # fmt: skip
CHUNKS = [[5, 0, 1, 40], [1, 7, 1, 1], [0, 1, 17, 2], [33, 4, 3, 0], [1, 1, 1, 1], [2, 2, 2, 2]]


@pytest.mark.parametrize("kernel", SCORES)
@pytest.mark.parametrize("sizes", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("padding", [0, 3])
def test_chunks_equal_the_formula(sizes: Sizes, kernel: str, padding: int) -> None:
    """Ragged and idle rows, page boundaries, lengths below and beyond the budget: blocks, tokens and outputs."""
    rows = Fed(sizes, [sum(column) for column in zip(*CHUNKS, strict=True)], seed=sizes.ratio + padding)
    with lowering.use(index_scores_topk=kernel, sparse_attention=kernel):
        for counts in CHUNKS:
            chunk = rows.chunk(counts, padding)
            found, places, y = rows.attended(chunk)
            for token, (row, place) in enumerate(chunk["at"]):
                blocks, tokens = rows.selection(row, place, rows.keys(row))
                assert filled(found[token]) == set(blocks) and filled(places[token]) == set(tokens)
                assert_close(
                    y[token].double(), rows.output(row, place, tokens), dtype=torch.float32, length=sizes.width
                )
            live = len(chunk["at"])
            assert bool((found[live:] == -1).all() and (places[live:] == -1).all()) and not y[live:].any()
            assert found.dtype == places.dtype == torch.int32 and places.shape[1] == sizes.width
    for row, length in enumerate(rows.lengths.tolist()):
        for block, key in enumerate(rows.keys(row)):
            assert_close(key.double(), rows.key(row, block), dtype=torch.float32, length=sizes.index_dim)
        assert len(rows.keys(row)) == length // sizes.ratio


@pytest.mark.parametrize("kernel", SCORES)
@pytest.mark.parametrize("seed", range(3))
def test_of_equal_scores_the_lower_block_wins(kernel: str, seed: int) -> None:
    """Whole numbers as keys, so that scores are exact and often equal; NaN in all other slots."""
    sizes = Sizes(index_dim=4, rotary_dim=2, top_k=5)
    rows = Fed(sizes, [131, 64], seed, whole=True)
    chunk, ties = rows.chunk([131, 64]), 0
    rows.index_pages[...] = torch.where(rows.index_pages.isnan(), rows.index_pages, rows.drawn(*rows.index_pages.shape))
    with lowering.use(index_scores_topk=kernel):
        found, _, _ = rows.attended(chunk)
    for token, (row, place) in enumerate(chunk["at"]):
        keys = rows.keys(row)
        assert filled(found[token]) == set(rows.selection(row, place, keys)[0])
        scores = (rows.qi[row][place] @ keys[: (place + 1) // 4].T).relu().sum(0)
        ties += len(scores.sort(descending=True).values[4:6].unique()) == 1 and len(scores) > 5
    assert ties > 20


@pytest.mark.parametrize(("ratio", "width"), [(r, w) for r in (2, 4) for w in range(1, r + 2)])
def test_any_count_of_drafted_tokens_may_be_dropped(ratio: int, width: int) -> None:
    """Every length modulo the ratio, every accepted count: later block keys are those of a run without drafts."""
    sizes = Sizes(ratio=ratio, page_size=2 * ratio)
    for phase, accepted in itertools.product(range(ratio), range(width + 1)):
        first = 3 * ratio + phase
        rows, plain = (Fed(sizes, [first + accepted + 3 * ratio], seed=phase) for _ in range(2))
        rows.chunk([first])
        kept = [x.clone() for x in rows.raw]
        rows.raw[0][first + accepted : first + width] = 7.0
        rows.chunk([width])
        rows.raw, rows.lengths = kept, torch.tensor([first + accepted], dtype=torch.int32)
        for count in (1, ratio, 1):
            rows.chunk([count])
        plain.chunk([first + accepted + ratio + 2])
        assert torch.equal(rows.keys(0), plain.keys(0))


@pytest.mark.parametrize("width", [1, 2, 9])
def test_every_row_may_complete_a_block_at_once(width: int) -> None:
    """The most blocks that so many tokens can complete: one more in each row than whole blocks of new tokens."""
    rows = Fed(Sizes(), [3 + width] * 5, seed=width)
    rows.chunk([3] * 5)
    rows.chunk([width] * 5)
    for row in range(5):
        for block, key in enumerate(rows.keys(row)):
            assert_close(key.double(), rows.key(row, block), dtype=torch.float32, length=8)


def test_blocks_that_are_not_complete_are_not_written() -> None:
    """Only the slots of completed blocks, and the scratch page, change."""
    rows = Fed(Sizes(), [40, 9, 30], seed=5)
    rows.chunk([13, 2, 0])
    before = rows.index_pages.clone()
    rows.chunk([6, 1, 9], padding=9)
    changed = ~(before == rows.index_pages).all(-1) & ~(before.isnan() & rows.index_pages.isnan()).all(-1)
    wanted = torch.zeros_like(changed)
    for row, block in ((0, 3), (2, 0), (2, 1)):
        wanted[int(rows.table[row, block // 4]), block % 4] = True
    assert torch.equal(changed[1:], wanted[1:])


def hf(layers: Sizes, budget: int) -> tuple[Qwen4ExpTextQSAIndexer, Any]:
    """The indexer of transformers with random norms, and its rotary embedding."""
    config = Qwen4ExpTextConfig(
        hidden_size=24, head_dim=layers.head_dim, indexer_n_heads=layers.index_heads, indexer_kv_heads=1,
        indexer_head_dim=layers.index_dim, indexer_budget=budget, indexer_compress_ratio=layers.ratio,
        rms_norm_eps=EPS, rope_parameters={
            "rope_type": "default", "rope_theta": THETA, "mrope_section": [1, 1, 1],
            "partial_rotary_factor": layers.rotary_dim / layers.head_dim,
        },
    )  # fmt: skip
    indexer = Qwen4ExpTextQSAIndexer(config, 3)
    for parameter in indexer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return indexer.requires_grad_(False), Qwen4ExpTextRotaryEmbedding(config)


@pytest.mark.parametrize("kernel", SCORES)
@pytest.mark.parametrize(("tokens", "left"), [(11, 0), (12, 0), (3, 0), (61, 0), (14, 3)])
def test_the_selection_is_that_of_transformers(kernel: str, tokens: int, left: int) -> None:
    """Budget 8, ratio 4: dense up to 11 tokens, sparse from 12 on; padding on the left shifts nothing."""
    torch.manual_seed(tokens)
    sizes = Sizes(top_k=2, page_size=8)
    indexer, embedding = hf(sizes, 8)
    x = torch.randn(1, left + tokens, 24)
    positions = (torch.arange(left + tokens) - left).clamp(min=0).expand(3, 1, -1)
    cos, sin = embedding(x, positions)
    visible = torch.ones(left + tokens, left + tokens, dtype=torch.bool).tril()
    visible[:, :left] = False
    expected = (indexer(x, (cos, sin), visible[None, None], None)[0, 0] & visible)[left:, left:]
    mixed = torch.nn.functional.linear(x[0, left:], indexer.index_qk_proj.weight).unflatten(-1, (-1, sizes.index_dim))
    q = ops.gemma_rms_norm(mixed[:, :-1], indexer.q_layernorm.weight, eps=EPS)
    angles = ops.rotary_angles(torch.arange(tokens), rotary_dim=sizes.rotary_dim, theta=THETA)
    q, _ = ops.rotary(q, q, *angles)
    rows = Fed(sizes, [tokens], seed=0)
    rows.raw, rows.qi, rows.weight = [mixed[:, -1]], [q], indexer.k_layernorm.weight
    with lowering.use(index_scores_topk=kernel):
        _, places, _ = rows.attended(rows.chunk([tokens]))
    found = torch.zeros(tokens, tokens + 1, dtype=torch.bool)
    found.scatter_(1, torch.where(places < 0, tokens, places).long(), True)
    assert torch.equal(found[:, :tokens], expected)
    assert bool((expected == visible[left:, left:]).all()) == (tokens < 12)


def stateless(rows: Fed, counts: list[int], padding: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and outputs of the first `counts` tokens, each row as one page."""
    s, chunk = rows.sizes, rows.chunk(counts, padding)

    def paged(values: list[Tensor]) -> Tensor:
        live = torch.cat([x[:count] for x, count in zip(values, counts, strict=True)])
        live = torch.cat((live, live.new_full((padding, *live.shape[1:]), torch.nan)))
        return as_pages(live, chunk["rows"], s.ratio)

    raw = paged(rows.raw).unflatten(1, (-1, s.ratio))
    positions = torch.arange(raw.shape[1]).expand(raw.shape[:2]) * s.ratio
    keys = ops.pool_keys(raw, positions, rows.weight, eps=EPS, rotary_dim=s.rotary_dim, theta=THETA)
    one = chunk["rows"].alone()
    found = ops.index_scores_topk(chunk["qi"].detach(), keys, one, ratio=s.ratio, top_k=s.top_k)
    places = ops.expand_blocks(found, one, ratio=s.ratio)
    return places, ops.sparse_attention(chunk["q"], paged(rows.k), paged(rows.v), places, one, scale=0.3)


@pytest.mark.parametrize(("counts", "padding"), [([37, 1, 0, 22], 2), ([18, 18], 0)])
def test_without_a_state_each_row_is_a_page(counts: list[int], padding: int) -> None:
    """The same tokens and outputs as over pages."""
    rows = Fed(Sizes(), counts, seed=2)
    places, y = stateless(rows, counts, padding)
    again = Fed(Sizes(), counts, seed=2)
    _, expected, other = again.attended(again.chunk(counts, padding))
    assert torch.equal(places.sort(-1).values, expected.sort(-1).values)
    assert_close(y, other, length=16)


@pytest.mark.parametrize("kernel", ["torch", "torch_blocked"])
def test_gradients_are_those_of_dense_attention_within_the_budget(kernel: str) -> None:
    """Where all tokens are selected, to queries, keys and values; nothing reaches the index."""
    sizes = Sizes()
    counts = [sizes.width, 9]
    rows = Fed(sizes, counts, seed=1)
    leaves = [x.requires_grad_() for values in (rows.q, rows.k, rows.v, rows.qi, rows.raw) for x in values]
    weight = torch.randn(sum(counts), sizes.heads, sizes.head_dim)
    with lowering.use(sparse_attention=kernel):
        found = torch.autograd.grad((stateless(rows, counts)[1] * weight).sum(), leaves, allow_unused=True)
    assert not any(x is not None and x.any() for x in found[6:])
    made = RowCounts("dense", tuple(counts), (0, 0)).made()
    dense = ops.attention(*map(torch.cat, (rows.q, rows.k, rows.v)), made, scale=0.3)
    expected = torch.autograd.grad((dense * weight).sum(), leaves[:6])
    assert_close(found[:6], expected, length=15)


@pytest.mark.parametrize("kernel", SCORES)
def test_later_tokens_change_no_earlier_one(kernel: str) -> None:
    """Whole prompt, and its first tokens alone: equal selections, outputs equal within rounding."""
    sizes = Sizes()
    with lowering.use(index_scores_topk=kernel, sparse_attention=kernel):
        whole = Fed(sizes, [90], seed=3)
        found, _, y = whole.attended(whole.chunk([90]))
        for first in (1, 15, 16, 17, 64):
            part = Fed(sizes, [90], seed=3)
            blocks, _, part_y = part.attended(part.chunk([first]))
            assert torch.equal(blocks.sort(-1).values, found[:first].sort(-1).values)
            assert_close(part_y, y[:first], length=16)


@pytest.mark.parametrize("kernel", SCORES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_selected_may_hold_anything(kernel: str, value: float) -> None:
    """Also tokens of the row itself, for many queries and few; a token with nothing selected gets zeros."""
    rows = Fed(Sizes(), [40], seed=4)
    chunk = rows.chunk([40])
    _, places, _ = rows.attended(chunk)
    places[7] = places[30] = -1
    places = torch.where((places == 0) | (places == 2), -1, places).sort(-1, descending=True).values
    call = (places, chunk["rows"])
    with lowering.use(sparse_attention=kernel):
        clean = ops.sparse_attention(chunk["q"], *rows.pools, *call, scale=0.3)
        for pool in rows.pools:
            pool[int(rows.table[0, 0]), :3:2] = value
        dirty = ops.sparse_attention(chunk["q"], *rows.pools, *call, scale=0.3)
        few = replace(chunk["rows"], query_start=torch.tensor([0, 2], dtype=torch.int32), max_query=2)
        newest = ops.sparse_attention(chunk["q"][-2:], *rows.pools, places[-2:], few, scale=0.3)
    assert not dirty[7].any() and not dirty[30].any() and bool(dirty[8].any())
    assert_close(dirty, clean, length=16)
    assert_close(newest, clean[-2:], length=16)


@pytest.mark.parametrize("drift", [0.0, 0.6, 3.0])
def test_neighbours_that_choose_alike_share_their_keys(drift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy for all of them where index queries hardly change from token to token; else each gathers its own."""
    rows = Fed(Sizes(), [200, 170], seed=9)
    for qi in rows.qi:
        qi[...] = qi[:1] + drift * qi
    gathered: list[int] = []
    plain = sparse._gathered

    def counted(q: Tensor, *args: Any) -> Tensor:
        gathered.append(q.shape[0])
        return plain(q, *args)

    monkeypatch.setattr(sparse, "_gathered", counted)
    with lowering.use(sparse_attention="torch_rows"):
        for counts in ([130, 120], [66, 0], [3, 49], [1, 1]):
            chunk = rows.chunk(counts)
            _, places, y = rows.attended(chunk)
            for token, (row, place) in enumerate(chunk["at"]):
                right = rows.output(row, place, sorted(filled(places[token])))
                assert_close(y[token].double(), right, dtype=torch.float32, length=15)
    # The last call has one token a row; the others begin within what is worth sharing with all keys.
    assert gathered[-2:] == [1, 1]
    assert {0.0: sum(gathered) == 2, 0.6: 2 < sum(gathered) < 200, 3.0: sum(gathered) > 200}[drift], gathered


@pytest.mark.parametrize("width", [1, 3])
def test_a_captured_step_serves_every_length(width: int) -> None:
    """Traced once with tensors that have no values, for fixed shapes; replayed over all phases of two rows."""
    sizes = Sizes(page_size=8)

    def step(
        q: Tensor, qi: Tensor, raw: Tensor, weight: Tensor, slots: Tensor, lengths: Tensor, table: Tensor,
        *pools: Tensor,
    ) -> Any:  # fmt: skip
        start = torch.arange(3, dtype=torch.int32) * width
        rows = lowering.Rows(start, lengths, table, max_query=width, uniform=True)
        kept = ops.index_keys(*pools[2:], raw, weight, slots, rows, eps=EPS, rotary_dim=6, theta=THETA)
        found = ops.index_scores_topk(qi, kept[1], rows, ratio=4, top_k=3)
        places = ops.expand_blocks(found, rows, ratio=4)
        return found, ops.sparse_attention(q, *pools[:2], places, rows, scale=0.3), kept[0]

    def arguments(rows: Fed) -> tuple[Tensor, ...]:
        old = rows.lengths
        chunk = rows.chunk([width, width])
        raw = torch.cat([x[int(a) : int(a) + width] for x, a in zip(rows.raw, old, strict=True)])
        page = [int(rows.table[row, place // 8]) * 8 + place % 8 for row, place in chunk["at"]]
        pools = [x.clone() for x in (*rows.pools, rows.raw_pages, rows.index_pages)]
        return (chunk["q"], chunk["qi"], raw, rows.weight, torch.tensor(page), rows.lengths, rows.table, *pools)

    rows = Fed(sizes, [70, 70], seed=6)
    rows.chunk([9, 21])
    graph = make_fx(step, tracing_mode="fake")(*arguments(rows))
    assert "aten.item" not in graph.code and "_local_scalar_dense" not in graph.code
    for _ in range(12):
        given = arguments(rows)
        found, y, _ = graph(*(x.clone() for x in given))
        expected, other, _ = step(*given)
        assert torch.equal(found.sort(-1).values, expected.sort(-1).values)
        assert_close(y, other, length=16)


def test_strided_arguments_select_and_attend_the_same() -> None:
    """Every tensor in turn as every second column of something twice as wide."""
    rows = Fed(Sizes(), [50, 9], seed=8)
    chunk = rows.chunk([50, 9])
    where = chunk["rows"]
    found, places, y = rows.attended(chunk)
    calls = {
        "index_scores_topk": ((chunk["qi"], rows.index_pages, where), {"ratio": 4, "top_k": 3}, found.sort(-1).values),
        "expand_blocks": ((found, where), {"ratio": 4}, places),
        "sparse_attention": ((chunk["q"], *rows.pools, places, where), {"scale": 0.3}, y),
    }
    for name, (args, kwargs, expected) in calls.items():
        for kernel, index in itertools.product(OPS[name].serving("cpu"), range(len(args))):
            given = list(args)
            given[index] = tree_map(lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2], args[index])
            with lowering.use(Policy({name: kernel.name})):
                result = OPS[name](*given, **kwargs)
            result = result.sort(-1).values if name == "index_scores_topk" else result
            assert_close(result, expected, length=16)


def test_pages_must_hold_whole_blocks() -> None:
    """A page of 6 raw keys and 4 block keys has no ratio."""
    rows = Fed(Sizes(), [4], seed=0)
    rows.raw_pages = rows.raw_pages[:, :6].contiguous()
    with pytest.raises(ValueError, match=r"pages of 6 raw keys and 4 block keys; .* make page_size a multiple"):
        rows.chunk([4])


def test_dense_attention_is_enough_while_no_row_can_exceed_the_budget() -> None:
    """By the shapes alone, or by what the host knows, of which an upper bound is enough; not by it while tracing."""
    rows = RowCounts("two", (1, 1), (10, 3)).made(torch.zeros(2, 3, dtype=torch.int32))
    known = replace(rows, host=HostLengths((1, 1), (11, 4), ((1, 2), (3,)), exact=False))
    assert selects_all(rows, 4, 12) and not selects_all(rows, 4, 11)
    assert selects_all(known, 4, 11) and not selects_all(known, 4, 10)
    seen = []
    make_fx(lambda x: (seen.append(selects_all(known, 4, 11)), x + 1)[1], tracing_mode="fake")(known.page_table)
    assert seen == [False]
