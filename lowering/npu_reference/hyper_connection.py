"""Hyper-connections: a sublayer's output added to streams, which no matrix mixes before."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import ASCEND_950, need, need_default, need_dtype, need_one_dtype, need_rank, need_shape, shown, soc
from .registration import operator

HALVES = (torch.float16, torch.bfloat16)
STREAMS = (4, 6, 8)


def _post_like(x: Tensor, h_res: Tensor | None, h_out: Tensor, h_post: Tensor) -> Tensor:
    need(soc() == ASCEND_950, f"documented for ascend950 alone; the call is lowered to {soc()}")
    need_default(h_res=h_res)
    need_rank(3, 4, x=x)
    need_dtype(HALVES, x=x)
    need_one_dtype(x=x, h_out=h_out)
    need_dtype((torch.float32,), h_post=h_post)
    need(x.shape[-2] in STREAMS, f"x is {shown(x)}, of {x.shape[-2]} streams; expected 4, 6 or 8")
    need_shape((*x.shape[:-2], x.shape[-1]), "one output a token", h_out=h_out)
    need_shape(x.shape[:-1], "one weight a stream", h_post=h_post)
    need(x.numel() > 0, f"x is {shown(x)}, without elements")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator("npu_mhc_post", shapes=_post_like)
def npu_mhc_post(x: Tensor, h_res: Tensor | None, h_out: Tensor, h_post: Tensor) -> Tensor:
    """x + h_post * h_out, stream by stream, rounded once."""
    return (x.float() + h_post[..., None] * h_out.float().unsqueeze(-2)).to(x.dtype)
