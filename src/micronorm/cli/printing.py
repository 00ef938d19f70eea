"""What commands print: sentences, reports, tables, JSON, and commands to run."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def say(console: Console, text: str) -> None:
    """Print a text without markup. A terminal breaks lines between words; a file gets whole lines, easy to search."""
    console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def show_report(console: Console, text: str, *, bold: Sequence[str], red: str, green: str) -> None:
    """Print a report as `say` does. A terminal shows some words in bold, and what matches a pattern in its colour."""
    report = Text(text)
    if console.is_terminal:
        report.highlight_words(bold, "bold")
        report.highlight_regex(red, "bold red")
        report.highlight_regex(green, "green")
    console.print(report, soft_wrap=not console.is_terminal)


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Collection[str] = (),
    styles: Sequence[str | None] = (),
    title: str | None = None,
) -> None:
    """Print a table. Columns named in `right` are aligned there; `styles` has the colour of each row."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for number, row in enumerate(rows):
        table.add_row(*row, style=styles[number] if styles else None)
    console.print(table, markup=False)


def as_options(given: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line. None and False are left out, True is a flag, a list repeats its option.

    Example:
        >>> as_options({"dtype": None, "save_every": 20, "compile": True})
        ['--save-every', '20', '--compile']
    """
    words = []
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            words += [word for one in (value if isinstance(value, list) else [value]) for word in (option, str(one))]
    return words


def print_json(value: Any) -> None:
    """Print a value as JSON, for the options named --json."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False))
