"""Line charts, of a size that stays legible on a phone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from micronorm.report.axes import Axis, Frame, axes_items, count_axis, value_axis
from micronorm.report.drawing import Circle, Drawing, Hover, Item, Path, Plot
from micronorm.report.thin import Piece, thin

MARKED = 40
"""Points of a line up to which each has a mark; more would hide the line."""

FRAME = Frame()


@dataclass(frozen=True)
class Series:
    """A named line: points (x, y), x ascending. Points that are not finite are left out, the line broken.

    `spread` has the half width of a band around each point, where there is one.
    """

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    role: str = "line"
    spread: Sequence[float] = ()


def line_plot(
    name: str,
    series: Sequence[Series],
    *,
    caption: str,
    below: str,
    limit: int = 400,
    note: str = "",
    log: bool | None = None,
) -> Plot | None:
    """The series over one another; None where no point is finite. Series of more points than `limit` are thinned.

    The scale is logarithmic where `log` says so, or where it says nothing and the values span magnitudes.
    """
    pieces = [_pieces(line, limit) for line in series]
    finite = [piece for line in pieces for piece in line if not math.isnan(piece.mean)]
    if not finite:
        return None
    x_axis = count_axis([piece.x for piece in finite], FRAME)
    values = [value for piece in finite for value in (piece.low, piece.high)]
    y_axis = value_axis(values, FRAME.height - FRAME.bottom, FRAME.top, log=log)
    items = axes_items(x_axis, y_axis, FRAME, below)
    for line, thinned in zip(series, pieces, strict=True):
        items += _band(line, thinned, x_axis, y_axis)
    for line, thinned in zip(series, pieces, strict=True):
        items += _line(line, thinned, x_axis, y_axis)
    notes = [note] * bool(note) + ["logarithmic scale"] * y_axis.log + _notes(series, pieces)
    drawing = Drawing(FRAME.width, FRAME.height, items, f"{caption} by {below}", below)
    return Plot(name, caption, drawing, "; ".join(notes))


def _pieces(line: Series, limit: int) -> list[Piece]:
    if not line.spread:
        return thin(line.points, limit)
    means = thin(line.points, limit)
    lows = thin([(x, y - s) for (x, y), s in zip(line.points, line.spread, strict=True)], limit)
    highs = thin([(x, y + s) for (x, y), s in zip(line.points, line.spread, strict=True)], limit)
    return [
        Piece(mean.x, low.low, mean.mean, high.high, mean.count)
        for mean, low, high in zip(means, lows, highs, strict=True)
    ]


def _notes(series: Sequence[Series], pieces: Sequence[Sequence[Piece]]) -> list[str]:
    most = max((piece.count for line in pieces for piece in line), default=1)
    left_out = sum(not math.isfinite(y) for line in series for _, y in line.points)
    thinned = f"means of up to {most} points, with a band from the least to the largest"
    return [thinned] * (most > 1) + [f"{left_out} values that are not finite left out"] * (left_out > 0)


def _runs(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """The pieces between gaps."""
    return [list(group) for finite, group in groupby(pieces, lambda piece: not math.isnan(piece.mean)) if finite]


def _band(line: Series, pieces: Sequence[Piece], x_axis: Axis, y_axis: Axis) -> list[Item]:
    if all(piece.low == piece.high for piece in pieces if not math.isnan(piece.mean)):
        return []
    low = y_axis.low  # a deviation may reach below a logarithmic axis
    outlines = [
        [(x_axis(p.x), y_axis(p.high)) for p in part] + [(x_axis(p.x), y_axis(max(p.low, low))) for p in part[::-1]]
        for part in _runs(pieces)
    ]
    return [Path(outlines, "band", line.colour, closed=True)]


def _line(line: Series, pieces: Sequence[Piece], x_axis: Axis, y_axis: Axis) -> list[Item]:
    parts = _runs(pieces)
    kept = [piece for part in parts for piece in part]
    if not kept:
        return []
    path = [[(x_axis(piece.x), y_axis(piece.mean)) for piece in part] for part in parts]
    values = [_value(piece) for piece in kept]
    hover = Hover(line.name, [f"{piece.x:.10g}" for piece in kept], values)
    items: list[Item] = [Path(path, line.role, line.colour, hover=hover)]
    marked = kept if len(kept) <= MARKED else kept[-1:]
    return items + [
        Circle(
            x_axis(piece.x),
            y_axis(piece.mean),
            2.6,
            colour=line.colour,
            title=f"{line.name}, {piece.x:.10g}: {_value(piece)}",
        )
        for piece in marked
    ]


def _value(piece: Piece) -> str:
    text = f"{piece.mean:.4g}"
    return text if piece.low == piece.high else f"{text} ({piece.low:.3g} to {piece.high:.3g})"
