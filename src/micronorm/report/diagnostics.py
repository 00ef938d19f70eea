"""The sections on what was measured inside the network: StatDiff, idle channels, gradient shares."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from micronorm.records import Record
from micronorm.report.charts import Chart, Line, area_chart, line_chart
from micronorm.report.html import LegendEntry, Section, is_finite, plain
from micronorm.report.runs import NamedRun, detail_of, legend_of

ABSENT = (
    "No layer statistics are recorded. Train with --observe 50, or put mn.observe(model) around a loop of your own."
)


@dataclass(frozen=True)
class LayerHistory:
    """Figures of layers over time.

    Args:
        unit: what `times` counts: "epoch" from 1, or "step" if all observations belong to one epoch.
        times: ascending.
        layers: names of the layers in the order of the network.
        values: for each time the figures of each layer, averaged over the observations of that time.
    """

    unit: str
    times: Sequence[int]
    layers: Sequence[str]
    values: Sequence[dict[str, tuple[float, ...]]]


def read_layer_history(record: Record, kind: str, *figures: str) -> LayerHistory | None:
    """Return the figures of all layers of a kind, or None if no layer has all of them as finite numbers."""
    found: list[tuple[int, int, str, tuple[float, ...]]] = []
    for row in record.diagnostics:
        for name, layer in (row.get("layers") or {}).items():
            if layer.get("kind") == kind:
                values = [layer.get(figure) for figure in figures]
                finite = tuple(filter(is_finite, values))
                if len(finite) == len(figures):
                    found.append(((row.get("epoch") or 0) + 1, row["step"], plain(name), finite))
    if not found:
        return None
    by_epoch = len({epoch for epoch, *_ in found}) > 1
    gathered: dict[int, dict[str, list[tuple[float, ...]]]] = {}
    for epoch, step, name, values in found:
        gathered.setdefault(epoch if by_epoch else step, {}).setdefault(name, []).append(values)
    means = {
        time: {name: tuple(map(_mean, zip(*rows, strict=True))) for name, rows in layers.items()}
        for time, layers in sorted(gathered.items())
    }
    names = list(dict.fromkeys(name for _, _, name, _ in found))
    return LayerHistory("epoch" if by_epoch else "step", list(means), names, list(means.values()))


def _read_all(runs: Sequence[NamedRun], kind: str, *figures: str) -> list[tuple[NamedRun, LayerHistory]]:
    found = ((run, read_layer_history(run.record, kind, *figures)) for run in runs)
    return [(run, history) for run, history in found if history is not None]


def _name_missing(shown: Sequence[NamedRun], runs: Sequence[NamedRun]) -> str:
    """Return a line of HTML that names the runs without layer statistics."""
    names = ", ".join(run.name for run in runs if run not in shown)
    return f'<p class="about">{escape(f"Without layer statistics: {names}.")}</p>' if names else ""


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# --- channels --------------------------------------------------------------------------------------------------------

_CHANNELS = (
    "StatDiff measures how much channels that are normalized together differ: the spread of their means over their "
    "mean standard deviation. It is 0 for BatchNorm. A high value means that single channels lie far from the rest of "
    "their group, so the following ReLU turns them off or lets them pass unchanged. micronorm diagnose names them."
)


def channels(runs: Sequence[NamedRun]) -> Section:
    """Return StatDiff over time, as in the paper's figure, and by layer; and the share of channels hardly active."""
    heading = "Differences between channels (StatDiff)"
    found = _read_all(runs, "norm", "stat_diff")
    if not found:
        return Section("stat-diff", heading, absent=ABSENT)
    unit = found[0][1].unit
    over_time = line_chart(
        "stat-diff",
        [_over_layers(run, history) for run, history in found],
        caption="StatDiff, mean over layers",
        x_label=unit,
        limit=detail_of(runs),
        note="the band is one standard deviation over layers",
    )
    by_layer = line_chart(
        "stat-diff-by-layer",
        [_by_layer(run, history) for run, history in found],
        caption="StatDiff by layer, at the last observation",
        x_label="norm, in the order of the network",
        limit=detail_of(runs),
    )
    idle = line_chart(
        "idle-channels",
        [_idle_channels(run, history) for run, history in _read_all(runs, "norm", "dead", "rare", "channels")],
        caption="Channels that are never or hardly ever active, %",
        x_label=unit,
        limit=detail_of(runs),
    )
    charts = [chart for chart in (over_time, by_layer, idle) if chart is not None]
    shown = [run for run, _ in found]
    return Section("stat-diff", heading, _CHANNELS, charts, legend_of(shown, runs), _name_missing(shown, runs))


def _over_layers(run: NamedRun, history: LayerHistory) -> Line:
    """Return the mean over layers at each time, in a band of one standard deviation over layers."""
    columns = [[values[0] for values in layers.values()] for layers in history.values]
    points = [(time, _mean(column)) for time, column in zip(history.times, columns, strict=True)]
    return Line(run.name, run.colour, points, run.style, [statistics.pstdev(column) for column in columns])


def _by_layer(run: NamedRun, history: LayerHistory) -> Line:
    """Return the last figure of each layer, numbered from 1."""
    last = {name: values[0] for at in history.values for name, values in at.items()}
    points = [(number, last[name]) for number, name in enumerate(history.layers, start=1)]
    return Line(run.name, run.colour, points, run.style)


def _idle_channels(run: NamedRun, history: LayerHistory) -> Line:
    """Return the share of channels that are dead or rarely active at each time."""
    points = []
    for time, layers in zip(history.times, history.values, strict=True):
        dead, rare, every = (sum(values[k] for values in layers.values()) for k in range(3))
        points.append((time, 100 * (dead + rare) / every if every else math.nan))
    return Line(run.name, run.colour, points, run.style)


# --- shares of the gradient ------------------------------------------------------------------------------------------

_SHARES = (
    "Weight Standardization removes two parts of the gradient of the standardized weights Ŵ before it reaches the "
    "weights W. This lowers the Lipschitz constant of the loss. The areas show how the squared gradient divides, as a "
    "mean over layers. For layers without Weight Standardization they show what it would remove."
)
_LEGEND = (
    LegendEntry("reaches W: σ²‖∇W‖²", "c0", "area"),
    LegendEntry("removed by the division, along Ŵ: ⟨Ŵ, ∇Ŵ⟩²/I", "s1", "area"),
    LegendEntry("removed by the centering, the mean: ⟨1, ∇Ŵ⟩²/I", "s2", "area"),
    LegendEntry("residual, due to ε", "s3", "area"),
)
_NAMES = ("reaches W", "along Ŵ", "mean", "residual")


def shares(runs: Sequence[NamedRun]) -> Section:
    """Return the shares over time, a chart for each run."""
    heading = "Shares of the gradient"
    found = _read_all(runs, "weight", "rest", "along", "mean")
    if not found:
        return Section("shares", heading, absent=ABSENT)
    charts = []
    for run, history in found:
        every = math.ceil(len(history.times) / detail_of(runs))
        rows = [[*map(_mean, zip(*at.values(), strict=True))] for at in history.values[::every]]
        caption = "Shares, mean over layers" + (f": {run.name}" if len(runs) > 1 else "")
        notes = [f"one {history.unit} in {every} shown"] * (every > 1)
        times = list(history.times[::every])
        charts.append(_shares_chart(f"shares-{run.slug}", times, rows, caption, history.unit, notes))
    return Section("shares", heading, _SHARES, charts, _LEGEND, _name_missing([run for run, _ in found], runs))


def _shares_chart(
    name: str, times: Sequence[float], rows: Sequence[Sequence[float]], caption: str, x_label: str, notes: list[str]
) -> Chart:
    """Stack the shares of each row. They are never scaled to sum to 1: the rest is the residual."""
    largest = max((1 - sum(row) for row in rows), key=abs)
    notes = notes + [f"they sum to 1 except for a residual of at most {largest:.1g}"] * (abs(largest) >= 1e-4)
    columns = zip(*([*row, 1 - sum(row)] for row in rows), strict=True)
    areas = [
        Line(label, entry.colour, [(time, max(0.0, value)) for time, value in zip(times, column, strict=True)])
        for label, entry, column in zip(_NAMES, _LEGEND, columns, strict=True)
    ]
    return area_chart(name, areas, caption=caption, x_label=x_label, note="; ".join(notes))
