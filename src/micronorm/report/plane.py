"""Points that wander over a plane, from a ring to a dot."""

from collections.abc import Sequence
from dataclasses import dataclass

from micronorm.report.axes import Frame, axes_items, value_axis
from micronorm.report.drawing import Circle, Drawing, Item, Path, Plot, Text

FRAME = Frame(height=310, top=34)


@dataclass(frozen=True)
class Way:
    """Where a named point was, first to last, with finite coordinates not below 0."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]


def plane_plot(name: str, ways: Sequence[Way], *, caption: str, across: str, up: str, note: str = "") -> Plot:
    """The ways on linear axes from 0, the dots above all lines."""
    left, top, right, bottom = FRAME.inner
    x_axis = value_axis([0.0, *(x for way in ways for x, _ in way.points)], left, right, log=False)
    y_axis = value_axis([0.0, *(y for way in ways for _, y in way.points)], bottom, top, log=False)
    items = [*axes_items(x_axis, y_axis, FRAME, across), Text(6, 13, up)]
    rings: list[Item] = []
    dots: list[Item] = []
    for way in ways:
        at = [(x_axis(x), y_axis(y)) for x, y in way.points]
        if len(at) > 1:
            items.append(Path([at], "trace", way.colour))
            rings.append(Circle(*at[0], 2.2, "ring", way.colour, title=f"{way.name}, at first: {_pair(way.points[0])}"))
        dots.append(Circle(*at[-1], 3, "mark", way.colour, title=f"{way.name}: {_pair(way.points[-1])}"))
    items += [*rings, *dots]
    return Plot(name, caption, Drawing(FRAME.width, FRAME.height, items, f"{caption}: {up} over {across}"), note)


def _pair(point: tuple[float, float]) -> str:
    return f"{point[0]:.3g}, {point[1]:.3g}"
