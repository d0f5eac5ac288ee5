"""Token buckets: the few sizes that batches are padded to, so that a few captured programs serve all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..protocols import Ragged

FEW = 8
"""Tokens a row up to which a uniform batch is not padded: decoding and verifying keep their shape anyway."""

Bucket = int | tuple[int, int]
"""Tokens, or tokens and the most of them in one row."""


class NoBucketError(ValueError):
    """A batch larger than the largest bucket."""


@dataclass(frozen=True)
class Buckets:
    """Sizes in rising order; None for the powers of two, which never end."""

    sizes: tuple[int, ...] | None = None

    @staticmethod
    def of(sizes: Sequence[int] | None) -> Buckets:
        """Sizes as a caller gives them. `ValueError` unless they are at least 1."""
        if sizes is None:
            return Buckets()
        if not sizes or min(sizes) < 1:
            raise ValueError(f"jit: buckets={list(sizes)!r:.100}; give token counts of at least 1, or leave it out")
        return Buckets(tuple(sorted(set(sizes))))

    def at_least(self, count: int) -> int:
        """The smallest size that holds `count` tokens."""
        if self.sizes is None:
            return 1 << max(count - 1, 0).bit_length()
        found = next((size for size in self.sizes if size >= count), None)
        if found is None:
            raise NoBucketError(f"a batch of {count} tokens is larger than the largest bucket, {self.sizes[-1]}")
        return found

    def fit(self, batch: Ragged) -> Any:
        """`batch` padded to its bucket. A uniform one of few tokens a row is a bucket of its own."""
        if batch.uniform and batch.max_query <= FEW:
            return batch
        tokens = self.at_least(batch.tokens.shape[0])
        # Without counts on the host, `max_query` is all that bounds what a row may get.
        most = min(tokens, self.at_least(batch.max_query)) if batch.counts else batch.max_query
        return batch.pad(tokens, most)


def idle(batch: Ragged, bucket: Bucket) -> Any:
    """A batch as `batch`, as large as `bucket` says, to capture with."""
    tokens, most = bucket if isinstance(bucket, tuple) else (bucket, bucket)
    return batch.idle(tokens, most, uniform=most <= FEW and tokens == batch.rows * most)
