"""The runs of a page by name and colour, and the figures in their records."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from micronorm.records import Record, read
from micronorm.report.drawing import Key
from micronorm.report.palette import RUNS
from micronorm.report.text import is_number

Source = str | os.PathLike[str] | Record
"""A run directory, or what was read from one."""
Runs = Mapping[str, Source] | Iterable[Source]

_FIGURES = {"top1": "error %", "top5": "top-5 error %"}
"""Figures of records by the names that readers know them by."""

LOWER_IS_BETTER = frozenset({"error", "top1", "top5", "loss"})


@dataclass(frozen=True)
class Detail:
    """How much a page shows of what is long; halved until the page is small enough."""

    points: int = 400
    """Of a line."""
    columns: int = 60
    """Of a heat map."""
    rows: int = 120
    """Of a heat map."""
    ways: int = 400
    """Layers of all runs on the plane."""
    wander: int = 24
    """Points of a layer's way on the plane."""

    def halved(self) -> "Detail":
        """Half as much of everything, rounded up."""
        return Detail(*(-(-value // 2) for value in (self.points, self.columns, self.rows, self.ways, self.wander)))


@dataclass(frozen=True)
class NamedRun:
    """A run and how the page shows it: the same in every section."""

    name: str
    index: int
    record: Record

    @property
    def colour(self) -> str:
        """Of its lines and dots."""
        return f"c{self.index % RUNS}"

    @property
    def role(self) -> str:
        """Of its lines: dashed and dotted where colours alone are not told apart by everyone, or come again."""
        return "line" if self.index < 5 else "dashed" if self.index < RUNS else "dotted"

    @property
    def slug(self) -> str:
        """For the names of files: its number and what of its name every file system takes."""
        plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in self.name.lower())
        return f"{self.index + 1}-{'-'.join(filter(None, plain.split('-')))[:40]}".rstrip("-")


def read_runs(runs: Runs) -> list[NamedRun]:
    """The runs in order, by the names given, or by what their records call them, told apart where that is the same."""
    if isinstance(runs, Mapping):
        named = [(str(name), _record(source)) for name, source in runs.items()]
        return [NamedRun(name, index, record) for index, (name, record) in enumerate(named)]
    records = [_record(source) for source in runs]
    names = [str(record.facts.get("name") or record.facts["recipe"]) for record in records]
    for distinguish in (lambda record, _: record.path.resolve().name, lambda _, index: str(index + 1)):
        often = Counter(names)
        names = [
            f"{name} ({distinguish(record, index)})" if often[name] > 1 else name
            for index, (name, record) in enumerate(zip(names, records, strict=True))
        ]
    return [NamedRun(name, index, record) for index, (name, record) in enumerate(zip(names, records, strict=True))]


def _record(source: Source) -> Record:
    return source if isinstance(source, Record) else read(source)


def keys_of(shown: Sequence[NamedRun], runs: Sequence[NamedRun]) -> list[Key]:
    """The legend of those that are shown; none is needed on a page about a single run."""
    return [Key(run.name, run.colour, run.role) for run in shown] if len(runs) > 1 else []


def title_of(figure: str) -> str:
    """What readers call a figure."""
    return _FIGURES.get(figure, figure.replace("_", " "))


def numbers(value: Any) -> dict[str, float]:
    """The entries of an object that are numbers; none of what is no object."""
    return {key: item for key, item in value.items() if is_number(item)} if isinstance(value, dict) else {}


def last_figures(record: Record) -> dict[str, float]:
    """The figures on the test samples of the last evaluation."""
    return next((found for row in reversed(record.epochs) if (found := numbers(row.get("test")))), {})


def main_figure(runs: Sequence[NamedRun]) -> str:
    """The error where there is one, else the first figure that is not the loss, else the loss."""
    rows = (row for run in runs for row in run.record.epochs)
    keys = dict.fromkeys(key for row in rows for key in numbers(row.get("test")))
    return "error" if "error" in keys else next((key for key in keys if key != "loss"), "loss")


def by_epoch(record: Record, part: str, key: str) -> list[tuple[float, float]]:
    """After how many epochs, and the figure then. Records count epochs from 0."""
    rows = [row for row in record.epochs if is_number(row.get("epoch"))]
    found = {row["epoch"] + 1: numbers(row.get(part)).get(key) for row in rows}
    return [(epoch, value) for epoch, value in sorted(found.items()) if value is not None]


def by_step(record: Record, key: str) -> list[tuple[float, float]]:
    """A figure of each step that has it."""
    return [(row["step"], row[key]) for row in record.steps if is_number(row.get(key))]


def epochs_done(record: Record) -> int:
    """How many epochs the run has been evaluated after."""
    return max((row["epoch"] + 1 for row in record.epochs if is_number(row.get("epoch"))), default=0)


def last_step(record: Record) -> int:
    """How far the run has come."""
    return max((row["step"] for row in (*record.steps[-1:], *record.epochs[-1:])), default=0)


def seconds_of(record: Record) -> float | None:
    """What the steps took together; None where no step says."""
    found = [value for _, value in by_step(record, "seconds")]
    return sum(found) if found else None


def state_of(record: Record) -> str:
    """Whether the run has ended, and how."""
    if record.outcome is None:
        return "not ended"
    return "finished" if record.outcome.get("finished", True) else "ended early"
