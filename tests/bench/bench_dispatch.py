"""What it costs to choose a kernel: an op call less the call of its body, eager.

    python -m tests.bench.bench_dispatch

Prints a line a number of tensors: microseconds a call of the plain function, of the op, and their difference; then the
first call of a signature, which runs the choice itself.
"""

from __future__ import annotations

import itertools
import time
import timeit
from typing import Any

import torch
from torch import Tensor

from lowering import Rows
from lowering.host import HostLengths
from lowering.op import Op

CALLS, REPEATS = 20_000, 9
HINTS: dict[str, Any] = {"max_query": 1, "uniform": True, "keep_steps": False}


def one(a: Tensor, *, max_query: int, uniform: bool, keep_steps: bool) -> Tensor:
    """A body that does nothing, of one tensor and three static arguments."""
    return a


def two(a: Tensor, b: Tensor, *, max_query: int, uniform: bool, keep_steps: bool) -> Tensor:
    """Of two tensors."""
    return a


def six(
    a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, *, max_query: int, uniform: bool, keep_steps: bool
) -> Tensor:
    """Of six tensors."""
    return a


def over_rows(a: Tensor, b: Tensor, c: Tensor, rows: Rows, *, scale: float) -> Tensor:
    """Of three tensors over rows, as attention is."""
    return a


def microseconds(statement: Any, calls: int = CALLS) -> float:
    """CPU time a call, the best of several repeats."""
    return 1e6 * min(timeit.repeat(statement, timer=time.thread_time, number=calls, repeat=REPEATS)) / calls


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    for count, body in ((1, one), (2, two), (6, six)):
        op, tensors = Op(body), [torch.zeros(2, 3) for _ in range(count)]
        op(*tensors, **HINTS)
        plain = microseconds(lambda body=body, tensors=tensors: body(*tensors, **HINTS))
        chosen = microseconds(lambda op=op, tensors=tensors: op(*tensors, **HINTS))
        print(f"{count} tensors, 3 static: body {plain:5.2f} us, op {chosen:5.2f} us, choice {chosen - plain:5.2f} us")
    over, tensors = Op(over_rows), [torch.zeros(2, 3) for _ in range(6)]
    starts, table = torch.arange(4, dtype=torch.int32), torch.zeros(3, 9, dtype=torch.int32)
    host = HostLengths((1,) * 3, (9,) * 3, ((1,),) * 3, exact=True)
    given = (tensors[0], tensors[1], tensors[2], Rows(starts, starts[1:], table, max_query=1, uniform=True, host=host))
    plain = microseconds(lambda: over_rows(*given, scale=1.0))
    chosen = microseconds(lambda: over(*given, scale=1.0))
    print(f"3 tensors and rows: body {plain:5.2f} us, op {chosen:5.2f} us, choice {chosen - plain:5.2f} us")
    sizes = itertools.count(1)
    first = microseconds(lambda: op(torch.empty(next(sizes)), *tensors[1:], **HINTS), 200)
    print(f"first call of a signature: {first:.1f} us")


if __name__ == "__main__":
    main()
