"""The section that shows the paper's figures beside ours."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from micronorm.records import Record
from micronorm.report.charts import Chart, Pair, pair_chart
from micronorm.report.html import Section, Table, format_value, slug, table_html
from micronorm.report.runs import NamedRun, last_figures, numbers, state_of, title_of

_ABSENT = (
    "No run here has a figure in the paper. micronorm reproduce lists the paper's tables; "
    "micronorm train cifar1/c10-bcn-ws trains a row of one."
)


@dataclass(frozen=True)
class _Comparison:
    """The runs of one recipe that differ from it in the same way, with the paper's figures and theirs."""

    recipe: str
    remark: str
    runs: Sequence[NamedRun]
    paper: dict[str, float]
    ours: dict[str, list[float]]

    @property
    def table(self) -> str:
        return self.recipe.partition("/")[0]

    @property
    def row(self) -> str:
        return self.recipe.partition("/")[2] or self.recipe


def paper(runs: Sequence[NamedRun], limit: int) -> Section:
    """Return a table and charts for each of the paper's tables that the runs belong to."""
    comparisons = _compare(runs)
    if not comparisons:
        return Section("paper", "The paper and our runs", absent=_ABSENT)
    charts: list[Chart] = []
    body = ""
    for table in dict.fromkeys(comparison.table for comparison in comparisons):
        own = [comparison for comparison in comparisons if comparison.table == table]
        charts += _charts(table, own)
        body += f"<h3>{escape(f'Table {table}')}</h3>{_table(own)}"
    about = "A ring is the paper's figure, a dot is ours: the mean over seeds." if charts else ""
    return Section("paper", "The paper and our runs", about, charts, body=body)


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


def _compare(runs: Sequence[NamedRun]) -> list[_Comparison]:
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
        found.append(_Comparison(recipe, remark, members, theirs, ours))
    return found


def _table(comparisons: Sequence[_Comparison]) -> str:
    rows = []
    for comparison in comparisons:
        for name, theirs in comparison.paper.items():
            ours = comparison.ours[name]
            mean = math.fsum(ours) / len(ours) if ours else None
            spread = f"± {statistics.stdev(ours):.2f}" if len(ours) > 1 and all(map(math.isfinite, ours)) else None
            rows.append(
                [
                    comparison.row,
                    title_of(name),
                    float(theirs),
                    None if mean is None else round(mean, 2),
                    spread,
                    len(ours),
                    None if mean is None else round(mean - theirs, 2),
                    comparison.remark or "as the recipe says",
                ]
            )
    header = ["row", "figure", "paper", "ours", "over seeds", "runs", "ours − paper", "remark"]
    if all(row[4] is None for row in rows):
        header, rows = header[:4] + header[5:], [row[:4] + row[5:] for row in rows]
    return table_html(Table("The paper and our runs", header, rows))


def _charts(table: str, comparisons: Sequence[_Comparison]) -> list[Chart]:
    found = []
    for name in dict.fromkeys(name for comparison in comparisons for name in comparison.paper):
        pairs = []
        for comparison in comparisons:
            finite = [value for value in comparison.ours.get(name, ()) if math.isfinite(value)]
            if finite and math.isfinite(comparison.paper.get(name, math.nan)):
                label = comparison.row + (" (differs)" if comparison.remark else "")
                mean = math.fsum(finite) / len(finite)
                pairs.append(Pair(label, comparison.paper[name], mean, comparison.runs[0].colour))
        if pairs:
            x_label = f"test {title_of(name)}"
            stem = f"paper-{slug(f'{table}-{name}')}"
            found.append(pair_chart(stem, pairs, caption=f"{table}: {x_label}", x_label=x_label))
    return found
