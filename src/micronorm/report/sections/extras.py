"""What the caller of a page knows beside its runs: findings, tables, and how far cuts took runs apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from micronorm.report.text import Section, Table, table_html


@dataclass(frozen=True)
class Lead:
    """The first screen of a page: one finding, one picture, one number. All other sections are folded below it.

    The picture is a bar for each run: its test error, in the run's colour, under the run's name.

    Args:
        finding: one sentence that says what the runs show.
        picture: the caption of the picture.
        number: one figure, as text: "7e-15".
        meaning: one sentence that says what the number is.
        measured: how finding and number were measured, in a few sentences.

    Example:
        >>> Lead("A beats B.", "Test error", "7e-15", "A step changes by this much.", "Twenty steps, twice.").number
        '7e-15'
    """

    finding: str
    picture: str
    number: str
    meaning: str
    measured: str


@dataclass(frozen=True)
class Cuts:
    """How far two runs of one recipe ended apart that differ in how their steps were cut, and a control beside it.

    Example:
        >>> Cuts(3e-6, 2e-6, "Cut in sevens.").control
        2e-06
    """

    difference: float
    control: float
    description: str = ""
    """What was cut, how, and what the control is."""


def findings_section(findings: Sequence[str]) -> list[Section]:
    """The sentences; no section where there are none."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in findings)
    body = f'<ul class="findings">{items}</ul>'
    return [Section("findings", "What was found", body=body)] if findings else []


def cuts_section(cuts: Cuts | None) -> list[Section]:
    """Both differences; no section where there are none."""
    if cuts is None:
        return []
    pair = (
        f"<div><dt>cut differently, ended apart by</dt><dd>{cuts.difference:.1e}</dd></div>"
        f"<div><dt>control: begun one unit in the last place apart</dt><dd>{cuts.control:.1e}</dd></div>"
    )
    return [Section("cuts", "Cut invariance", cuts.description, body=f'<dl class="tiles">{pair}</dl>')]


def table_sections(tables: Sequence[Table]) -> list[Section]:
    """A section for each table."""
    return [Section(f"table-{k}", table.caption, body=table_html(table)) for k, table in enumerate(tables, start=1)]
