"""Line charts as inline SVG, of a size that stays legible on a phone. Colours are classes of the page's style sheet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = 8
"""Classes c0 to c7; further series take the same colours with dashed lines."""

_WIDTH, _HEIGHT = 420, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 12, 38
_POINTS_MARKED = 40  # more marks than that would hide the line
_LOG_RATIO = 30  # largest to smallest value from which a linear axis would press the small ones flat


@dataclass(frozen=True)
class Series:
    """A named line: points (x, y), x whole and ascending. Points that are not finite are left out, the line broken."""

    name: str
    points: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class _Axis:
    """From values to pixels, over [low, high]."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float]
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 2)


def line_chart(series: Sequence[Series], *, caption: str, x_label: str) -> str:
    """A figure of the series over one another, or of a sentence where no point is finite."""
    finite = [(x, y) for line in series for x, y in line.points if math.isfinite(y)]
    if not finite:
        return f"<figure><figcaption>{escape(caption)}</figcaption><p>No finite values.</p></figure>"
    x_axis = _x_axis([x for x, _ in finite])
    y_axis = _y_axis([y for _, y in finite])
    left_out = sum(len(line.points) for line in series) - len(finite)
    notes = ["logarithmic scale"] * y_axis.log + [f"{left_out} values that are not finite left out"] * (left_out > 0)
    note = f' <span class="note">({escape("; ".join(notes))})</span>' if notes else ""
    lines = "".join(_line(line, index, x_axis, y_axis) for index, line in enumerate(series))
    return (
        f"<figure><figcaption>{escape(caption)}{note}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(caption)} by {escape(x_label)}">'
        f"{_grid(x_axis, y_axis, x_label)}{lines}</svg></figure>"
    )


def legend(names: Sequence[str]) -> str:
    """The names with a piece of their lines, in the order of the series."""
    items = "".join(
        f'<li><svg viewBox="0 0 28 10" aria-hidden="true"><path class="{_look(index)}" d="M1 5H27"/></svg>'
        f"{escape(name)}</li>"
        for index, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'


def _look(index: int) -> str:
    return f"line c{index % COLOURS}" + (" dashed" if index // COLOURS % 2 else "")


def _line(line: Series, index: int, x_axis: _Axis, y_axis: _Axis) -> str:
    path, marks, pen = [], [], "M"
    for x, y in line.points:
        if not math.isfinite(y):
            pen = "M"
            continue
        at = x_axis(x), y_axis(y)
        path.append(f"{pen}{at[0]:g} {at[1]:g}")
        pen = "L"
        title = f"<title>{escape(line.name)}, {x}: {y:.4g}</title>"
        marks.append(f'<circle class="mark c{index % COLOURS}" cx="{at[0]:g}" cy="{at[1]:g}" r="2.6">{title}</circle>')
    shown = marks if len(marks) <= _POINTS_MARKED else marks[-1:]
    return f'<path class="{_look(index)}" d="{" ".join(path)}"/>{"".join(shown)}' if path else ""


def _grid(x_axis: _Axis, y_axis: _Axis, x_label: str) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for tick in y_axis.ticks:
        y = y_axis(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:g}H{right}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{y + 4:g}" text-anchor="end">{tick:g}</text>')
    for tick in x_axis.ticks:
        x = x_axis(tick)
        parts.append(f'<path class="tick" d="M{x:g} {bottom}v4"/>')
        parts.append(f'<text x="{x:g}" y="{bottom + 17}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>')
    parts.append(f'<text x="{(_LEFT + right) / 2:g}" y="{_HEIGHT - 5}" text-anchor="middle">{escape(x_label)}</text>')
    return "".join(parts)


def _x_axis(values: Sequence[int]) -> _Axis:
    low, high = min(values), max(values)
    every = max(1, round(_nice_step(high - low, 7))) if high > low else 1
    ticks = [tick for tick in range(low, high + 1) if tick % every == 0] or [low]
    if low not in ticks and ticks[0] - low > 0.6 * every:
        ticks.insert(0, low)
    # A little room at both ends keeps marks off the frame, and a lone point in the middle.
    room = 0.03 * (high - low) or 1
    return _Axis(low - room, high + room, _LEFT, _WIDTH - _RIGHT, ticks)


def _y_axis(values: Sequence[float]) -> _Axis:
    low, high = min(values), max(values)
    pixels = _HEIGHT - _BOTTOM, _TOP
    if low > 0 and high / low >= _LOG_RATIO:
        return _Axis(low / 1.15, high * 1.15, *pixels, _log_ticks(low / 1.15, high * 1.15), log=True)
    if 0 <= low < high / 2 or high == low == 0:
        low = 0.0  # where the values come near it, the distance to zero is part of the picture
    step = _nice_step(high - low or abs(high) or 1.0, 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    last = max(last, first + 1)
    return _Axis(first * step, last * step, *pixels, [k * step for k in range(first, last + 1)])


def _log_ticks(low: float, high: float) -> list[float]:
    """Seven at most: 1, 2 and 5 times powers of ten, or only every so many powers."""
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    ticks = [tick for power in powers for m in (1, 2, 5) if low <= (tick := float(f"{m}e{power}")) <= high]
    if len(ticks) <= 7:
        return ticks
    every = math.ceil(len(powers) / 7)
    return [tick for power in powers if power % every == 0 and low <= (tick := float(f"1e{power}")) <= high]


def _nice_step(span: float, count: int) -> float:
    """The least of 1, 2 and 5 times a power of ten of which `count` at most fit into `span`."""
    unit = 10.0 ** math.floor(math.log10(span / count))
    return next(unit * m for m in (1, 2, 5, 10, 20) if span <= unit * m * count * (1 + 1e-9))
