"""One self-contained HTML page about some runs: what they came to, how they got there, and what they ran on.

No request leaves the page: style, script, charts and pictures are inline, and its content security policy forbids the
rest, and any script and style but these two. Whatever comes from a run is text, and escaped.
"""

import base64
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from micronorm.records import write_atomically
from micronorm.report.drawing import Drawing, Item, Key, Plot, box, to_svg
from micronorm.report.drawing import Path as Outline
from micronorm.report.runs import Detail, NamedRun, Runs, read_runs
from micronorm.report.script import SCRIPT
from micronorm.report.sections.extras import Cuts, Lead, cuts_section, findings_section, table_sections
from micronorm.report.sections.facts import facts
from micronorm.report.sections.paper import paper
from micronorm.report.sections.predictions import predictions
from micronorm.report.sections.resources import resources
from micronorm.report.sections.results import results, verdict
from micronorm.report.sections.shares import shares
from micronorm.report.sections.singularities import singularities
from micronorm.report.sections.stat_diff import stat_diff
from micronorm.report.sections.training import training
from micronorm.report.style import STYLE
from micronorm.report.text import Section, Table, breakable, count

LARGEST = 3_000_000
"""Bytes of a page: long runs are shown in less detail rather than go beyond."""

FIRST: tuple[Callable[[Sequence[NamedRun], Detail], Section], ...] = (results, paper, training)
"""The sections before what the caller adds."""
LAST = (stat_diff, singularities, shares, resources, predictions, facts)
"""The sections after it."""


def write_page(
    target: str | os.PathLike[str],
    *,
    runs: Runs,
    title: str = "Runs",
    lead: Lead | None = None,
    findings: Sequence[str] = (),
    tables: Sequence[Table] = (),
    cuts: Cuts | None = None,
    left_out: Sequence[str] = (),
) -> Path:
    """Write the page about some run directories, and return where it lies.

    Args:
        target: the HTML file; folders on the way are made.
        runs: run directories, or their records as `records.read` gives them, by the name each shall have; or in a row,
            named by their fact `name`, by their recipe where there is none, and by their folder too where names would
            be alike.
        title: the page's heading.
        lead: the first screen, with all other sections folded below it.
        findings: sentences that stand at the top.
        tables: shown after the training curves.
        cuts: shown as a section on cut invariance.
        left_out: why runs that were meant are not on the page, a line each, shown at the top.

    Raises:
        FileNotFoundError: a path holds no run.
        ValueError: a run's record is damaged, `runs` is empty, or so many that no page under 3 MB holds them.

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
    named = _read(runs)
    detail = Detail()
    while True:
        first = [] if lead is None else [lead.finding, f"{lead.number}: {lead.meaning}", lead.measured]
        added = [*cuts_section(cuts), *table_sections(tables)]
        sections = [
            *findings_section([*first, *findings]),
            *(section(named, detail) for section in FIRST),
            *added,
            *(section(named, detail) for section in LAST),
        ]
        # A command line may hold bytes that are no text; as question marks they spoil nothing.
        page = _page(title, named, sections, left_out).encode("utf-8", "replace")
        if len(page) < LARGEST:
            break
        if detail == detail.halved():
            raise ValueError(f"{len(named)} runs make a page of {len(page):,} bytes: give fewer runs at a time")
        detail = detail.halved()
    file = Path(target)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, page)
    return file


def plots_of(runs: Runs) -> list[Plot]:
    """The plots that a page about the runs shows, each with its own legend, in their order."""
    named = _read(runs)
    found = []
    for section in (*FIRST, *LAST):
        made = section(named, Detail())
        found += [replace(plot, keys=made.keys if plot.keys is None else plot.keys) for plot in made.plots]
    return found


def _read(runs: Runs) -> list[NamedRun]:
    named = read_runs(runs)
    if not named:
        raise ValueError("a page needs at least one run, got none")
    return named


def _page(title: str, named: Sequence[NamedRun], sections: Sequence[Section], left_out: Sequence[str]) -> str:
    links = "".join(f'<a href="#{s.key}">{escape(s.heading)}</a>' for s in sections if not s.absent)
    absent = "".join(f'<p class="about">{escape(f"Left out: {reason}")}</p>\n' for reason in left_out)
    policy = (
        f"default-src 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="lead">{escape(_lead(named))}</p>
<p class="verdict">{escape(verdict(named))}</p>
{absent}<nav aria-label="Sections">{links}</nav>
{"".join(map(_section, sections))}<footer>Made by micronorm from the records of {count(len(named), "run")}.</footer>
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _lead(named: Sequence[NamedRun]) -> str:
    records = [run.record for run in named]
    data = " and ".join(dict.fromkeys(str(r.facts["data"].get("name")) for r in records if r.facts["data"].get("name")))
    days = sorted({record.facts["date"][:10] for record in records})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return ", ".join(filter(None, (count(len(records), "run"), f"data: {data}" if data else "", when)))


def _section(section: Section) -> str:
    look = ' class="absent"' if section.absent else ""
    parts = [f"<h2>{escape(section.heading)}</h2>"]
    if section.absent:
        parts.append(f"<p>{escape(section.absent)}</p>")
    if section.about:
        parts.append(f'<p class="about">{escape(section.about)}</p>')
    if section.plots:
        parts.append(_legend(section.keys))
        parts.append(f'<div class="charts">{"".join(map(_figure, section.plots))}</div>')
    body = "\n".join(filter(None, (*parts, section.body)))
    return f'<section id="{section.key}"{look}>\n{body}\n</section>\n'


def _figure(plot: Plot) -> str:
    note = f' <span class="note">({escape(plot.note)})</span>' if plot.note else ""
    return f"<figure><figcaption>{escape(plot.caption)}{note}</figcaption>{to_svg(plot.drawing)}</figure>"


def _legend(keys: Sequence[Key]) -> str:
    items = "".join(
        f"<li>{to_svg(Drawing(26, 12, [swatch(key)], ''), attributes=_HIDDEN)}{breakable(key.text)}</li>"
        for key in keys
    )
    return f'<ul class="legend">{items}</ul>' if items else ""


_HIDDEN = ' aria-hidden="true"'


def swatch(key: Key, left: float = 1, top: float = 1) -> Item:
    """A piece of the line, or of the area, that a legend's entry is about: 24 pixels wide, 10 high."""
    if key.role == "cell":
        return Outline([box(left, top, 24, 10)], "cell", key.colour, closed=True)
    return Outline([[(left, top + 5), (left + 24, top + 5)]], key.role, key.colour)
