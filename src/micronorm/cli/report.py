"""`micronorm report RUN…`: write one page about some runs, and its charts as files."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from micronorm import records
from micronorm.cli.printing import MISUSE, one_line
from micronorm.report import write_page, write_plots


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run directories, or folders that contain some at any depth.")
    ],
    out: Annotated[Path, typer.Option(help="The page to write; an existing file is replaced.")] = Path("report.html"),
    plots: Annotated[Path | None, typer.Option(help="A folder to write every chart to, as SVG and PNG.")] = None,
    title: Annotated[
        str, typer.Option(help="The page's heading. Default: the run's name, or the number of runs.")
    ] = "",
    browse: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
) -> None:
    """Write one self-contained HTML page about runs: results, the paper's figures, curves, layers, memory and speed.

    The page makes no network requests. Unfinished runs are shown up to their last step. If the
    records of some runs are damaged, the page names them and shows the others.

    Exit code 0: written. 1: the disk is full. 2: no readable run was found, or a path or an option is wrong.
    """
    found, faults = _read(_find(runs))
    for fault in faults:
        typer.echo(f"micronorm report: {'left out: ' if found else ''}{fault}", err=True)
    if not found:
        raise typer.Exit(MISUSE)
    heading = title or (found[0].path.resolve().name if len(found) == 1 else f"{len(found)} runs")
    page = write_page(out, runs=found, title=heading, left_out=faults)
    typer.echo(f"{page}: {len(found)} run{'s' * (len(found) > 1)}, {page.stat().st_size / 1000:,.0f} kB")
    if plots is not None:
        typer.echo(f"{plots}: {len(write_plots(plots, runs=found))} files")
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
            faults.append(one_line(fault))
    return found, faults
