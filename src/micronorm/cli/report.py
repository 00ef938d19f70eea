"""`micronorm report RUN…`: one page about some runs, and its plots as files."""

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
        list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders that hold some at any depth.")
    ],
    out: Annotated[Path, typer.Option(help="The page; replaced where it is there.")] = Path("report.html"),
    plots: Annotated[
        Path | None, typer.Option(help="A folder for every plot as SVG and PNG; PNG needs matplotlib.")
    ] = None,
    title: Annotated[str, typer.Option(help="The page's heading; the run's name, or how many runs.")] = "",
    browse: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
) -> None:
    """Write one self-contained HTML page about runs: results, the paper's figures, curves, looks, memory and speed.

    The page loads nothing from anywhere and stays under 3 MB however long the runs are. Several runs are compared, each
    in one colour throughout. A run that goes on is shown as far as it has come. Of several runs those whose records are
    damaged are left out, and named.

    Exit code 0: written. 1: it could not be written; or matplotlib is missing for --plots, which then writes SVG alone.
    2: no run there, no run with an undamaged record, or an option is wrong.
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
    except (_NotWritten, ImportError) as fault:
        raise _said(str(fault), FAILED) from None
    if browse:
        webbrowser.open(page.resolve().as_uri())


def _find(places: list[Path]) -> list[Path]:
    """The run directories that are meant, each once."""
    found: dict[Path, Path] = {}
    for place in places:
        here = records.find_runs(place)
        if not here:
            raise FileNotFoundError(f"{place} holds no run: there is no {records.FACTS} in it or below")
        found |= {run.resolve(): run for run in here}
    return list(found.values())


def _read(runs: list[Path]) -> tuple[list[records.Record], list[str]]:
    """The records that can be read, and what is wrong with the others."""
    found, faults = [], []
    for run in runs:
        try:
            found.append(records.read(run))
        except (OSError, ValueError) as fault:
            faults.append(" ".join(str(fault).split()))
    return found, faults


class _NotWritten(Exception):
    """A file or a folder that cannot be written, in words."""


@contextmanager
def _writing(target: Path, *, folder: bool = False) -> Iterator[None]:
    """Say of a failure what the user named, not the hidden file that was written first; leave no empty folder."""
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
