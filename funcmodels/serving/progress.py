"""What a person at a terminal sees while prompts are run: how far they are, and that something is being captured.

All of it goes to standard error and vanishes at the end; where that is no terminal, nothing is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

from params.tree import size

from .requests import Event

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE = 1.0
"""Seconds before progress is shown: what is over sooner shows nothing."""


def _status(what: str) -> AbstractContextManager[object]:
    console = _terminal()
    return console.status(f"capturing {what} ...") if console.is_terminal else nullcontext()


def _terminal() -> Console:
    from rich.console import Console

    return Console(stderr=True)


WATCH: ContextVar[Callable[[str], AbstractContextManager[object]]] = ContextVar("watch", default=_status)
"""Who is told of captures: called with what is captured, and entered while it is."""


def capturing(what: str) -> AbstractContextManager[object]:
    """To be entered around the capture of `what`, which takes seconds to minutes: says so."""
    return WATCH.get()(what)


@contextmanager
def shown(requests: int, state_bytes: int, console: Console | None = None) -> Iterator[Callable[[Event], None]]:
    """A bar of `requests` done, tokens and tokens a second; gives what it wants to be called with: each event."""
    console = console or _terminal()
    if not console.is_terminal:
        yield lambda event: None
        return
    bar = _Bar(requests, state_bytes, console)
    token = WATCH.set(bar.capturing)
    try:
        yield bar.told
    finally:
        WATCH.reset(token)
        bar.progress.stop()


class _Bar:
    """The bar of `shown`, drawn once there was time to get impatient."""

    def __init__(self, requests: int, state_bytes: int, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        done, speed = "{task.completed}/{task.total} prompts", "{task.fields[speed]:.0f} tokens/s"
        texts = (f"{done}, {{task.fields[tokens]}} tokens, {speed}", "{task.description}")
        columns = (BarColumn(), *map(TextColumn, texts), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True)
        self.idle = f"generating, state {size(state_bytes)}"
        self.task = self.progress.add_task(self.idle, total=requests, tokens=0, speed=0.0)
        self.begun = time.monotonic()
        self.tokens = 0

    def told(self, event: Event) -> None:
        """Count an event."""
        self.tokens += len(event.tokens)
        seconds = time.monotonic() - self.begun
        speed = self.tokens / max(seconds, 1e-3)
        self.progress.update(self.task, advance=event.result is not None, tokens=self.tokens, speed=speed)
        if seconds >= PATIENCE:
            self.progress.start()

    @contextmanager
    def capturing(self, what: str) -> Iterator[None]:
        """Say what is captured for as long as it takes; that time is not the tokens'."""
        self.progress.update(self.task, description=f"capturing {what} ...")
        self.progress.start()
        before = time.monotonic()
        yield
        self.begun += time.monotonic() - before
        self.progress.update(self.task, description=self.idle)
