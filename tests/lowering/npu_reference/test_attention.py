"""Fused inference attention against a float64 loop over queries, heads and keys."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import lowering
from lowering.target import Target, named
from tests.cases import Draw
from tests.lowering.npu_reference.calls import assert_like, call, refused
from tests.tolerances import assert_close

FIA = "npu_fused_infer_attention_score_v2"
MASK = torch.ones(2048, 2048).triu(1).bool()
HEADS, KV_HEADS, WIDTH, BLOCK = 6, 2, 128, 128
BFLOAT = torch.bfloat16


def naive(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> tuple[Tensor, Tensor]:
    """One request, its last query standing on its last key; each query sees that key and those before, or `window`."""
    out, lse = torch.empty(*q.shape[:2], v.shape[2]).double(), torch.empty(q.shape[:2]).double()
    for i in range(q.shape[0]):
        last = i + k.shape[0] - q.shape[0]
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(q.shape[1]):
            own = head // (q.shape[1] // k.shape[1])
            scores = k[first : last + 1, own].double() @ q[i, head].double() * scale
            lse[i, head] = scores.exp().sum().log()
            out[i, head] = scores.softmax(-1) @ v[first : last + 1, own].double()
    return out, lse


class Paged:
    """Keys and values of ragged requests, and the pages that hold them among NaN."""

    def __init__(
        self, held: Sequence[int], width: int = WIDTH, block: int = BLOCK, dtype: torch.dtype = BFLOAT
    ) -> None:
        draw = Draw(dtype, seed=sum(held))
        self.k = [draw.normal(length, KV_HEADS, width) for length in held]
        self.v = [draw.normal(length, KV_HEADS, width) for length in held]
        most = max(-(-length // block) for length in held)
        ids = draw.distinct(len(held) * most + 2, 1, len(held) * most)[0].int()
        self.table = ids.reshape(len(held), most)
        shape = (len(held) * most + 2, block, KV_HEADS * width)
        self.pages = tuple(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        for row, length in enumerate(held):
            for at in range(length):
                for pages, each in zip(self.pages, (self.k, self.v), strict=True):
                    pages[self.table[row, at // block], at % block] = each[row][at].flatten()

    def arguments(self, held: Sequence[int], **more: Any) -> dict[str, Any]:
        return {
            "key": self.pages[0], "value": self.pages[1], "block_table": self.table, "actual_seq_kvlen": list(held),
            "block_size": self.pages[0].shape[1], "num_query_heads": HEADS, "num_key_value_heads": KV_HEADS,
            "softmax_scale": 0.11, "return_softmax_lse": True, **more,
        }  # fmt: skip


def packed(counts: Sequence[int], held: Sequence[int], **more: Any) -> tuple[dict[str, Any], Paged]:
    """A call with layout TND over pages."""
    cache = Paged(held)
    query = Draw(BFLOAT, seed=1).normal(sum(counts), HEADS, WIDTH)
    masked = {"atten_mask": MASK, "sparse_mode": 4, "next_tokens": 0}
    lists = {"query": query, "actual_seq_qlen": list(accumulate(counts)), "input_layout": "TND"}
    return cache.arguments(held, **lists, **masked | more), cache


@pytest.mark.parametrize("mode", [3, 4])
def test_packed_queries_over_pages(mode: int) -> None:
    """Page boundaries (128, 256 and one past), an idle row, one query, as many queries as keys."""
    counts, held = [3, 0, 1, 5, 2], [128, 7, 256, 129, 2]
    arguments, cache = packed(counts, held, sparse_mode=mode, next_tokens=0 if mode == 4 else 2147483647)
    out, lse = call(FIA, arguments)
    assert out.dtype == BFLOAT and lse.shape == (11, HEADS, 1)
    for row, q in enumerate(arguments["query"].split(counts)):
        y, denominator = naive(q, cache.k[row], cache.v[row], 0.11)
        assert_close(out.split(counts)[row], y.to(BFLOAT), length=held[row])
        assert_close(lse.split(counts)[row][..., 0], denominator, dtype=torch.float32)
    assert_like(FIA, arguments)


def test_window_counts_the_tokens_before() -> None:
    arguments, cache = packed([4, 2], [200, 5])
    out, _ = call(FIA, arguments | {"pre_tokens": 2})
    for row, q in enumerate(arguments["query"].split([4, 2])):
        assert_close(out.split([4, 2])[row], naive(q, cache.k[row], cache.v[row], 0.11, window=3)[0].to(BFLOAT))


def test_packed_keys_have_running_sums() -> None:
    counts, held = [2, 3, 1], [4, 3, 6]
    draw = Draw(BFLOAT, seed=9)
    arguments = {
        "query": draw.normal(6, HEADS, 192), "key": draw.normal(13, KV_HEADS, 192),
        "value": draw.normal(13, KV_HEADS, 128), "actual_seq_qlen": [2, 5, 6], "actual_seq_kvlen": [4, 7, 13],
        "num_query_heads": HEADS, "num_key_value_heads": KV_HEADS, "softmax_scale": 0.2, "input_layout": "TND",
        "atten_mask": MASK, "sparse_mode": 4, "next_tokens": 0,
    }  # fmt: skip
    out, lse = call(FIA, arguments)
    assert lse.shape == (0,)
    parts = (arguments["query"].split(counts), arguments["key"].split(held), arguments["value"].split(held))
    expected = torch.cat([naive(*each, 0.2)[0] for each in zip(*parts, strict=True)])
    assert_close(out, expected.to(BFLOAT))
    refused(FIA, arguments | {"actual_seq_kvlen": held}, "cumulative")
    refused(FIA, arguments | {"actual_seq_kvlen": [7, 13]}, "2 entries for 3")
    refused(FIA, arguments | {"actual_seq_kvlen": None}, "mandatory in layout TND")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("width", "block"), [(256, 128), (48, 256)], ids=str)
def test_padded_queries_over_pages(width: int, block: int, dtype: torch.dtype) -> None:
    counts, held = [3, 0, 2, 1], [block, 9, 2, block + 1]
    cache = Paged(held, width, block, dtype)
    query = Draw(dtype, seed=2).normal(4, 3, HEADS, width)
    arguments = cache.arguments(
        held, query=query, actual_seq_qlen=counts, input_layout="BSND", atten_mask=MASK, sparse_mode=3
    )
    out, lse = call(FIA, arguments)
    assert out.shape == query.shape and lse.shape == (4, HEADS, 3, 1)
    for row, count in enumerate(counts):
        y, denominator = naive(query[row, :count], cache.k[row], cache.v[row], 0.11)
        assert_close(out[row, :count], y.to(dtype), length=held[row])
        assert_close(lse[row, :, :count, 0].T, denominator, dtype=torch.float32)
        assert out[row, count:].isnan().all() and lse[row, :, count:].isnan().all()
    assert_like(FIA, arguments)


def test_one_step_over_small_pages() -> None:
    held = [16, 1, 33]
    cache = Paged(held, 32, 16)
    query = Draw(BFLOAT, seed=3).normal(3, 1, HEADS, 32)
    arguments = cache.arguments(held, query=query, input_layout="BSND")
    out, _ = call(FIA, arguments)
    for row in range(3):
        assert_close(out[row], naive(query[row], cache.k[row], cache.v[row], 0.11)[0].to(BFLOAT))
    refused(FIA, arguments | {"atten_mask": MASK, "sparse_mode": 3}, "covers 0 for a query of one step")
    refused(FIA, arguments | {"block_size": 24}, "multiple of 16")


def test_one_step_with_a_mask_of_its_own() -> None:
    """True masks out, over all slots of a request's pages; those past its keys may say anything."""
    held = [40, 1, 33]
    cache = Paged(held, 32, 16)
    query = Draw(BFLOAT, seed=3).normal(3, 1, HEADS, 32)
    mask = torch.arange(48) < torch.tensor(held)[:, None] - 5
    mask[:, 40:] = True
    arguments = cache.arguments(held, query=query, input_layout="BSND", atten_mask=mask[:, None, None])
    out, _ = call(FIA, arguments)
    for row in range(3):
        assert_close(out[row], naive(query[row], cache.k[row], cache.v[row], 0.11, window=5)[0].to(BFLOAT))
    assert_like(FIA, arguments)
    refused(FIA, arguments | {"atten_mask": mask[:, None, None, :40].contiguous()}, "with at least 48 keys")
    refused(FIA, arguments | {"atten_mask": mask[:2, None, None]}, r"\[requests, 1, 1, keys\] of 3 requests")


@pytest.mark.parametrize("target", [named("ascend910b", cann="8.5.0"), named("ascend950")], ids=str)
def test_a_band_has_no_effect_on_one_query(target: Target) -> None:
    """By the documentation; so a call that counts on it is refused, but where engines do (see the next test)."""
    arguments, _ = packed([1, 1], [200, 5])
    words = "sees 199 keys before its own; pre_tokens is documented to have no eff"
    with lowering.use(target=target):
        refused(FIA, arguments | {"pre_tokens": 2}, words)
        call(FIA, arguments | {"pre_tokens": 199})


def test_a_band_of_one_query_where_engines_rely_on_it() -> None:
    """On Ascend 910 from CANN 9.0.0 on."""
    arguments, cache = packed([1, 1], [200, 5], pre_tokens=2)
    out, _ = call(FIA, arguments)
    for row, q in enumerate(arguments["query"].split(1)):
        assert_close(out[row : row + 1], naive(q, cache.k[row], cache.v[row], 0.11, window=3)[0].to(BFLOAT))


def test_before_9_packed_queries_are_bfloat16() -> None:
    """By the documentation; the host code of later versions takes float16 too."""
    half = {name: x.half() for name, x in packed([3, 2], [130, 7])[0].items() if name in ("query", "key", "value")}
    call(FIA, changed(**half))
    with lowering.use(target=named("ascend910b", cann="8.5.0")):
        refused(FIA, changed(**half), "layout TND takes torch.bfloat16 before CANN 9.0.0")


def test_padded_queries_over_a_window() -> None:
    counts, held = [3, 0, 2], [130, 9, 2]
    cache = Paged(held)
    query = Draw(BFLOAT, seed=2).normal(3, 3, HEADS, WIDTH)
    arguments = cache.arguments(held, query=query, actual_seq_qlen=counts, input_layout="BSND", atten_mask=MASK)
    out, _ = call(FIA, arguments | {"sparse_mode": 4, "pre_tokens": 6, "next_tokens": 0})
    for row, count in enumerate(counts):
        y, _ = naive(query[row, :count], cache.k[row], cache.v[row], 0.11, window=7)
        assert_close(out[row, :count], y.to(BFLOAT))


def test_dense_keys() -> None:
    draw = Draw(BFLOAT, seed=4)
    q, k, v = draw.normal(2, 5, HEADS, 64), draw.normal(2, 5, KV_HEADS, 64), draw.normal(2, 5, KV_HEADS, 64)
    arguments = {
        "query": q, "key": k, "value": v, "num_query_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "softmax_scale": 0.3, "input_layout": "BSND", "atten_mask": MASK, "sparse_mode": 3,
    }  # fmt: skip
    out, _ = call(FIA, arguments)
    for row in range(2):
        assert_close(out[row], naive(q[row], k[row], v[row], 0.3)[0].to(BFLOAT))
    y = call(FIA, arguments | {"atten_mask": None, "sparse_mode": 0})[0]
    assert_close(y[0, :1], naive(q[0, :1], k[0], v[0], 0.3)[0].to(BFLOAT))
    refused(FIA, arguments | {"key": k[:1]}, "expected 2 requests")
    refused(FIA, arguments | {"value": v[..., :48].contiguous()}, "as key")
    refused(FIA, arguments | {"key": k[:, :, :1].contiguous()}, "expected 2 heads")
    # The default scale is 1, and the default number of key heads that of the query.
    same = {name: value for name, value in arguments.items() if name not in ("softmax_scale", "num_key_value_heads")}
    y = call(FIA, same | {"key": q, "value": q})[0]
    assert_close(y[1], naive(q[1], q[1], q[1], 1.0)[0].to(BFLOAT))


def test_undefined_values_are_nan() -> None:
    """A request without keys, and queries that stand before the first key."""
    arguments, _ = packed([2, 3], [0, 1], pre_tokens=2147483647)
    out, lse = call(FIA, arguments)
    assert out[:4].isnan().all() and out[4].isfinite().all()
    assert (lse[:2] == torch.inf).all() and lse[2:4].isnan().all() and lse[4].isfinite().all()


def test_keys_that_are_empty_altogether_give_zeros() -> None:
    draw = Draw(BFLOAT)
    empty = draw.normal(2, 0, KV_HEADS, 64)
    y = torch.ops.npu.npu_fused_infer_attention_score_v2(
        draw.normal(2, 3, HEADS, 64), empty, empty, num_query_heads=HEADS, num_key_value_heads=KV_HEADS,
        input_layout="BSND",
    )[0]  # fmt: skip
    assert (y == 0).all()


def test_cells_past_the_length_are_never_read() -> None:
    arguments, _ = packed([3, 2], [130, 7])
    before = call(FIA, arguments)[0]
    for pages in (arguments["key"], arguments["value"]):
        pages[pages.isnan()] = 3.0
    assert torch.equal(call(FIA, arguments)[0], before)


def changed(**changes: Any) -> dict[str, Any]:
    return packed([3, 2], [130, 7])[0] | changes


Q = torch.zeros(5, HEADS, WIDTH, dtype=BFLOAT)
WIDE = torch.zeros(6, 128, 512, dtype=BFLOAT)
TABLE = torch.tensor([[0, 1], [2, 2]], dtype=torch.int32)
LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"query": Q.float()}, "query is torch.float32"),
    "dtypes": ({"key": torch.zeros(6, 128, 256).half()}, "dtypes differ"),
    "contiguity": ({"query": torch.zeros(HEADS, 5, WIDTH, dtype=BFLOAT).transpose(0, 1)}, "query .* not contiguous"),
    "rank of the query": ({"query": Q[None]}, "4-dimensional"),
    "number of heads": ({"num_query_heads": 4}, "num_query_heads=4"),
    "too many heads": ({"num_query_heads": 257}, "1 to 256"),
    "heads not a multiple": ({"num_key_value_heads": 4}, "expected a multiple"),
    "too many heads a key head": ({"query": torch.zeros(5, 130, 128).bfloat16(), "num_query_heads": 130}, "64 times"),
    "layout": ({"input_layout": "NTD_TND"}, "covers TND, BSND"),
    "no query lengths": ({"actual_seq_qlen": None}, "actual_seq_qlen is missing"),
    "query lengths a request": ({"actual_seq_qlen": [3, 2]}, "cumulative"),
    "query lengths with a leading zero": ({"actual_seq_qlen": [0, 3, 5]}, "2 entries for 3 requests"),
    "query lengths short of the tokens": ({"actual_seq_qlen": [2, 4]}, "ends at the number of tokens, 5"),
    "no key lengths": ({"actual_seq_kvlen": None}, "mandatory with a block_table"),
    "negative lengths": ({"actual_seq_kvlen": [130, -1]}, "length of each request"),
    "running key lengths": ({"actual_seq_kvlen": [130, 400]}, "at least 4 blocks"),
    "width of the query": ({"query": Q[..., :64].contiguous()}, "equal widths"),
    "width in TND": ({"query": Q.repeat(1, 1, 2), "key": WIDE, "value": WIDE[..., :256].contiguous()}, "as key"),
    "no mask": ({"atten_mask": None}, "sparse_mode is 4 without"),
    "mask without a mode": ({"sparse_mode": 0}, "sparse_mode is 0 with atten_mask"),
    "mode": ({"sparse_mode": 2}, "sparse_mode is 2"),
    "shape of the mask": ({"atten_mask": MASK[:5, :130].contiguous()}, "one for all lengths"),
    "dtype of the mask": ({"atten_mask": MASK.bfloat16()}, "atten_mask is torch.bfloat16"),
    "polarity of the mask": ({"atten_mask": ~MASK}, "True masks out"),
    "mask with the diagonal": ({"atten_mask": torch.ones(2048, 2048).triu(0).bool()}, "True masks out"),
    "more queries than keys": ({"sparse_mode": 3, "actual_seq_kvlen": [130, 1]}, "no more queries than keys"),
    "tokens before": ({"pre_tokens": -1}, "a sum of at least 0"),
    "size of blocks": ({"block_size": 72}, "block_size is 72; expected a multiple of 16, at most 1024"),
    "size of blocks by the host code": ({name: torch.zeros(6, 640, 384).bfloat16() for name in ("key", "value")}
                                        | {"query": Q.repeat(1, 1, 2)[..., :192].contiguous(), "block_size": 640},
                                        "takes page sizes by CANN"),
    "no size of blocks": ({"block_size": 0}, "block_size is 0"),
    "blocks of another size": ({"block_size": 256}, "blocks, block_size"),
    "rank of pages": ({name: torch.zeros(6, 128, 2, 128).bfloat16() for name in ("key", "value")}, "4-dimensional"),
    "unequal pages": ({"value": torch.zeros(7, 128, 256).bfloat16()}, "as key"),
    "dtype of the table": ({"block_table": TABLE.long()}, "block_table is torch.int64"),
    "lines of the table": ({"block_table": TABLE[:1]}, "2 lines"),
    "short table": ({"block_table": TABLE[:, :1].contiguous()}, "at least 2 blocks"),
    "block that does not exist": ({"block_table": TABLE + 5}, "ids of blocks"),
    "sentinel in an unused entry": ({"block_table": torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)}, "unused"),
    "fewer blocks than the requests hold": ({name: torch.zeros(2, 128, 256).bfloat16() for name in ("key", "value")}
                                            | {"block_table": TABLE.clamp(max=1)}, "no fewer blocks"),
    "what no kernel passes": ({"learnable_sink": torch.zeros(HEADS).bfloat16()}, "does not cover learnable_sink"),
}  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS)
def test_limits_over_pages(limit: str) -> None:
    changes, words = LIMITS[limit]
    refused(FIA, changed(**changes), words)


def test_limits_of_padded_queries() -> None:
    held = [9, 12]
    good = Paged(held, 48).arguments(
        held, query=torch.zeros(2, 3, HEADS, 48, dtype=BFLOAT), input_layout="BSND", atten_mask=MASK, sparse_mode=3
    )
    call(FIA, good)
    refused(FIA, good | {"actual_seq_qlen": [2, 4]}, "length of each request, 0 to 3")
    refused(FIA, good | {"actual_seq_qlen": []}, "0 entries; expected 1, or 2")
    pages = torch.zeros(6, 128, 2 * 40, dtype=BFLOAT)
    refused(FIA, good | {"query": good["query"][..., :40].contiguous(), "key": pages, "value": pages}, "multiple of 16")
    wide = torch.zeros(6, 128, 2 * 528, dtype=BFLOAT)
    refused(
        FIA, good | {"query": torch.zeros(2, 3, HEADS, 528, dtype=BFLOAT), "key": wide, "value": wide}, "at most 512"
    )
    flat = torch.zeros(2, 128, 512, dtype=BFLOAT)
    many = {"query": torch.zeros(2, 3, 256, 256, dtype=BFLOAT), "num_query_heads": 256, "num_key_value_heads": 4}
    pages = torch.zeros(2, 128, 1024, dtype=BFLOAT)
    refused(FIA, good | many | {"key": pages, "value": pages}, "less than 65535")
    refused(FIA, good | {"key": flat[..., :511].contiguous(), "value": flat}, "not 2 heads")


@pytest.mark.parametrize("cache", [(10, 128, 2 * 128)], ids=str)
def test_shapes_seen_on_the_real_meta_kernels(cache: tuple[int, ...]) -> None:
    draw = Draw(BFLOAT)
    pages, table = torch.zeros(cache, dtype=BFLOAT), torch.zeros(2, 2, dtype=torch.int32)
    shared = {"num_query_heads": 8, "num_key_value_heads": 2, "block_size": 128, "return_softmax_lse": True}
    lists = {"actual_seq_kvlen": [4, 5], "block_table": table, **shared}
    out, lse = torch.ops.npu.npu_fused_infer_attention_score_v2(
        draw.normal(5, 8, 128), pages, pages, actual_seq_qlen=[2, 5], input_layout="TND", **lists
    )
    assert (out.shape, lse.shape) == ((5, 8, 128), (5, 8, 1))
    out, lse = torch.ops.npu.npu_fused_infer_attention_score_v2(
        draw.normal(2, 1, 8, 128), pages, pages, input_layout="BSND", **lists
    )
    assert (out.shape, lse.shape) == ((2, 1, 8, 128), (2, 8, 1, 1))


LATENT, ROPE = 512, 64


def apart(q: Tensor, q_rope: Tensor, k: Tensor, k_rope: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One request of latent attention: `naive` on heads whose rope channels lie behind the others."""
    return naive(torch.cat((q, q_rope), -1), torch.cat((k, k_rope), -1), v, scale)


def packed_latent(counts: Sequence[int], held: Sequence[int], **more: Any) -> dict[str, Any]:
    """Heads of 128 with 64 rope channels apart, over packed keys."""
    draw = Draw(BFLOAT, seed=sum(held))
    masked = {"atten_mask": MASK, "sparse_mode": 4, "next_tokens": 0}
    return {
        "query": draw.normal(sum(counts), HEADS, 128), "query_rope": draw.normal(sum(counts), HEADS, ROPE),
        "key": draw.normal(sum(held), KV_HEADS, 128), "key_rope": draw.normal(sum(held), KV_HEADS, ROPE),
        "value": draw.normal(sum(held), KV_HEADS, 128), "actual_seq_qlen": list(accumulate(counts)),
        "actual_seq_kvlen": list(accumulate(held)), "num_query_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "softmax_scale": 0.07, "input_layout": "TND", "return_softmax_lse": True, **masked, **more,
    }  # fmt: skip


def test_rope_channels_apart_over_packed_keys() -> None:
    """As many keys as queries, more, one query, no query; and without a mask, as over a prefix."""
    counts, held = [4, 2, 1, 0], [4, 9, 30, 5]
    arguments = packed_latent(counts, held)
    names = ("query", "query_rope", "key", "key_rope", "value")
    split = [arguments[name].split(counts if name[0] == "q" else held) for name in names]
    for given, alone in ((arguments, False), (arguments | {"atten_mask": None, "sparse_mode": 0}, True)):
        out, lse = call(FIA, given)
        for row, request in enumerate(zip(*split, strict=True)):
            q, q_rope, k, k_rope, v = request
            # Without a mask every query sees all keys, as one query alone does.
            steps = [(q[i : i + 1], q_rope[i : i + 1]) for i in range(len(q))] if alone else [(q, q_rope)]
            parts = [apart(*step, k, k_rope, v, 0.07) for step in steps if len(step[0])]
            for found, each in zip((out, lse[..., 0]), zip(*parts, strict=True), strict=True) if parts else ():
                expected = torch.cat(each)
                assert_close(found.split(counts)[row], expected.to(found.dtype), length=held[row])
        assert_like(FIA, given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key_rope": None}, "both or neither"),
        ({"query_rope": torch.zeros(7, HEADS, 32, dtype=BFLOAT)}, "as query, 64 wide"),
        ({"key_rope": torch.zeros(47, KV_HEADS, ROPE, dtype=BFLOAT)}, "as key, 64 wide"),
        ({"query_rope": torch.zeros(7, HEADS, ROPE).half()}, "dtypes differ"),
        ({"query_rope": torch.zeros(7, ROPE, HEADS, dtype=BFLOAT).mT}, "query_rope .* not contiguous"),
        ({"query": torch.zeros(7, HEADS, 192, dtype=BFLOAT)}, "128 or 512 wide"),
        ({"value": torch.zeros(48, KV_HEADS, 192, dtype=BFLOAT)}, "layout TND takes"),
        ({"block_table": torch.zeros(4, 1, dtype=torch.int32)}, "packed keys only"),
        ({"sparse_mode": 3, "actual_seq_kvlen": [3, 12, 42, 48]}, "no more queries than keys"),
        ({name: torch.zeros(0, KV_HEADS, width, dtype=BFLOAT)
          for name, width in (("key", 128), ("value", 128), ("key_rope", ROPE))} | {"actual_seq_kvlen": [0] * 4},
         "no empty tensor"),
    ],
    ids=str,
)  # fmt: skip
def test_limits_of_rope_over_packed_keys(changes: dict[str, Any], words: str) -> None:
    refused(FIA, packed_latent([4, 2, 1, 0], [4, 9, 30, 5]) | changes, words)


def test_packed_keys_are_never_empty() -> None:
    plain = packed_latent([2], [3])
    plain = {name: x for name, x in plain.items() if "rope" not in name}
    call(FIA, plain)
    none = {name: torch.zeros(0, KV_HEADS, 128, dtype=BFLOAT) for name in ("key", "value")}
    refused(FIA, plain | none | {"actual_seq_kvlen": [0]}, "layout TND takes no empty tensor")


def paged_latent(
    steps: int, held: Sequence[int], heads: int = 4, block: int = 128, *, tiles: bool = False,
    dtype: torch.dtype = BFLOAT, **more: Any,
) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:  # fmt: skip
    """Heads over the one latent of their request's pages, and those latents and rope keys in order."""
    draw = Draw(dtype, seed=sum(held))
    own = [(draw.normal(length, LATENT), draw.normal(length, ROPE)) for length in held]
    most = max(-(-length // block) for length in held)
    table = draw.distinct(len(held) * most + 2, 1, len(held) * most)[0].int().reshape(len(held), most)
    pools = [torch.full((len(held) * most + 2, block, width), torch.nan, dtype=dtype) for width in (LATENT, ROPE)]
    for row, vectors in enumerate(own):
        for pool, x in zip(pools, vectors, strict=True):
            for at in range(len(x)):
                pool[table[row, at // block], at % block] = x[at]
    if tiles:
        pools = [pool.unflatten(2, (1, -1, 16)).permute(0, 2, 3, 1, 4).contiguous() for pool in pools]
    masked = {"atten_mask": MASK, "sparse_mode": 3, "actual_seq_qlen": [steps] * len(held)} if steps > 1 else {}
    return {
        "query": draw.normal(len(held), steps, heads, LATENT), "key": pools[0], "value": pools[0],
        "query_rope": draw.normal(len(held), steps, heads, ROPE), "key_rope": pools[1], "block_table": table,
        "actual_seq_kvlen": list(held), "block_size": block, "num_query_heads": heads, "num_key_value_heads": 1,
        "softmax_scale": 0.04, "input_layout": "BSND", **masked, **more,
    }, own  # fmt: skip


@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("tiles", [False, True], ids=["plain", "tiled"])
@pytest.mark.parametrize("steps", [1, 3, 16])
def test_heads_over_a_shared_latent(steps: int, tiles: bool, layout: str) -> None:
    held = [128, 16, 257]
    dtype = torch.float16 if steps == 3 else BFLOAT
    arguments, own = paged_latent(steps, held, tiles=tiles, dtype=dtype)
    out = call(FIA, arguments)[0]
    if layout == "TND":
        flat = {name: arguments[name].flatten(0, 1) for name in ("query", "query_rope")}
        ends = {"actual_seq_qlen": [steps, 2 * steps, 3 * steps], "input_layout": "TND"}
        assert torch.equal(call(FIA, arguments | flat | ends)[0], out.flatten(0, 1))
        return
    for row, (latent, rope) in enumerate(own):
        q, q_rope = arguments["query"][row], arguments["query_rope"][row]
        y, _ = apart(q, q_rope, latent[:, None], rope[:, None], latent[:, None], 0.04)
        assert_close(out[row], y.to(dtype), length=held[row])
    assert_like(FIA, arguments)


@pytest.mark.parametrize("steps", [1, 3])
def test_heads_come_first_where_they_are_asked_for(steps: int) -> None:
    """Layout BSND_NBSD: the same numbers in another order, over a shared latent alone."""
    arguments, _ = paged_latent(steps, [128, 16, 257])
    turned = arguments | {"input_layout": "BSND_NBSD"}
    expected = call(FIA, arguments)[0].permute(2, 0, 1, 3)
    assert torch.equal(call(FIA, turned)[0], expected)
    assert_like(FIA, turned)
    no_rope = {"query_rope": None, "key_rope": None}
    refused(FIA, turned | no_rope, "outputs of layout NBSD over a shared latent alone")


def test_128_heads_share_a_latent() -> None:
    """The other forms take 64 query heads a key head at most."""
    arguments, own = paged_latent(1, [3], heads=128)
    y, _ = apart(
        arguments["query"][0], arguments["query_rope"][0], *(x[:, None] for x in (*own[0], own[0][0])), scale=0.04
    )
    assert_close(call(FIA, arguments)[0][0], y.to(BFLOAT))


def test_limits_of_a_shared_latent() -> None:
    good, _ = paged_latent(2, [130, 7])
    call(FIA, good)
    refused(FIA, good | {"return_softmax_lse": True}, "not documented")
    refused(FIA, good | {"atten_mask": None, "sparse_mode": 0}, "3 with for up to 16")
    refused(FIA, good | {"sparse_mode": 4}, "3 with for up to 16")
    one, _ = paged_latent(1, [130, 7])
    refused(FIA, one | {"atten_mask": MASK, "sparse_mode": 3}, "0 without for one query")
    refused(FIA, paged_latent(17, [130, 20])[0], "17 queries")
    refused(FIA, paged_latent(1, [9], heads=3)[0], "one of")
    refused(FIA, paged_latent(1, [9], block=24)[0], "block_size is 24; expected a multiple of 16, at most 1024")
    for block in (16, 48, 1024):
        call(FIA, paged_latent(2, [9], block=block, tiles=block == 48)[0])
    refused(FIA, good | {"block_table": None, "actual_seq_kvlen": [90, 7]}, "read from pages only")
    refused(FIA, good | {"num_key_value_heads": 0}, "a shared latent is one head")
    refused(FIA, good | {"key_rope": good["key_rope"][..., :32].contiguous()}, "as key, 64 wide")
    refused(FIA, good | {"value": good["key"][..., :256].contiguous()}, "as key")
    tiles, _ = paged_latent(2, [130, 7], tiles=True)
    refused(FIA, tiles | {"key_rope": good["key_rope"]}, "as key in NZ")
    refused(FIA, tiles | {"key": tiles["key"].transpose(3, 4).contiguous()}, "width / 16, block_size, 16")
    refused(FIA, good | {"key": good["key"][:, None]}, "4-dimensional")
