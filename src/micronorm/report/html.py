"""Values, tables, legends and sections as HTML. All given text is escaped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, TypeGuard

from micronorm.records import is_number

if TYPE_CHECKING:
    from micronorm.report.charts import Chart

LONGEST = 2000
"""Characters of a fact that are shown."""


@dataclass(frozen=True)
class LegendEntry:
    """A text with the colour and style ("solid", "dashed", "dotted" or "area") of what it names."""

    text: str
    colour: str
    style: str = "solid"


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        key: its anchor.
        heading: its title.
        about: what the reader sees, in a sentence or two.
        charts: its pictures.
        legend: the legend of its charts.
        body: HTML below the charts.
        absent: if there is nothing to show, how to get it.
    """

    key: str
    heading: str
    about: str = ""
    charts: "Sequence[Chart]" = field(default_factory=tuple)
    legend: Sequence[LegendEntry] = field(default_factory=tuple)
    body: str = ""
    absent: str = ""

    def html(self, *, folded: bool = False) -> str:
        """Return the section as HTML, its content behind its heading if `folded`."""
        parts = [f'<p class="about">{escape(self.about)}</p>'] if self.about else []
        parts += [legend_html(self.legend)] if self.charts else []
        parts += [f'<div class="charts">{"".join(map(_figure_html, self.charts))}</div>'] if self.charts else []
        body = "\n".join(filter(None, (*parts, self.body)))
        heading = f"<h2>{escape(self.heading)}</h2>"
        inner = f"<details><summary>{heading}</summary>\n{body}\n</details>" if folded else f"{heading}\n{body}"
        kind = ' class="folded"' if folded else ""
        return f'<section id="{self.key}"{kind}>\n{inner}\n</section>\n'


def absent_html(sections: "Sequence[Section]") -> str:
    """Return one section that names those without data, and says once for each reason how to get them."""
    headings: dict[str, list[str]] = {}
    for section in sections:
        if section.absent:
            headings.setdefault(section.absent, []).append(section.heading)
    items = "".join(f"<li>{escape(', '.join(names))}: {escape(reason)}</li>" for reason, names in headings.items())
    return f'<section id="absent">\n<h2>Not on this page</h2>\n<ul>{items}</ul>\n</section>\n' if items else ""


def _figure_html(chart: "Chart") -> str:
    note = f' <span class="note">({escape(chart.note)})</span>' if chart.note else ""
    return f"<figure><figcaption>{escape(chart.caption)}{note}</figcaption>{chart.svg()}</figure>"


def legend_html(entries: Sequence[LegendEntry]) -> str:
    """Return a legend as HTML, or nothing without entries."""
    items = "".join(f'<li><i class="key {e.style} {e.colour}"></i>{breakable(e.text)}</li>' for e in entries)
    return f'<ul class="legend">{items}</ul>' if items else ""


def dot_html(colour: str) -> str:
    """Return a dot of a run's colour."""
    return f'<i class="dot {colour}"></i>'


def count(number: int, thing: str) -> str:
    """Return the number with the thing, in the plural unless it is one."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def plain(text: str) -> str:
    """Return the text without characters that XML or a font cannot show, such as control characters."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def slug(text: str) -> str:
    """Return the text as a part of file names and ids: lower-case letters, digits and hyphens, at most 40.

    Example:
        >>> slug("BatchNorm, 64 images")
        'batchnorm-64-images'
    """
    letters = "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower())
    return "-".join(filter(None, letters.split("-")))[:40].rstrip("-")


def breakable(text: str) -> str:
    """Return the text as HTML that a narrow column breaks after / and - rather than within words.

    Example:
        >>> breakable("digits/bcn-ws")
        'digits/<wbr>bcn-<wbr>ws'
    """
    return escape(text).replace("/", "/<wbr>").replace("-", "-<wbr>")


def is_finite(value: Any) -> TypeGuard[float]:
    """Return whether the value is a number that can be added up and drawn; numbers beyond 1e302 are not."""
    return is_number(value) and abs(value) < 1e302


def format_value(value: Any) -> str:
    """Return a value as text: four digits of a float, a dash for an empty value, the beginning of a long text."""
    if value is None or value == {} or value == []:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if 10_000 <= abs(value) < 10**18 else str(value) if abs(value) < 10**18 else f"{value:.4e}"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = ", ".join(map(format_value, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text) - LONGEST:,} more characters)"


def format_duration(seconds: float) -> str:
    """Return seconds in two units at most.

    Example:
        >>> [format_duration(seconds) for seconds in (0.42, 52.3, 754, 9000, 200_000)]
        ['0.4 s', '52 s', '12 min 34 s', '2 h 30 min', '2 d 7 h']
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = round(seconds)
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    large, unit, small, less = next(row for row in units if whole >= row[0])
    return f"{whole // large} {unit} {whole % large // small} {less}"


def table_html(header: Sequence[str], rows: Sequence[Sequence[Any]], *, colours: Sequence[str] = ()) -> str:
    """Return a table as HTML. Columns of numbers are aligned to the right.

    Args:
        header: the names of its columns.
        rows: its cells, row by row.
        colours: of the dots in the first cells.
    """
    numeric = [all(is_number(row[k]) or row[k] is None for row in rows) for k in range(len(header))]
    classes = [' class="number"' if right else "" for right in numeric]
    columns = [_format_column([row[k] for row in rows]) for k in range(len(header))]
    head = "".join(
        f'<th scope="col"{each}>{escape(str(name))}</th>' for name, each in zip(header, classes, strict=True)
    )
    body = ""
    for number, (first, *rest) in enumerate(zip(*columns, strict=True)):
        cells = "".join(f"<td{each}>{escape(cell)}</td>" for cell, each in zip(rest, classes[1:], strict=True))
        dot = dot_html(colours[number]) if colours else ""
        body += f'<tr><th scope="row"{classes[0]}>{dot}{breakable(first)}</th>{cells}</tr>'
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _format_column(cells: Sequence[Any]) -> list[str]:
    """Return the cells as text: floats with equally many decimals, unless that would hide the small ones."""
    sizes = [abs(cell) for cell in cells if isinstance(cell, float) and math.isfinite(cell) and cell != 0]
    decimals = max(0, min(4, 3 - math.floor(math.log10(max(sizes))))) if sizes else 0
    if not sizes or max(sizes) >= 1e6 or min(sizes) < 10.0**-decimals:
        return [format_value(cell) for cell in cells]
    while decimals and all(f"{size:.{decimals}f}".endswith("0") for size in sizes):
        decimals -= 1
    texts = [f"{cell:,.{decimals}f}" if isinstance(cell, float) else format_value(cell) for cell in cells]
    return ["−" + text[1:] if text.startswith("-") else text for text in texts]  # as wide as a plus
