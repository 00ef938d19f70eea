"""Training curves: by epoch what was evaluated, by step what was logged."""

from collections.abc import Sequence

from micronorm.records import Record
from micronorm.report.lines import Series, line_plot
from micronorm.report.runs import Detail, NamedRun, by_epoch, by_step, keys_of, main_figure, title_of
from micronorm.report.text import Section, is_number

_ABSENT = "No step and no epoch is recorded yet: micronorm train RECIPE writes them while it trains."


def training(runs: Sequence[NamedRun], detail: Detail) -> Section:
    """Loss and the main figure by epoch, loss and learning rate by step."""
    key = main_figure(runs)
    wanted = (
        ("training-loss", "Training loss", "epoch", [loss_by_epoch(run.record) for run in runs]),
        (f"test-{_plain(key)}", f"Test {title_of(key)}", "epoch", [by_epoch(run.record, "test", key) for run in runs]),
        ("step-loss", "Training loss of each step", "step", [by_step(run.record, "loss") for run in runs]),
        ("learning-rate", "Learning rate", "step", [by_step(run.record, "lr") for run in runs]),
    )
    plots, empty = [], []
    for name, caption, below, found in wanted:
        if any(found):
            series = [Series(r.name, r.colour, p, r.role) for r, p in zip(runs, found, strict=True)]
            # A cosine's rate ends near 0: its last steps would fill a logarithmic scale.
            log = False if name == "learning-rate" else None
            plot = line_plot(name, series, caption=caption, below=below, limit=detail.points, log=log)
            plots += [] if plot is None else [plot]
            empty += [caption] if plot is None else []
    if not plots and not empty:
        return Section("training", "Training", absent=_ABSENT)
    about = f"No finite values: {', '.join(empty)}." if empty else ""
    return Section("training", "Training", about, plots, keys_of(runs, runs))


def _plain(key: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in key)[:40]


def loss_by_epoch(record: Record) -> list[tuple[float, float]]:
    """The recorded loss of each epoch; of a run that recorded none, the mean over the samples of its steps."""
    if recorded := by_epoch(record, "train", "loss"):
        return recorded
    sums: dict[float, tuple[float, float]] = {}
    for row in record.steps:
        if is_number(row.get("loss")) and is_number(row.get("epoch")):
            total, samples = sums.get(row["epoch"] + 1, (0.0, 0.0))
            weight = row.get("samples", 1)
            sums[row["epoch"] + 1] = total + weight * row["loss"], samples + weight
    return [(epoch, total / samples) for epoch, (total, samples) in sorted(sums.items()) if samples]
