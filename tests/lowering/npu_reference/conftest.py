"""The operators of torch_npu 2.13.0 on the CPU, for every test of this folder."""

from __future__ import annotations

from lowering import npu_reference

npu_reference.load("2.13.0")
