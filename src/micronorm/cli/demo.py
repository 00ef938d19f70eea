"""`micronorm demo`: train five networks on digits, compare split with whole steps, and write a page about it."""

import math
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from micronorm import records
from micronorm.cli.printing import TrainingProgress, print_table, say
from micronorm.engine.settings import Execution
from micronorm.engine.task import Listener
from micronorm.recipes import Recipe, find, find_table
from micronorm.recipes.digits import EPOCHS, STEP_BATCH
from micronorm.recipes.protocols import method
from micronorm.recipes.run import Variation, run_recipe
from micronorm.report import Lead, write_page

COMMAND = "micronorm demo"
PAGE = "report.html"
RECIPES = find_table("digits").rows
SPLIT_SIZE, SPLIT_STEPS = 7, 20
OBSERVED = 20  # steps between two measurements inside the network: about one epoch

ROUNDING = 1e-10
"""The largest difference between split and whole steps that rounding in float64 explains: the tests' tolerance."""

HOW_MEASURED = (
    '"About as many" allows for chance: 2·sqrt(a + b) for error counts a and b. One seed, one small data set and the '
    "same settings for all methods make this a demonstration, not a benchmark.",
    "Weights are compared in float64, relative to the largest entry of each tensor.",
)
_MEASURED = (
    "BCN is Batch-Channel Normalization, WS is Weight Standardization. A small ResNet learns handwritten digits of 8×8 "
    f"pixels. Every optimizer step uses {STEP_BATCH} images; the methods differ in how many of them a normalization "
    "layer sees at a time."
)
_LONG_NAMES = {"BN": "BatchNorm", "GN": "GroupNorm", "GN+WS": "GroupNorm + WS", "BCN+WS": "BCN + WS"}


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
    together, with the same result. Nothing is downloaded. The demo takes about one minute on one CPU core.

    Exit code 0: done. 2: an option is wrong, or a file in --out would be lost. 130, 143: interrupted.
    """
    console = Console(highlight=False)
    # Use one thread. A second one does not speed up tensors this small, and on two busy cores a step took ten times as
    # long. Also, the figures then do not depend on the number of cores.
    torch.set_num_threads(1)
    variation, trained = Variation(epochs=epochs, seed=seed), dict[str, records.Record]()
    try:
        make_room(out)
        say(
            console,
            f"Training a small ResNet on digits of 8×8 pixels: epochs: {epochs}, images per optimizer step: "
            f"{STEP_BATCH}, seed: {seed}, one CPU thread. WS is Weight Standardization, BCN is Batch-Channel "
            "Normalization.",
        )
        for recipe in RECIPES:
            trained[recipe.name] = _train(recipe, variation, out / recipe.row, console)
        _print_methods(console, trained)
        with console.status(f"Training {SPLIT_STEPS} steps in float64, whole and split"):
            split = {
                name: split_difference(find(name), variation, micro_batch=SPLIT_SIZE, steps=SPLIT_STEPS)
                for name in ("digits/bcn-ws", "digits/bn-64")
            }
        say(console, f"Results with curves: {_print_and_write(console, out / PAGE, trained, split)}")
    except KeyboardInterrupt as stop:
        done = f"{len(trained)} of {len(RECIPES)} methods had finished"
        say(console, f"Interrupted: {done}. Records are in {out}; the next demo replaces them.")
        raise typer.Exit(128 + (stop.args[0] if stop.args else signal.SIGINT)) from None


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


# --- training ---------------------------------------------------------------------------------------------------------


def run(recipe: Recipe, variation: Variation, execution: Execution, **options: Any) -> None:
    """Train a recipe on the CPU, so that the figures are the same on every machine, up to rounding.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM arrived; the step in progress was finished. Its argument is the signal.
    """
    execution = replace(execution, device=torch.device("cpu"))
    outcome = run_recipe(recipe, **{"out": None, **options}, variation=variation, execution=execution)
    if outcome.signal is not None:
        raise KeyboardInterrupt(outcome.signal)


def _train(recipe: Recipe, variation: Variation, folder: Path, console: Console) -> records.Record:
    """Train one method into its folder, and return its record."""
    name, live = name_of(recipe), console.is_interactive
    listener = TrainingProgress(console, name=name) if live else Listener()
    command = f"{COMMAND} --epochs {variation.epochs} --seed {variation.seed}"
    run(recipe, variation, Execution(observe=OBSERVED), out=folder, listener=listener, command=command)
    record = records.read(folder)
    if not live:
        say(console, f"{name}: {_error(record):.2f} % test error")
    return record


def split_difference(recipe: Recipe, variation: Variation, *, micro_batch: int, steps: int) -> float:
    """Return how much the result of the first steps changes if each is split into micro-batches, in float64."""
    # BatchNorm's recipe keeps its 64 images together (`unit`). Without that, the measurement shows what a split does.
    splittable = replace(recipe, settings=replace(recipe.settings, unit=1, largest=None))
    settings = variation.apply(recipe.settings)
    states = []
    for size in (settings.step_batch, micro_batch):
        model = splittable.build(settings.seed)
        run(splittable, replace(variation, dtype="float64"), Execution(micro_batch=size, steps=steps), model=model)
        # Integer buffers are left out: BatchNorm's count of forward passes would hide what happens to its statistics.
        states.append({name: value for name, value in model.state_dict().items() if value.is_floating_point()})
    whole, split = states
    return largest_difference(split, whole)


def largest_difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference of any tensor, relative to the largest entry of the expected tensor.

    Infinite if an expected tensor is zero and the actual one is not; NaN if either contains NaN.

    Example:
        >>> largest_difference({"weight": torch.tensor([1.0, 3.5])}, {"weight": torch.tensor([1.0, 4.0])})
        0.125
    """
    found = []
    for name, tensor in expected.items():
        difference = (actual[name] - tensor).abs().max()
        found.append((difference / tensor.abs().max()).item() if difference else 0.0)
    return math.nan if any(map(math.isnan, found)) else max(found)


# --- what is printed and written --------------------------------------------------------------------------------------


def name_of(recipe: Recipe) -> str:
    """Return the method and how many images its statistics cover: "BatchNorm, 64 at a time"."""
    short = method(recipe.norm, recipe.weight)
    return f"{_LONG_NAMES.get(short, short)}, {recipe.micro_batch} at a time"


def _error(record: records.Record) -> float:
    """Return the test error of a finished run in percent."""
    assert record.outcome is not None
    return record.outcome["figures"]["top1"]


def _print_methods(console: Console, trained: Mapping[str, records.Record]) -> None:
    rows = []
    for recipe in RECIPES:
        record = trained[recipe.name]
        loss, seconds = record.epochs[-1]["train"]["loss"], sum(row["seconds"] for row in record.steps)
        rows.append([name_of(recipe), f"{loss:.4f}", f"{_error(record):.2f}", f"{seconds:.1f}"])
    figures = ("training loss", "test error %", "seconds")
    print_table(console, ["method", *figures], rows, right=figures)


def _print_and_write(
    console: Console, page: Path, trained: Mapping[str, records.Record], differences: Mapping[str, float]
) -> Path:
    """Print the findings as sentences, write them and the curves into the page, and return its path."""
    images = trained["digits/bn"].facts["data"]["test"]
    wrong = {name: round(_error(record) * images / 100) for name, record in trained.items()}
    errors = describe_errors(wrong["digits/bcn-ws"], wrong["digits/bn"], wrong["digits/bn-64"], images)
    number, split = describe_split(differences["digits/bcn-ws"])
    baseline = describe_baseline(differences["digits/bn-64"])
    for sentence in (errors, split, baseline, "", *HOW_MEASURED):
        say(console, sentence)
    lead = Lead(
        finding=errors,
        picture="Test error, by normalization layer and images processed at a time",
        number=number,
        meaning=split,
        measured=" ".join((_MEASURED, *HOW_MEASURED, baseline)),
    )
    runs = {name_of(recipe): page.parent / recipe.row for recipe in RECIPES}
    return write_page(page, runs=runs, title="micronorm demo", lead=lead)


def describe_errors(ours: int, single: int, batch: int, images: int) -> str:
    """Compare the wrong answers of BCN + WS, of BatchNorm over one image, and of BatchNorm over the images of a step.

    Example:
        >>> describe_errors(3, 106, 4, 500).split(", ")[-1]
        'about as many as BatchNorm with 64 at a time (4).'
    """
    # Wrong answers are rare events: a count varies by its root, a difference of two counts by the root of their sum.
    relation = "about as many as" if abs(ours - batch) <= 2 * math.sqrt(ours + batch) else "compared with"
    return (
        f"Trained one image at a time, BatchNorm gets {single} of {images} test images wrong and BCN + WS gets {ours}, "
        f"{relation} BatchNorm with {STEP_BATCH} at a time ({batch})."
    )


def describe_split(difference: float) -> tuple[str, str]:
    """Return by how much splitting the steps changes BCN + WS, in a few words, and the sentence about it.

    Example:
        >>> describe_split(7e-15)[0]
        '14 digits'
    """
    ways = f"whether a step processes its {STEP_BATCH} images at once or {SPLIT_SIZE} at a time"
    if difference <= ROUNDING:
        digits = 15 if difference == 0 else math.floor(-math.log10(difference))
        return f"{digits} digits", (
            f"With BCN + WS the weights after {SPLIT_STEPS} steps agree to {digits} digits, {ways}. So use as many at "
            "a time as fit into memory."
        )
    return f"{difference:.0e}", (  # also if it is NaN
        f"With BCN + WS the weights after {SPLIT_STEPS} steps differ by {difference:.0e}, depending on {ways}. That is "
        "more than rounding explains: please run micronorm doctor and report it."
    )


def describe_baseline(difference: float) -> str:
    """Say by how much the same split changes BatchNorm."""
    if not math.isfinite(difference):
        return "With BatchNorm the same split makes the training diverge."
    return f"With BatchNorm the same split changes weights or running statistics by {100 * difference:.0f} %."
