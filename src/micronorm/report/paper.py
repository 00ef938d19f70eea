"""The section that shows the paper's figures beside ours."""

import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from micronorm.records import Record
from micronorm.report.html import Section, Table, format_value, table_html
from micronorm.report.runs import NamedRun, last_figures, numbers, state_of, title_of

_ABSENT = (
    "No run here has a figure in the paper. micronorm reproduce lists the paper's tables; "
    "micronorm train cifar1/c10-bcn-ws trains a row of one."
)
_AS_RECIPE = "as the recipe says"
_HEADER = ["row", "figure", "paper", "ours", "over seeds", "runs", "ours − paper", "remark"]


def paper(runs: Sequence[NamedRun], limit: int) -> Section:
    """Return a table for each of the paper's tables. Runs that differ from their recipe in the same way share a row."""
    groups: dict[tuple[str, str], list[NamedRun]] = {}
    for run in runs:
        if numbers(run.record.facts.get("paper")):
            remark = "; ".join(departures(run.record))
            groups.setdefault((run.record.facts["recipe"], remark), []).append(run)
    if not groups:
        return Section("paper", "The paper and our runs", absent=_ABSENT)
    tables: dict[str, list[list[Any]]] = {}
    for (recipe, remark), members in groups.items():
        table, _, row = recipe.partition("/")
        figures = [last_figures(run.record) for run in members]
        for name, theirs in numbers(members[0].record.facts["paper"]).items():
            ours = [found[name] for found in figures if name in found]
            tables.setdefault(table, []).append([row or recipe, *_compare(name, theirs, ours), remark or _AS_RECIPE])
    parts = [
        f"<h3>{escape(f'Table {table}')}</h3>{table_html(Table(table, _HEADER, rows))}"
        for table, rows in tables.items()
    ]
    return Section("paper", "The paper and our runs", body="".join(parts))


def _compare(name: str, theirs: float, ours: Sequence[float]) -> list[Any]:
    mean = math.fsum(ours) / len(ours) if ours else None
    spread = f"± {statistics.stdev(ours):.2f}" if len(ours) > 1 and all(map(math.isfinite, ours)) else None
    rounded, difference = (None, None) if mean is None else (round(mean, 2), round(mean - theirs, 2))
    return [title_of(name), float(theirs), rounded, spread, len(ours), difference]


def departures(record: Record) -> list[str]:
    """Return how the run differs from its recipe, in words."""
    recipe, varied = _object(record, "definition"), _object(record, "variation")
    settings = record.facts["settings"]
    found = (
        [] if state_of(record) == "finished" else [f"the run {state_of(record)}".replace("not ended", "has not ended")]
    )
    for name in ("epochs", "step_batch") if recipe else ():
        mine, theirs = settings.get(name), recipe.get(name)
        if mine != theirs:
            found.append(f"{name.replace('_', ' ')} {format_value(mine)} where the recipe has {format_value(theirs)}")
    for name in ("lr", "size", "unverified"):
        if varied.get(name) is not None:
            found.append("data not verified" if name == "unverified" else f"{name} set to {format_value(varied[name])}")
    return found


def _object(record: Record, name: str) -> dict[str, Any]:
    """Return a fact that is a JSON object, or an empty dict: older records lack some of them."""
    found = record.facts.get(name)
    return found if isinstance(found, dict) else {}
