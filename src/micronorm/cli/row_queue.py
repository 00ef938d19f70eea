"""The rows that `micronorm reproduce` trains, one after the other."""

import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from micronorm import records
from micronorm.cli.printing import FAILED, TrainingProgress, as_options, one_line, say
from micronorm.cli.train import execution_options
from micronorm.engine.loop import Diverged
from micronorm.engine.parallel import own_device
from micronorm.engine.settings import Execution
from micronorm.recipes import Recipe
from micronorm.recipes.recipe import DATA
from micronorm.recipes.run import Variation, run_recipe
from micronorm.tasks import open_task


@dataclass(frozen=True, kw_only=True)
class RowQueue:
    """Rows that are trained one after the other.

    Args:
        console: where to print.
        runs: folder of the run directories.
        data: folder of the data set; None searches for it.
        variation: how the runs depart from their recipes.
        execution: how to compute them; its minutes are those of the whole queue.
        workers: processes that decode files.
    """

    console: Console
    runs: Path
    data: Path | None
    variation: Variation
    execution: Execution
    workers: int

    def run(self, missing: Sequence[Recipe], required: set[str], *, confirm: bool) -> set[str]:
        """Announce the rows, ask if `confirm`, and train until the minutes are over.

        Returns:
            The names of the recipes that could not be run.
        """
        minutes = self.execution.minutes
        deadline = None if minutes is None else time.monotonic() + 60 * minutes
        tasks = self._open_data([recipe for recipe in missing if recipe.unavailable is None])
        places = {recipe.name: self._place(recipe) for recipe in missing if recipe.name in tasks}
        for recipe in missing:
            if recipe.name in places:
                say(self.console, self._announcement(recipe, places[recipe.name]))
            elif recipe.unavailable is not None and recipe.name in required:
                say(self.console, f"{recipe.name} cannot be run: {recipe.unavailable}.")
        failed = {recipe.name for recipe in missing} - set(places)
        if places and confirm and not typer.confirm(f"Train {'these rows' if len(places) > 1 else 'this row'} now?"):
            raise typer.Exit(FAILED)
        for recipe in missing:
            if recipe.name not in places:
                continue
            execution = self.execution
            if deadline is not None:
                left = (deadline - time.monotonic()) / 60
                if left <= 0:
                    say(self.console, f"The minutes are over before {recipe.name}; the same command continues with it.")
                    raise typer.Exit(FAILED)
                execution = replace(execution, minutes=left)
            why = self._train(recipe, places[recipe.name], execution, tasks[recipe.name])
            if why is not None:
                failed.add(recipe.name)
                typer.echo(f"micronorm reproduce: {recipe.name} could not be run: {why}", err=True)
        return failed

    def _open_data(self, recipes: Sequence[Recipe]) -> dict[str, Any]:
        """Open each data set once, print why if it cannot be opened, and return the data by the name of the recipe."""
        groups: dict[tuple[str, str, int], list[Recipe]] = {}
        for recipe in recipes:
            groups.setdefault((recipe.task, recipe.data, recipe.classes), []).append(recipe)
        found: dict[str, Any] = {}
        for (task, data, classes), members in groups.items():
            options = {"classes": classes or None, "device": own_device(None), "workers": self.workers}
            try:
                opened = open_task(task, data, self.data, **options)
            except (OSError, ImportError, ValueError) as fault:
                rows = ", ".join(recipe.row for recipe in members)
                typer.echo(f"micronorm reproduce: {one_line(fault)}. Rows that need it: {rows}", err=True)
                continue
            found |= {recipe.name: opened for recipe in members}
        return found

    def _announcement(self, recipe: Recipe, out: Path) -> str:
        settings = self.variation.apply(recipe.settings)
        length = f"{settings.length} of {settings.step_batch} samples"
        if settings.epochs is not None:
            steps = settings.epochs * math.ceil(DATA[recipe.data].train / settings.step_batch)
            length = f"{settings.length}, {steps:,} steps of {settings.step_batch} samples"
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

    def _train(self, recipe: Recipe, out: Path, execution: Execution, task: Any) -> str | None:
        """Train one row as `micronorm train` does. A stopped run ends the command.

        Returns:
            Why the row could not be run, or None.
        """
        variation = self.variation
        given = {"seed": variation.seed, "out": out, "dtype": variation.dtype, "epochs": variation.epochs}
        options = [*as_options(given), *execution_options(execution, self.workers)]
        try:
            outcome = run_recipe(
                recipe,
                out=out,
                variation=variation,
                execution=execution,
                data=self.data,
                workers=self.workers,
                task=task,
                resume=(out / records.FACTS).exists(),
                listener=TrainingProgress(self.console),
                command=shlex.join(["micronorm", "train", recipe.name, *options]),
            )
        except (OSError, ImportError, MemoryError, ValueError, Diverged) as fault:  # missing data, a loss of NaN, …
            return one_line(fault)
        if not outcome.finished:
            typer.echo(f"{recipe.name} was stopped after step {outcome.steps}; run the same command to continue.")
            raise typer.Exit(FAILED if outcome.signal is None else 128 + outcome.signal)
        return None


def _is_finished(place: Path) -> bool:
    try:
        outcome = records.read(place, rows=False).outcome
    except (FileNotFoundError, ValueError):
        return False
    return outcome is not None and outcome.get("finished") is True
