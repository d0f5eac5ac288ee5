"""What latent attention calls beside fused attention: the merge of partial results, ATB's ring, products by head.

The first two weigh partial results by the logarithms of their softmax denominators (lse, natural, float32).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import (
    ASCEND_950,
    FLOATS,
    OperatorError,
    need,
    need_contiguous,
    need_default,
    need_dtype,
    need_one_dtype,
    need_rank,
    need_shape,
    shown,
    soc,
)
from .registration import operator

Pair = tuple[Tensor, Tensor]

MOST_PARTS = 16
"""Partial attentions that one merge takes."""

NOPE, ROPE = 128, 64
"""Widths of the plain and the rotated channels of a head in the ring; values are as wide as the former."""

MASK_SIDE = 512
"""Side of the ring's mask, whatever the lengths."""


def _update_like(lse: list[Tensor], local_out: list[Tensor], update_type: int) -> Pair:
    need(update_type in (0, 1), f"update_type is {update_type}; expected 0, or 1 for an lse too")
    need(
        1 <= len(lse) <= MOST_PARTS and len(lse) == len(local_out),
        f"{len(lse)} lse and {len(local_out)} local_out are given; expected as many, 1 to {MOST_PARTS}",
    )
    rows, width = local_out[0].shape[0], local_out[0].shape[-1]
    for at, (one, out) in enumerate(zip(lse, local_out, strict=True)):
        named = {f"lse[{at}]": one, f"local_out[{at}]": out}
        need_contiguous(**named)
        need_dtype((torch.float32,), **{f"lse[{at}]": one})
        need_shape((rows,), "one a row of local_out", **{f"lse[{at}]": one})
        need_shape((rows, width), "batch * tokens * heads, width", **{f"local_out[{at}]": out})
        need_dtype(FLOATS, **{f"local_out[{at}]": out})
    need_one_dtype(**{f"local_out[{at}]": out for at, out in enumerate(local_out)})
    need(8 <= width <= 512 and width % 8 == 0, f"rows are {width} wide; expected a multiple of 8 up to 512")
    return torch.empty_like(local_out[0]), torch.empty_like(lse[0])


@operator("npu_attention_update", shapes=_update_like)
def npu_attention_update(lse: list[Tensor], local_out: list[Tensor], update_type: int) -> Pair:
    """(merged attention, its lse: NaN unless update_type is 1).

    A part whose lse is -inf has no weight; one whose lse is inf, or -inf everywhere, leaves NaN.
    """
    whole = torch.stack(lse).logsumexp(0)
    weights = ((one - whole).exp()[:, None] for one in lse)
    out = sum(weight * part.float() for weight, part in zip(weights, local_out, strict=True))
    assert isinstance(out, Tensor)
    return out.to(local_out[0].dtype), whole if update_type else torch.full_like(whole, torch.nan)


def _ring_like(
    q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, value: Tensor, mask: Tensor, seqlen: Tensor,
    head_num: int, kv_head_num: int, pre_out: Tensor | None, prev_lse: Tensor | None, qk_scale: float,
    kernel_type: str | None, mask_type: str | None, input_layout: str | None, calc_type: str | None,
) -> Pair:  # fmt: skip
    need(soc() != ASCEND_950, "documented for ascend910b and ascend910_93; the call is lowered to ascend950")
    tensors = {"q_nope": q_nope, "q_rope": q_rope, "k_nope": k_nope, "k_rope": k_rope, "value": value, "mask": mask}
    need_dtype((torch.float16, torch.bfloat16), q_nope=q_nope)
    need_one_dtype(**tensors, pre_out=pre_out)
    need_contiguous(**tensors, pre_out=pre_out, prev_lse=prev_lse)
    need_rank(3, 3, q_nope=q_nope, k_nope=k_nope)
    tokens, keys = q_nope.shape[0], k_nope.shape[0]
    for width, name, x in ((NOPE, "q_nope", q_nope), (ROPE, "q_rope", q_rope)):
        need_shape((tokens, head_num, width), "tokens, head_num, width", **{name: x})
    for width, name, x in ((NOPE, "k_nope", k_nope), (ROPE, "k_rope", k_rope), (NOPE, "value", value)):
        need_shape((keys, kv_head_num, width), "keys, kv_head_num, width", **{name: x})
    need(keys > 0, "k_nope is empty; leave the call out when no request holds a key")
    need(head_num % kv_head_num == 0, f"head_num is {head_num}; expected a multiple of kv_head_num, {kv_head_num}")
    _need_ring_words(kernel_type, mask_type, input_layout, calc_type)
    first = calc_type in (None, "calc_type_first_ring")
    need((pre_out is None) == first, "pre_out is given unless calc_type is calc_type_first_ring, and only then")
    need((prev_lse is None) == first, "prev_lse is given unless calc_type is calc_type_first_ring, and only then")
    need_shape((MASK_SIDE, MASK_SIDE), "one for all lengths", mask=mask)
    need_shape((tokens, head_num, NOPE), "as q_nope", pre_out=pre_out)
    need_shape((head_num, tokens), "head_num, tokens: heads first", prev_lse=prev_lse)
    need_dtype((torch.float32,), prev_lse=prev_lse)
    need_dtype((torch.int32,), seqlen=seqlen)
    need(seqlen.dim() == 1 or (seqlen.dim() == 2 and seqlen.shape[0] == 2), f"seqlen is {shown(seqlen)}; [B] or [2, B]")
    return torch.empty_like(q_nope), q_nope.new_empty((head_num, tokens), dtype=torch.float32)


def _need_ring_words(kernel: str | None, mask: str | None, layout: str | None, calc: str | None) -> None:
    words = (
        ("kernel_type", kernel, ("kernel_type_default", "kernel_type_high_precision")),
        ("mask_type", mask, ("no_mask", "mask_type_triu")),
        ("input_layout", layout, ("type_bsnd",)),
        ("calc_type", calc, ("calc_type_first_ring", "calc_type_default")),
    )
    for name, given, allowed in words:
        need(given is None or given in allowed, f"{name} is {given!r}; expected one of {', '.join(allowed)}")


@operator("atb.npu_ring_mla", shapes=_ring_like)
def npu_ring_mla(
    q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, value: Tensor, mask: Tensor, seqlen: Tensor,
    head_num: int, kv_head_num: int, pre_out: Tensor | None, prev_lse: Tensor | None, qk_scale: float,
    kernel_type: str | None, mask_type: str | None, input_layout: str | None, calc_type: str | None,
) -> Pair:  # fmt: skip
    """(attention, lse [heads tokens]), merged with what `pre_out` and `prev_lse` hold unless this is the first ring.

    `seqlen` is on the host: the lengths of queries and keys, or both in two lines. NaN stands for requests that hold no
    key, which the documentation allows without a word on the result.
    """
    queries, held = _ring_lengths(seqlen, len(q_nope), len(k_nope), causal=mask_type == "mask_type_triu")
    if mask_type == "mask_type_triu":
        later = torch.ones_like(mask).triu(1)
        need(torch.equal(mask, later), "mask must be 1 strictly above the diagonal and 0 elsewhere")
    q, k = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1)
    parts = zip(q.split(queries), k.split(held), value.split(held), strict=True)
    found = [_ring_part(*part, qk_scale, causal=mask_type == "mask_type_triu") for part in parts]
    out, lse = (torch.cat(each) for each in zip(*found, strict=True))
    if pre_out is not None and prev_lse is not None:
        whole = torch.logaddexp(lse, prev_lse.T)
        out = (lse - whole).exp()[..., None] * out + (prev_lse.T - whole).exp()[..., None] * pre_out.float()
        lse = whole
    return out.to(q_nope.dtype), lse.T.contiguous()


def _ring_lengths(seqlen: Tensor, tokens: int, keys: int, causal: bool) -> tuple[list[int], list[int]]:
    need(seqlen.device.type == "cpu", f"seqlen is on {seqlen.device}; the operator reads it on the host")
    queries, held = (seqlen, seqlen) if seqlen.dim() == 1 else seqlen.unbind(0)
    lengths = queries.tolist(), held.tolist()
    for count, length in zip(*lengths, strict=True):
        if count <= 0 or not (length == 0 or length >= count):
            raise OperatorError(
                f"a request has {count} queries and {length} keys; expected at least one query, and no key or as many "
                "as queries"
            )
        need(not causal or count == length, f"a request has {count} queries and {length} keys; masked, as many of both")
    need(sum(lengths[0]) == tokens, f"seqlen has {sum(lengths[0])} queries, q_nope has {tokens}")
    need(sum(lengths[1]) == keys, f"seqlen has {sum(lengths[1])} keys, k_nope has {keys}")
    return lengths


def _ring_part(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Pair:
    """Outputs [queries heads width] and lse [queries heads] of one request, in float32."""
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q.float(), k) * scale
    if causal:
        later = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    out = torch.einsum("qhk,khd->qhd", (scores - lse[..., None]).exp(), v)
    return (out, lse) if len(k) else (out * torch.nan, lse * torch.nan)


IN_ORDER, TURNED = [0, 1, 2], [1, 0, 2]
"""Orders of the axes: as they lie, and the first two in each other's place."""

BELOW = 65536
"""Bound of a product's batch, of its outputs and of the channels that a row of x holds."""


def _by_head_like(
    input: Tensor, weight: Tensor, perm_x1: list[int] | None, perm_x2: list[int] | None, perm_y: list[int] | None,
    batch_split_factor: int, **rest: object,
) -> Tensor:  # fmt: skip
    need_default(**rest)
    need(batch_split_factor == 1, f"batch_split_factor is {batch_split_factor}; the reference covers 1")
    order = list(perm_x1 or IN_ORDER)
    need(order in (IN_ORDER, TURNED), f"perm_x1 is {order}; expected {IN_ORDER} or {TURNED}")
    need(list(perm_x2 or IN_ORDER) == IN_ORDER, f"perm_x2 is {perm_x2}; documented is {IN_ORDER}")
    need(list(perm_y or TURNED) == TURNED, f"perm_y is {perm_y}; documented is {TURNED}")
    need_rank(3, 3, input=input, weight=weight)
    need_dtype(FLOATS, input=input)
    need_one_dtype(input=input, weight=weight)
    batch, rows, inner = (input.shape[axis] for axis in order)
    need_shape((batch, inner, weight.shape[2]), "batch, inner as in input, outputs", weight=weight)
    need(inner % 16 == weight.shape[2] % 16 == 0, f"weight is {shown(weight)}; its last two axes are multiples of 16")
    held = inner * (batch if order == TURNED else 1)
    need(held < BELOW, f"input is {shown(input)}, {held} channels a row; expected less than {BELOW}")
    return input.new_empty((rows, batch, weight.shape[2]))


@operator("npu_transpose_batchmatmul", shapes=_by_head_like)
def npu_transpose_batchmatmul(input: Tensor, weight: Tensor, perm_x1: list[int] | None, **rest: object) -> Tensor:
    """[rows batch outputs]: each matrix of the batch times its weight, in float32, rounded once.

    `input` is [batch rows inner], or [rows batch inner] where `perm_x1` turns its first two axes.
    """
    x = input.permute(list(perm_x1 or IN_ORDER)).float()
    return (x @ weight.float()).transpose(0, 1).to(input.dtype).contiguous()
