"""The part of `micronorm reproduce` that is about figures: measure what is missing, draw, say where it lies."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table as Grid

from micronorm import records
from micronorm.cli.progress import TrainingProgress
from micronorm.engine.parallel import own_device
from micronorm.recipes import figures
from micronorm.recipes.figures import sheet as sheets

FOLDER = "figures"
"""Within the folder of runs, where data files and pictures go."""


def reproduce_figure(name: str, request: figures.Request, *, out: Path | None, as_json: bool) -> None:
    """Print the numbers of the figure `name`, or measure what is missing and draw it.

    ValueError for a name or an option that is wrong, OSError and ImportError for what is not there.
    """
    figure = figures.find(name)
    figure.check(request)
    wanted = figure.settings(request)
    stem = figure.stem(request)
    anew = figure.from_records and not as_json and bool(_runs(request.runs))
    found, where = (None, None) if anew else _find(wanted, stem, request.runs)
    if as_json:
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False))
        return
    console = Console(highlight=False)
    _say(console, f"{figure.name}: {figure.title}.")
    _say(console, f"The paper: {figure.paper}")
    for note in figure.ours:
        _say(console, f"Ours: {note}.")
    if figure.measure is not None and found is None:
        path = request.runs / FOLDER / f"{stem}.json"
        _say(console, f"To measure, into {path}; stopped, the same command goes on from there.")
        request = replace(request, device=own_device(None))
        found = figure.run(request, path, command=_command(name, request), listener=TrainingProgress(console))
        where = path
    if where is not None and found is not None:
        _say(console, f"Numbers: {where} ({found['date'][:10]}, {found['seconds']:g} s).")
    for row, why in ((found or {}).get("numbers") or {}).get("missing", {}).items():
        _say(console, f"Missing: {row} ({why}); drawn without it.")
    for path in figures.paint(figure, found or {}, out or request.runs / FOLDER, stem):
        _say(console, f"Drawn: {path}")


def list_figures(*, as_json: bool) -> list[dict[str, Any]]:
    """Every figure as a row for --json; without it they are printed."""
    rows = [{"figure": f.name, "title": f.title, "datasets": list(f.datasets)} for f in figures.figures().values()]
    if not as_json:
        grid = Grid(box=box.SIMPLE_HEAD)
        for column in ("figure", "on", "what"):
            grid.add_column(column, overflow="fold")
        for row in rows:
            grid.add_row(row["figure"], ", ".join(row["datasets"]), row["title"])
        Console(highlight=False).print(grid)
    return rows


def _runs(folder: Path) -> list[Path]:
    return records.find_runs(folder) if folder.is_dir() else []


def _find(wanted: dict[str, Any], stem: str, runs: Path) -> tuple[dict[str, Any] | None, Path | None]:
    """The data file with these settings: in the folder of runs, else among those that the checkout holds."""
    for folder in (runs / FOLDER, figures.RECORDED):
        path = folder / f"{stem}.json"
        found = sheets.read(path)
        if found is not None and found["settings"] == json.loads(json.dumps(wanted)):
            return found, path
    return None, None


def _command(name: str, request: figures.Request) -> str:
    options = {"dataset": request.dataset, "network": request.network, "epochs": request.epochs, "seed": request.seed}
    given = [part for key, value in options.items() if value is not None for part in (f"--{key}", str(value))]
    return shlex.join(["micronorm", "reproduce", name, *given])


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=not console.is_terminal)
