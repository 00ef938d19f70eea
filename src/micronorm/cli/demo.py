"""`micronorm demo`: five networks on digits side by side, one of them again cut differently, and a page about it."""

import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import nn

from micronorm import records
from micronorm.cli.board import Board, Row
from micronorm.cli.cuts import State, Stopped, cut_difference, difference, nudge, run, state_of
from micronorm.cli.findings import (
    Repeated,
    Result,
    compare_cuts,
    compare_methods,
    describe_single_steps,
    describe_wide,
)
from micronorm.cli.targets import MISUSE
from micronorm.recipes import Recipe, find, find_table
from micronorm.recipes.digits import EPOCHS, STEP_BATCH
from micronorm.recipes.protocols import method
from micronorm.recipes.run import Variation
from micronorm.report import Cuts, Table, write_page

COMMAND = "micronorm demo"
PAGE = "report.html"
RECIPES = find_table("digits").rows
BATCH_BN = find("digits/bn-64")
REPEATED = find("digits")
CUT = 23  # samples per micro-batch of the run that is repeated: 23, 23, 18; smaller ones take longer
WIDE_CUT = 7  # of the comparison in float64
WIDE_STEPS = 20
OBSERVED = 20  # steps between two looks into the network, about an epoch
LOOKS = (1, 2, 5, 10, 20, 50, 100, 200)  # the steps, beside the last, after which repeated runs are compared


def name_of(recipe: Recipe) -> str:
    """The method and over how many images it takes its statistics: "BN at 64"."""
    return f"{method(recipe.norm, recipe.weight)} at {recipe.micro_batch}"


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the 1,297 training images.")] = EPOCHS,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of weights, order and augmentation.")] = 0,
    out: Annotated[Path, typer.Option(help="Where runs and page are kept; an older demo there is replaced.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train a small network on scikit-learn's digits with five normalizations, then one of them again, cut differently.

    BN is batch normalization, GN group normalization, WS weight standardization, BCN batch-channel normalization. "At
    1" takes its statistics over one image per micro-batch; a step's 64 micro-batches are computed at once in the exact
    batched form, and the seconds are those of that. Nothing is downloaded. The defaults take about a minute and a half
    on one CPU core.

    Exit code 0: done. 2: an option is wrong, or --out holds something else. 130, 143: interrupted.
    """
    console = Console(highlight=False)
    # One thread: tensors this small gain nothing from a second (with it, on two busy cores, a step took ten times as
    # long), and the figures then do not depend on how many cores there are.
    torch.set_num_threads(1)
    shown = _Demo(console, out, Variation(epochs=epochs, seed=seed))
    number: int = signal.SIGINT
    try:
        make_room(out)
        shown.go()
        return
    except (FileExistsError, NotADirectoryError, PermissionError) as fault:
        typer.echo(f"{COMMAND}: {fault}", err=True)
        raise typer.Exit(MISUSE) from None
    except Stopped as stopped:
        number = stopped.number
    except KeyboardInterrupt:
        pass
    shown.say(
        f"Interrupted: {len(shown.results)} of {len(RECIPES)} methods had finished. Records are in {out}; the next "
        "demo replaces them."
    )
    raise typer.Exit(128 + number)


def make_room(out: Path) -> None:
    """Remove what an older demo left in `out`, and nothing else.

    Raises:
        FileExistsError: something that no demo has made has one of the names it needs. Nothing was removed then.
        NotADirectoryError: `out` is a file.
    """
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"{out} is a file; name a folder with --out")
    present = {path.name for path in out.iterdir()} if out.exists() else set[str]()
    folders = [out / recipe.row for recipe in RECIPES if recipe.row in present]
    page = out / PAGE
    foreign = [folder for folder in folders if not _holds_demo_run(folder)]
    if PAGE in present and not (page.is_file() and b"Made by micronorm" in page.read_bytes()):
        foreign.append(page)
    if foreign:
        raise FileExistsError(f"{foreign[0]} was not made by a demo and would be lost; name another folder with --out")
    for folder in folders:
        shutil.rmtree(folder)
    page.unlink(missing_ok=True)  # it would speak of runs that are gone


def _holds_demo_run(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        return records.read(folder).facts["command"].startswith(COMMAND)
    except FileNotFoundError:
        return not any(folder.iterdir())  # killed before it had begun
    except ValueError:  # damaged: it could have been anyone's
        return False


@dataclass
class _Demo:
    """The state of one call of `demo`."""

    console: Console
    out: Path
    variation: Variation
    results: list[Result] = field(default_factory=list)
    """Of the methods that have finished."""
    states: dict[int, State] = field(default_factory=dict)
    """Of the run to be repeated, after the steps of `LOOKS` and after the last."""

    def say(self, text: str) -> None:
        # A terminal breaks lines between words; a file gets the whole line, for whoever searches in it.
        self.console.print(text, markup=False, soft_wrap=not self.console.is_terminal)

    def go(self) -> None:
        settings = self.variation.apply(REPEATED.settings)
        self.say(
            f"Digits, 8×8 pixels; a residual network with 16, 32 and 64 channels; epochs: {settings.epochs}, images "
            f'per optimizer step: {STEP_BATCH}, seed: {settings.seed}, one CPU thread. "At {STEP_BATCH}" takes its '
            f'statistics over the images of a step, "at 1" over one image per micro-batch, computed {STEP_BATCH} at a '
            "time in the exact batched form."
        )
        self._train_methods()
        found = compare_methods(self.results)
        for sentence in found:
            self.say(sentence)
        single = self._single_steps()
        self.say(describe_single_steps(single, broken=name_of(BATCH_BN)))
        found.append(describe_wide(self._wide(), method=name_of(REPEATED), steps=WIDE_STEPS, size=WIDE_CUT))
        self.say(found[-1])
        repeated = self._repeat()
        self.say(compare_cuts(repeated))
        self.say(f"All of it on one page: {self._write_page(found, single, repeated)}")

    def _train_methods(self) -> None:
        model = REPEATED.build(self.variation.seed or 0)
        command = f"{COMMAND} --epochs {self.variation.epochs} --seed {self.variation.seed}"

        def keep_state(step: int) -> None:
            if step in LOOKS:
                self.states[step] = state_of(model)

        rows = [Row(name_of(recipe), keep_state if recipe == REPEATED else None) for recipe in RECIPES]
        with Board(self.console, rows, first="method") as board:
            for recipe, row in zip(RECIPES, rows, strict=True):
                own = model if recipe == REPEATED else None
                folder = self.out / recipe.row
                given = {"model": own, "listener": row, "command": command, "observe": OBSERVED}
                outcome = run(recipe, self.variation, out=folder, **given)
                if recipe == REPEATED:
                    self.states[outcome.steps] = state_of(model)
                self.results.append(Result.read(row.name, folder))
                board.tell(row)

    def _single_steps(self) -> dict[str, float]:
        with self.console.status("One step image by image, by each method"):
            return {name_of(recipe): cut_difference(recipe, self.variation, micro_batch=1) for recipe in RECIPES}

    def _wide(self) -> float:
        with self.console.status(f"{WIDE_STEPS} steps in float64, whole and cut"):
            return cut_difference(REPEATED, self.variation, micro_batch=WIDE_CUT, steps=WIDE_STEPS, dtype="float64")

    def _repeat(self) -> Repeated:
        """Without records: these are not results of the recipe."""
        seed, name = self.variation.seed or 0, name_of(REPEATED)
        again = (
            (f"cut by {CUT}", REPEATED.build(seed), CUT),
            ("control, one ulp", nudge(REPEATED.build(seed)), None),
        )
        apart: list[list[float]] = [[], []]

        def measure(model: nn.Module, found: list[float], step: int) -> float | None:
            if step not in self.states:
                return None
            found.append(difference(state_of(model), self.states[step]))
            return found[-1]

        rows = [
            Row(title, partial(measure, model, found)) for (title, model, _), found in zip(again, apart, strict=True)
        ]
        with Board(self.console, rows, first=f"{name} again", last="apart") as board:
            for row, (_, model, size) in zip(rows, again, strict=True):
                run(REPEATED, self.variation, model=model, micro_batch=size, listener=row)
                board.tell(row)
        return Repeated(name, CUT, list(self.states), *apart, *(row.error for row in rows))  # type: ignore[arg-type]

    def _write_page(self, found: Sequence[str], single: Mapping[str, float], repeated: Repeated) -> Path:
        steps = [[name, _short(value)] for name, value in single.items()]
        looks = zip(repeated.steps, map(_short, repeated.cut), map(_short, repeated.control), strict=True)
        return write_page(
            self.out / PAGE,
            runs={name_of(recipe): self.out / recipe.row for recipe in RECIPES},
            title="micronorm demo: digits, one image per micro-batch",
            findings=found,
            tables=[
                Table("One step image by image against whole", ["method", "difference"], steps),
                Table(
                    f"{repeated.method} again: how far apart after so many steps",
                    ["steps", f"cut by {CUT}", "control, one ulp"],
                    list(looks),
                ),
            ],
            cuts=Cuts(repeated.cut[-1], repeated.control[-1], compare_cuts(repeated)),
        )


def _short(value: float) -> float:
    """With two digits: more are noise."""
    return float(f"{value:.1e}")
