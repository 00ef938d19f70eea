"""The charts about layers: stacked shares, heat maps and trajectories."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from micronorm.report.charts import (
    CHART_STYLE,
    RIGHT,
    WIDTH,
    Chart,
    Line,
    draw_points,
    new_axes,
    set_count_axis,
    shorten,
)
from micronorm.report.plots import LIGHT, load_matplotlib, plot_style


def area_chart(name: str, areas: Sequence[Line], *, caption: str, x_label: str, note: str = "") -> Chart:
    """Stack the areas, which share their x, from the bottom up. The axis ends at 1 unless their sum is larger."""
    xs, shares = [x for x, _ in areas[0].points], [[y for _, y in area.points] for area in areas]
    if len(xs) == 1:  # an area needs a width
        xs, shares = [xs[0], xs[0] + 1], [share * 2 for share in shares]
    hover = {}
    with plot_style(**CHART_STYLE):
        figure, axes = new_axes(240)
        top = max(map(sum, zip(*shares, strict=True)))
        axes.set_ylim(0, top if top > 1.001 else 1)
        set_count_axis(axes, xs, x_label, room=0)
        layers = axes.stackplot(xs, *shares, colors=[LIGHT[area.colour] for area in areas], edgecolor=LIGHT["card"])
        for k, (area, layer) in enumerate(zip(areas, layers, strict=True)):
            layer.set_gid(f"{name}-{k}")
            hover[f"{name}-{k}"] = [f"{area.name}: {shares[k][0]:.1%} at first, {shares[k][-1]:.1%} at the end"]
    return Chart(name, caption, figure, hover, note)


@dataclass(frozen=True)
class Grid:
    """Values by row and column; NaN where no value is known."""

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]


def largest_shown(grids: Sequence[Grid]) -> float:
    """Return where a common colour scale ends: at the largest value, or at the 98th percentile if that is under half.

    A few large values would otherwise leave one colour for all the others.
    """
    values = np.concatenate([np.ravel(grid.values) for grid in grids])
    finite = np.sort(values[np.isfinite(values)])
    if not len(finite):
        return 1.0
    usual, largest = finite[math.ceil(0.98 * len(finite)) - 1], finite[-1]
    return float(largest if largest <= 2 * usual or usual <= 0 else usual) or 1.0


def heat_map(name: str, grid: Grid, *, top: float, caption: str, x_label: str, note: str = "") -> Chart:
    """Draw the values as colours from 0 to `top`, the first row on top. A row shows its values under the pointer."""
    rows, columns = len(grid.rows), len(grid.columns)
    height = min(18.0, max(3.0, 200 / rows)) * rows
    values = np.asarray(grid.values, dtype=float)
    hover = {}
    with plot_style(**CHART_STYLE):
        figure, axes = new_axes(height + 100, left=118, bottom=90)
        image = axes.imshow(values, cmap="cividis", vmin=0, vmax=top, aspect="auto", interpolation="none")
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        every = math.ceil(12 * rows / height)
        axes.set_yticks(range(0, rows, every), labels=[shorten(label) for label in grid.rows[::every]])
        every = math.ceil(columns / 8)
        axes.set_xticks(range(0, columns, every), labels=grid.columns[::every])
        axes.set_xlabel(x_label)
        scale = figure.add_axes((118 / WIDTH, 26 / (height + 100), 1 - (118 + RIGHT) / WIDTH, 8 / (height + 100)))
        extend = "max" if np.nanmax(values, initial=0) > top else "neither"
        bar = figure.colorbar(image, cax=scale, orientation="horizontal", extend=extend)
        bar.outline.set_visible(False)
        bar.set_ticks([0, top / 2, top], labels=[f"{tick:.3g}" for tick in (0, top / 2, top)])
        scale.tick_params(colors=LIGHT["quiet"], length=0)
        for k, (label, row) in enumerate(zip(grid.rows, values, strict=True)):
            # Fully transparent patches are drawn without a fill, and the pointer would not hit them.
            axes.axhspan(k - 0.5, k + 0.5, alpha=0.001, gid=f"{name}-{k}")
            hover[f"{name}-{k}"] = [f"{label}: {_row_text(row, grid.columns, x_label)}"]
    return Chart(name, caption, figure, hover, note, has_legend=False)


def _row_text(row: np.ndarray, columns: Sequence[str], x_label: str) -> str:
    known = [(value, column) for value, column in zip(row, columns, strict=True) if math.isfinite(value)]
    if not known:
        return "no finite value"
    ends = list(dict.fromkeys([known[0], max(known, key=lambda pair: pair[0]), known[-1]]))
    return ", ".join(f"{value:.3g} at {x_label} {column}" for value, column in ends)


def trajectory_chart(
    name: str, trajectories: Sequence[Line], *, caption: str, x_label: str, y_label: str, note: str = ""
) -> Chart:
    """Draw the places of points, at least 0, from a ring at the first to a dot at the last, on linear axes."""
    hover: dict[str, list[str]] = {}
    collections = load_matplotlib().collections
    with plot_style(**CHART_STYLE):
        figure, axes = new_axes(300, top=26)
        for colour in dict.fromkeys(trajectory.colour for trajectory in trajectories):
            own = [trajectory for trajectory in trajectories if trajectory.colour == colour]
            moved = [trajectory for trajectory in own if len(trajectory.points) > 1]
            paths = [trajectory.points for trajectory in moved]
            axes.add_collection(collections.LineCollection(paths, color=LIGHT[colour], alpha=0.45, linewidth=1))
            for kind, members, place, words in (("rings", moved, 0, ", at first"), ("dots", own, -1, "")):
                gid = f"{name}-{colour}-{kind}"
                style = {"markerfacecolor": LIGHT["card"], "markeredgecolor": LIGHT[colour]} if place == 0 else {}
                draw_points(axes, [t.points[place] for t in members], LIGHT[colour], gid, **style)
                at = [(t.name, *t.points[place]) for t in members]
                hover |= {gid: [f"{label}{words}: {x:.3g}, {y:.3g}" for label, x, y in at]} if at else {}
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(x_label)
        axes.set_title(y_label, loc="left", x=-0.12, size=12, color=LIGHT["quiet"])
    return Chart(name, caption, figure, hover, note)
