"""Long series as short ones that hide nothing: each piece keeps its least, its mean and its largest value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Neighbouring points of a series. Without a finite value among them, `mean` is NaN."""

    x: float
    """Of the last point."""
    low: float
    mean: float
    high: float
    count: int


def thin(points: Sequence[tuple[float, float]], limit: int) -> list[Piece]:
    """At most `limit` pieces of equally many neighbouring points; of few points each is its own piece.

    Args:
        points: (x, y) with ascending x. Values that are not finite have no part in what their piece keeps.
        limit: from 1 on.

    Example:
        >>> thin([(1, 5.0), (2, 1.0), (3, 3.0), (4, 3.0)], 2)
        [Piece(x=2, low=1.0, mean=3.0, high=5.0, count=2), Piece(x=4, low=3.0, mean=3.0, high=3.0, count=2)]
    """
    size = max(1, math.ceil(len(points) / limit))
    found = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        finite = [y for _, y in part if math.isfinite(y)] or [math.nan]
        # A mean of sums could overflow, and stray out of [low, high] by rounding.
        mean = min(max(math.fsum(y / len(finite) for y in finite), min(finite)), max(finite))
        found.append(Piece(part[-1][0], min(finite), mean, max(finite), len(part)))
    return found
