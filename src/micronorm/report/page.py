"""One self-contained HTML page about some runs: what they came to, how they got there, and what they ran on.

No request leaves the page: style and charts are inline, there is no script, and its content security policy forbids
the rest. Whatever comes from a run is text, and escaped.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from micronorm.records import Record, read, write_atomically
from micronorm.report.chart import Series, legend, line_chart
from micronorm.report.style import STYLE

_FIGURES = {"top1": "error %", "top5": "top-5 error %"}
"""Figures of records by the names that readers know them by."""

_OUTSIDE_FACTS = ("format", "name")  # the first is of the file, the second is shown as the run's heading


@dataclass(frozen=True)
class Table:
    """A small table; cells that are numbers stand to the right."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"table {self.caption!r}: {len(row)} cells under {len(self.header)} headings")


@dataclass(frozen=True)
class Cuts:
    """How far two runs of one recipe ended apart that differ in how their steps were cut, and a control beside it."""

    difference: float
    control: float
    description: str = ""
    """What was cut, how, and what the control is."""


def write_page(
    target: str | os.PathLike[str],
    *,
    runs: Mapping[str, str | os.PathLike[str]] | Iterable[str | os.PathLike[str]],
    title: str = "Runs",
    findings: Sequence[str] = (),
    tables: Sequence[Table] = (),
    cuts: Cuts | None = None,
) -> Path:
    """Write the page about some run directories, and return where it lies.

    Args:
        target: the HTML file; folders on the way are made.
        runs: run directories, by the name each shall have; or in a row, named by their fact `name`, by their recipe
            where there is none, and by their folder too where names would be alike.
        title: the page's heading.
        findings: sentences that stand at the top.
        tables: shown after the results.
        cuts: shown as a section on cut invariance.

    Raises:
        FileNotFoundError: a path holds no run.
        ValueError: a run's record is damaged, or `runs` is empty.

    Example:
        >>> import tempfile
        >>> from micronorm.records import Run
        >>> folder = tempfile.TemporaryDirectory()
        >>> facts = {"recipe": "digits", "settings": {}, "execution": {}, "data": {}, "environment": {}}
        >>> facts |= {"revision": None, "command": "micronorm train digits", "date": "2025-01-01"}
        >>> run = Run.create(f"{folder.name}/run", facts)
        >>> run.append_epoch({"epoch": 0, "step": 41, "train": {"loss": 0.8}, "test": {"error": 4.2}})
        >>> page = write_page(f"{folder.name}/report.html", runs=[run.path], findings=["One epoch is few."])
        >>> "4.2" in page.read_text()
        True
        >>> folder.cleanup()
    """
    named = _named(runs)
    if not named:
        raise ValueError("a page needs at least one run, got none")
    sections = [
        _findings(findings),
        _results(named),
        _charts(named),
        _cuts(cuts),
        *(_section(table.caption, _table(table)) for table in tables),
        _facts(named),
    ]
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="lead">{escape(_lead(named))}</p>
{"".join(sections)}<footer>Made by micronorm from the records of {_count(len(named), "run")}.</footer>
</main>
</body>
</html>
"""
    file = Path(target)
    file.parent.mkdir(parents=True, exist_ok=True)
    # A command line may hold bytes that are no text; as question marks they spoil nothing.
    write_atomically(file, page.encode("utf-8", "replace"))
    return file


def _named(runs: Mapping[str, str | os.PathLike[str]] | Iterable[str | os.PathLike[str]]) -> dict[str, Record]:
    if isinstance(runs, Mapping):
        return {str(name): read(path) for name, path in runs.items()}
    records = [read(path) for path in runs]
    names = [str(record.facts.get("name") or record.facts["recipe"]) for record in records]
    for distinguish in (lambda record, _: record.path.resolve().name, lambda _, index: str(index + 1)):
        often = Counter(names)
        names = [
            f"{name} ({distinguish(record, index)})" if often[name] > 1 else name
            for index, (name, record) in enumerate(zip(names, records, strict=True))
        ]
    return dict(zip(names, records, strict=True))


def _lead(named: Mapping[str, Record]) -> str:
    records = list(named.values())
    data = " and ".join(dict.fromkeys(str(r.facts["data"].get("name")) for r in records if r.facts["data"].get("name")))
    days = sorted({record.facts["date"][:10] for record in records})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return ", ".join(filter(None, (_count(len(records), "run"), f"data: {data}" if data else "", when)))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _section(heading: str, content: str) -> str:
    return f"<section>\n<h2>{escape(heading)}</h2>\n{content}\n</section>\n"


def _findings(findings: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in findings)
    return _section("What was found", f'<ul class="findings">{items}</ul>') if findings else ""


def _results(named: Mapping[str, Record]) -> str:
    figures = {name: _last_figures(record) for name, record in named.items()}
    keys = list(dict.fromkeys(key for found in figures.values() for key in found))
    keys.sort(key=lambda key: key != _charted_figure(named.values()))  # what the page is about stands first
    header = ["run", *(f"test {_title(key)}" for key in keys), "steps", "seconds", "seed", "state"]
    rows = [
        [
            name,
            *(figures[name].get(key) for key in keys),
            max(row["step"] for row in ({"step": 0}, *record.steps[-1:], *record.epochs[-1:])),
            _seconds(record),
            record.facts["settings"].get("seed"),
            _state(record),
        ]
        for name, record in named.items()
    ]
    return _section("Results", _table(Table("Results", header, rows)))


def _last_figures(record: Record) -> dict[str, float]:
    for row in reversed(record.epochs):
        if figures := _numbers(row.get("test")):
            return figures
    return {}


def _title(figure: str) -> str:
    return _FIGURES.get(figure, figure.replace("_", " "))


def _numbers(value: Any) -> dict[str, float]:
    return {key: item for key, item in value.items() if _is_number(item)} if isinstance(value, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _seconds(record: Record) -> float | None:
    seconds = [row["seconds"] for row in record.steps if _is_number(row.get("seconds"))]
    return round(sum(seconds), 1) if seconds else None


def _state(record: Record) -> str:
    if record.outcome is None:
        return "not ended"
    return "finished" if record.outcome.get("finished", True) else "ended early"


def _table(table: Table) -> str:
    numeric = [all(_is_number(row[k]) or row[k] is None for row in table.rows) for k in range(len(table.header))]
    look = [' class="number"' if right else "" for right in numeric]
    columns = [_column([row[k] for row in table.rows]) for k in range(len(table.header))]
    head = "".join(
        f'<th scope="col"{each}>{escape(str(name))}</th>' for name, each in zip(table.header, look, strict=True)
    )
    body = ""
    for first, *rest in zip(*columns, strict=True):
        cells = "".join(f"<td{each}>{escape(cell)}</td>" for cell, each in zip(rest, look[1:], strict=True))
        body += f'<tr><th scope="row"{look[0]}>{escape(first)}</th>{cells}</tr>'
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _column(cells: Sequence[Any]) -> list[str]:
    """The cells of a column as text: floats with equally many decimals, unless that would hide the small ones."""
    sizes = [abs(cell) for cell in cells if isinstance(cell, float) and math.isfinite(cell) and cell != 0]
    decimals = max(0, min(4, 3 - math.floor(math.log10(max(sizes))))) if sizes else 0
    if not sizes or max(sizes) >= 1e6 or min(sizes) < 10.0**-decimals:
        return [_shown(cell) for cell in cells]
    while decimals and all(f"{size:.{decimals}f}".endswith("0") for size in sizes):
        decimals -= 1
    return [f"{cell:,.{decimals}f}" if isinstance(cell, float) else _shown(cell) for cell in cells]


def _shown(value: Any) -> str:
    """A value as a reader wants it: four digits of a float, a dash for nothing."""
    if value is None or value == {} or value == []:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(_shown, value)) if isinstance(value, list) else str(value)


def _cuts(cuts: Cuts | None) -> str:
    if cuts is None:
        return ""
    text = f"<p>{escape(cuts.description)}</p>" if cuts.description else ""
    pair = (
        f"<div><dt>cut differently, ended apart by</dt><dd>{cuts.difference:.1e}</dd></div>"
        f"<div><dt>control: begun one unit in the last place apart</dt><dd>{cuts.control:.1e}</dd></div>"
    )
    return _section("Cut invariance", f'{text}<dl class="pair">{pair}</dl>')


def _charts(named: Mapping[str, Record]) -> str:
    key = _charted_figure(named.values())
    loss = [Series(name, _loss_by_epoch(record)) for name, record in named.items()]
    test = [Series(name, _by_epoch(record, "test", key)) for name, record in named.items()]
    charts = [
        line_chart(lines, caption=caption, x_label="epoch")
        for lines, caption in ((loss, "Training loss"), (test, f"Test {_title(key)}"))
        if any(line.points for line in lines)
    ]
    return _section("By epoch", f'{legend(list(named))}<div class="charts">{"".join(charts)}</div>') if charts else ""


def _charted_figure(records: Iterable[Record]) -> str:
    """The error where there is one, else the first figure that is not the loss, else the loss."""
    keys = dict.fromkeys(key for record in records for row in record.epochs for key in _numbers(row.get("test")))
    return "error" if "error" in keys else next((key for key in keys if key != "loss"), "loss")


def _by_epoch(record: Record, part: str, key: str) -> list[tuple[int, float]]:
    """After how many epochs, and the figure then. Records count epochs from 0."""
    found = {row["epoch"] + 1: _numbers(row.get(part)).get(key) for row in record.epochs if "epoch" in row}
    return [(epoch, value) for epoch, value in sorted(found.items()) if value is not None]


def _loss_by_epoch(record: Record) -> list[tuple[int, float]]:
    """The recorded loss of each epoch; of a run that recorded none, the mean over the samples of its steps."""
    if recorded := _by_epoch(record, "train", "loss"):
        return recorded
    sums: dict[int, tuple[float, float]] = {}
    for row in record.steps:
        if _is_number(row.get("loss")) and "epoch" in row:
            total, samples = sums.get(row["epoch"] + 1, (0.0, 0.0))
            weight = row.get("samples", 1)
            sums[row["epoch"] + 1] = total + weight * row["loss"], samples + weight
    return [(epoch, total / samples) for epoch, (total, samples) in sorted(sums.items()) if samples]


def _facts(named: Mapping[str, Record]) -> str:
    flat = {name: _flat({k: v for k, v in r.facts.items() if k not in _OUTSIDE_FACTS}) for name, r in named.items()}
    first, *others = flat.values()
    common = {key: value for key, value in first.items() if all(key in o and o[key] == value for o in others)}
    heading = f"<p>The same in all {len(flat)} runs:</p>" if others and common else ""
    own = "".join(
        f"<details><summary>{escape(name)}</summary>{_definitions(rest)}</details>"
        for name, facts in flat.items()
        if (rest := {key: value for key, value in facts.items() if key not in common})
    )
    return _section("What was run, and on what", f"{heading}{_definitions(common)}{own}")


def _flat(facts: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for key, value in facts.items():
        found |= _flat(value, (*prefix, key)) if isinstance(value, dict) and value else {(*prefix, key): value}
    return found


def _definitions(facts: Mapping[tuple[str, ...], Any]) -> str:
    """The facts with those of one group on one line: settings: epochs 15 · seed 0."""
    grouped: dict[str, list[str]] = {}
    for (group, *path), value in facts.items():
        text = escape(_shown(value))
        text = f"<code>{text}</code>" if group in ("command", "revision") and value is not None else text
        name = escape(" ".join(path).replace("_", " "))
        grouped.setdefault(group, []).append(f'<span class="name">{name}</span> {text}' if name else text)
    items = "".join(f"<dt>{escape(group)}</dt><dd>{' · '.join(parts)}</dd>" for group, parts in grouped.items())
    return f'<dl class="facts">{items}</dl>' if items else ""
