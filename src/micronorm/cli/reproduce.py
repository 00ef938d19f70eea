"""`micronorm reproduce`: a table of the paper, its numbers beside ours, and the runs that are missing; or a figure."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from micronorm import records
from micronorm.cli.printing import (
    FAILED,
    FIGURE_NAMES,
    CommandFailed,
    TargetError,
    TrainingProgress,
    as_options,
    one_line,
    print_json,
    print_table,
    say,
)
from micronorm.cli.row_queue import RowQueue
from micronorm.cli.train import Dtype
from micronorm.engine.parallel import own_device
from micronorm.engine.settings import Execution
from micronorm.recipes import Recipe, Table, figures, find_table, tables, unknown
from micronorm.recipes.figures.figure import read
from micronorm.recipes.results import Findings, RunResult, gather, packaged, read_runs
from micronorm.recipes.run import Variation


def reproduce(
    table: Annotated[
        str | None,
        typer.Argument(metavar="TABLE", help="A table or figure (fig:…) of the paper, or ours. Without one, list all."),
    ] = None,
    rows: Annotated[str | None, typer.Option(help="Comma-separated names of rows. Default: all.")] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Train for this many epochs instead of the recipe's. Such runs never count."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**31, help="Run this seed even if other seeds have results.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder to read runs from and write runs to.")] = Path("runs"),
    data: Annotated[Path | None, typer.Option(help="Folder of the data set. Default: ./data and ~/data.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that decode image files.")] = 0,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="Stop after this many minutes and save; the same command resumes the queue."),
    ] = None,
    dtype: Dtype = None,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Store images in NHWC.")] = False,
    cuda_graph: Annotated[bool, typer.Option("--cuda-graph", help="Capture the whole step as a CUDA graph.")] = False,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Epochs between evaluations; always after the last.")] = 1,
    dataset: Annotated[
        str | None, typer.Option(help="What to measure a figure on: digits, cifar10, …. Default: the smallest.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Train nothing; print what is recorded as JSON.")] = False,
) -> None:
    """Show a table of the paper with its results and ours, then train the rows that have no result of ours.

    The rows to train are listed first, with their length. On a terminal the command then asks before it trains, unless
    you give an option such as --rows, --seed or --minutes. Use --json to train nothing.

    A run counts if it finished with the recipe's settings and data. The table shows the mean over seeds. A run that
    was stopped resumes from its checkpoint.

    Rows are trained one after the other, in the order of --rows. So `--rows a,b,c --minutes 25` is a queue: it stops
    after 25 minutes, and the same command continues it later, also on another machine with the same RUNS folder.

    A figure (fig:…) is drawn as SVG and PNG into RUNS/figures. Missing numbers are measured first.

    Exit code 0: every requested row has a result. 1: one could not be run, or the minutes were over. (Rows that we
    cannot run count only if --rows names them.) 2: a name or an option is wrong. 130, 143: stopped by a signal.
    """
    meant = {"--rows": rows, "--epochs": epochs, "--seed": seed, "--data": data, "--minutes": minutes, "--dtype": dtype}
    meant |= {"--channels-last": channels_last or None, "--cuda-graph": cuda_graph or None}
    meant |= {"--workers": workers or None, "--dataset": dataset}
    meant |= {"--evaluate-every": None if evaluate_every == 1 else evaluate_every}
    given = [name for name, value in meant.items() if value is not None]
    _check_options(table, given, as_json=as_json)
    if table is None:
        _list_tables(as_json=as_json)
        return
    if table.startswith("fig:"):
        request = figures.Request(dataset=dataset, epochs=epochs, data=data, runs=runs)
        try:
            _reproduce_figure(table, request, as_json=as_json)
        except (OSError, ImportError) as fault:  # no data, no matplotlib
            raise CommandFailed(f"{table} could not be made: {one_line(fault)}") from None
        except KeyboardInterrupt:
            typer.echo(f"{table} was stopped; run the same command to continue.")
            raise typer.Exit(130) from None
        return
    chosen, required = _choose(table, rows)
    found = _find_rows(chosen, runs)
    if as_json:
        print_json([row.to_dict() for row in found])
        return
    console = Console(highlight=False)
    queue = RowQueue(
        console=console,
        runs=runs,
        data=data,
        variation=Variation(epochs=epochs, seed=seed or 0, dtype=dtype),
        execution=Execution(
            minutes=minutes, channels_last=channels_last, cuda_graph=cuda_graph, evaluate_epochs=evaluate_every
        ),
        workers=workers,
    )
    _print_rows(console, find_table(table), found)
    _print_remarks(console, found)
    missing = [row.recipe for row in found if _is_missing(row, epochs=epochs, seed=seed)]
    failed = queue.run(missing, required, confirm=not given and sys.stdin.isatty())
    if len(failed) < len(missing):  # something was trained
        _print_rows(console, find_table(table), _find_rows(chosen, runs, tell=False))
    if failed & required:
        raise typer.Exit(FAILED)


_FOR_FIGURES = ("--epochs", "--data", "--dataset")


def _check_options(table: str | None, given: Sequence[str], *, as_json: bool) -> None:
    """Raise TargetError if an option does not fit what is reproduced: nothing, a figure, or a table."""
    if table is None and given:
        raise TargetError(f"say which table: {', '.join(tables())}")
    if table is not None and table.startswith("fig:"):
        unfit = [name for name in given if name not in _FOR_FIGURES]
        if unfit:
            raise TargetError(f"{', '.join(unfit)} is for tables; {table} is a figure")
        return
    if "--dataset" in given:
        raise TargetError("--dataset is for figures; a table's rows have their own")
    training = [name for name in given if name != "--rows"]
    if as_json and training:
        raise TargetError(f"--json runs nothing; remove {', '.join(training)}")


def _list_tables(*, as_json: bool) -> None:
    if as_json:
        listed = [{"table": t.name, "title": t.title, "rows": [r.row for r in t.rows]} for t in tables().values()]
        drawn = [{"figure": f.name, "title": f.title, "datasets": list(f.datasets)} for f in figures.FIGURES.values()]
        print_json([*listed, *drawn])
        return
    console = Console(highlight=False)
    rows = [(table.name, str(len(table.rows)), table.title) for table in tables().values()]
    print_table(console, ("table", "rows", "what"), rows, right=["rows"])
    rows = [(figure.name, ", ".join(figure.datasets), figure.title) for figure in figures.FIGURES.values()]
    print_table(console, ("figure", "data sets", "title"), rows)
    say(console, "micronorm reproduce TABLE shows the paper's figures beside ours and runs what is missing.")
    say(console, "micronorm reproduce FIGURE measures what is missing and draws it.")


def _choose(name: str, rows: str | None) -> tuple[tuple[Recipe, ...], set[str]]:
    """Return the recipes to show, and the names of those without which the command has failed.

    Rows that cannot be run are among the latter only if --rows names them.
    """
    table = find_table(name)
    if rows is None:
        return table.rows, {recipe.name for recipe in table.rows if recipe.unavailable is None}
    known = {recipe.row: recipe for recipe in table.rows}
    wanted = list(dict.fromkeys(row.strip() for row in rows.split(",") if row.strip()))
    if not wanted:
        raise TargetError(f"--rows names no row; {name} has {', '.join(known)}")
    for row in wanted:
        if row not in known:
            raise TargetError(unknown(f"{name} has no row {row!r}", row, list(known)))
    chosen = tuple(known[row] for row in wanted)
    return chosen, {recipe.name for recipe in chosen}


def _find_rows(recipes: Sequence[Recipe], runs: Path, *, tell: bool = True) -> list[Findings]:
    local, damaged = read_runs(runs)
    if tell:
        for path, why in damaged:
            typer.echo(f"micronorm reproduce: {path} cannot be read and is left out: {why}", err=True)
    results = [*packaged(), *local]
    return [gather(recipe, results) for recipe in recipes]


def _is_missing(row: Findings, *, epochs: int | None, seed: int | None) -> bool:
    if epochs is not None and epochs != row.recipe.settings.epochs:
        return True  # the user requested another length, so no recorded run matches
    return not row.counted if seed is None else seed not in row.seeds


# --- a figure -------------------------------------------------------------------------------------------------------

FOLDER = "figures"
"""The folder of data files and pictures, inside the folder of runs."""


def _reproduce_figure(name: str, request: figures.Request, *, as_json: bool) -> None:
    """Print the numbers of a figure as JSON, or measure them if they are missing and draw the figure."""
    figure = figures.find(name)
    figure.check(request)
    stem = figure.stem(request)
    has_runs = request.runs.is_dir() and bool(records.find_runs(request.runs))
    measure_again = figure.from_records and not as_json and has_runs
    found, path = (None, None) if measure_again else _find_numbers(figure.settings(request), stem, request.runs)
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


def _find_numbers(wanted: dict[str, Any], stem: str, runs: Path) -> tuple[dict[str, Any] | None, Path | None]:
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


# --- what is printed --------------------------------------------------------------------------------------------------


def _print_rows(console: Console, table: Table, rows: Sequence[Findings]) -> None:
    in_paper = {name for row in rows for name in row.recipe.paper or ()}
    in_ours = {name for row in rows for name in row.mean() or ()}
    shown = [name for name in FIGURE_NAMES if name in in_paper]
    shown = shown or [name for name in FIGURE_NAMES if name in in_ours][:1]
    say(console, f"{table.name}: {table.title}.")
    if shown:
        titles = " / ".join(FIGURE_NAMES[name] for name in shown)
        say(console, f"Figures: {titles} in %; of several seeds mean ± standard deviation.")
    cells = [
        (
            row.recipe.row,
            _figures(row.recipe.paper, None, shown),
            _figures(row.mean(), row.deviation(), shown),
            ", ".join(map(str, row.seeds)),
            row.reason or "\n".join(map(_provenance, row.counted)),
        )
        for row in rows
    ]
    styles = [None if row.recipe.unavailable is None else "dim" for row in rows]
    columns = ("row", "paper", "ours", "seeds", "provenance")
    print_table(console, columns, cells, right=("paper", "ours"), styles=styles)


def _figures(values: Mapping[str, float] | None, spread: Mapping[str, float] | None, shown: Sequence[str]) -> str:
    if values is None:
        return "–"
    around = {name: f" ± {value:.2f}" for name, value in (spread or {}).items()}
    return " / ".join(f"{values[name]:.2f}{around.get(name, '')}" if name in values else "–" for name in shown)


def _provenance(result: RunResult) -> str:
    facts = ", ".join(str(fact) for fact in (result.date[:10], result.device, result.settings.get("dtype")) if fact)
    return f"{result.where} ({facts})" if facts else result.where


def _print_remarks(console: Console, rows: Sequence[Findings]) -> None:
    """Print each recipe note once with its rows, then the runs that were not counted and why."""
    about: dict[str, list[str]] = {}
    for row in rows:
        for note in row.recipe.notes:
            about.setdefault(note, []).append(row.recipe.row)
    for note, names in about.items():
        say(console, f"{'All rows' if len(names) == len(rows) else ', '.join(names)}: {note}.")
    for row in rows:
        if row.counted:  # else the table says so
            for result, why in row.rejected:
                say(console, f"{row.recipe.row}: {result.where} does not count: {why}.")
