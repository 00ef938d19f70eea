"""The training curves, and the section on memory and speed."""

from collections.abc import Collection, Sequence

from micronorm.records import Record, is_number
from micronorm.report.charts import Line, line_chart
from micronorm.report.html import Section, slug
from micronorm.report.runs import (
    LOWER_IS_BETTER,
    NamedRun,
    by_epoch,
    by_step,
    legend_of,
    main_figure,
    speed_by_step,
    title_of,
)

Points = list[tuple[float, float]]


def training(runs: Sequence[NamedRun], limit: int) -> Section:
    """Return loss and main figure by epoch, loss and learning rate by step."""
    key = main_figure(runs)
    records = [run.record for run in runs]
    curves = {
        ("training-loss", "Training loss", "epoch"): [loss_by_epoch(record) for record in records],
        (f"test-{slug(key)}", f"Test {title_of(key)}", "epoch"): [by_epoch(r, "test", key) for r in records],
        ("step-loss", "Training loss of each step", "step"): [by_step(record, "loss") for record in records],
        ("learning-rate", "Learning rate", "step"): [by_step(record, "lr") for record in records],
    }
    absent = "No step or epoch is recorded yet. micronorm train RECIPE records them while it trains."
    # The rate of a cosine schedule ends near 0: its last steps would fill a logarithmic scale. The first evaluations of
    # a figure that grows would, too.
    linear = {"learning-rate"} | (set() if key in LOWER_IS_BETTER else {f"test-{slug(key)}"})
    return _curves_section("training", "Training", curves, runs, limit, absent=absent, linear=linear)


def resources(runs: Sequence[NamedRun], limit: int) -> Section:
    """Return samples per second, memory if the device reports it, and the micro-batch size if it changed."""
    memory = [[(x, y / 2**30) for x, y in by_step(run.record, "memory")] for run in runs]
    sizes = [by_step(run.record, "micro_batch") for run in runs]
    changed = any(len({size for _, size in points}) > 1 for points in sizes)
    curves = {
        ("speed", "Samples per second", "step"): [speed_by_step(run.record) for run in runs],
        ("memory", "Peak memory so far, GiB", "step"): memory,
        ("micro-batch", "Samples per micro-batch", "step"): sizes if changed else [[] for _ in runs],
    }
    absent = "No step recorded its seconds. micronorm train records them."
    about = "" if any(memory) else "Memory is recorded on GPUs only."
    return _curves_section("resources", "Memory and speed", curves, runs, limit, about=about, absent=absent)


def _curves_section(
    key: str,
    heading: str,
    curves: dict[tuple[str, str, str], list[Points]],
    runs: Sequence[NamedRun],
    limit: int,
    *,
    about: str = "",
    absent: str,
    linear: Collection[str] = (),
) -> Section:
    """Return a section with a chart for each of `curves`: (name, caption, x label) and the points of each run.

    Charts named in `linear` never have a logarithmic scale.
    """
    charts, empty = [], []
    for (name, caption, x_label), found in curves.items():
        if not any(found):
            continue
        lines = [Line(run.name, run.colour, points, run.style) for run, points in zip(runs, found, strict=True)]
        log = False if name in linear else None
        chart = line_chart(name, lines, caption=caption, x_label=x_label, limit=limit, log=log)
        if chart is None:
            empty.append(caption)
        else:
            charts.append(chart)
    if not charts and not empty:
        return Section(key, heading, absent=absent)
    about = f"No finite values: {', '.join(empty)}." if empty else about
    return Section(key, heading, about, charts, legend_of(runs, runs))


def loss_by_epoch(record: Record) -> Points:
    """Return the recorded loss of each epoch, or else the mean over the samples of its steps."""
    if recorded := by_epoch(record, "train", "loss"):
        return recorded
    sums: dict[float, tuple[float, float]] = {}
    for row in record.steps:
        if is_number(row.get("loss")) and is_number(row.get("epoch")):
            total, samples = sums.get(row["epoch"] + 1, (0.0, 0.0))
            weight = row.get("samples", 1)
            sums[row["epoch"] + 1] = total + weight * row["loss"], samples + weight
    return [(epoch, total / samples) for epoch, (total, samples) in sorted(sums.items()) if samples]
