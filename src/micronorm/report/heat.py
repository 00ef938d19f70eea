"""Tables of numbers as tables of colours, on a scale that may be shared by several."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from micronorm.report.axes import nice_step, tick_text
from micronorm.report.drawing import Drawing, Grid, Item, Path, Plot, Text, box
from micronorm.report.palette import LEVELS

_WIDTH, _LEFT, _RIGHT, _TOP = 420, 118, 12, 6
_LETTERS = 17  # of a row's name that fit into the margin


@dataclass(frozen=True)
class Table:
    """Values by row and column; NaN where there is none."""

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]


def scale_top(tables: Sequence[Table]) -> float:
    """Where the scale ends: at the largest value, or where 98 % lie below, if the largest is more than twice that.

    A few cells far out would otherwise leave one colour for all the others.
    """
    finite = sorted(v for table in tables for row in table.values for v in row if math.isfinite(v))
    if not finite:
        return 1.0
    usual = finite[math.ceil(0.98 * len(finite)) - 1]
    return (finite[-1] if finite[-1] <= 2 * usual or usual <= 0 else usual) or 1.0


def heat_plot(name: str, table: Table, *, top: float, caption: str, below: str, note: str = "") -> Plot:
    """The table from 0 (palest) to `top`, rows downwards."""
    rows, columns = len(table.rows), len(table.columns)
    height = min(18.0, max(3.0, 200 / rows))
    width = (_WIDTH - _LEFT - _RIGHT) / columns
    bottom = _TOP + rows * height
    items: list[Item] = [Path([box(_LEFT, _TOP, width * columns, rows * height)], "grid", closed=True)]
    items += _cells(table, top, width, height)
    every = math.ceil(12 / height)
    for k in range(0, rows, every):
        items.append(Text(_LEFT - 6, _TOP + (k + 0.5) * height + 4, _short(table.rows[k]), "end"))
    every = math.ceil(columns / 8)
    for k in range(0, columns, every):
        items.append(Text(_LEFT + (k + 0.5) * width, bottom + 15, table.columns[k], "middle"))
    items.append(Text(_LEFT + columns * width / 2, bottom + 31, below, "middle"))
    items += _scale(top, bottom + 42, above=any(v > top for row in table.values for v in row))
    finite = [f"{value:.3g}" if math.isfinite(value) else "–" for row in table.values for value in row]
    grid = Grid(_LEFT, _TOP, columns * width, rows * height, table.rows, table.columns, finite)
    drawing = Drawing(_WIDTH, bottom + 70, items, f"{caption} by layer and {below}", below, grid)
    return Plot(name, caption, drawing, note, keys=())


def _cells(table: Table, top: float, width: float, height: float) -> list[Item]:
    """A path per colour: thousands of elements would weigh more than all the rest of a page."""
    by_level: dict[int, list] = {}
    for k, row in enumerate(table.values):
        for j, value in enumerate(row):
            if math.isfinite(value):
                level = min(LEVELS - 1, max(0, int(value / top * LEVELS)))
                # a hair wider than its place, or the sheet would shine through between neighbours
                cell = box(_LEFT + j * width, _TOP + k * height, width + 0.3, height + 0.3)
                by_level.setdefault(level, []).append(cell)
    return [Path(cells, "cell", f"h{level}", closed=True) for level, cells in sorted(by_level.items())]


def _scale(top: float, y: float, *, above: bool) -> list[Item]:
    size = (_WIDTH - _LEFT - _RIGHT) / LEVELS
    items: list[Item] = [
        Path([box(_LEFT + k * size, y, size + 0.3, 9)], "cell", f"h{k}", closed=True) for k in range(LEVELS)
    ]
    for tick in _scale_ticks(top):
        items.append(Text(_LEFT + tick / top * size * LEVELS, y + 22, tick_text(float(f"{tick:.3g}")), "middle"))
    return [*items, Text(_LEFT - 6, y + 9, "above: darkest" if above else "scale", "end")]


def _scale_ticks(top: float) -> list[float]:
    """Round figures from 0 on, and the scale's end, which a reader needs most."""
    step = nice_step(top, 4)
    # those too near the end would be written over it
    return [tick for k in range(5) if (tick := k * step) <= 0.85 * top] + [top]


def _short(name: str) -> str:
    """The end of a long name: layers are told apart there."""
    return name if len(name) <= _LETTERS else "…" + name[1 - _LETTERS :]
