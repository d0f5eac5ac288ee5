"""What `params` raises."""

from __future__ import annotations

LINE, LINES = 2000, 1500
"""Characters of a line, and lines, that a message has at most: what a hostile file says is not repeated whole."""


class _BoundedError(ValueError):
    """An error whose message stays readable, whatever values it repeats."""

    def __init__(self, message: str) -> None:
        lines = [cut(line, LINE) for line in message.split("\n", LINES)]
        more = [f"... ({len(message)} characters in all)"] if len(lines) > LINES else []
        super().__init__("\n".join(lines[:LINES] + more))


class CheckpointError(_BoundedError):
    """A checkpoint directory, file, name, shape or dtype that cannot be loaded or saved as asked."""


class ConfigError(_BoundedError):
    """A model configuration with a missing, unknown or contradictory field."""


def cut(text: str, most: int = 400) -> str:
    """A text for a message, without its middle where it has more than `most` characters."""
    if len(text) <= most:
        return text
    gap = f" ... ({len(text)} characters) ... "
    half = (most - len(gap)) // 2
    return text[:half] + gap + text[-half:]
