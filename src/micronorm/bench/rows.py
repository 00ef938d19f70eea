"""A row per method, layout and route; what it is compared with; and the rows as CSV."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from micronorm.bench.cases import Case
from micronorm.bench.peers import BN, BN_COMPILED, BN_EVAL_GN, BN_GN, Method, groups_for
from micronorm.bench.timing import Spread

ROUTES = ("graph", "eager")

PEERS = {"to_bn": BN, "to_bn_gn": BN_GN, "to_bn_eval_gn": BN_EVAL_GN}
"""Columns of ratios to a peer in the same layout by the same route."""

RATIOS = ("to_bn_best", "to_bn_nhwc", *PEERS)


@dataclass
class Row:
    """One method at a shape, in a layout, by a route. Without `time` there is a `fault` that says why."""

    case: Case
    layout: str
    route: str
    method: Method
    dtype: str
    itemsize: int
    rounds: int
    backend: str = ""
    time: Spread | None = None
    floor_ms: float | None = None
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    error: float | None = None
    """The worst error of outputs and gradients, as a share of what is allowed."""
    fault: str = ""
    busy_elsewhere: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    best: str = ""
    """Which of BatchNorm's rows `to_bn_best` divides by."""

    @property
    def floors(self) -> float | None:
        """The median as a multiple of the floor of memory traffic."""
        return None if self.time is None or self.floor_ms is None else self.time.median / self.floor_ms

    @property
    def saved_activations(self) -> float | None:
        """Bytes saved for backward as multiples of one activation."""
        return None if self.saved_bytes is None else self.saved_bytes / (self.itemsize * self.case.elements)


def best_batch_norm(rows: Iterable[Row]) -> Row | None:
    """The fastest of BatchNorm's rows at one shape: eager, compiled and graphed, in whichever layout."""
    timed = [row for row in rows if row.method in (BN, BN_COMPILED) and row.time is not None]
    return min(timed, key=_median, default=None)


def _median(row: Row) -> float:
    assert row.time is not None
    return row.time.median


def describe(row: Row) -> str:
    """Which row that is: its route, its layout and what computed it.

    Example:
        >>> describe(Row(Case((1, 8), ""), "nhwc", "graph", BN, "bfloat16", 2, 3, backend="native"))
        'BN>ReLU graph nhwc (native)'
    """
    return f"{row.method.name} {row.route} {row.layout} ({row.backend})"


def compare(rows: Sequence[Row]) -> None:
    """Give the rows of one shape their ratios; a ratio whose peer was not measured is left out."""
    best = best_batch_norm(rows)
    at = {(row.method, row.layout, row.route): row for row in rows if row.time is not None}
    for row in rows:
        if row.time is None:
            continue
        peers = {"to_bn_best": best, "to_bn_nhwc": at.get((BN, "nhwc", row.route))}
        peers |= {name: at.get((peer, row.layout, row.route)) for name, peer in PEERS.items()}
        row.ratios = {name: _median(row) / _median(peer) for name, peer in peers.items() if peer is not None}
        row.best = "" if best is None else describe(best)


# --- CSV --------------------------------------------------------------------------------------------------------------


def _cell(value: float | int | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.6f}"


def as_record(row: Row, facts: Mapping[str, object]) -> dict[str, object]:
    """The row with what every row says of the run, as a CSV file holds it."""
    time = row.time or Spread(*[None] * 3)  # type: ignore[list-item]
    return {
        "group": row.case.group,
        "shape": row.case.name,
        "layout": row.layout,
        "route": row.route,
        "method": row.method.name,
        "mode": row.method.mode,
        "backend": row.backend,
        "groups": groups_for(row.case.channels),
        "dtype": row.dtype,
        "rounds": row.rounds,
        "median_ms": _cell(time.median),
        "q25_ms": _cell(time.q25),
        "q75_ms": _cell(time.q75),
        **{name: _cell(row.ratios.get(name)) for name in RATIOS},
        "bn_best": row.best,
        "floors": _cell(row.floors),
        "floor_ms": _cell(row.floor_ms),
        "saved_bytes": _cell(row.saved_bytes),
        "saved_activations": _cell(row.saved_activations),
        "peak_bytes": _cell(row.peak_bytes),
        "error_of_allowed": _cell(row.error),
        "fault": row.fault,
        "busy_elsewhere": "" if row.busy_elsewhere is None else f"{row.busy_elsewhere:.2f}",
        **{name: "" if value is None else value for name, value in facts.items()},
    }


def to_csv(rows: Sequence[Row], facts: Mapping[str, object]) -> str:
    """The rows as CSV text, with a header."""
    records = [as_record(row, facts) for row in rows]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(records[0]) if records else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def read_csv(path: Path) -> list[dict[str, str]]:
    """The records of a CSV file, those of earlier versions too, which have fewer columns."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
