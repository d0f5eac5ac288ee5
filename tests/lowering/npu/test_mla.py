"""Latent attention on Ascend, kernel by kernel, against dense float64 attention on the keys of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from torch import Tensor

import lowering
from lowering import OPS, LoweringError, Policy, npu_reference
from lowering.dryrun import versions
from lowering.layouts import LAYOUTS, NdPages, NzPages
from lowering.npu import features, mla
from lowering.ops import LatentPools, LatentQueries, Latents
from lowering.target import ASCEND, Target, named
from params import tree
from params.tree import tree_map
from tests.cases import Draw, RowCounts
from tests.each import each

OP = OPS["mla_prefix_attention"]
TWO, CONCAT, RING, ABSORBED = "two_fia_merge", "concat_fia", "atb_ring_mla", "npu_fia_absorbed"
BY_HEAD = "npu_fia_absorbed_by_head"
KERNELS = (TWO, CONCAT, RING, ABSORBED, BY_HEAD)
FIA, UPDATE = "npu_fused_infer_attention_score_v2", "npu_attention_update"
PRODUCT = "npu_transpose_batchmatmul"
BOUNDS = {torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Sizes:
    """Widths of a head and of a latent; `rope` 0 is attention without rope."""

    heads: int = 2
    nope: int = 128
    rope: int = 64
    v: int = 128
    latent: int = 512


@dataclass(frozen=True)
class Made:
    """A call, and what its rows hold as the test wrote it down: latents and rope keys of every token, in order."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    held: list[tuple[Tensor, Tensor]]
    counts: Sequence[int]
    sizes: Sizes

    def run(self, kernel: str, target: str | Target = "ascend910b") -> Tensor:
        with lowering.use(Policy({OP.name: kernel}), target=target):
            return OP(*self.args, **self.kwargs)

    def expected(self, rounded: bool = False) -> Tensor:
        """Row by row, head by head, in float64; zeros for padding. If `rounded`, over keys and values of q's dtype."""
        q, _, _, up, _ = self.args
        sizes, scale = self.sizes, self.kwargs["scale"]
        out = torch.zeros(*q.nope.shape[:2], sizes.v, dtype=torch.float64)
        start = 0
        for count, (latent, rope) in zip(self.counts, self.held, strict=True):
            later = torch.ones(count, len(latent)).triu(len(latent) - count + 1).bool()
            for head in range(sizes.heads):
                rows = up[head * (sizes.nope + sizes.v) :][: sizes.nope + sizes.v]
                both = (latent @ rows.T).double() if rounded else latent.double() @ rows.double().T
                scores = q.nope[start : start + count, head].double() @ both[:, : sizes.nope].T
                if q.rope is not None:
                    scores += q.rope[start : start + count, head].double() @ rope.double().T
                weights = (scale * scores).masked_fill(later, -torch.inf).softmax(-1)
                out[start : start + count, head] = weights @ both[:, sizes.nope :]
            start += count
        return out


def made(
    counts: Sequence[int], past: Sequence[int], sizes: Sizes = Sizes(), dtype: torch.dtype = torch.bfloat16, *,
    page_size: int = 128, layout: str = "nd", padding: int = 0, filler: float = 0.0, sharpness: float = 1.0,
    seed: int = 0, picks: bool = False,
) -> Made:  # fmt: skip
    """Pages in random order among NaN; `filler` is what padding tokens hold.

    `sharpness` multiplies the logits, and with them what the rounding of keys or of absorbed queries does. Where the
    up-projection `picks` channels, none is rounded.
    """
    draw = Draw(dtype, seed)
    lengths = [count + before for count, before in zip(counts, past, strict=True)]
    held = [(draw.normal(length, sizes.latent), draw.normal(length, sizes.rope)) for length in lengths]
    used = [-(-length // page_size) for length in lengths]
    order = (1 + draw.distinct(sum(used) + 1, 1, sum(used) + 1)[0]).tolist()
    ends = list(accumulate(used))
    pages = [tuple(order[end - count : end]) for end, count in zip(ends, used, strict=True)]
    table = torch.zeros(len(counts), max(used) + 2, dtype=torch.int32)
    for row, ids in enumerate(pages):
        table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    pools = []
    for index, width in enumerate((sizes.latent, sizes.rope)):
        plain = torch.full((sum(used) + 3, page_size, width), torch.nan, dtype=dtype)
        for ids, vectors in zip(pages, (pair[index] for pair in held), strict=True):
            for at in range(len(vectors)):
                plain[ids[at // page_size], at % page_size] = vectors[at]
        pools.append(NdPages(plain) if layout == "nd" else NzPages(tiled(plain)))
    tail = [torch.full((padding, width), filler, dtype=dtype) for width in (sizes.latent, sizes.rope)]
    ends = [slice(len(pair[0]) - n, None) for pair, n in zip(held, counts, strict=True)]
    new: list[Any] = [
        torch.cat([*(pair[i][end] for pair, end in zip(held, ends, strict=True)), tail[i]]) for i in (0, 1)
    ]
    q = sharpness * draw.normal(sum(counts) + padding, sizes.heads, sizes.nope + sizes.rope)
    q[sum(counts) :] = filler
    queries = LatentQueries(*q.split((sizes.nope, sizes.rope), -1))
    up = draw.normal(sizes.heads * (sizes.nope + sizes.v), sizes.latent) / sizes.latent**0.5
    up = picking(sizes, dtype) if picks else up
    parts = (queries, Latents(*new), LatentPools(*pools))
    parts = parts if sizes.rope else tuple(replace(part, rope=None) for part in parts)
    rows = RowCounts("made", tuple(counts), tuple(past), padding).made(table, pages)
    rows = replace(rows, uniform=len(set(counts)) == 1 and not padding)
    hints = {"scale": (sizes.nope + sizes.rope) ** -0.5, "v_dim": sizes.v}
    return Made((*parts, up, rows), hints, held, counts, sizes)


def tiled(plain: Tensor) -> Tensor:
    """Pages with channel c of token t at [c // 16, t, c % 16]."""
    pages, size, width = plain.shape
    out = plain.new_empty(pages, width // 16, size, 16)
    for channel in range(width):
        out[:, channel // 16, :, channel % 16] = plain[:, :, channel]
    return out


def picking(sizes: Sizes, dtype: torch.dtype) -> Tensor:
    """Each row of the up-projection is one channel of the latent, another for each row of a head's keys."""
    at = torch.arange(sizes.heads * (sizes.nope + sizes.v))
    return torch.nn.functional.one_hot((3 * at + 1) % sizes.latent, sizes.latent).to(dtype)


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    npu_reference.load()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operators that kernels call from here on."""
    names: list[str] = []

    class Noting:
        def __init__(self, operators: Any, prefix: str) -> None:
            self.operators, self.prefix = operators, prefix

        def __getattr__(self, name: str) -> Any:
            names.append(self.prefix + name)
            return getattr(self.operators, name)

    monkeypatch.setattr(mla, "npu", Noting(features.npu, ""))
    monkeypatch.setattr(mla, "atb", Noting(features.atb, "atb."))
    return names


MIXED = (101, 870, 876, 874, 869, 864, 904, 863, 837, 768)
CALLS: dict[str, Callable[[torch.dtype], Made]] = {
    "ragged": lambda dtype: made((5, 0, 1, 12, 33), (3, 7, 0, 2, 300), Sizes(4), dtype, padding=3, filler=torch.nan),
    "tiled": lambda dtype: made((5, 0, 1, 12, 33), (3, 7, 0, 2, 300), Sizes(4), dtype, padding=3, layout="nz"),
    "pages_of_1": lambda dtype: made((3, 0, 9, 2), (5, 4, 0, 17), dtype=dtype, page_size=1, padding=1, filler=7.0),
    "pages_of_1_tiled": lambda dtype: made((3, 2), (5, 17), dtype=dtype, page_size=1, layout="nz"),
    "heads_8": lambda dtype: made((16, 3), (128, 127), Sizes(8), dtype),
    "heads_16": lambda dtype: made((2, 0, 5), (129, 1, 0), Sizes(16), dtype, padding=300, filler=-3.0),
    "heads_128": lambda dtype: made((3, 16), (40, 0), Sizes(128), dtype),
    "long": lambda dtype: made((257, 31), (2048, 0), Sizes(2), dtype),
    "one_row": lambda dtype: made((130,), (256,), Sizes(4), dtype),
    "no_prefix": lambda dtype: made((9, 9), (0, 0), Sizes(4), dtype),
    "uniform": lambda dtype: made((9, 9, 9), (5, 0, 140), Sizes(4), dtype),
    "decode": lambda dtype: made((1, 1, 1), (128, 0, 40), Sizes(4), dtype, page_size=16),
    "decode_tiled": lambda dtype: made((1, 0, 1), (128, 30, 40), Sizes(4), dtype, layout="nz", padding=2),
    "verify": lambda dtype: made((4, 4, 4), (5, 126, 0), Sizes(4), dtype),
    "all_idle": lambda dtype: made((0, 0), (5, 0), Sizes(4), dtype, padding=2, filler=torch.nan),
    "large_logits": lambda dtype: made((12, 7, 5), (200, 0, 3), Sizes(4), dtype, sharpness=30.0, picks=True),
    "large_logits_tiled": lambda dtype: made(
        (2, 3), (140, 9), Sizes(2), dtype, sharpness=30.0, layout="nz", picks=True
    ),
    "without_rope": lambda dtype: made((5, 0, 8), (9, 3, 0), Sizes(3, rope=0), dtype, padding=2),
    "keys_of_192": lambda dtype: made((5, 3), (9, 150), Sizes(3, 128, 64, 192, 512), dtype),
    "joined": lambda dtype: made((5, 3), (9, 150), Sizes(3, 160, 32, 128, 64), dtype),
    "odd_widths": lambda dtype: made((5, 1, 8), (9, 3, 0), Sizes(3, 20, 6, 13, 32), dtype, page_size=5, padding=1),
    "wide_values": lambda dtype: made((5, 8), (9, 0), Sizes(3, 16, 16, 72, 32), dtype, page_size=5),
}  # fmt: skip
LATENTS_ELSEWHERE = {
    "all_idle", "ragged", "tiled", "pages_of_1", "pages_of_1_tiled", "long", "one_row", "without_rope", "joined",
    "odd_widths", "wide_values",
}  # fmt: skip
REFUSED = {
    RING: {"without_rope", "keys_of_192", "joined", "odd_widths", "wide_values"},
    ABSORBED: LATENTS_ELSEWHERE,
    BY_HEAD: LATENTS_ELSEWHERE,
}
"""Calls that a kernel does not take, by name: rows, pages, heads or widths that it is not documented for."""


@lru_cache(maxsize=1)
def dense(name: str, dtype: torch.dtype) -> tuple[Made, Tensor]:
    """A call and what it gives: its kernels follow each other."""
    call = CALLS[name](dtype)
    return call, call.expected()


@each(
    product(CALLS, BOUNDS, KERNELS),
    by=lambda name, dtype, kernel: name,
    hooked=lambda name, dtype, kernel: [(name, kernel), (dtype, kernel)],
)
def test_against_dense_attention(name: str, dtype: torch.dtype, kernel: str, called: list[str]) -> None:
    """Padding gets zeros to the bit, everything is finite, and the kernel calls its own operators only."""
    called.clear()
    call, exact = dense(name, dtype)
    if name in REFUSED.get(kernel, ()):
        assert OP.kernels[kernel].refuse(*call.args, **call.kwargs)  # type: ignore[misc]
        return
    y, live = call.run(kernel), sum(call.counts)
    assert y.shape == (*call.args[0].nope.shape[:2], call.sizes.v) and y.dtype == dtype
    assert y.isfinite().all() and not y[live:].any()
    assert (y.double() - exact).abs().max() <= BOUNDS[dtype]
    rows, past = (
        sum(map(bool, call.counts)),
        any(n < len(pair[0]) for n, pair in zip(call.counts, call.held, strict=True) if n),
    )
    wanted: dict[str, list[str]] = {
        TWO: [FIA, FIA, UPDATE] if past else [FIA], CONCAT: [FIA] * rows, ABSORBED: [FIA],
        RING: ["atb.npu_ring_mla"] * (1 + past), BY_HEAD: [PRODUCT, FIA, PRODUCT],
    }  # fmt: skip
    assert called == (wanted[kernel] if live else [])


def test_the_mixed_batch(called: list[str]) -> None:
    """Ten rows, one of them on a prefix, in one pass of two calls and a merge."""
    call = made(MIXED, (768, *[0] * 9), Sizes(2))
    y = call.run(TWO)
    assert called == [FIA, FIA, UPDATE]
    assert (y.double() - call.expected()).abs().max() <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("kernel", KERNELS)
def test_tiled_pages_give_the_same_bits(kernel: str) -> None:
    """And tiles read as if they were plain do not."""
    calls = [made((3, 1, 7), (150, 9, 0), Sizes(4), layout=layout) for layout in LAYOUTS]
    plain, other = (call.run(kernel) for call in calls)
    assert torch.equal(plain, other)
    pools = {
        part: NdPages(getattr(calls[1].args[2], part).values.view(getattr(calls[0].args[2], part).values.shape))
        for part in ("latent", "rope")
    }
    wrong = changed(calls[0], 2, **pools)
    found = wrong.run(kernel).double() - wrong.expected()
    assert not (found.abs().max() <= BOUNDS[torch.bfloat16])


@pytest.mark.parametrize("kernel", KERNELS)
def test_strided_arguments(kernel: str) -> None:
    """Queries, latents and rope keys as slices of one projection, the table and lengths as slices of larger ones."""
    call = made((4, 2, 9), (130, 0, 5), Sizes(4), padding=2)
    q, new, pages, up, rows = call.args
    wide = torch.cat((q.nope.flatten(1), q.rope.flatten(1), new.latent, new.rope), 1)
    q_nope, q_rope, *both = wide.split((4 * 128, 4 * 64, 512, 64), 1)
    q, new = LatentQueries(q_nope.unflatten(1, (4, 128)), q_rope.unflatten(1, (4, 64))), Latents(*both)
    up, rows = torch.cat((up, up), 1)[:, :512], tree_map(lambda x: torch.stack((x, x), -1)[..., 0], rows)
    args = (q, new, pages, up, rows)
    assert not any(x.is_contiguous() for x in tree.leaves((q, new, up, rows)))
    assert torch.equal(Made(args, call.kwargs, call.held, call.counts, call.sizes).run(kernel), call.run(kernel))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", [TWO, CONCAT, RING])
def test_large_logits_of_rounded_keys(kernel: str, dtype: torch.dtype) -> None:
    """Given the keys and values that half precision makes of latents, attention adds no more than it does elsewhere."""
    call = made((12, 7, 5), (200, 0, 30), Sizes(4), dtype, sharpness=30.0)
    assert (call.run(kernel).double() - call.expected(rounded=True)).abs().max() <= BOUNDS[dtype]


@pytest.mark.parametrize("kernel", KERNELS)
def test_unused_memory_is_never_read(kernel: str) -> None:
    """Slots behind a row's length hold NaN in every test here; other pages and padding may change too."""
    call = made((4, 2, 9), (130, 0, 5), Sizes(4), padding=2)
    before = call.run(kernel)
    for pool in tree.leaves(call.args[2]):
        pool[pool.isnan()] = 1e4
    for x in tree.leaves(call.args[:2]):
        x[sum(call.counts) :] = torch.inf
    assert torch.equal(call.run(kernel), before)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_share_a_prefix(kernel: str) -> None:
    """One set of pages for what two rows have in common, and pages of their own behind it."""
    call = made((9, 4), (128, 131), Sizes(4))
    pages, table = call.args[4].host.pages, call.args[4].page_table.clone()
    table[1, 0] = pages[0][0]
    held = [call.held[0], tuple(torch.cat((x[:128], y[128:])) for x, y in zip(*call.held, strict=True))]
    shared = told(changed(call, 4, page_table=table), pages=(pages[0], (pages[0][0], *pages[1][1:])))
    shared = Made(shared.args, call.kwargs, held, call.counts, call.sizes)
    assert (shared.run(kernel).double() - shared.expected()).abs().max() <= BOUNDS[torch.bfloat16]


FEW = "rows of up to 8 new tokens read latents as they lie where npu_fia_absorbed takes them; else "
MERGE = "from two rows on, two calls and a merge take less than a call a row"
ALONE = "one row needs no merge: one call over its prefix and new tokens"


@pytest.mark.parametrize("target", ASCEND)
@pytest.mark.parametrize(
    ("counts", "past", "sizes", "kernel", "why"),
    [
        ((1, 1), (9, 3), Sizes(4), ABSORBED, FEW + MERGE),
        ((8, 2), (9, 3), Sizes(4), ABSORBED, FEW + MERGE),
        ((9, 2), (9, 3), Sizes(4), TWO, MERGE),
        ((9,), (9,), Sizes(4), CONCAT, ALONE),
        ((1, 1), (9, 3), Sizes(4, rope=0), TWO, FEW + MERGE),
        ((1,), (9,), Sizes(3, rope=0), CONCAT, FEW + ALONE),
        ((1,), (9,), Sizes(3), ABSORBED, FEW + ALONE),
    ],
)
def test_the_choice_by_shape(
    counts: Sequence[int], past: Sequence[int], sizes: Sizes, kernel: str, why: str, target: str
) -> None:
    call = made(counts, past, sizes)
    choice = OP.explain(*call.args, target=target, **call.kwargs)
    by_head = kernel == ABSORBED and target != "ascend950"
    assert choice.kernel.name == (BY_HEAD if by_head else kernel)
    others = {TWO, CONCAT} - {kernel}
    assert {choice.refused[name] for name in others if name in choice.refused} == {why}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_policy_overrides_the_rule(kernel: str) -> None:
    call = made((4, 2), (9, 3), Sizes(4))
    with lowering.use(Policy({OP.name: kernel})):
        assert OP.explain(*call.args, target="ascend910b", **call.kwargs).kernel.name == kernel


def test_ascend_950_has_all_but_the_ring() -> None:
    """From the CANN that builds fused attention for it."""
    call = made((9, 2), (9, 3), Sizes(4))
    choice = OP.explain(*call.args, target="ascend950", **call.kwargs)
    assert choice.kernel.name == TWO and {kernel.name for kernel in OP.serving("ascend950") if kernel.operators} == {
        TWO,
        CONCAT,
        ABSORBED,
        BY_HEAD,
    }
    choice = OP.explain(*call.args, target=named("ascend950", cann="8.5.0"), **call.kwargs)
    built = "npu_fused_infer_attention_score_v2 is built for ascend950 from CANN 9.0.0 on; the target has 8.5.0"
    assert not choice.kernel.operators and choice.refused[TWO] == choice.refused[ABSORBED] == built


@pytest.mark.parametrize(
    ("sizes", "dtype", "packed"),
    [
        (Sizes(4), torch.bfloat16, "8.5.0 9.0.0 950"),
        (Sizes(4), torch.float16, "9.0.0 950"),
        (Sizes(4, 160, 32, 128, 64), torch.bfloat16, "8.5.0 9.0.0 950"),
        (Sizes(4, 128, 64, 192), torch.bfloat16, "9.0.0 950"),
        (Sizes(4, 224, 32, 256), torch.bfloat16, "9.0.0 950"),
        (Sizes(4, 480, 32, 512), torch.bfloat16, "950"),
        (Sizes(4, 20, 6, 26, 32), torch.bfloat16, ""),
    ],
    ids=str,
)
def test_which_heads_are_packed(sizes: Sizes, dtype: torch.dtype, packed: str) -> None:
    """Layout TND where the host code takes the widths, the padded one elsewhere; and both are right."""
    call = made((9, 1), (4, 130), sizes, dtype)
    machines = {"8.5.0": named("ascend910b", cann="8.5.0"), "9.0.0": named("ascend910_93", cann="9.0.0")}
    for name, target in (machines | {"950": named("ascend950")}).items():
        with pytest.MonkeyPatch.context() as patch:
            taken = name in packed.split()
            patch.setattr(mla, "_padded" if taken else "_packed", None)
            assert (call.run(TWO, target).double() - call.expected()).abs().max() <= BOUNDS[dtype]


def changed(call: Made, at: int, **parts: Any) -> Made:
    """With other parts of the argument at a place."""
    args = (*call.args[:at], replace(call.args[at], **parts), *call.args[at + 1 :])
    return Made(args, call.kwargs, call.held, call.counts, call.sizes)


def hinted(call: Made, **hints: Any) -> Made:
    return Made(call.args, call.kwargs | hints, call.held, call.counts, call.sizes)


def told(call: Made, **facts: Any) -> Made:
    """With other facts about the rows' lengths."""
    return changed(call, 4, host=replace(call.args[4].host, **facts))


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def pool(pages: int, size: int, width: int, kind: type[NdPages] | type[NzPages] = NdPages) -> NdPages | NzPages:
    return kind.empty(pages, size, width, torch.bfloat16, torch.device("meta"))


def symbolic(call: Made) -> Made:
    """With lengths as a captured program has them."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    shapes = ShapeEnv()
    names = [ConstantSource(f"length_{at}") for at in range(len(call.args[4].host.length))]
    pairs = zip(call.args[4].host.length, names, strict=True)
    made_up = [(shapes.create_symbol(n, source, DimDynamic.DYNAMIC), n, source) for n, source in pairs]
    lengths = tuple(shapes.create_symintnode(symbol, hint=n, source=source) for symbol, n, source in made_up)
    return told(call, length=lengths)


BASE = made((4, 2), (9, 3), Sizes(4))
DROPPED = "needs exact row lengths on the host, and only an upper bound is known: read the accepted counts first"
FROZEN = "gathers as many tokens as rows hold, and a captured program cannot change the number"
REFUSALS: list[tuple[str, Made, str]] = [
    *((kernel, told(BASE, exact=False), DROPPED) for kernel in KERNELS),
    *((kernel, symbolic(BASE), FROZEN) for kernel in (TWO, CONCAT, RING)),
    (TWO, changed(BASE, 0, nope=BASE.args[0].nope.float()), "takes float16, bfloat16; q_nope is float32"),
    (CONCAT, changed(BASE, 1, rope=BASE.args[1].rope.half()),
     "takes one dtype; found q_nope bfloat16, q_rope bfloat16, latent bfloat16, rope float16"),
    (TWO, changed(BASE, 0, nope=meta(6, 257, 128), rope=meta(6, 257, 64)),
     "takes at most 256 heads; this call has 257"),
    (TWO, changed(BASE, 0, nope=meta(2**20 + 1, 4, 128), rope=meta(2**20 + 1, 4, 64)),
     "takes at most 1048576 tokens; this call has 1048577"),
    (TWO, changed(BASE, 4, query_start=torch.empty(4097, dtype=torch.int32, device="meta")),
     "takes at most 4095 rows; this call has 4096"),
    (CONCAT, changed(BASE, 0, nope=meta(6, 4, 500), rope=meta(6, 4, 20)),
     "takes at most 512 channels a head; this call has 528"),
    (CONCAT, changed(BASE, 0, nope=meta(6, 200, 300), rope=meta(6, 200, 28)),
     "takes heads * head_dim below 65535; this call has 67200"),
    (TWO, changed(hinted(BASE, v_dim=16), 0, nope=meta(6, 257, 16), rope=meta(6, 257, 16)),
     "takes at most 256 heads; this call has 257"),
    (RING, hinted(BASE, v_dim=192), "takes 128 + 64 channels and values of 128; this call has 128 + 64 and 192"),
    (RING, changed(BASE, 0, rope=None), "takes 128 + 64 channels and values of 128; this call has 128 + 0 and 128"),
    (RING, changed(BASE, 1, latent=BASE.args[1].latent.float()),
     "takes float16, bfloat16; latent is float32"),
    (ABSORBED, told(BASE, fits=False),
     "counts pages that rows share once a row, and the pool has fewer: give init_state more pages"),
    (ABSORBED, changed(BASE, 4, max_query=0), "takes no empty tensor; no row has a new token"),
    (ABSORBED, changed(BASE, 4, max_query=17), "takes at most 16 tokens a row; this call has 17"),
    (ABSORBED, changed(BASE, 2, latent=pool(5, 128, 256)),
     "takes latents of 512 and rope keys of 64; this call has 256 and 64"),
    (ABSORBED, changed(BASE, 2, rope=None), "takes latents of 512 and rope keys of 64; this call has 512 and 0"),
    (ABSORBED, changed(BASE, 0, nope=meta(6, 129, 128), rope=meta(6, 129, 64)),
     "takes at most 128 heads; this call has 129"),
    (ABSORBED, changed(BASE, 0, nope=BASE.args[0].nope.half()),
     "takes one dtype; found q_nope float16, q_rope bfloat16, latent_pages bfloat16, rope_pages bfloat16"),
    (ABSORBED, changed(BASE, 2, latent=pool(5, 128, 512, NzPages)), "takes latents and rope keys in one layout"),
    (ABSORBED, changed(BASE, 2, latent=pool(5, 24, 512)), "takes pages of 16 to 1024 tokens in steps of 16; found 24"),
    (ABSORBED, changed(BASE, 2, latent=pool(2**15, 128, 512)),
     "takes pools of fewer than 2**31 elements; this one has 2147483648: make fewer pages"),
    (BY_HEAD, changed(BASE, 4, max_query=17), "takes at most 16 tokens a row; this call has 17"),
    (BY_HEAD, hinted(BASE, v_dim=24), "takes channels in multiples of 16; this call has 24 a head"),
    (BY_HEAD, changed(BASE, 0, nope=meta(6, 128, 512), rope=meta(6, 128, 64)),
     "takes at most 65535 channels of all heads; this call has 65536"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "call", "sentence"), REFUSALS, ids=[f"{one[0]}-{one[2][:60]}" for one in REFUSALS])
def test_refusals(kernel: str, call: Made, sentence: str) -> None:
    with lowering.use(Policy({OP.name: kernel})), pytest.raises(LoweringError) as error:
        OP.explain(*call.args, target="ascend910b", **call.kwargs)
    assert str(error.value).splitlines()[1].strip() == f"{kernel}: {sentence}"


def test_nothing_is_refused_without_a_reason() -> None:
    """The call that the refusals change."""
    for kernel in KERNELS:
        assert OP.kernels[kernel].refuse(*BASE.args, **BASE.kwargs) is None  # type: ignore[misc]


def test_operators_of_the_atb_library_are_looked_up_by_its_name() -> None:
    """In the recorded schemas, and in its own namespace of the dispatcher."""
    for version in features.recorded():
        assert features.missing((mla.RING,), named("ascend910b", torch_npu=version)) is None
    assert features.missing(("npu_ring_mla",), named("ascend910b")) is not None
    schema = torch.ops.atb.npu_ring_mla.default._schema
    assert str(schema) == f"atb::{features.recorded()['2.13.0'][mla.RING]}"
    with pytest.raises(LoweringError, match="operator atb::npu_rung_mla is not loaded"):
        features.atb.npu_rung_mla  # noqa: B018
    wrong = versions.problems("atb::npu_ring_mla", (), {"q": BASE.args[0].nope}, "2.13.0")
    assert [version for version, _ in wrong] == [v for v in features.recorded() if v != "2.13.0"]
    assert all(reason == "has no argument q" for _, reason in wrong)


def masked_prefix(q: Any, keys: Any, new: Any, held: Any, scale: float, *, causal: bool, lse: bool) -> Any:
    return ATTENDED(q, keys, new, held, scale, causal=True, lse=lse)


def turned_lse(*parts: tuple[Tensor, Tensor]) -> Tensor:
    return MERGED(*((out, lse.T.reshape(lse.shape)) for out, lse in parts))


def whole_rows(new: Sequence[int], past: Sequence[int]) -> list[tuple[int, int, int]]:
    return [(row, count, held) for row, (count, held) in enumerate(zip(new, past, strict=True)) if count]


def as_they_lie(pages: NzPages) -> Tensor:
    return pages.values.view(-1, pages.page_size, pages.width)


def turned_up(q: LatentQueries, up: Tensor, v_dim: int) -> tuple[Tensor, Tensor]:
    keys, values = MOVED_OVER(q, up, v_dim)
    return values, keys


ATTENDED, MERGED, MOVED_OVER = mla._attended, mla._merged, mla._moved_over
BROKEN: dict[str, tuple[str, str, Any]] = {
    "an empty prefix keeps its lse of inf": (TWO, "_without_empty", lambda part, split: part),
    "the prefix is masked": (TWO, "_attended", masked_prefix),
    "lse has heads first": (TWO, "_merged", turned_lse),
    "lengths are each row's own": (TWO, "accumulate", list),
    "queries see later tokens": (TWO, "BOTTOM_RIGHT", 0),
    "rows are cut at their capacity": (CONCAT, "_known", lambda lengths: [max(n - 1, 0) for n in lengths]),
    "rings have fewer keys than queries": (RING, "_pieces", whole_rows),
    "a query alone has no mode": (ABSORBED, "BOTTOM_RIGHT", 0),
    "tiles are read as they lie": (ABSORBED, "_shared", as_they_lie),
    "keys are made of a head's first rows": (BY_HEAD, "_moved_over", turned_up),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_kernel_is_noticed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a wrong value, or by the operator's reference."""
    kernel, name, instead = BROKEN[broken]
    call = made((9, 3, 1, 5), (4, 0, 130, 2), Sizes(4), layout="nz")
    assert (call.run(kernel).double() - call.expected()).abs().max() <= BOUNDS[torch.bfloat16]
    monkeypatch.setattr(mla, name, instead)
    try:
        found = call.run(kernel)
    except (LoweringError, RuntimeError, IndexError):
        return
    assert not ((found.double() - call.expected()).abs().max() <= BOUNDS[torch.bfloat16])
