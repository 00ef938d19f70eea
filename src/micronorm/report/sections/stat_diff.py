"""Statistical differences between the channels of a group: how near the layers are to elimination singularities."""

from collections.abc import Sequence

from micronorm.report.heat import heat_plot, scale_top
from micronorm.report.lines import Series, line_plot
from micronorm.report.looks import HOW, Looks, missing, over_layers, read_looks, to_table
from micronorm.report.runs import Detail, NamedRun, keys_of
from micronorm.report.text import Section

_HEADING = "Statistical differences (StatDiff)"
_ABOUT = (
    "The spread of the channels' means within a group over their mean deviation: 0 for batch normalization. The "
    "higher, the further single channels lie from the rest of their group: the ReLU that follows shuts them off, or "
    "passes them whole."
)


def stat_diff(runs: Sequence[NamedRun], detail: Detail) -> Section:
    """Mean over the layers by epoch, as the paper's figure has it, and every layer by epoch."""
    found = [(run, looks) for run in runs if (looks := read_looks(run.record, "norm", "stat_diff")) is not None]
    if not found:
        return Section("stat-diff", _HEADING, absent=f"No look into the network is recorded. {HOW}")
    series = [Series(run.name, run.colour, *_points(run, looks)) for run, looks in found]
    plot = line_plot(
        "stat-diff",
        series,
        caption="StatDiff, mean over layers",
        below=found[0][1].below,
        limit=detail.points,
        note="band: a standard deviation over layers",
    )
    tables = [to_table(looks, detail) for _, looks in found]
    top = scale_top([table for table, _ in tables])
    heats = [
        heat_plot(
            f"stat-diff-{run.slug}",
            table,
            top=top,
            caption="StatDiff by layer" + (f": {run.name}" if len(runs) > 1 else ""),
            below=looks.below,
            note=note,
        )
        for (run, looks), (table, note) in zip(found, tables, strict=True)
    ]
    shown = [run for run, _ in found]
    plots = [*([plot] if plot else []), *heats]
    return Section("stat-diff", _HEADING, _ABOUT, plots, keys_of(shown, runs), missing(shown, runs))


def _points(run: NamedRun, looks: Looks) -> tuple[list[tuple[float, float]], str, list[float]]:
    points, spread = over_layers(looks)
    return points, run.role, spread
