"""The charts of a page: lines, bars and stacked areas.

Each function returns a `Chart`. Colours are names of `plots.LIGHT`. Coordinates that are not finite are left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from micronorm.report.html import LegendEntry, is_finite, plain
from micronorm.report.plots import LIGHT, apply_style, load_matplotlib, plot_style, save_figure, subplots, to_svg

LOG_RATIO = 30
"""A value axis is logarithmic if its largest value is at least this many times its smallest."""
MARKED = 40
"""The most points of a line that shows a marker at each. A longer line has this many invisible hover targets, and two
more at its least and largest value."""

CHART_STYLE = {"text_parse_math": False, "font_size": 12}  # a name such as "$a$" is text, not a formula
_DASHES = {"solid": "solid", "dashed": (0, (3, 1.5)), "dotted": (0, (0.8, 1.8)), "area": "solid"}
WIDTH = 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 40


@dataclass(frozen=True)
class Chart:
    """A matplotlib figure with its words.

    Args:
        name: the stem of its files, made of letters, digits and hyphens.
        caption: what it shows.
        figure: the drawing.
        hover: texts under the pointer, as `plots.to_svg` takes them.
        note: a remark for the caption.
    """

    name: str
    caption: str
    figure: Any
    hover: Mapping[str, Sequence[str]] = field(default_factory=dict)
    note: str = ""

    def svg(self) -> str:
        """Return the drawing as an SVG element for a page."""
        with plot_style(**CHART_STYLE):
            return to_svg(self.figure, name=self.name, label=self.caption, hover=self.hover)

    def save(self, folder: Any, legend: Sequence[LegendEntry]) -> list[Any]:
        """Write the drawing with its caption and legend as SVG and PNG into `folder`, and return the files."""
        Line2D = load_matplotlib().lines.Line2D
        with plot_style(**CHART_STYLE):
            words = self.caption + (f"\n({self.note})" if self.note else "")
            self.figure.suptitle(words, x=0.02, y=1.0, ha="left", va="bottom", wrap=False)
            if legend:
                styles = [{"color": LIGHT[e.colour], "linestyle": _DASHES[e.style]} for e in legend]
                widths = [8 if entry.style == "area" else 2 for entry in legend]
                lines = [Line2D([], [], lw=lw, **style) for style, lw in zip(styles, widths, strict=True)]
                names = [entry.text for entry in legend]
                self.figure.legend(lines, names, loc="upper left", bbox_to_anchor=(0.02, 0), frameon=False)
            return save_figure(self.figure, folder / self.name)


@dataclass(frozen=True)
class Line:
    """A named line through points (x, y) with ascending x; `spread` is the half width of a band around each point."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    style: str = "solid"
    spread: Sequence[float] = ()


@dataclass(frozen=True)
class Summary:
    """Neighbouring points of a line: the last x, and the least, mean and largest value. NaN if no value is finite."""

    x: float
    low: float
    mean: float
    high: float
    count: int


def summarize(points: Sequence[tuple[float, float]], limit: int, *, spread: Sequence[float] = ()) -> list[Summary]:
    """Return at most `limit` summaries of equally many neighbouring points. Values that are not finite are skipped.

    Example:
        >>> summarize([(1, 5.0), (2, 1.0), (3, 3.0), (4, 3.0)], 2)
        [Summary(x=2, low=1.0, mean=3.0, high=5.0, count=2), Summary(x=4, low=3.0, mean=3.0, high=3.0, count=2)]
    """
    size = max(1, math.ceil(len(points) / limit))
    bands = spread or [0.0] * len(points)
    found = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        pairs = zip(part, bands[start : start + size], strict=True)
        finite = [(y, band) for (_, y), band in pairs if is_finite(y)] or [(math.nan, 0.0)]
        low, high = min(y - band for y, band in finite), max(y + band for y, band in finite)
        # Dividing first avoids overflow; clamping keeps rounding from moving the mean out of [low, high].
        mean = min(max(math.fsum(y / len(finite) for y, _ in finite), low), high)
        found.append(Summary(part[-1][0], low, mean, high, len(part)))
    return found


def line_chart(
    name: str,
    lines: Sequence[Line],
    *,
    caption: str,
    x_label: str,
    limit: int = 400,
    note: str = "",
    log: bool | None = None,
) -> Chart | None:
    """Draw lines over one another, or return None if no point is finite.

    A line of more than `limit` points is drawn through the means of neighbouring points, in a band from the least to
    the largest of them. The value axis is logarithmic if `log` is True, or if it is None and the values span
    magnitudes.
    """
    summaries = [summarize(line.points, limit, spread=line.spread) for line in lines]
    finite = [point for points in summaries for point in points if not math.isnan(point.mean)]
    if not finite:
        return None
    low, high = min(point.low for point in finite), max(point.high for point in finite)
    log = low > 0 and (high / low >= LOG_RATIO if log is None else log)
    hover: dict[str, list[str]] = {}
    with plot_style(**CHART_STYLE):
        figure, axes = new_axes(260)
        _set_value_axis(axes, low, high, log)
        set_count_axis(axes, [point.x for point in finite], x_label)
        for k, (line, points) in enumerate(zip(lines, summaries, strict=True)):
            _draw_line(axes, line, points, hover, f"{name}-{k}")
    most = max(point.count for points in summaries for point in points)
    left_out = sum(not is_finite(y) for line in lines for _, y in line.points)
    notes = [note] * bool(note) + ["logarithmic scale"] * log
    notes += [f"means of up to {most} points, with a band from the least to the largest"] * (most > 1)
    notes += [f"{left_out} values that are not finite left out"] * (left_out > 0)
    return Chart(name, caption, figure, hover, "; ".join(notes))


def _draw_line(axes: Any, line: Line, points: Sequence[Summary], hover: dict[str, list[str]], gid: str) -> None:
    kept = [point for point in points if not math.isnan(point.mean)]
    if not kept:
        return
    colour = LIGHT[line.colour]
    xs = [point.x for point in points]
    if any(point.low < point.high for point in kept):
        bottom = axes.get_ylim()[0]  # a band may reach below the end of a logarithmic axis
        lows = [max(point.low, bottom) for point in points]
        axes.fill_between(xs, lows, [point.high for point in points], color=colour, alpha=0.18, linewidth=0)
    axes.plot(xs, [p.mean for p in points], color=colour, linewidth=2, linestyle=_DASHES[line.style], gid=gid)
    hover[gid] = [line.name]
    few = len(kept) <= MARKED
    chosen = {round(k * (len(kept) - 1) / (MARKED - 1)) for k in range(MARKED)}
    chosen |= {max(range(len(kept)), key=lambda k: kept[k].high), min(range(len(kept)), key=lambda k: kept[k].low)}
    targets = kept if few else [kept[k] for k in sorted(chosen)]
    style = {"markersize": 5} if few else {"markersize": 9, "alpha": 0}
    places = [point.x for point in targets], [point.mean for point in targets]
    # Above all lines, and not cut off at the edge of the axes.
    given = {"linestyle": "", "marker": "o", "markeredgecolor": LIGHT["card"], "clip_on": False, "zorder": 3, **style}
    axes.plot(*places, color=colour, gid=f"{gid}-points", **given)
    hover[f"{gid}-points"] = [f"{line.name}, {point.x:.10g}: {_value_text(point)}" for point in targets]


def _value_text(point: Summary) -> str:
    text = f"{point.mean:.4g}"
    return text if point.low == point.high else f"{text} ({point.low:.3g} to {point.high:.3g})"


def bar_chart(name: str, bars: Sequence[tuple[str, str, float]], *, caption: str, unit: str) -> Chart:
    """Draw a horizontal bar for each (name, colour, value), with its value at its end, the first on top."""
    with plot_style(**CHART_STYLE):
        figure, axes = subplots(figsize=(560 / 72, (36 * len(bars) + 12) / 72))
        figure.subplots_adjust(left=225 / 560, right=1 - 70 / 560, top=1, bottom=0)
        apply_style(axes, grid="")
        axes.spines[:].set_visible(False)
        axes.set_xticks([])
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.set_xlim(0, max(max(value for *_, value in bars), 1e-9))
        axes.set_yticks(range(len(bars)), labels=[plain(label) for label, *_ in bars], color=LIGHT["text"])
        for k, (_, colour, value) in enumerate(bars):
            axes.barh(k, value, height=0.62, color=LIGHT[colour])
            axes.annotate(f"{value:.1f}{unit}", (value, k), (6, 0), textcoords="offset points", va="center", size=13)
    return Chart(name, caption, figure)


def tick_text(value: float, _: object = None) -> str:
    """Return the figure at a tick: 0.25, 1500, 20k, 1.5M.

    Example:
        >>> [tick_text(value) for value in (0.30000000000000004, 1500, 20_000, 1_500_000, 1e300)]
        ['0.3', '1500', '20k', '1.5M', '1e+300']
    """
    value = float(value)
    for size, sign in ((1e6, "M"), (1e3, "k")):
        if 1e4 <= abs(value) < 1e9 and abs(value) >= size:
            return f"{value / size:g}{sign}"
    return f"{round(value, 12):g}" if abs(value) >= 1e-9 else f"{value:g}"


def new_axes(height: float) -> tuple[Any, Any]:
    """Return a figure of 420 by `height` pixels and its axes, with fixed margins: automatic layout is slow."""
    figure, axes = subplots(figsize=(WIDTH / 72, height / 72))
    right, top = 1 - _RIGHT / WIDTH, 1 - _TOP / height
    figure.subplots_adjust(left=_LEFT / WIDTH, right=right, top=top, bottom=_BOTTOM / height)
    axes.yaxis.set_major_formatter(tick_text)
    axes.xaxis.set_major_formatter(tick_text)
    return figure, apply_style(axes)


def _set_value_axis(axes: Any, low: float, high: float, log: bool) -> None:
    if log:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.15, high * 1.15)
        axes.minorticks_off()
        axes.yaxis.set_major_locator(
            load_matplotlib().ticker.LogLocator(subs=(1, 2, 5) if high / low < 50 else (1,), numticks=7)
        )
        axes.yaxis.set_major_formatter(tick_text)
        return
    if 0 <= low <= high / 2:
        low = 0.0  # if the values come near zero, the distance to it is part of the picture
    room = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    axes.set_ylim(low if low == 0 else low - room, high + room)
    axes.yaxis.set_major_locator(load_matplotlib().ticker.MaxNLocator(5))


def set_count_axis(axes: Any, xs: Sequence[float], label: str, *, room: float = 0.03) -> None:
    """Set the horizontal axis of epochs or steps: whole ticks, and a little room at both ends."""
    space = room * (max(xs) - min(xs)) if max(xs) > min(xs) else 1
    axes.set_xlim(min(xs) - space, max(xs) + space)
    axes.xaxis.set_major_locator(load_matplotlib().ticker.MaxNLocator(7, integer=True))
    axes.grid(axis="x", visible=False)
    axes.set_xlabel(label)


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
