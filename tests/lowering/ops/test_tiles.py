"""Tiles of hand-written kernels against the buffers of the machines, in a table worked out by hand."""

from __future__ import annotations

import warnings

import pytest

from lowering.target import TARGETS
from lowering.tiles import TileWarning, planes_at_once

KIB = 1024
A2, A5 = "ascend910b", "ascend950"


@pytest.mark.parametrize(
    ("target", "copies", "plane", "item_size", "planes", "expected"),
    [
        # A plane of 64 KiB twice is 128 of 192; two planes would be 2,097,152 bits of 1,572,864.
        (A2, 2, (128, 128), 4, 32, 1),
        (A2, 1, (128, 128), 4, 32, 2),
        (A2, 2, (128, 128), 2, 32, 2),
        # 192 / 64 = 3, of 12 planes and of 3; of 32 only 2 divide.
        (A2, 2, (64, 128), 4, 12, 3),
        (A2, 2, (64, 128), 4, 3, 3),
        (A2, 2, (64, 128), 4, 32, 2),
        (A2, 2, (64, 128), 4, 1, 1),
        (A2, 2, (96, 128), 4, 8, 2),
        # 248 KiB: 3 copies of one plane of 64 KiB, or 7 planes of 16 KiB twice.
        (A5, 3, (128, 128), 4, 16, 1),
        (A5, 2, (64, 64), 4, 35, 7),
        (A5, 2, (8, 1, 16), 4, 7, 7),
        # The last byte counts.
        (192 * KIB, 2, (96 * KIB,), 1, 5, 1),
        (192 * KIB - 1, 2, (48 * KIB,), 1, 4, 1),
        (192 * KIB, 2, (48 * KIB,), 1, 4, 2),
    ],
)
def test_planes_that_fit(
    target: str | int, copies: int, plane: tuple[int, ...], item_size: int, planes: int, expected: int
) -> None:
    """Without a warning, and one more that divides would not fit."""
    buffer = target if isinstance(target, int) else TARGETS[target].unified_buffer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert buffer is not None and planes_at_once(buffer, copies, plane, item_size, planes) == expected


def test_a_plane_that_does_not_fit_is_said() -> None:
    """With its sizes."""
    message = "2 copies of one plane of 256 x 128 elements of 4 bytes take 262144 bytes, and the buffer has 196608"
    with pytest.warns(TileWarning, match=message):
        assert planes_at_once(192 * KIB, 2, (256, 128), 4, 8) == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 2, (8, 8), 4, 1), "buffer=0"),
        ((64, 0, (8, 8), 4, 1), "copies=0"),
        ((64, 2, (8, 0), 4, 1), "plane=0"),
        ((64, 2, (8, 8), 0, 1), "item_size=0"),
        ((64, 2, (8, 8), 4, 0), "planes=0"),
    ],
)
def test_sizes_that_mean_nothing(sizes: tuple[int, int, tuple[int, ...], int, int], message: str) -> None:
    """An empty plane would fit any number of times."""
    with pytest.raises(ValueError, match=message):
        planes_at_once(*sizes)
