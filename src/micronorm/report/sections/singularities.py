"""The plane of singularities: how far each layer's normalized channels are from batch normalization's."""

import math
from collections.abc import Sequence
from typing import Any

from micronorm.report.lines import Series, line_plot
from micronorm.report.looks import HOW, Looks, missing, read_looks
from micronorm.report.plane import Way, plane_plot
from micronorm.report.runs import Detail, NamedRun, keys_of
from micronorm.report.text import Section

_HEADING = "Distance to batch normalization"
_ABOUT = (
    "Each layer by the spread of its normalized channels' means (σ_μ) and deviations (σ_σ): batch normalization lies "
    "at the origin, elimination singularities far from it. A ring is a layer's first look, a dot its last."
)


def singularities(runs: Sequence[NamedRun], detail: Detail) -> Section:
    """The plane, and the share of channels that are hardly ever active."""
    found = [(r, looks) for r in runs if (looks := read_looks(r.record, "norm", "sigma_mean", "sigma_std")) is not None]
    if not found:
        absent = f"No look into the network is recorded that has the spread of channels. {HOW}"
        return Section("singularities", _HEADING, absent=absent)
    most = max(1, detail.ways // len(found))
    left_out = sum(max(0, len(looks.layers) - most) for _, looks in found)
    ways = [way for run, looks in found for way in _ways(run, looks, most, detail.wander, named=len(runs) > 1)]
    note = f"{left_out} layers that stayed nearest to the origin left out" if left_out else ""
    plots = [
        plane_plot(
            "singularities",
            ways,
            caption="Singularity plane",
            across="σ_μ, spread of means",
            up="σ_σ, spread of deviations",
            note=note,
        ),
        *_idle(runs, detail),
    ]
    shown = [run for run, _ in found]
    return Section("singularities", _HEADING, _ABOUT, plots, keys_of(shown, runs), missing(shown, runs))


def _ways(run: NamedRun, looks: Looks, most: int, wander: int, *, named: bool) -> list[Way]:
    ways = []
    for layer in looks.layers:
        points: list[tuple[float, float]] = [values[layer] for values in looks.values if layer in values]  # type: ignore[misc]
        # first, last and evenly between: the ends are what the plane is about
        count = min(wander, len(points))
        at = [round(k * (len(points) - 1) / max(1, count - 1)) for k in range(count)]
        kept = [points[k] for k in at] if count > 1 else points[-1:]
        ways.append(Way(f"{run.name}, {layer}" if named else layer, run.colour, kept))
    return sorted(ways, key=lambda way: -math.hypot(*way.points[-1]))[:most]


def _idle(runs: Sequence[NamedRun], detail: Detail) -> list[Any]:
    series, below = [], "step"
    for run in runs:
        looks = read_looks(run.record, "norm", "dead", "rare", "channels")
        if looks is not None:
            points = []
            for x, layers in zip(looks.xs, looks.values, strict=True):
                dead, rare, channels = (sum(values[k] for values in layers.values()) for k in range(3))
                points.append((x, 100 * (dead + rare) / channels if channels else math.nan))
            series.append(Series(run.name, run.colour, points, run.role))
            below = looks.below
    caption = "Channels never or hardly ever active, %"
    plot = line_plot("idle-channels", series, caption=caption, below=below, limit=detail.points) if series else None
    return [] if plot is None else [plot]
