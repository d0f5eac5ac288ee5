"""A roofline as a picture: how many FLOP/s a machine could reach at most for so many FLOPs a byte, by public peaks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from .sheet import Roof

WIDTH, HEIGHT, EDGE = 640, 300, 48
LEAST, MOST = -1.0, 4.0
"""Powers of ten of FLOPs a byte at the left and right edges."""
DECADES = 5.0
"""Powers of ten of FLOP/s below the roof that are shown."""


def drawn(roof: Roof) -> str:
    """The figure, as HTML: an SVG, and what its numbers stand for."""
    legend = "".join(f"<li>{escape(_told(roof, *point))}</li>" for point in roof.points)
    said = f"Roofline of {roof.machine}: an estimate from public peaks, nothing measured ({roof.peaks.source})."
    picture = "".join(_shapes(roof))
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="roofline" fill="none" '
        f'stroke="currentColor" font-size="11">{picture}</svg>'
        f"<figcaption>{escape(said)}<ol>{legend}</ol></figcaption></figure>"
    )


def _told(roof: Roof, name: str, flops: int, moved: int) -> str:
    return f"{name}: {flops / moved:.2g} FLOPs a byte, at least {1e3 * roof.peaks.seconds(flops, moved):.2g} ms"


def _shapes(roof: Roof) -> Iterator[str]:
    peaks = roof.peaks
    ridge = peaks.flops / peaks.bandwidth
    corners = (_at(roof, 10.0**LEAST), _at(roof, ridge), _at(roof, 10.0**MOST))
    yield f'<path d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in corners)}" stroke="#3b82f6" stroke-width="2"/>'
    yield f'<path d="M{EDGE} {EDGE / 2} V{HEIGHT - EDGE} H{WIDTH - EDGE / 2}" opacity=".5"/>'
    for power in range(int(LEAST), int(MOST) + 1):
        yield _word(_across(10.0**power), HEIGHT - EDGE + 14, f"{10.0**power:g}")
    yield _word(WIDTH / 2, HEIGHT - EDGE + 30, "FLOPs a byte")
    yield _word(corners[2][0] - 70, corners[2][1] - 6, f"{peaks.flops / 1e12:g} TFLOP/s")
    yield _word(corners[0][0] + 30, corners[0][1] - 26, f"{peaks.bandwidth / 1e12:g} TB/s")
    for number, (_, flops, moved) in enumerate(roof.points, 1):
        x, y = _at(roof, flops / moved)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#f59e0b" stroke="none"/>'
        yield _word(x + 4, y + 12 + 11 * (number % 3), str(number))


def _word(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" fill="currentColor" stroke="none">{text}</text>'


def _across(intensity: float) -> float:
    place = (math.log10(intensity) - LEAST) / (MOST - LEAST)
    return EDGE + place * (WIDTH - 1.5 * EDGE)


def _at(roof: Roof, intensity: float) -> tuple[float, float]:
    """Where the roof stands over so many FLOPs a byte; beyond the edges, at them."""
    intensity = min(max(intensity, 10.0**LEAST), 10.0**MOST)
    reached = min(roof.peaks.flops, intensity * roof.peaks.bandwidth)
    below = min(math.log10(roof.peaks.flops / reached) / DECADES, 1.0)
    return _across(intensity), EDGE / 2 + below * (HEIGHT - 1.5 * EDGE)
