"""What the device's host code refuses: op-plugin's bindings, aclnn's checks and the tiling functions of CANN, as data.

One file a family of operators, named as in `ops/`; each check cites where it was read. The operators' CPU references
and the dry run raise what `refused` says, so that a kernel cannot make a call here that a device refuses at launch. A
call that passes may still be wrong or slow there: what runs on the device was not read.
"""

from . import (
    attention,
    cache,
    delta,
    hyper_connection,
    mla,
    mlp,
    moe,
    norm,
    quant,
    rotary,
    sampling,
    short_conv,
    sparse,
)
from .check import CHECKS, HostCheck, refused

# The modules enter their checks when they are imported.
__all__ = [
    "CHECKS",
    "HostCheck",
    "attention",
    "cache",
    "delta",
    "hyper_connection",
    "mla",
    "mlp",
    "moe",
    "norm",
    "quant",
    "refused",
    "rotary",
    "sampling",
    "short_conv",
    "sparse",
]
