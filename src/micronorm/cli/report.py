"""`micronorm report RUN…`: write one page about some runs, and its charts as files."""

import os
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from micronorm import records
from micronorm.cli.targets import MISUSE
from micronorm.report import write_page, write_plots

FAILED = 1


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders that contain some at any depth.")
    ],
    out: Annotated[Path, typer.Option(help="The page to write; an existing file is replaced.")] = Path("report.html"),
    plots: Annotated[Path | None, typer.Option(help="A folder to write every chart to, as SVG and PNG.")] = None,
    title: Annotated[str, typer.Option(help="The page's heading; by default the run's name or how many runs.")] = "",
    browse: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
) -> None:
    """Write one self-contained HTML page about runs: results, the paper's figures, curves, layers, memory and speed.

    The page makes no network requests and stays under 3 MB. It compares several runs, each in its own colour, and shows
    unfinished runs up to their last step. If some of several records are damaged, the page leaves them out and names
    them.

    Exit code 0: written. 1: a file could not be written. 2: no readable run was found, or an option is wrong.
    """
    try:
        found, faults = _read(_find(runs))
    except (OSError, ValueError) as fault:
        raise _said(str(fault), MISUSE) from None
    for fault in faults:
        _say(f"left out: {fault}" if found else fault)
    if not found:
        raise typer.Exit(MISUSE)
    heading = title or (found[0].path.resolve().name if len(found) == 1 else f"{len(found)} runs")
    try:
        with _writing(out):
            page = write_page(out, runs=found, title=heading, left_out=faults)
        typer.echo(f"{page}: {len(found)} run{'s' * (len(found) > 1)}, {page.stat().st_size / 1000:,.0f} kB")
        if plots is not None:
            with _writing(plots, folder=True):
                files = write_plots(plots, runs=found)
            typer.echo(f"{plots}: {len(files)} files")
    except ValueError as fault:
        raise _said(str(fault), MISUSE) from None
    except _NotWritten as fault:
        raise _said(str(fault), FAILED) from None
    if browse:
        webbrowser.open(page.resolve().as_uri())


def _find(places: list[Path]) -> list[Path]:
    """Return the run directories at and below the given places, each once."""
    found: dict[Path, Path] = {}
    for place in places:
        here = records.find_runs(place)
        if not here:
            raise FileNotFoundError(f"{place} holds no run: there is no {records.FACTS} in it or below")
        found |= {run.resolve(): run for run in here}
    return list(found.values())


def _read(runs: list[Path]) -> tuple[list[records.Record], list[str]]:
    """Return the records that can be read, and what is wrong with the others."""
    found, faults = [], []
    for run in runs:
        try:
            found.append(records.read(run))
        except (OSError, ValueError) as fault:
            faults.append(" ".join(str(fault).split()))
    return found, faults


class _NotWritten(Exception):
    """A file or folder could not be written; the message says why."""


@contextmanager
def _writing(target: Path, *, folder: bool = False) -> Iterator[None]:
    """On failure name the user's path instead of a temporary file, and remove the folders made for it."""
    missing = [path for path in (target, *target.parents) if not os.path.exists(path)]
    try:
        if not folder and target.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        if folder and target.is_file():
            raise NotADirectoryError(0, "it is a file, not a folder")
        yield
    except OSError as fault:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        raise _NotWritten(f"{target} cannot be written: {fault.strerror or fault}") from fault


def _say(message: str) -> None:
    typer.echo(f"micronorm report: {' '.join(message.split())}", err=True)


def _said(message: str, code: int) -> typer.Exit:
    _say(message)
    return typer.Exit(code)
