"""Hyper-connections: a sublayer's output added to streams, which a matrix mixes before."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import ASCEND_950, need, need_dtype, need_one_dtype, need_rank, need_shape, shown, soc
from .registration import operator

HALVES = (torch.float16, torch.bfloat16)


def _post_like(x: Tensor, h_res: Tensor | None, h_out: Tensor, h_post: Tensor) -> Tensor:
    need_rank(3, 4, x=x)
    need_dtype(HALVES, x=x)
    need_one_dtype(x=x, h_out=h_out)
    need_dtype((torch.float32,), h_post=h_post, h_res=h_res)
    streams = (4, 6, 8) if soc() == ASCEND_950 else (4,)
    need(x.shape[-2] in streams, f"x is {shown(x)}, of {x.shape[-2]} streams; expected one of {streams}")
    need_shape((*x.shape[:-2], x.shape[-1]), "one output a token", h_out=h_out)
    need_shape(x.shape[:-1], "one weight a stream", h_post=h_post)
    need_shape((*x.shape[:-1], x.shape[-2]), "one matrix a token", h_res=h_res)
    need(x.numel() > 0, f"x is {shown(x)}, without elements")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator("npu_mhc_post", shapes=_post_like)
def npu_mhc_post(x: Tensor, h_res: Tensor | None, h_out: Tensor, h_post: Tensor) -> Tensor:
    """x + h_post * h_out, stream by stream, rounded once, for an h_res that mixes no stream with another."""
    one = torch.eye(x.shape[-2]).expand(*x.shape[:-1], -1)
    need(h_res is None or torch.equal(h_res, one), "h_res is not the identity; the reference covers no other")
    return (x.float() + h_post[..., None] * h_out.float().unsqueeze(-2)).to(x.dtype)
