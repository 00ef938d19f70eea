"""Results of measurements: ratios to BatchNorm, tables, CSV files, and where figures come from."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from micronorm.bench.cases import BN, BN_COMPILED, Case, NormMethod, groups_for
from micronorm.bench.timing import Spread, floor_ms
from micronorm.engine.environment import environment, package_version
from micronorm.records import write_atomically

ROUTES = ("eager", "graph")

RATIOS = {"to_bn_best": "÷ BN best", "to_bn": "÷ BN"}
"""Ratios of times: the name in CSV files and the heading in tables."""

LEFT = ("method", "mode", "route", "layout", "by")
COLUMNS = (*LEFT, "ms", "quartiles", *RATIOS.values(), "× floor", "saved", "peak MB")


@dataclass(frozen=True)
class BenchSettings:
    """How to measure. `bandwidth` is that of a copy in bytes per second; without it no traffic floor is computed."""

    device: torch.device
    dtype: torch.dtype
    routes: Sequence[str]
    rounds: int
    bandwidth: float | None = None

    @property
    def dtype_name(self) -> str:
        """The dtype as in tables: bfloat16."""
        return str(self.dtype).removeprefix("torch.")


@dataclass
class BenchResult:
    """What was measured for one method at a shape, in a layout, by a route. Without a `time`, `fault` says why.

    `error` is the worst error of outputs and gradients as a share of the tolerance. `best` names the BatchNorm result
    that the ratio `to_bn_best` divides by.
    """

    case: Case
    layout: str
    route: str
    method: NormMethod
    settings: BenchSettings
    backend: str = ""
    time: Spread | None = None
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    error: float | None = None
    fault: str = ""
    ratios: dict[str, float] = field(default_factory=dict)
    best: str = ""

    @property
    def median(self) -> float:
        """Median time in ms; only for a result with a time."""
        assert self.time is not None
        return self.time.median

    @property
    def floor_ms(self) -> float | None:
        """The time of the least memory traffic, or None if the bandwidth is unknown."""
        settings, bandwidth = self.settings, self.settings.bandwidth
        return None if bandwidth is None else floor_ms(self.case.elements, settings.dtype.itemsize, bandwidth)

    @property
    def floors(self) -> float | None:
        """The median as a multiple of the floor of memory traffic."""
        return None if self.time is None or self.floor_ms is None else self.time.median / self.floor_ms

    @property
    def saved_activations(self) -> float | None:
        """Bytes stored for the backward as a multiple of one activation."""
        activation = self.settings.dtype.itemsize * self.case.elements
        return None if self.saved_bytes is None else self.saved_bytes / activation


def compare(results: Sequence[BenchResult]) -> None:
    """Set the ratios of the results of one shape; a ratio whose denominator was not measured is left out."""
    timed = [result for result in results if result.time is not None]
    batch_norms = [result for result in timed if result.method in (BN, BN_COMPILED)]
    best = min(batch_norms, key=lambda result: result.median, default=None)
    same = {(result.layout, result.route): result for result in timed if result.method == BN}
    for result in timed:
        denominators = {"to_bn_best": best, "to_bn": same.get((result.layout, result.route))}
        result.ratios = {name: result.median / d.median for name, d in denominators.items() if d is not None}
        result.best = "" if best is None else f"{best.method.name} {best.route} {best.layout} ({best.backend})"


# --- tables -----------------------------------------------------------------------------------------------------------


def title(case: Case, results: Sequence[BenchResult]) -> str:
    """Return the line above a table."""
    best = next((result.best for result in results if result.best), "")
    baseline = f"; BN's best: {best}" if best else ""
    return f"{case.name}, {groups_for(case.channels)} groups: {case.reason}{baseline}"


def grid(results: Sequence[BenchResult]) -> tuple[list[str], list[list[str]]]:
    """Return the columns that are not empty, and the cells of each result in them."""
    lines = [_cells(result) for result in results]
    kept = [k for k in range(len(COLUMNS)) if any(line[k] for line in lines)]
    return [COLUMNS[k] for k in kept], [[line[k] for k in kept] for line in lines]


def _cells(result: BenchResult) -> tuple[str, ...]:
    what = (result.method.name, result.method.mode, result.route, result.layout, result.backend)
    if result.time is None:
        return (*what, "–", *[""] * (len(COLUMNS) - len(what) - 1))
    digits = 2 if result.time.median >= 1 else 4
    return (
        *what,
        f"{result.time.median:.{digits}f}",
        f"{result.time.q25:.{digits}f} to {result.time.q75:.{digits}f}",
        *(number(result.ratios.get(name), 2) for name in RATIOS),
        number(result.floors, 2),
        number(result.saved_activations, 2),
        "" if result.peak_bytes is None else f"{result.peak_bytes / 1e6:.0f}",
    )


def remarks(results: Sequence[BenchResult]) -> list[str]:
    """Return the lines below a table: every fault."""
    return [f"{r.method.key}, {r.layout}, {r.route}: {r.fault}" for r in results if r.fault]


# --- files ------------------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 6) -> str:
    """Return a number with this many digits after the point, or an empty string for None.

    Example:
        >>> number(0.5, 2), number(None)
        ('0.50', '')
    """
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.{digits}f}"


def as_record(result: BenchResult, facts: Mapping[str, object]) -> dict[str, object]:
    """Return the result as a row of a CSV file, followed by the facts about the run."""
    time = result.time
    return {
        "group": result.case.group,
        "shape": result.case.name,
        "layout": result.layout,
        "route": result.route,
        "method": result.method.name,
        "mode": result.method.mode,
        "backend": result.backend,
        "groups": groups_for(result.case.channels),
        "dtype": result.settings.dtype_name,
        "rounds": result.settings.rounds,
        "median_ms": number(time and time.median),
        "q25_ms": number(time and time.q25),
        "q75_ms": number(time and time.q75),
        **{name: number(result.ratios.get(name)) for name in RATIOS},
        "bn_best": result.best,
        "floors": number(result.floors),
        "floor_ms": number(result.floor_ms),
        "saved_bytes": number(result.saved_bytes),
        "saved_activations": number(result.saved_activations),
        "peak_bytes": number(result.peak_bytes),
        "error_of_allowed": number(result.error),
        "fault": result.fault,
        **facts,
    }


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write the rows atomically; a column that a row does not have is empty there.

    Raises:
        OSError: the file cannot be written. Names it and, if the disk is full, the bytes that it needs.
    """
    text = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue().encode())


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, or an empty list if the file does not exist."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table.

    Example:
        >>> print(markdown_table(["a", "b"], [[1, 2]]))
        | a | b |
        | --- | --- |
        | 1 | 2 |
    """
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [header, ["---"] * len(header), *rows])


def provenance(device: torch.device, command: str, *, packages: Sequence[str] = ("triton",)) -> dict[str, object]:
    """Return where figures come from: device, versions, date, revision and command. No host name and no path.

    Args:
        device: what was measured.
        command: the command that repeats the measurement.
        packages: installed packages whose versions matter, beside torch, micronorm and Python.
    """
    found = environment()
    gpu: Mapping[str, Any] = (found["gpu"] or {}) if device.type == "cuda" else {}
    facts = {
        "gpu": gpu.get("name"),
        "cpu": found["cpu"]["model"],
        "cores": found["cpu"]["threads"],
        "threads": found["cpu"]["torch_threads"],
        "torch": found["torch"],
        **{package: package_version(package) for package in packages},
        "cuda": gpu.get("cuda"),
        "cudnn": gpu.get("cudnn"),
        "micronorm": found["micronorm"],
        "python": found["python"],
        "date": found["date"],
        "revision": found["revision"],
        "command": command,
    }
    return {name: "" if value is None else value for name, value in facts.items()}
