"""`micronorm report RUN…`: one page about some runs, and its plots as files."""

import webbrowser
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
    in one colour throughout. A run that goes on is shown as far as it has come.

    Exit code 0: written. 1: it could not be written, or matplotlib is missing for --plots. 2: no run there, a damaged
    record, or an option is wrong.
    """
    try:
        found = _find(runs)
        heading = title or (found[0].resolve().name if len(found) == 1 else f"{len(found)} runs")
        page = write_page(out, runs=found, title=heading)
        typer.echo(f"{page}: {len(found)} run{'s' * (len(found) > 1)}, {page.stat().st_size / 1000:,.0f} kB")
        if plots is not None:
            files = write_plots(plots, runs=found)
            typer.echo(f"{plots}: {len(files)} files")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as fault:
        raise _said(fault, MISUSE) from None
    except (OSError, ImportError) as fault:
        raise _said(fault, FAILED) from None
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


def _said(fault: BaseException, code: int) -> typer.Exit:
    typer.echo(f"micronorm report: {' '.join(str(fault).split())}", err=True)
    return typer.Exit(code)
