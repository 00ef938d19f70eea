"""The figures of `micronorm reproduce`: measure missing numbers, draw the figure, and print where the files are."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from micronorm import records
from micronorm.cli.printing import as_options, print_json, say
from micronorm.cli.progress import TrainingProgress
from micronorm.engine.parallel import own_device
from micronorm.recipes import figures
from micronorm.recipes.figures.data import read

FOLDER = "figures"
"""Folder of data files and pictures, inside the folder of runs."""


def reproduce_figure(name: str, request: figures.Request, *, as_json: bool) -> None:
    """Print the numbers of a figure as JSON, or measure them if they are missing and draw the figure.

    Raises:
        ValueError: the name or an option is wrong.
        OSError: the data set is missing.
    """
    figure = figures.find(name)
    figure.check(request)
    stem = figure.stem(request)
    has_runs = request.runs.is_dir() and bool(records.find_runs(request.runs))
    measure_again = figure.from_records and not as_json and has_runs
    found, path = (None, None) if measure_again else _find(figure.settings(request), stem, request.runs)
    if as_json:
        print_json(found)
        return
    console = Console(highlight=False)
    say(console, f"{figure.name}: {figure.title}.")
    say(console, f"The paper: {figure.paper}")
    for note in figure.ours:
        say(console, f"Ours: {note}.")
    if figure.measure is not None and found is None:
        path = request.runs / FOLDER / f"{stem}.json"
        say(console, f"Measuring into {path}. If it is interrupted, the same command continues.")
        request = replace(request, device=own_device(None))
        found = figure.run(request, path, command=_command(name, request), listener=TrainingProgress(console))
    if found is not None:
        say(console, f"Numbers: {path} ({found['date'][:10]}, {found['seconds']:g} s).")
    for row, why in ((found or {}).get("numbers") or {}).get("missing", {}).items():
        say(console, f"Missing: {row} ({why}); drawn without it.")
    for picture in figure.save(found or {}, request.runs / FOLDER, stem):
        say(console, f"Drawn: {picture}")


def _find(wanted: dict[str, Any], stem: str, runs: Path) -> tuple[dict[str, Any] | None, Path | None]:
    """Return the data file with these settings and its path: from the folder of runs, or from the checkout."""
    for folder in (runs / FOLDER, figures.RECORDED):
        path = folder / f"{stem}.json"
        found = read(path, wanted)
        if found is not None:
            return found, path
    return None, None


def _command(name: str, request: figures.Request) -> str:
    """Return the command that repeats the measurement, without folders."""
    options = as_options({"dataset": request.dataset, "epochs": request.epochs})
    return shlex.join(["micronorm", "reproduce", name, *options])
