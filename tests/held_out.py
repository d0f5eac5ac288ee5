"""Prompts that the bundled model never saw: beginnings of the held-out files of its corpus, in this interpreter.

The split goes by file name, so every Python version has held-out files, if not the very ones of the model card.
"""

from __future__ import annotations

import functools
import random
import runpy
from pathlib import Path

from funcmodels.checkpoint.text import Tokenizer

CORPUS = Path(__file__).parent.parent / "docs/bundled/corpus.py"


@functools.cache
def texts() -> tuple[str, ...]:
    """The held-out files of this interpreter's standard library."""
    documents = runpy.run_path(str(CORPUS))["documents"]()
    return tuple(document.text for document in documents if document.held_out)


def prompts(tokenizer: Tokenizer, count: int, least: int, most: int, seed: int = 0) -> list[list[int]]:
    """`count` pieces of `least` to `most` tokens, from places that begin a line."""
    draw = random.Random(seed)
    long = [text for text in texts() if len(text) > 12 * most]
    found = []
    for _ in range(count):
        text = draw.choice(long)
        start = text.index("\n", draw.randrange(len(text) - 10 * most)) + 1
        found.append(tokenizer.encode(text[start : start + 10 * most])[: draw.randint(least, most)])
    return found
