"""`micronorm demo`: train five networks on digits, compare split with whole steps, and write a page about it."""

import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from micronorm import records
from micronorm.cli.cuts import Stopped, run, split_difference
from micronorm.cli.findings import HOW_MEASURED, Errors, findings, name_of, write_demo_page
from micronorm.cli.progress import TrainingProgress, say
from micronorm.engine.listener import Listener
from micronorm.engine.settings import Execution
from micronorm.recipes import find_table
from micronorm.recipes.digits import EPOCHS, STEP_BATCH
from micronorm.recipes.run import Variation

COMMAND = "micronorm demo"
PAGE = "report.html"
RECIPES = find_table("digits").rows
SPLIT_SIZE, SPLIT_STEPS = 7, 20
OBSERVED = 20  # steps between two measurements inside the network: about one epoch


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the 1,297 training images.")] = EPOCHS,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Seed of weights, order and augmentation.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for runs and page; an older demo there is replaced.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train a small network on scikit-learn's digits with five normalizations and compare them.

    WS is Weight Standardization, BCN is Batch-Channel Normalization. "1 at a time" is one image per micro-batch:
    BatchNorm computes its statistics over that image alone. To save time, the 64 micro-batches of a step are computed
    together, with the same result. Nothing is downloaded. The demo takes about two minutes on one CPU core.

    Exit code 0: done. 2: an option is wrong, or --out contains other files. 130, 143: interrupted.
    """
    console = Console(highlight=False)
    # One thread: tensors this small gain nothing from a second thread (on two busy cores a step took ten times as
    # long), and the figures do not depend on the number of cores.
    torch.set_num_threads(1)
    shown = _Demo(console, out, Variation(epochs=epochs, seed=seed))
    number: int = signal.SIGINT
    try:
        make_room(out)
        shown.run()
        return
    except Stopped as stopped:
        number = stopped.number
    except KeyboardInterrupt:
        pass
    done = f"{len(shown.errors)} of {len(RECIPES)} methods had finished"
    say(console, f"Interrupted: {done}. Records are in {out}; the next demo replaces them.")
    raise typer.Exit(128 + number)


def make_room(out: Path) -> None:
    """Remove the runs and the page of an older demo from `out`, and nothing else.

    Raises:
        FileExistsError: A file or folder that no demo has made has one of the names the demo needs. Nothing is removed.
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
    page.unlink(missing_ok=True)  # it describes runs that no longer exist


def _holds_demo_run(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        return records.read(folder).facts["command"].startswith(COMMAND)
    except FileNotFoundError:
        return not any(folder.iterdir())  # a demo was killed before it wrote anything
    except ValueError:  # a damaged record does not say which command made it
        return False


@dataclass
class _Demo:
    """One call of `demo`."""

    console: Console
    out: Path
    variation: Variation
    errors: dict[str, Errors] = field(default_factory=dict)
    """The methods that have finished, by recipe."""

    def run(self) -> None:
        say(
            self.console,
            f"Training a small ResNet on digits of 8×8 pixels: epochs: {self.variation.epochs}, images per optimizer "
            f"step: {STEP_BATCH}, seed: {self.variation.seed}, one CPU thread. WS is Weight Standardization, BCN is "
            "Batch-Channel Normalization.",
        )
        self._train_methods()
        self.console.print(self._table())
        found = findings(self.errors, self._compare_splits(), steps=SPLIT_STEPS, size=SPLIT_SIZE)
        for sentence in (found.errors, found.split, found.baseline, "", *HOW_MEASURED):
            say(self.console, sentence)
        say(self.console, f"Results with curves: {write_demo_page(self.out / PAGE, found)}")

    def _train_methods(self) -> None:
        command = f"{COMMAND} --epochs {self.variation.epochs} --seed {self.variation.seed}"
        live = self.console.is_interactive
        for recipe in RECIPES:
            folder, name = self.out / recipe.row, name_of(recipe)
            listener = TrainingProgress(self.console, name=name) if live else Listener()
            run(recipe, self.variation, Execution(observe=OBSERVED), out=folder, listener=listener, command=command)
            self.errors[recipe.name] = errors = Errors.read(folder)
            if not live:
                say(self.console, f"{name}: {errors.percent:.2f} % test error")

    def _table(self) -> Table:
        table = Table(box=SIMPLE_HEAD)
        table.add_column("method", no_wrap=True)
        for heading in ("training loss", "test error %", "seconds"):
            table.add_column(heading, justify="right")
        for recipe in RECIPES:
            record = records.read(self.out / recipe.row)
            loss, seconds = record.epochs[-1]["train"]["loss"], sum(row["seconds"] for row in record.steps)
            error = self.errors[recipe.name].percent
            table.add_row(name_of(recipe), f"{loss:.4f}", f"{error:.2f}", f"{seconds:.1f}")
        return table

    def _compare_splits(self) -> dict[str, float]:
        with self.console.status(f"Training {SPLIT_STEPS} steps in float64, whole and split"):
            return {
                recipe.name: split_difference(recipe, self.variation, micro_batch=SPLIT_SIZE, steps=SPLIT_STEPS)
                for recipe in RECIPES
            }
