"""Memory and speed over the steps."""

from collections.abc import Sequence

from micronorm.report.lines import Series, line_plot
from micronorm.report.runs import Detail, NamedRun, by_step, keys_of
from micronorm.report.text import Section, is_number

_HEADING = "Memory and speed"


def resources(runs: Sequence[NamedRun], detail: Detail) -> Section:
    """Samples per second, memory where the device tells it, and the micro-batch where it changed."""
    speed = [_speed(run) for run in runs]
    memory = [[(x, y / 2**30) for x, y in by_step(run.record, "memory")] for run in runs]
    cuts = [by_step(run.record, "micro_batch") for run in runs]
    changed = any(len({size for _, size in points}) > 1 for points in cuts)
    plots = []
    for name, caption, found in (
        ("speed", "Samples per second", speed),
        ("memory", "Peak memory so far, GiB", memory),
        ("micro-batch", "Samples per micro-batch", cuts if changed else []),
    ):
        series = [Series(r.name, r.colour, p, r.role) for r, p in zip(runs, found, strict=False) if p]
        plot = line_plot(name, series, caption=caption, below="step", limit=detail.points) if series else None
        plots += [] if plot is None else [plot]
    if not plots:
        return Section(
            "resources", _HEADING, absent="No step is recorded with its seconds: micronorm train notes them."
        )
    about = "" if any(memory) else "Memory is recorded on GPUs only."
    return Section("resources", _HEADING, about, plots, keys_of(runs, runs))


def _speed(run: NamedRun) -> list[tuple[float, float]]:
    rows = [r for r in run.record.steps if is_number(r.get("seconds")) and is_number(r.get("samples"))]
    return [(row["step"], row["samples"] / row["seconds"]) for row in rows if row["seconds"] > 0]
