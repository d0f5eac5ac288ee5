"""Timing that two sides share: interleaved rounds, the best of each."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def best(rounds: int, *functions: Callable[[], object]) -> list[float]:
    """Seconds of the fastest run of each function, run in turn.

    With one thread it is the thread's CPU time, which other programs on the machine disturb less.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times = [float("inf")] * len(functions)
    for _ in range(rounds):
        for index, function in enumerate(functions):
            start = clock()
            function()
            times[index] = min(times[index], clock() - start)
    return times
