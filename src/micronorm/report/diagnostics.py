"""The sections on what was measured inside the network, layer by layer: StatDiff, singularities, gradient shares."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from micronorm.records import Record
from micronorm.report.charts import Chart, Grid, Line, area_chart, heat_map, largest_shown, line_chart, trajectory_chart
from micronorm.report.html import LegendEntry, Section, is_finite, plain
from micronorm.report.runs import NamedRun, legend_of

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


# --- StatDiff --------------------------------------------------------------------------------------------------------

_STAT_DIFF = (
    "StatDiff measures how much channels that are normalized together differ: the spread of their means over their "
    "mean standard deviation. It is 0 for BatchNorm. A high value means that single channels lie far from the rest of "
    "their group, so the following ReLU turns them off or lets them pass unchanged."
)


def stat_diff(runs: Sequence[NamedRun], limit: int) -> Section:
    """Return StatDiff as a mean over layers, as in the paper's figure, and by layer as heat maps with one scale."""
    heading = "Differences between channels (StatDiff)"
    found = _read_all(runs, "norm", "stat_diff")
    if not found:
        return Section("stat-diff", heading, absent=ABSENT)
    lines = [_over_layers(run, history) for run, history in found]
    chart = line_chart(
        "stat-diff",
        lines,
        caption="StatDiff, mean over layers",
        x_label=found[0][1].unit,
        limit=limit,
        note="the band is one standard deviation over layers",
    )
    grids = [_grid(history, limit) for _, history in found]
    top = largest_shown([grid for grid, _ in grids])
    charts = [] if chart is None else [chart]
    for (run, history), (grid, note) in zip(found, grids, strict=True):
        caption = "StatDiff by layer" + (f": {run.name}" if len(runs) > 1 else "")
        name = f"stat-diff-{run.slug}"
        charts.append(heat_map(name, grid, top=top, caption=caption, x_label=history.unit, note=note))
    shown = [run for run, _ in found]
    return Section("stat-diff", heading, _STAT_DIFF, charts, legend_of(shown, runs), _name_missing(shown, runs))


def _over_layers(run: NamedRun, history: LayerHistory) -> Line:
    """Return the mean over layers at each time, in a band of one standard deviation over layers."""
    columns = [[values[0] for values in layers.values()] for layers in history.values]
    points = [(time, _mean(column)) for time, column in zip(history.times, columns, strict=True)]
    return Line(run.name, run.colour, points, run.style, [statistics.pstdev(column) for column in columns])


def _grid(history: LayerHistory, limit: int) -> tuple[Grid, str]:
    """Return the first figure by layer and time, and a note on what was put together.

    Neighbouring times are averaged. Of neighbouring layers the largest value is kept, so that no outlier is lost.
    """
    across = math.ceil(len(history.times) / limit)
    down = math.ceil(len(history.layers) / max(1, limit * 3 // 10))
    columns = [slice(k, k + across) for k in range(0, len(history.times), across)]
    groups = [history.layers[k : k + down] for k in range(0, len(history.layers), down)]

    def cell(group: Sequence[str], column: slice) -> float:
        known = [[at[name][0] for at in history.values[column] if name in at] for name in group]
        return max((_mean(values) for values in known if values), default=math.nan)

    notes = [f"each column is the mean of {across} {history.unit}s"] * (across > 1)
    notes += [f"each row is the largest of {down} neighbouring layers"] * (down > 1)
    heads = [f"{history.times[column][-1]}" for column in columns]
    values = [[cell(group, column) for column in columns] for group in groups]
    return Grid([group[0] for group in groups], heads, values), "; ".join(notes)


# --- singularities ---------------------------------------------------------------------------------------------------

_SINGULARITIES = (
    "Each point is a layer: how much the means (σ_μ) and the standard deviations (σ_σ) of its normalized channels "
    "differ. BatchNorm lies at the origin. Layers far from the origin have channels that are switched off for all "
    "images (elimination singularities). A ring is the first observation of a layer, a dot its last."
)


def singularities(runs: Sequence[NamedRun], limit: int) -> Section:
    """Return the layers' paths over the plane of singularities, and the share of channels that are hardly active."""
    heading = "Distance to BatchNorm"
    found = _read_all(runs, "norm", "sigma_mean", "sigma_std")
    if not found:
        return Section("singularities", heading, absent=ABSENT)
    most = max(1, limit // len(found))
    left_out = sum(max(0, len(history.layers) - most) for _, history in found)
    paths = [path for run, history in found for path in _trajectories(run, history, most, limit, len(runs) > 1)]
    plane = trajectory_chart(
        "singularities",
        paths,
        caption="Layers by the spread of their channels",
        x_label="σ_μ, spread of means",
        y_label="σ_σ, spread of standard deviations",
        note=f"{left_out} layers nearest to the origin left out" if left_out else "",
    )
    shown = [run for run, _ in found]
    charts = [plane, *_idle_channels(runs, limit)]
    heading_words = legend_of(shown, runs)
    return Section("singularities", heading, _SINGULARITIES, charts, heading_words, _name_missing(shown, runs))


def _trajectories(run: NamedRun, history: LayerHistory, most: int, limit: int, several: bool) -> list[Line]:
    """Return the `most` layers that end farthest from the origin, each by its first, last and evenly chosen places."""
    paths = []
    for layer in history.layers:
        points: list[tuple[float, float]] = [at[layer] for at in history.values if layer in at]  # type: ignore[misc]
        kept = min(max(1, limit // 16), len(points))
        places = [points[round(k * (len(points) - 1) / max(1, kept - 1))] for k in range(kept)]
        name = f"{run.name}, {layer}" if several else layer
        paths.append(Line(name, run.colour, places if kept > 1 else points[-1:]))
    return sorted(paths, key=lambda path: -math.hypot(*path.points[-1]))[:most]


def _idle_channels(runs: Sequence[NamedRun], limit: int) -> list[Chart]:
    found = _read_all(runs, "norm", "dead", "rare", "channels")
    lines = []
    for run, history in found:
        points = []
        for time, layers in zip(history.times, history.values, strict=True):
            dead, rare, channels = (sum(values[k] for values in layers.values()) for k in range(3))
            points.append((time, 100 * (dead + rare) / channels if channels else math.nan))
        lines.append(Line(run.name, run.colour, points, run.style))
    caption = "Channels that are never or hardly ever active, %"
    unit = found[0][1].unit if found else ""
    chart = line_chart("idle-channels", lines, caption=caption, x_label=unit, limit=limit)
    return [] if chart is None else [chart]


# --- shares of the gradient ------------------------------------------------------------------------------------------

_SHARES = (
    "Weight Standardization removes two parts of the gradient of the standardized weights Ŵ before it reaches the "
    "weights W. This lowers the Lipschitz constant of the loss. The areas show how the squared gradient divides, as a "
    "mean over layers."
)
_PLAIN = "For layers without Weight Standardization they show what it would remove."
_LEGEND = (
    LegendEntry("reaches W: σ²‖∇W‖²", "c0", "area"),
    LegendEntry("removed by the division, along Ŵ: ⟨Ŵ, ∇Ŵ⟩²/I", "s1", "area"),
    LegendEntry("removed by the centering, the mean: ⟨1, ∇Ŵ⟩²/I", "s2", "area"),
    LegendEntry("residual, due to ε", "s3", "area"),
)
_NAMES = ("reaches W", "along Ŵ", "mean", "residual")


def shares(runs: Sequence[NamedRun], limit: int) -> Section:
    """Return the shares over time for each run, and by layer at the last observation of a single run."""
    heading = "Shares of the gradient"
    found = _read_all(runs, "weight", "rest", "along", "mean")
    if not found:
        return Section("shares", heading, absent=ABSENT)
    charts, some_plain = [], False
    for run, history in found:
        plain = _plain_layers(run.record) & {*history.layers}
        some_plain |= bool(plain)
        all_plain = len(plain) == len(history.layers)
        what = "Shares that standardization would remove" if all_plain else "Shares"
        notes = [f"{len(plain)} of {len(history.layers)} layers are not standardized"] * (bool(plain) and not all_plain)
        every = math.ceil(len(history.times) / limit)
        notes += [f"one {history.unit} in {every} shown"] * (every > 1)
        rows = [[*map(_mean, zip(*at.values(), strict=True))] for at in history.values[::every]]
        caption = f"{what}, mean over layers" + (f": {run.name}" if len(runs) > 1 else "")
        name, times = f"shares-{run.slug}", list(history.times[::every])
        charts.append(_shares_chart(name, times, rows, caption, history.unit, notes))
        if len(runs) == 1:
            last = history.values[-1]
            caption = f"{what}, by layer, at {history.unit} {history.times[-1]}"
            by_layer = [[*last[layer]] for layer in history.layers if layer in last]
            places = list(range(1, len(by_layer) + 1))
            label = "layer, in the order of the network"
            charts.append(_shares_chart(f"shares-by-layer-{run.slug}", places, by_layer, caption, label, notes[:1]))
    about = f"{_SHARES} {_PLAIN}" if some_plain else _SHARES
    return Section("shares", heading, about, charts, _LEGEND, _name_missing([run for run, _ in found], runs))


def _plain_layers(record: Record) -> set[str]:
    """Return the layers that use their weights as they are."""
    found = (item for row in record.diagnostics for item in (row.get("layers") or {}).items())
    return {plain(name) for name, layer in found if layer.get("kind") == "weight" and layer.get("weight") == "none"}


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
