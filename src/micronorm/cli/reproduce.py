"""`micronorm reproduce`: a table of the paper, its numbers beside ours, and the runs that are missing; or a figure."""

import json
import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table as Grid

from micronorm import records
from micronorm.cli.figures import list_figures, reproduce_figure
from micronorm.cli.progress import TrainingProgress, say
from micronorm.cli.targets import MISUSE, TargetError, unknown
from micronorm.cli.train import execution_options
from micronorm.engine.loop import Diverged
from micronorm.engine.settings import DTYPES, Execution
from micronorm.recipes import Recipe, Table, find_table, tables
from micronorm.recipes.figures import Request
from micronorm.recipes.recipe import DATA
from micronorm.recipes.results import Findings, RunResult, gather, packaged, read_runs
from micronorm.recipes.run import Variation, run_recipe

INCOMPLETE = 1

_SHOWN = {"top1": "top-1", "top5": "top-5"}


@dataclass(frozen=True)
class TableRow:
    """A recipe and what was found for it."""

    recipe: Recipe
    found: Findings

    @property
    def reason(self) -> str | None:
        """Return why we have no result for this row, or None if we have one."""
        if self.found.counted:
            return None
        if self.recipe.unavailable is not None:
            return self.recipe.unavailable
        if self.found.rejected:
            return "; ".join(f"{result.where} does not count: {why}" for result, why in self.found.rejected)
        return "not run"

    def to_dict(self) -> dict[str, Any]:
        """Return the row as `--json` prints it. Values that are not finite become null."""
        mean = self.found.mean()
        record = {
            "row": self.recipe.row,
            "paper": None if self.recipe.paper is None else dict(self.recipe.paper),
            "ours": mean and {name: value if math.isfinite(value) else None for name, value in mean.items()},
            "seeds": self.found.seeds,
            "run": [result.where for result in self.found.counted] or None,
        }
        return record if self.reason is None else {**record, "reason": self.reason}


def reproduce(
    table: Annotated[
        str | None, typer.Argument(help="A table or figure (fig:…) of the paper, or ours; without one all are listed.")
    ] = None,
    rows: Annotated[str | None, typer.Option(help="Comma-separated row names.")] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Train for this many epochs instead; such runs are not counted."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**31, help="Run this seed even if other seeds have results.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder to read runs from and write runs to.")] = Path("runs"),
    data: Annotated[Path | None, typer.Option(help="Folder of the data set.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="Stop after so many minutes and save; the same command resumes the queue."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; the record keeps it.")] = None,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Store images in NHWC.")] = False,
    cuda_graph: Annotated[bool, typer.Option("--cuda-graph", help="Capture the whole step, one GPU only.")] = False,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Epochs between evaluations; the last is evaluated.")] = 1,
    dataset: Annotated[
        str | None, typer.Option(help="What a figure is measured on: digits, cifar10, …; the smallest by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Run nothing; print what is recorded as JSON.")] = False,
) -> None:
    """Show a table of the paper with its results and ours, then train the rows that have no result of ours.

    The rows to train are listed first, with their length. On a terminal the command then asks, unless an option such as
    --rows, --seed or --minutes says that training is meant. Use --json to train nothing.

    A run counts when it finished with the recipe's settings and data. Of several seeds the mean is shown. A run that
    was stopped resumes from its checkpoint.

    Rows run one after the other, in the order of --rows. So `--rows a,b,c --minutes 25` is a queue: it runs until the
    minutes are over, and the same command continues it later, also on another machine with the same RUNS folder.

    A figure (fig:…) is drawn as SVG and PNG into RUNS/figures. Missing numbers are measured first.

    Exit code 0: every row asked for has a figure or was run. 1: one could not be run, or the minutes were over (rows
    that cannot be run at all count only if --rows names them). 2: a name or an option is wrong. 130, 143: stopped by a
    signal.
    """
    meant = {"--rows": rows, "--epochs": epochs, "--seed": seed, "--data": data, "--minutes": minutes, "--dtype": dtype}
    meant |= {"--channels-last": channels_last or None, "--cuda-graph": cuda_graph or None}
    given = [name for name, value in {**meant, "--dataset": dataset}.items() if value is not None]
    try:
        _check_options(table, given, as_json=as_json)
        if table is None:
            _list_tables(as_json=as_json)
            return
        if table.startswith("fig:"):
            _reproduce_figure(table, Request(dataset=dataset, epochs=epochs, data=data, runs=runs), as_json=as_json)
            return
        chosen, asked = _choose(table, rows)
        if dtype is not None and dtype not in DTYPES:
            raise TargetError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    except (TargetError, ValueError) as fault:
        typer.echo(f"micronorm reproduce: {fault}", err=True)
        raise typer.Exit(MISUSE) from None
    found = _find_rows(chosen, runs)
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in found], indent=1, ensure_ascii=False, allow_nan=False))
        return
    options = {"channels_last": channels_last, "cuda_graph": cuda_graph, "evaluate_epochs": evaluate_every}
    queue = Queue(
        Console(highlight=False),
        runs=runs,
        data=data,
        variation=Variation(epochs=epochs, seed=seed or 0, dtype=dtype),
        execution=Execution(minutes=minutes, **options),
    )
    missing = [row.recipe for row in found if _is_missing(row, epochs=epochs, seed=seed)]
    _show_and_run(find_table(table), found, missing, asked, queue, confirm=not given and sys.stdin.isatty())


def _show_and_run(
    table: Table,
    found: Sequence[TableRow],
    missing: Sequence[Recipe],
    asked: set[str],
    queue: "Queue",
    *,
    confirm: bool,
) -> None:
    """Print the table, train what is missing, and print the table again if a row was trained."""
    _print_rows(queue.console, table, found)
    _print_remarks(queue.console, found)
    failed = queue.run(missing, asked, confirm=confirm)
    if len(failed) < len(missing):
        _print_rows(queue.console, table, _find_rows([row.recipe for row in found], queue.runs, tell=False))
    if failed & asked:
        raise typer.Exit(INCOMPLETE)


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


def _reproduce_figure(name: str, request: Request, *, as_json: bool) -> None:
    """Reproduce a figure. An interrupted measurement ends the command, and the same command continues it."""
    try:
        reproduce_figure(name, request, as_json=as_json)
    except (OSError, ImportError) as fault:  # no data, no matplotlib
        typer.echo(f"micronorm reproduce: {name} could not be made: {' '.join(str(fault).split())}", err=True)
        raise typer.Exit(INCOMPLETE) from None
    except KeyboardInterrupt:
        typer.echo(f"{name} was stopped; run the same command to continue.")
        raise typer.Exit(130) from None


def _list_tables(*, as_json: bool) -> None:
    if as_json:
        listed = [{"table": t.name, "title": t.title, "rows": [r.row for r in t.rows]} for t in tables().values()]
        typer.echo(json.dumps([*listed, *list_figures(as_json=True)], indent=1, ensure_ascii=False))
        return
    grid = Grid(box=box.SIMPLE_HEAD)
    for column in ("table", "rows", "what"):
        grid.add_column(column, justify="right" if column == "rows" else "left", overflow="fold")
    for table in tables().values():
        grid.add_row(table.name, str(len(table.rows)), table.title)
    console = Console(highlight=False)
    console.print(grid)
    list_figures(as_json=False)
    say(console, "micronorm reproduce TABLE shows the paper's figures beside ours and runs what is missing.")
    say(console, "micronorm reproduce FIGURE measures what is missing and draws it.")


def _choose(name: str, rows: str | None) -> tuple[tuple[Recipe, ...], set[str]]:
    """The recipes to show, and the names of those without which the command has failed.

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


def _find_rows(recipes: Sequence[Recipe], runs: Path, *, tell: bool = True) -> list[TableRow]:
    local, damaged = read_runs(runs)
    if tell:
        for path, why in damaged:
            typer.echo(f"micronorm reproduce: {path} cannot be read and is left out: {why}", err=True)
    results = [*packaged(), *local]
    return [TableRow(recipe, gather(recipe, results)) for recipe in recipes]


def _is_missing(row: TableRow, *, epochs: int | None, seed: int | None) -> bool:
    if epochs is not None and epochs != row.recipe.settings.epochs:
        return True  # the user requested another length, so no recorded run matches
    return not row.found.counted if seed is None else seed not in row.found.seeds


# --- what is printed --------------------------------------------------------------------------------------------------


def _print_rows(console: Console, table: Table, rows: Sequence[TableRow]) -> None:
    in_paper = {name for row in rows for name in row.recipe.paper or ()}
    shown = [name for name in _SHOWN if name in in_paper] or ["top1"]
    grid = Grid(box=box.SIMPLE_HEAD)
    figures = " / ".join(_SHOWN[name] for name in shown)
    say(console, f"{table.name}: {table.title}. Error in %, {figures}; of several seeds mean ± standard deviation.")
    for column in ("row", "paper", "ours", "seeds", "provenance"):
        grid.add_column(column, justify="right" if column in ("paper", "ours") else "left", overflow="fold")
    for row in rows:
        found = row.found
        grid.add_row(
            row.recipe.row,
            _figures(row.recipe.paper, None, shown),
            _figures(found.mean(), found.deviation(), shown),
            ", ".join(map(str, found.seeds)),
            row.reason or "\n".join(map(_provenance, found.counted)),
            style=None if row.recipe.unavailable is None else "dim",
        )
    console.print(grid)


def _figures(figures: Mapping[str, float] | None, spread: Mapping[str, float] | None, shown: Sequence[str]) -> str:
    if figures is None:
        return "–"
    around = {name: f" ± {value:.2f}" for name, value in (spread or {}).items()}
    return " / ".join(f"{figures[name]:.2f}{around.get(name, '')}" if name in figures else "–" for name in shown)


def _provenance(result: RunResult) -> str:
    facts = ", ".join(str(fact) for fact in (result.date[:10], result.device, result.settings.get("dtype")) if fact)
    return f"{result.where} ({facts})" if facts else result.where


def _print_remarks(console: Console, rows: Sequence[TableRow]) -> None:
    """Print each recipe note once with its rows, then the runs that were not counted and why."""
    about: dict[str, list[str]] = {}
    for row in rows:
        for note in row.recipe.notes:
            about.setdefault(note, []).append(row.recipe.row)
    for note, names in about.items():
        say(console, f"{'All rows' if len(names) == len(rows) else ', '.join(names)}: {note}.")
    for row in rows:
        if row.found.counted:  # else the table says so
            for result, why in row.found.rejected:
                say(console, f"{row.recipe.row}: {result.where} does not count: {why}.")


# --- runs -------------------------------------------------------------------------------------------------------------


class Queue:
    """Rows that are trained one after the other.

    Args:
        console: where to print.
        runs: folder of the run directories.
        data: folder of the data set; None searches for it.
        variation: how the runs depart from their recipes.
        execution: how to compute them; its minutes are those of the whole queue.
    """

    def __init__(
        self, console: Console, *, runs: Path, data: Path | None, variation: Variation, execution: Execution
    ) -> None:
        self.console, self.runs, self.data = console, runs, data
        self.variation, self.execution = variation, execution

    def run(self, missing: Sequence[Recipe], asked: set[str], *, confirm: bool) -> set[str]:
        """Announce the rows, ask if `confirm`, and train until the minutes are over.

        Returns:
            The names of the recipes that could not be run.
        """
        minutes = self.execution.minutes
        deadline = None if minutes is None else time.monotonic() + 60 * minutes
        places = {recipe.name: self._place(recipe) for recipe in missing if recipe.unavailable is None}
        for recipe in missing:
            if recipe.name in places:
                say(self.console, self._announcement(recipe, places[recipe.name]))
            elif recipe.name in asked:
                say(self.console, f"{recipe.name} cannot be run: {recipe.unavailable}.")
        failed = {recipe.name for recipe in missing} - set(places)
        if places and confirm and not typer.confirm(f"Train {'these rows' if len(places) > 1 else 'this row'} now?"):
            raise typer.Exit(INCOMPLETE)
        for recipe in missing:
            if recipe.name not in places:
                continue
            execution = self.execution
            if deadline is not None:
                left = (deadline - time.monotonic()) / 60
                if left <= 0:
                    say(self.console, f"The minutes are over before {recipe.name}; the same command continues with it.")
                    raise typer.Exit(INCOMPLETE)
                execution = replace(execution, minutes=left)
            why = self._train(recipe, places[recipe.name], execution)
            if why is not None:
                failed.add(recipe.name)
                typer.echo(f"micronorm reproduce: {recipe.name} could not be run: {why}", err=True)
        return failed

    def _announcement(self, recipe: Recipe, out: Path) -> str:
        settings = self.variation.apply(recipe.settings)
        images = DATA[recipe.data].train
        steps = settings.steps or settings.epochs * math.ceil(images / settings.step_batch)
        length = f"{settings.length}, {steps:,} steps of {settings.step_batch}"
        text = f"To run: {recipe.name} ({recipe.title}), {length}, seed {self.variation.seed}, into {out}."
        if settings.length != recipe.settings.length:
            text += f" It has {recipe.settings.length}: this run is kept, but never counts as ours."
        return text

    def _place(self, recipe: Recipe) -> Path:
        """Return the folder of the run: a new one, or that of the same run left unfinished, to be resumed."""
        seed, epochs = self.variation.seed, self.variation.epochs
        short = epochs is not None and epochs != recipe.settings.epochs
        first = self.runs / recipe.table / recipe.row / (f"seed-{seed}-epochs-{epochs}" if short else f"seed-{seed}")
        place, number = first, 1
        while _is_finished(place):  # and yet does not count: it is kept
            number += 1
            place = first.with_name(f"{first.name}-{number}")
        return place

    def _train(self, recipe: Recipe, out: Path, execution: Execution) -> str | None:
        """Train one row as `micronorm train` does. A stopped run ends the command.

        Returns:
            Why the row could not be run, or None.
        """
        variation = self.variation
        command = ["micronorm", "train", recipe.name, "--seed", str(variation.seed), "--out", str(out)]
        command += [] if variation.dtype is None else ["--dtype", variation.dtype]
        command += [] if variation.epochs is None else ["--epochs", str(variation.epochs)]
        command += execution_options(execution)
        try:
            outcome = run_recipe(
                recipe,
                out=out,
                variation=variation,
                execution=execution,
                data=self.data,
                resume=(out / records.FACTS).exists(),
                listener=TrainingProgress(self.console),
                command=shlex.join(command),
            )
        except (OSError, ImportError, MemoryError, ValueError, Diverged) as fault:  # missing data, a loss of NaN, …
            return " ".join(str(fault).split())
        if not outcome.finished:
            typer.echo(f"{recipe.name} was stopped after step {outcome.steps}; run the same command to continue.")
            raise typer.Exit(INCOMPLETE if outcome.signal is None else 128 + outcome.signal)
        return None


def _is_finished(place: Path) -> bool:
    try:
        outcome = records.read(place, rows=False).outcome
    except (FileNotFoundError, ValueError):
        return False
    return outcome is not None and outcome.get("finished") is True
