"""`micronorm demo`: four normalizations, one image per micro-batch, and a table of how they came out."""

import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from micronorm.cli.digits import (
    BATCH_BN,
    EPOCHS,
    METHODS,
    SAMPLES_PER_STEP,
    Outcome,
    count_steps,
    cut_difference,
    train,
)
from micronorm.data.digits import Digits, Labelled, read_digits

INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the 1,297 training images.")] = EPOCHS,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="The first seed, of the weights and the order.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from the first on.")] = 2,
) -> None:
    """Train a small network on scikit-learn's digits, one image per micro-batch, with four normalizations.

    BN is batch normalization, GN group normalization, WS weight standardization, BCN batch-channel normalization.
    A step's 32 micro-batches are computed 32 at a time in the exact batched form, and the seconds are those of that.
    Nothing is downloaded. The defaults take about a minute on one CPU core.
    """
    console = Console(highlight=False)
    # One thread: tensors this small gain nothing from a second (with it, on two busy cores, a step took ten times as
    # long), and the figures then do not depend on how many cores there are.
    torch.set_num_threads(1)
    seed_range = range(seed, seed + seeds)
    outcomes: list[Outcome] = []
    try:
        digits = read_digits()
        _print_plan(console, digits, epochs=epochs, seeds=seed_range)
        _print_cuts(console, digits.train, seed=seed)
        _train_all(console, digits, outcomes, epochs=epochs, seeds=seed_range)
    except KeyboardInterrupt:
        if outcomes:
            console.print(results_table(outcomes))
        console.print(f"Interrupted: {len(outcomes)} of {seeds * len(METHODS)} runs had finished.")
        raise typer.Exit(INTERRUPTED) from None
    console.print(results_table(outcomes))
    for sentence in findings(outcomes):
        _say(console, sentence)


def _say(console: Console, text: str) -> None:
    # A terminal breaks lines between words; a file gets the whole line, for whoever searches in it.
    console.print(text, markup=False, soft_wrap=not console.is_terminal)


def _print_plan(console: Console, digits: Digits, *, epochs: int, seeds: range) -> None:
    steps = count_steps(len(digits.train.labels), epochs=epochs)
    which = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    _say(
        console,
        f"Digits, 8×8 pixels: {len(digits.train.labels):,} images to train on, {len(digits.test.labels)} to test. A "
        f"residual network with 16, 32 and 64 channels; {steps} optimizer steps of {SAMPLES_PER_STEP} images, {which}. "
        f"One image per micro-batch, computed {SAMPLES_PER_STEP} at a time in the exact batched form.",
    )


def _print_cuts(console: Console, train: Labelled, *, seed: int) -> None:
    found = {method.name: cut_difference(method, train, seed=seed) for method in (*METHODS, BATCH_BN)}
    kept = ", ".join(f"{method.name} {found[method.name]:.1e}" for method in METHODS)
    _say(
        console,
        f"One step image by image against the same step whole, largest relative difference of parameters and running "
        f"estimates (float32): {kept}; for comparison {BATCH_BN.name}, which depends on the cut, "
        f"{found[BATCH_BN.name]:.1e}.",
    )


def _train_all(console: Console, digits: Digits, outcomes: list[Outcome], *, epochs: int, seeds: range) -> None:
    """Train every method with every seed; each outcome is printed and appended as soon as it is there."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    steps = count_steps(len(digits.train.labels), epochs=epochs)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=steps * len(seeds) * len(METHODS))
        for seed in seeds:  # the outer loop, so that an interrupted demo leaves seeds complete
            for method in METHODS:
                run = f"seed {seed}, {method.name}"
                progress.update(bar, description=run, refresh=True)  # at once: a fast run ends before the next tick
                outcome = train(method, digits, epochs=epochs, seed=seed, on_step=partial(progress.advance, bar))
                outcomes.append(outcome)
                console.print(f"{run}: {outcome.error:.2f} % test error, {outcome.seconds:.1f} s")


def _by_method(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    grouped: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        grouped.setdefault(outcome.method, []).append(outcome)
    return grouped


def results_table(outcomes: Sequence[Outcome]) -> Table:
    """One row per method, in the order they ran: mean test error, its spread over seeds, mean seconds."""
    several = len(outcomes) > len(_by_method(outcomes))
    caption = "mean ± standard deviation over seeds; seconds per run" if several else None
    table = Table(caption=caption)
    for name in ("method", "test error %", "seconds", "steps", "images/step", "seeds"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for method, runs in _by_method(outcomes).items():
        errors = [run.error for run in runs]
        spread = f" ± {statistics.stdev(errors):.2f}" if len(errors) > 1 else ""
        table.add_row(
            method,
            f"{statistics.mean(errors):.2f}{spread}",
            f"{statistics.mean(run.seconds for run in runs):.1f}",
            str(runs[0].steps),
            str(SAMPLES_PER_STEP),
            str(len(runs)),
        )
    return table


def findings(outcomes: Sequence[Outcome]) -> list[str]:
    """What the table shows and what it does not, in sentences that follow from its figures alone."""
    counts = {method: statistics.mean(run.wrong for run in runs) for method, runs in _by_method(outcomes).items()}
    seeds = len(outcomes) // len(counts)
    images = outcomes[0].images
    ranked = sorted(counts, key=lambda method: counts[method])
    best = counts[ranked[0]]
    # Wrong answers are rare events: a count varies by its root, a difference of two counts by the root of their sum.
    behind = [method for method in ranked if counts[method] - best > 2 * math.sqrt(counts[method] + best)]
    rest = [method for method in ranked if method not in behind]
    if behind:
        apart = f"{_and(behind)} did worse than {ranked[0]} by more than that"
        apart += f"; {_and(rest)} are not told apart." if len(rest) > 1 else "."
    else:
        apart = "no two methods here are further apart than that."
    return [
        f"Wrong of {images} test images{', mean over seeds' if seeds > 1 else ''}: "
        f"{', '.join(f'{method} {counts[method]:.3g}' for method in ranked)}. One image is {100 / images:.1f} points.",
        f"The choice of test images alone moves the difference of counts a and b by up to about 2·sqrt(a+b): {apart}",
        f"More it does not show: the data set is small, {'one seed is' if seeds == 1 else f'{seeds} seeds are'} few, "
        f"one setting serves all methods, and the seconds are those of one CPU thread, {SAMPLES_PER_STEP} images at a "
        "time.",
    ]


def _and(names: Sequence[str]) -> str:
    *front, last = names
    return f"{', '.join(front)} and {last}" if front else last
