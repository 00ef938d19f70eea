"""The page: one HTML file with everything in it, and its charts as files."""

import base64
import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from micronorm.records import write_atomically
from micronorm.report.charts import bar_chart
from micronorm.report.diagnostics import channels, shares
from micronorm.report.html import Section, absent_html, count, is_finite
from micronorm.report.plots import DARK, LIGHT
from micronorm.report.predictions import predictions
from micronorm.report.results import facts, paper, resources, results, training, verdict
from micronorm.report.runs import NamedRun, Runs, last_figures, main_figure, read_runs

SECTIONS: tuple[Callable[[Sequence[NamedRun]], Section], ...] = (
    results,
    paper,
    training,
    channels,
    shares,
    resources,
    predictions,
    facts,
)
"""The sections of a page in their order."""


@dataclass(frozen=True)
class Lead:
    """The first screen of a page: one finding, one picture, one number. All sections are folded below it.

    The picture has a bar for each run: its test error, in the run's colour, under the run's name.

    Args:
        finding: one sentence that says what the runs show.
        picture: the caption of the picture.
        number: one figure, as text: "7e-15".
        meaning: one sentence that says what the number is.
        measured: how finding and number were measured, in a few sentences.
    """

    finding: str
    picture: str
    number: str
    meaning: str
    measured: str


def write_page(
    target: str | os.PathLike[str],
    *,
    runs: Runs,
    title: str = "Runs",
    lead: Lead | None = None,
    left_out: Sequence[str] = (),
) -> Path:
    """Write a page about run directories, and return its path.

    Args:
        target: the HTML file. Missing folders are created.
        runs: run directories or their records, by their names on the page. In a list, a run has the name in its
            record, or that of its recipe; equal names are extended by the folder's name or a number.
        title: the page's heading.
        lead: the first screen; without it the page begins with the results in a sentence.
        left_out: why some runs are not on the page, a line each.

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
        >>> page = write_page(f"{folder.name}/report.html", runs=[run.path], title="One epoch")
        >>> "4.2" in page.read_text()
        True
        >>> folder.cleanup()
    """
    named = read_runs(runs)
    sections = [make(named) for make in SECTIONS]
    # A recorded command line may hold bytes that are no text; they become question marks.
    page = _page_html(title, named, sections, lead, left_out).encode("utf-8", "replace")
    file = Path(target)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, page)
    return file


def write_plots(folder: str | os.PathLike[str], *, runs: Runs) -> list[Path]:
    """Write every chart of a page about the runs as SVG and PNG into `folder`, and return the files."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    return [
        file for section in sections_of(runs) for chart in section.charts for file in chart.save(target, section.legend)
    ]


def sections_of(runs: Runs) -> list[Section]:
    """Return the sections of a page about the runs."""
    named = read_runs(runs)
    return [make(named) for make in SECTIONS]


def _page_html(
    title: str, named: Sequence[NamedRun], sections: Sequence[Section], lead: Lead | None, left_out: Sequence[str]
) -> str:
    style = _stylesheet()
    absent = "".join(f'<p class="about">{escape(f"Left out: {reason}")}</p>\n' for reason in left_out)
    shown = [section for section in sections if not section.absent]
    links = "".join(f'<a href="#{s.key}">{escape(s.heading)}</a>' for s in shown)
    first = f'<p class="verdict">{escape(verdict(named))}</p>\n' if lead is None else _lead_html(lead, named)
    nav = f'<nav aria-label="Sections">{links}</nav>' if lead is None else "<h2>Details</h2>"
    body = "".join(section.html(folded=lead is not None) for section in shown)
    body += absent_html(sections) if lead is None else ""
    # The policy forbids scripts, requests and all styles but this one.
    policy = f"default-src 'none'; style-src {_hash(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="summary">{escape(_summary(named))}</p>
{first}{absent}{nav}
{body}<footer>Made by micronorm from the records of {count(len(named), "run")}.</footer>
</main>
</body>
</html>
"""


def _lead_html(lead: Lead, named: Sequence[NamedRun]) -> str:
    key = main_figure(named)
    bars = [(r.name, r.colour, last_figures(r.record).get(key, math.nan)) for r in named]
    finite = [bar for bar in bars if is_finite(bar[2])]
    picture = bar_chart("lead", finite, caption=lead.picture, unit=" %").svg() if finite else "No finite error."
    return f"""<section id="lead" class="lead">
<p class="verdict">{escape(lead.finding)}</p>
<figure><figcaption>{escape(lead.picture)}</figcaption>{picture}</figure>
<p class="law"><strong>{escape(lead.number)}</strong> {escape(lead.meaning)}</p>
<details><summary>How this was measured</summary><p>{escape(lead.measured)}</p></details>
</section>
"""


def _summary(named: Sequence[NamedRun]) -> str:
    records = [run.record for run in named]
    data = " and ".join(dict.fromkeys(str(r.facts["data"].get("name")) for r in records if r.facts["data"].get("name")))
    days = sorted({record.facts["date"][:10] for record in records})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return ", ".join(filter(None, (count(len(records), "run"), f"data: {data}" if data else "", when)))


def _stylesheet() -> str:
    """Return the colours as CSS variables, a class for each, and the layout."""
    classes = "".join(f".{name}{{color:var(--{name})}}" for name in LIGHT if name[1:].isdigit())
    return (
        f":root{{color-scheme:light dark;{_variables(LIGHT)}}}"
        f"@media screen and (prefers-color-scheme: dark){{:root{{{_variables(DARK)}}}}}"
        f"{classes}{files('micronorm.report').joinpath('page.css').read_text('utf-8')}"
    )


def _variables(colours: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
