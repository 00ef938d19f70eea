"""Looks into the network, layer by layer, from a record's diagnostics."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from micronorm.records import Record
from micronorm.report.heat import Table
from micronorm.report.runs import Detail, NamedRun
from micronorm.report.text import is_number

HOW = "Train with --observe 50, or put `with mn.observe(model):` around a loop of your own."
"""How a run comes to have looks."""


@dataclass(frozen=True)
class Looks:
    """Figures of the layers that have them all, by epoch (from 1), or by step where all looks are of one epoch."""

    below: str
    """What `xs` counts: "epoch" or "step"."""
    xs: Sequence[int]
    layers: Sequence[str]
    """In the order of their first look, which is that of the network."""
    values: Sequence[dict[str, tuple[float, ...]]]
    """By x, layer and figure: the mean over the looks of that epoch."""


def read_looks(record: Record, kind: str, *figures: str) -> Looks | None:
    """What the looks say of the layers of a kind; None where no layer has all the figures as finite numbers."""
    found: list[tuple[int, int, str, tuple[float, ...]]] = []
    for row in record.diagnostics:
        layers = row.get("layers")
        for name, layer in layers.items() if isinstance(layers, dict) else ():
            if isinstance(layer, dict) and layer.get("kind") == kind:
                values = [layer.get(figure) for figure in figures]
                finite = tuple(value for value in values if is_number(value) and math.isfinite(value))
                if len(finite) == len(figures):
                    epoch = row["epoch"] + 1 if isinstance(row.get("epoch"), int) else 1
                    found.append((epoch, row["step"], name, finite))
    if not found:
        return None
    by_epoch = len({epoch for epoch, *_ in found}) > 1
    gathered: dict[int, dict[str, list[tuple[float, ...]]]] = {}
    for epoch, step, name, values in found:
        gathered.setdefault(epoch if by_epoch else step, {}).setdefault(name, []).append(values)
    means = {
        x: {name: tuple(map(_mean, zip(*rows, strict=True))) for name, rows in layers.items()}
        for x, layers in sorted(gathered.items())
    }
    names = list(dict.fromkeys(name for _, _, name, _ in found))
    return Looks("epoch" if by_epoch else "step", list(means), names, list(means.values()))


def missing(shown: Sequence[NamedRun], runs: Sequence[NamedRun]) -> str:
    """A line of HTML about the runs that have no looks, where others have."""
    names = ", ".join(run.name for run in runs if run not in shown)
    return f'<p class="about">{escape(f"No looks are recorded of {names}.")}</p>' if names else ""


def over_layers(looks: Looks, figure: int = 0) -> tuple[list[tuple[float, float]], list[float]]:
    """Mean and standard deviation over the layers, by x."""
    columns = [[values[figure] for values in layers.values()] for layers in looks.values]
    points: list[tuple[float, float]] = [(x, _mean(column)) for x, column in zip(looks.xs, columns, strict=True)]
    return points, [statistics.pstdev(column) for column in columns]


def to_table(looks: Looks, detail: Detail) -> tuple[Table, str]:
    """The first figure by layer and x, with what was put together: neighbouring columns by mean, layers by maximum."""
    across = math.ceil(len(looks.xs) / detail.columns)
    down = math.ceil(len(looks.layers) / detail.rows)
    columns = [slice(k, k + across) for k in range(0, len(looks.xs), across)]
    groups = [looks.layers[k : k + down] for k in range(0, len(looks.layers), down)]
    values = [
        [
            max(means)
            if (means := [m for name in group if (m := _cell(looks, name, column)) is not None])
            else math.nan
            for column in columns
        ]
        for group in groups
    ]
    notes = [f"each column the mean of {across} {looks.below}s"] * (across > 1)
    notes += [f"each row the largest of {down} neighbouring layers"] * (down > 1)
    heads = [f"{looks.xs[column][-1]}" for column in columns]
    return Table([group[0] for group in groups], heads, values), "; ".join(notes)


def _cell(looks: Looks, layer: str, column: slice) -> float | None:
    found = [layers[layer][0] for layers in looks.values[column] if layer in layers]
    return _mean(found) if found else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
