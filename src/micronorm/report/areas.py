"""Shares over one another as stacked areas: how a whole divides, and how that changes."""

from collections.abc import Sequence
from dataclasses import dataclass

from micronorm.report.axes import Frame, axes_items, count_axis, value_axis
from micronorm.report.drawing import Drawing, Hover, Item, Path, Plot

FRAME = Frame(height=240)
ROUNDING = 1e-3  # by which shares may add up to more than one without the axis making room for it


@dataclass(frozen=True)
class Layer:
    """One of the areas: its share at each x, none below 0."""

    name: str
    colour: str
    shares: Sequence[float]


def area_plot(
    name: str, xs: Sequence[float], layers: Sequence[Layer], *, caption: str, below: str, note: str = ""
) -> Plot:
    """The layers stacked from the bottom up, over ascending `xs`. The axis goes to 1, and further only if they do."""
    if len(xs) == 1:  # an area needs a width: the one look is drawn as a bar
        xs, layers = [xs[0], xs[0] + 1], [Layer(y.name, y.colour, [*y.shares] * 2) for y in layers]
    sums = [0.0] * len(xs)
    edges = [sums]
    for layer in layers:
        sums = [total + share for total, share in zip(sums, layer.shares, strict=True)]
        edges.append(sums)
    x_axis = count_axis(xs, FRAME, room=0)
    above = [total for total in sums if total > 1 + ROUNDING]
    y_axis = value_axis([0.0, 1.0, *above], FRAME.height - FRAME.bottom, FRAME.top)
    at = [x_axis(x) for x in xs]
    areas: list[Item] = []
    lines: list[Item] = []
    for layer, low, high in zip(layers, edges, edges[1:], strict=False):
        upper = [(x, y_axis(value)) for x, value in zip(at, high, strict=True)]
        lower = [(x, y_axis(value)) for x, value in zip(at, low, strict=True)]
        span = f"{layer.shares[0]:.1%} at first, {layer.shares[-1]:.1%} in the end"
        areas.append(Path([upper + lower[::-1]], "area", layer.colour, closed=True, title=f"{layer.name}: {span}"))
        hover = Hover(layer.name, [f"{x:.10g}" for x in xs], [f"{share:.1%}" for share in layer.shares])
        lines.append(Path([upper], "edge", layer.colour, hover=hover))
    # The grid lies over the areas' feet only: under them it would not be seen, over them it would cut them up.
    items = [*axes_items(x_axis, y_axis, FRAME, below), *areas, *reversed(lines)]
    return Plot(name, caption, Drawing(FRAME.width, FRAME.height, items, f"{caption} by {below}", below), note)
