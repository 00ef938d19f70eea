"""The runs of a page with their names and colours, and the figures in their records."""

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from micronorm.records import Record, is_number, read
from micronorm.report.html import LegendEntry, plain, slug
from micronorm.report.plots import COLOURS, METHOD_COLOURS

Source = str | os.PathLike[str] | Record
"""A run directory, or the record read from one."""
Runs = Mapping[str, Source] | Iterable[Source]

_TITLES = {"top1": "error", "top5": "top-5 error", "miou": "mIoU", "dice": "Dice"}
LOWER_IS_BETTER = frozenset({"error", "top1", "top5", "pixel_error", "loss"})
PERCENT = frozenset({"top1", "top5", "pixel_error", "miou", "accuracy"})
_PRECISION = re.compile(r"(mask_)?A[PR]\w*|(soft_)?dice\w*")  # between 0 and 100, but no shares of a count


def is_recall(figure: str) -> bool:
    """Return whether a figure is one of COCO's recalls."""
    return figure.removeprefix("mask_").startswith("AR")


def is_rounded(figure: str) -> bool:
    """Return whether a figure lies between 0 and 100, so that two decimals say enough."""
    return figure in PERCENT or _PRECISION.fullmatch(figure) is not None


@dataclass(frozen=True)
class NamedRun:
    """A run with the name and colour that it has in every section of a page."""

    name: str
    index: int
    colour_index: int
    record: Record

    @property
    def colour(self) -> str:
        """Return the name of the run's colour in `plots.LIGHT`."""
        return f"c{self.colour_index % len(COLOURS)}"

    @property
    def style(self) -> str:
        """Return the style of the run's lines. Colours alone tell only five runs apart for every reader."""
        return "solid" if self.colour_index < 5 else "dashed" if self.colour_index < len(COLOURS) else "dotted"

    @property
    def slug(self) -> str:
        """Return the run's number and name as a part of file names."""
        return f"{self.index + 1}-{slug(self.name)}".rstrip("-")


def read_runs(runs: Runs) -> list[NamedRun]:
    """Return the runs in order, under the names given or recorded; equal names get their folder or number added.

    Raises:
        ValueError: there are no runs.
    """
    sources = list(runs.values() if isinstance(runs, Mapping) else runs)
    if not sources:
        raise ValueError("a page needs at least one run, got none")
    records = [source if isinstance(source, Record) else read(source) for source in sources]
    if isinstance(runs, Mapping):
        names = [plain(str(name)) for name in runs]
    else:
        names = [plain(str(record.facts.get("name") or record.facts["recipe"])) for record in records]
        names = _distinguish(names, [record.path.resolve().name for record in records])
        names = _distinguish(names, [str(number) for number in range(1, len(names) + 1)])
    rows = enumerate(zip(names, _colour_indices(records), records, strict=True))
    return [NamedRun(name, index, colour, record) for index, (name, colour, record) in rows]


def _colour_indices(records: Sequence[Record]) -> list[int]:
    """Return a different index for each run. The first run of a method has the colour of the method, if it has one."""
    wanted = [METHOD_COLOURS.get(_method_of(record)) for record in records]
    found = {run: COLOURS.index(wanted[run]) for run in range(len(records)) if wanted[run] not in (None, *wanted[:run])}
    free = (index for index in itertools.count() if index not in found.values())
    return [found[run] if run in found else next(free) for run in range(len(records))]


def _method_of(record: Record) -> str:
    """Return the name of the recorded method, such as "GN+WS"; an empty string if the record has none."""
    definition = record.facts.get("definition")
    if not isinstance(definition, dict) or "norm" not in definition:
        return ""
    norm, weight = (str(definition.get(part) or "").partition("(")[0] for part in ("norm", "weight"))
    return "+".join([norm or "BN", *([weight] if weight else [])])


def _distinguish(names: Sequence[str], marks: Sequence[str]) -> list[str]:
    """Return the names; those that occur more than once with their mark in parentheses."""
    often = Counter(names)
    return [f"{name} ({mark})" if often[name] > 1 else name for name, mark in zip(names, marks, strict=True)]


def legend_of(shown: Sequence[NamedRun], runs: Sequence[NamedRun]) -> list[LegendEntry]:
    """Return the legend of the runs that are shown; a page about a single run needs none."""
    return [LegendEntry(run.name, run.colour, run.style) for run in shown] if len(runs) > 1 else []


def detail_of(runs: Sequence[NamedRun]) -> int:
    """Return how many points a line has at most: fewer on a page of many runs, which would grow too large."""
    return min(400, max(40, 8000 // len(runs)))


def title_of(figure: str) -> str:
    """Return a recorded figure's name for readers."""
    return _TITLES.get(figure, figure.replace("_", " ")) + " %" * (figure in PERCENT)


def numbers(value: Any) -> dict[str, float]:
    """Return the entries of a JSON object that are numbers; an empty dict if `value` is no object."""
    return {plain(key): item for key, item in value.items() if is_number(item)} if isinstance(value, dict) else {}


def last_figures(record: Record) -> dict[str, float]:
    """Return the figures on the test samples of the last evaluation."""
    return next((found for row in reversed(record.epochs) if (found := numbers(row.get("test")))), {})


def main_figure(runs: Sequence[NamedRun]) -> str:
    """Return the figure that the page is about: the error, else the first that is not the loss, else the loss."""
    rows = (row for run in runs for row in run.record.epochs)
    keys = dict.fromkeys(key for row in rows for key in numbers(row.get("test")))
    return "error" if "error" in keys else next((key for key in keys if key != "loss"), "loss")


def by_epoch(record: Record, part: str, key: str) -> list[tuple[float, float]]:
    """Return (completed epochs, figure) of each evaluation. Records count epochs from 0."""
    rows = [row for row in record.epochs if is_number(row.get("epoch"))]
    found = {row["epoch"] + 1: numbers(row.get(part)).get(key) for row in rows}
    return [(epoch, value) for epoch, value in sorted(found.items()) if value is not None]


def by_step(record: Record, key: str) -> list[tuple[float, float]]:
    """Return (step, figure) of each step that has the figure."""
    return [(row["step"], row[key]) for row in record.steps if is_number(row.get(key))]


def speed_by_step(record: Record) -> list[tuple[float, float]]:
    """Return (step, samples per second) of each step that recorded both."""
    rows = [row for row in record.steps if is_number(row.get("seconds")) and is_number(row.get("samples"))]
    return [(row["step"], row["samples"] / row["seconds"]) for row in rows if row["seconds"] > 0]


def last_step(record: Record) -> int:
    """Return the number of recorded steps."""
    return max((row["step"] for row in (*record.steps[-1:], *record.epochs[-1:])), default=0)


def training_seconds(record: Record) -> float | None:
    """Return the sum of all steps' seconds, or None if no step recorded them."""
    found = [value for _, value in by_step(record, "seconds")]
    return sum(found) if found else None


def state_of(record: Record) -> str:
    """Return "not ended", "finished" or "ended early"."""
    if record.outcome is None:
        return "not ended"
    return "finished" if record.outcome.get("finished", True) else "ended early"
