"""The rows of one shape as a table, and what a run says of the targets."""

from collections.abc import Sequence

from micronorm.bench.cases import TARGETS, Case
from micronorm.bench.measure import Settings
from micronorm.bench.peers import MODES, groups_for
from micronorm.bench.rows import Row
from micronorm.bench.timing import FOOTPRINT, LARGE, PASSES_AT_LEAST, QUIET

COLUMNS = (
    "method",
    "mode",
    "route",
    "layout",
    "by",
    "ms",
    "quartiles",
    "÷ BN best",
    "÷ BN nhwc",
    "÷ BN",
    "÷ BN>GN",
    "÷ BN eval>GN",
    "× floor",
    "saved",
    "peak MB",
)
LEFT = ("method", "mode", "route", "layout", "by")


def heading(settings: Settings) -> list[str]:
    """What holds for the whole run, in lines."""
    lines = [
        f"norm + ReLU, forward + backward, {settings.dtype_name}; median and quartiles of {settings.rounds} rounds, "
        "in each of which every method takes part once."
    ]
    if settings.bandwidth is not None:
        lines += [
            f"Floor: {PASSES_AT_LEAST} passes over memory at {settings.bandwidth / 1e12:.2f} TB/s, the bandwidth of a "
            "copy in this run (bytes read and written).",
            f"From {LARGE / 1e6:.0f} MB of input and gradient on, passes rotate over {FOOTPRINT / 1e6:.0f} MB of them "
            "or more; smaller ones use one pair again and again, which the cache may hold, as it may in training.",
        ]
    lines.append(
        "÷: by the time of BN>ReLU (best: of eager, compiled and graph in either layout; nhwc: in that layout by the "
        "same route; else in the same layout by the same route). saved: activations kept for the backward."
    )
    return lines


def title(case: Case, rows: Sequence[Row]) -> str:
    """The line above a table."""
    best = next((row.best for row in rows if row.best), "")
    told = f"; BN's best: {best}" if best else ""
    return f"{case.name}, {groups_for(case.channels)} groups: {case.reason}{told}"


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, by COLUMNS."""
    what = (row.method.name, row.method.mode, row.route, row.layout, row.backend)
    if row.time is None:
        return (*what, "–", row.fault, *[""] * (len(COLUMNS) - len(what) - 2))
    ratios = (row.ratios.get(name) for name in ("to_bn_best", "to_bn_nhwc", "to_bn", "to_bn_gn", "to_bn_eval_gn"))
    digits = 2 if row.time.median >= 1 else 4
    return (
        *what,
        f"{row.time.median:.{digits}f}",
        f"{row.time.q25:.{digits}f} to {row.time.q75:.{digits}f}",
        *(_number(ratio) for ratio in ratios),
        _number(row.floors),
        _number(row.saved_activations),
        "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def grid(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The columns that hold anything, and the cells of each row in them."""
    all_cells = [cells(row) for row in rows]
    kept = [k for k in range(len(COLUMNS)) if any(line[k] for line in all_cells)]
    return [COLUMNS[k] for k in kept], [[line[k] for k in kept] for line in all_cells]


def as_text(case: Case, rows: Sequence[Row]) -> list[str]:
    """The table in plain lines."""
    columns, lines = grid(rows)
    sized = [columns, *(line for line, row in zip(lines, rows, strict=True) if row.time is not None)]
    widths = [max(map(len, column)) for column in zip(*sized, strict=True)]
    text = [title(case, rows)]
    for line in (columns, *lines):
        justified = (
            cell.ljust(width) if name in LEFT else cell.rjust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        )
        text.append("  ".join(justified).rstrip())
    return [*text, *remarks(rows)]


def remarks(rows: Sequence[Row]) -> list[str]:
    """What the reader of one table must know besides."""
    busy = max((row.busy_elsewhere or 0.0 for row in rows if row.peak_bytes is None), default=0.0)
    return [f"preliminary: other processes kept {busy:.1f} cores busy"] if busy > QUIET else []


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Which targets our default form meets in its training modes, a line each, with the worst case."""
    lines = []
    for group, targets in TARGETS.items():
        for mode in MODES:
            ours = [r for r in rows if r.case.group == group and r.method.key == f"bcn-{mode}" and r.time is not None]
            graph, eager = ([r for r in ours if r.route == route] for route in ("graph", "eager"))
            what = f"{group}, {mode}"
            lines += _verdict(f"{what}, graph, ÷ BN nhwc", graph, "to_bn_nhwc", targets.graph_to_bn)
            lines += _verdict(f"{what}, graph, × floor", graph, "floors", targets.floors)
            lines += _verdict(f"{what}, eager, ÷ BN nhwc", eager, "to_bn_nhwc", targets.eager_to_bn)
    return lines


def _verdict(what: str, rows: Sequence[Row], figure: str, most: float | None) -> list[str]:
    found = [(row.floors if figure == "floors" else row.ratios.get(figure), row) for row in rows]
    known = [(value, row) for value, row in found if value is not None]
    if most is None or not known:
        return []
    met = sum(value <= most for value, _ in known)
    worst, where = max(known, key=lambda pair: pair[0])
    return [f"{what} ≤ {most:g}: {met} of {len(known)}; the most is {worst:.2f}, at {where.case.name} {where.layout}"]
