"""From values to pixels: linear and logarithmic axes with few, round ticks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from micronorm.report.drawing import Item, Path, Text

LOG_RATIO = 30
"""Largest to smallest value from which a linear axis would press the small ones flat."""


@dataclass(frozen=True)
class Frame:
    """A chart's sheet and the margins within it, in pixels."""

    width: float = 420
    height: float = 260
    left: float = 46
    right: float = 12
    top: float = 12
    bottom: float = 38

    @property
    def inner(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom edge of what lies within the margins."""
        return self.left, self.top, self.width - self.right, self.height - self.bottom


@dataclass(frozen=True)
class Axis:
    """From values to pixels, over [low, high]."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float]
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel at which the value stands."""
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def count_axis(values: Sequence[float], frame: Frame, *, room: float = 0.03) -> Axis:
    """The horizontal axis of epochs or steps: whole ticks, and a little room at both ends."""
    low, high = min(values), max(values)
    every = max(1, round(nice_step(high - low, 7))) if high > low else 1
    first = math.ceil(low / every)
    ticks: list[float] = [k * every for k in range(first, math.floor(high / every) + 1)] or [low]
    if low < min(10, ticks[0] - 0.6 * every):  # the first epoch or step, not the end of a first piece of many
        ticks.insert(0, low)
    # Room keeps marks off the frame, and a lone point in the middle.
    space = room * (high - low) if high > low else 1
    return Axis(low - space, high + space, frame.left, frame.width - frame.right, ticks)


def value_axis(values: Sequence[float], start: float, end: float, *, log: bool | None = None) -> Axis:
    """An axis over values of any kind, from pixel `start` to pixel `end`; logarithmic where they span magnitudes."""
    low, high = min(values), max(values)
    if low > 0 and (high / low >= LOG_RATIO if log is None else log):
        return Axis(low / 1.15, high * 1.15, start, end, _log_ticks(low / 1.15, high * 1.15), log=True)
    if 0 <= low < high / 2 or high == low == 0:
        low = 0.0  # where the values come near it, the distance to zero is part of the picture
    step = nice_step(high - low or abs(high) or 1.0, 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    last = max(last, first + 1)
    return Axis(first * step, last * step, start, end, [k * step for k in range(first, last + 1)])


def axes_items(x_axis: Axis, y_axis: Axis, frame: Frame, below: str) -> list[Item]:
    """Grid lines, ticks, their figures, and what the horizontal axis is of."""
    left, _, right, bottom = frame.inner
    lines = [[(left, y_axis(tick)), (right, y_axis(tick))] for tick in y_axis.ticks]
    ticks = [[(x_axis(tick), bottom), (x_axis(tick), bottom + 4)] for tick in x_axis.ticks]
    items: list[Item] = [Path(lines, "grid"), Path([[(left, bottom), (right, bottom)], *ticks], "axis")]
    items += [Text(left - 7, y_axis(tick) + 4, tick_text(tick), "end") for tick in y_axis.ticks]
    items += [Text(x_axis(tick), bottom + 17, tick_text(tick), "middle") for tick in x_axis.ticks]
    return [*items, Text((left + right) / 2, frame.height - 5, below, "middle")]


def tick_text(value: float) -> str:
    """A tick's figure: 0.25, 1500, 20k, 1.5M.

    Example:
        >>> [tick_text(value) for value in (0.30000000000000004, 1500, 20_000, 1_500_000, 1e300)]
        ['0.3', '1500', '20k', '1.5M', '1e+300']
    """
    for size, sign in ((1e6, "M"), (1e3, "k")):
        if 1e4 <= abs(value) < 1e9 and abs(value) >= size:
            return f"{value / size:g}{sign}"
    return f"{round(value, 12):g}" if abs(value) >= 1e-9 else f"{value:g}"


def nice_step(span: float, count: int) -> float:
    """The least of 1, 2 and 5 times a power of ten of which `count` at most fit into `span`."""
    unit = 10.0 ** math.floor(math.log10(span / count))
    return next(unit * m for m in (1, 2, 5, 10, 20) if span <= unit * m * count * (1 + 1e-9))


def _log_ticks(low: float, high: float) -> list[float]:
    """Seven at most: 1, 2 and 5 times powers of ten, or only every so many powers."""
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    ticks = [tick for power in powers for m in (1, 2, 5) if low <= (tick := float(f"{m}e{power}")) <= high]
    if len(ticks) <= 7:
        return ticks
    every = math.ceil(len(powers) / 7)
    return [tick for power in powers if power % every == 0 and low <= (tick := float(f"1e{power}")) <= high]
