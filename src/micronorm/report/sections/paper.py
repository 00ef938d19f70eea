"""The paper's figure beside ours, by table."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from micronorm.records import Record
from micronorm.report.drawing import Plot
from micronorm.report.pairs import Pair, pair_plot
from micronorm.report.runs import Detail, NamedRun, last_figures, numbers, state_of, title_of
from micronorm.report.text import Section, Table, shown, table_html

_ABSENT = (
    "None of these records holds a figure of the paper. Runs of its recipes do: micronorm reproduce lists the tables, "
    "micronorm train cifar1/c10-bcn-ws trains a row of one."
)


@dataclass(frozen=True)
class _Row:
    """The runs of one recipe, seeds apart, that agree in whether and why they depart from it."""

    recipe: str
    remark: str
    runs: Sequence[NamedRun]
    paper: dict[str, float]
    ours: dict[str, list[float]]


def paper(runs: Sequence[NamedRun], detail: Detail) -> Section:
    """Per recipe of the paper's tables: its figure, ours, and what speaks against comparing them."""
    rows = _rows(runs)
    if not rows:
        return Section("paper", "Paper against ours", absent=_ABSENT)
    tables = list(dict.fromkeys(row.recipe.partition("/")[0] for row in rows))
    plots: list[Plot] = []
    body = ""
    for table in tables:
        own = [row for row in rows if row.recipe.partition("/")[0] == table]
        plots += _plots(table, own)
        body += f"<h3>{escape(f'Table {table}')}</h3>{_table(own)}"
    about = "A ring is the paper's figure, a dot is ours; of several seeds the mean."
    return Section("paper", "Paper against ours", about if plots else "", plots, body=body)


def departures(record: Record) -> list[str]:
    """Where the run is not what its recipe says, in words; such a figure does not stand for the paper's experiment."""
    recipe, varied = _object(record, "definition"), _object(record, "variation")
    settings = record.facts["settings"]
    found = [] if state_of(record) == "finished" else [f"the run has {state_of(record)}".replace("has ended", "ended")]
    for name in ("epochs", "step_batch") if recipe else ():
        mine, theirs = settings.get(name), recipe.get(name)
        if mine != theirs:
            found.append(f"{name.replace('_', ' ')} {shown(mine)} where the recipe has {shown(theirs)}")
    for name in ("lr", "size", "unverified"):
        if varied.get(name) is not None:
            found.append("data not verified" if name == "unverified" else f"{name} set to {shown(varied[name])}")
    return found


def _object(record: Record, name: str) -> dict[str, Any]:
    """A fact that is an object; older records have not all of them."""
    found = record.facts.get(name)
    return found if isinstance(found, dict) else {}


def _rows(runs: Sequence[NamedRun]) -> list[_Row]:
    groups: dict[tuple[str, str], list[NamedRun]] = {}
    for run in runs:
        if numbers(run.record.facts.get("paper")):
            remark = "; ".join(departures(run.record))
            groups.setdefault((run.record.facts["recipe"], remark), []).append(run)
    found = []
    for (recipe, remark), members in groups.items():
        theirs = numbers(members[0].record.facts["paper"])
        figures = [last_figures(run.record) for run in members]
        ours = {name: [mine[name] for mine in figures if name in mine] for name in theirs}
        found.append(_Row(recipe, remark, members, theirs, ours))
    return found


def _table(rows: Sequence[_Row]) -> str:
    cells = []
    for row in rows:
        for name, theirs in row.paper.items():
            ours = row.ours[name]
            mean = math.fsum(ours) / len(ours) if ours else None
            spread = f"± {statistics.stdev(ours):.2f}" if len(ours) > 1 and all(map(math.isfinite, ours)) else None
            cells.append(
                [
                    row.recipe.partition("/")[2] or row.recipe,
                    title_of(name),
                    float(theirs),
                    None if mean is None else round(mean, 2),
                    spread,
                    len(ours),
                    None if mean is None else round(mean - theirs, 2),
                    row.remark or "as the recipe says",
                ]
            )
    header = ["row", "figure", "paper", "ours", "over seeds", "runs", "ours − paper", "remark"]
    if all(line[4] is None for line in cells):
        header, cells = header[:4] + header[5:], [line[:4] + line[5:] for line in cells]
    return table_html(Table("Paper against ours", header, cells))


def _plots(table: str, rows: Sequence[_Row]) -> list[Plot]:
    found = []
    for name in dict.fromkeys(name for row in rows for name in row.paper):
        pairs = []
        for row in rows:
            finite = [value for value in row.ours.get(name, ()) if math.isfinite(value)]
            if finite and math.isfinite(row.paper.get(name, math.nan)):
                label = row.recipe.partition("/")[2] or row.recipe
                label += " (departs)" if row.remark else ""
                pairs.append(Pair(label, row.paper[name], math.fsum(finite) / len(finite), row.runs[0].colour))
        if pairs:
            plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in f"{table}-{name}")
            below = f"test {title_of(name)}"
            found.append(pair_plot(f"paper-{plain}", pairs, caption=f"{table}: {below}", below=below))
    return found
