"""Values, tables and sections as HTML. Whatever is given as text leaves as text, escaped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, TypeGuard

from micronorm.report.drawing import Key, Plot

LONGEST = 2000
"""Characters of a fact that are shown."""


@dataclass(frozen=True)
class Table:
    """A small table; cells that are numbers stand to the right.

    Example:
        >>> Table("Errors", ["method", "error %"], [["GN", 2.5]]).header
        ['method', 'error %']
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"table {self.caption!r}: {len(row)} cells under {len(self.header)} headings")


@dataclass(frozen=True)
class Section:
    """A part of the page: its words, its plots, and what follows them as HTML."""

    key: str
    """Its anchor."""
    heading: str
    about: str = ""
    """What one sees, in a sentence or two of text."""
    plots: Sequence[Plot] = field(default_factory=tuple)
    keys: Sequence[Key] = field(default_factory=tuple)
    """The legend of all its plots."""
    body: str = ""
    absent: str = ""
    """Where there is nothing to show: how to get it, as text."""


def count(number: int, thing: str) -> str:
    """The number and the thing, in the plural where it is not one."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def breakable(text: str) -> str:
    """The text as HTML that a narrow column breaks after / and - rather than within words.

    Example:
        >>> breakable("digits/bcn-ws")
        'digits/<wbr>bcn-<wbr>ws'
    """
    return escape(text).replace("/", "/<wbr>").replace("-", "-<wbr>")


def is_number(value: Any) -> TypeGuard[float]:
    """Whether the value is an int or a float; True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A value as a reader wants it: four digits of a float, a dash for nothing, the beginning of long text."""
    if value is None or value == {} or value == []:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if 10_000 <= abs(value) < 10**18 else str(value) if abs(value) < 10**18 else f"{value:.4e}"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = ", ".join(map(shown, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text) - LONGEST:,} more characters)"


def duration(seconds: float) -> str:
    """Seconds for people.

    Example:
        >>> [duration(seconds) for seconds in (0.42, 52.3, 754, 9000, 200_000)]
        ['0.4 s', '52 s', '12 min 34 s', '2 h 30 min', '2 d 7 h']
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = round(seconds)
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    large, unit, small, less = next(row for row in units if whole >= row[0])
    return f"{whole // large} {unit} {whole % large // small} {less}"


def size(number: float) -> str:
    """Bytes for people.

    Example:
        >>> size(3_543_348_019), size(52_000_000)
        ('3.30 GiB', '49.6 MiB')
    """
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def table_html(table: Table, *, colours: Sequence[str] = ()) -> str:
    """The table, the first cell of each row with a dot of its colour where colours are given."""
    numeric = [all(is_number(row[k]) or row[k] is None for row in table.rows) for k in range(len(table.header))]
    look = [' class="number"' if right else "" for right in numeric]
    columns = [_column([row[k] for row in table.rows]) for k in range(len(table.header))]
    head = "".join(
        f'<th scope="col"{each}>{escape(str(name))}</th>' for name, each in zip(table.header, look, strict=True)
    )
    body = ""
    for number, (first, *rest) in enumerate(zip(*columns, strict=True)):
        cells = "".join(f"<td{each}>{escape(cell)}</td>" for cell, each in zip(rest, look[1:], strict=True))
        dot = f'<i class="dot {colours[number]}"></i>' if colours else ""
        body += f'<tr><th scope="row"{look[0]}>{dot}{breakable(first)}</th>{cells}</tr>'
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _column(cells: Sequence[Any]) -> list[str]:
    """The cells of a column as text: floats with equally many decimals, unless that would hide the small ones."""
    sizes = [abs(cell) for cell in cells if isinstance(cell, float) and math.isfinite(cell) and cell != 0]
    decimals = max(0, min(4, 3 - math.floor(math.log10(max(sizes))))) if sizes else 0
    if not sizes or max(sizes) >= 1e6 or min(sizes) < 10.0**-decimals:
        return [shown(cell) for cell in cells]
    while decimals and all(f"{size:.{decimals}f}".endswith("0") for size in sizes):
        decimals -= 1
    return [_minus(f"{cell:,.{decimals}f}") if isinstance(cell, float) else shown(cell) for cell in cells]


def _minus(text: str) -> str:
    """With the sign that is as wide as a plus."""
    return "−" + text[1:] if text.startswith("-") else text
