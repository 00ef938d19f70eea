"""Two figures per row, theirs as a ring and ours as a dot, with the way between them."""

from collections.abc import Sequence
from dataclasses import dataclass

from micronorm.report.axes import tick_text, value_axis
from micronorm.report.drawing import Circle, Drawing, Item, Path, Plot, Text

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 420, 150, 16, 6, 24
_LETTERS = 22


@dataclass(frozen=True)
class Pair:
    """A row: its name, their figure, and ours with its colour."""

    name: str
    theirs: float
    ours: float
    colour: str


def pair_plot(name: str, pairs: Sequence[Pair], *, caption: str, below: str, note: str = "") -> Plot:
    """The rows downwards, on one axis."""
    bottom = _TOP + _ROW * len(pairs)
    values = [value for pair in pairs for value in (pair.theirs, pair.ours)]
    axis = value_axis(values, _LEFT, _WIDTH - _RIGHT, log=False)
    items: list[Item] = [Path([[(axis(tick), _TOP), (axis(tick), bottom)] for tick in axis.ticks], "grid")]
    items += [Text(axis(tick), bottom + 16, tick_text(tick), "middle") for tick in axis.ticks]
    items.append(Text((_LEFT + _WIDTH - _RIGHT) / 2, bottom + 33, below, "middle"))
    for k, pair in enumerate(pairs):
        y = _TOP + (k + 0.5) * _ROW
        theirs, ours = axis(pair.theirs), axis(pair.ours)
        short = pair.name if len(pair.name) <= _LETTERS else pair.name[: _LETTERS - 1] + "…"
        items += [
            Text(_LEFT - 8, y + 4, short, "end", "name"),
            Path([[(theirs, y), (ours, y)]], "line", pair.colour),
            Circle(theirs, y, 4.5, "ring", pair.colour, title=f"{pair.name}, the paper: {pair.theirs:.4g}"),
            Circle(ours, y, 4.5, "mark", pair.colour, title=f"{pair.name}, ours: {pair.ours:.4g}"),
        ]
    return Plot(name, caption, Drawing(_WIDTH, bottom + 40, items, f"{caption}: {below}"), note, keys=())
