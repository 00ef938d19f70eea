"""`micronorm predict RUN IMAGES`: the predictions of a trained network for image files: a table, JSON and pictures."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from micronorm import records
from micronorm.cli.printing import FAILED, one_line, print_table
from micronorm.cli.targets import find_recipe
from micronorm.cli.train import find_device
from micronorm.data.files import SUFFIXES
from micronorm.engine.parallel import own_device
from micronorm.recipes.load import find_trained, load, recorded_names
from micronorm.recipes.recipe import DATA, Recipe
from micronorm.records import write_atomically
from micronorm.records.files import is_count
from micronorm.tasks import open_predictor
from micronorm.tasks.scores import Prediction, Predictor

ANSWERS = "predictions.json"
_MOST_SHOWN = 20
_LARGEST = 10_000  # pixels; a larger image would only exhaust the memory


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory of `micronorm train`.")],
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGES", help=f"Image files ({', '.join(SUFFIXES)}), or folders of them.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the pictures and predictions.json.")] = Path("predictions"),
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1. Default: the GPU if there is one.")] = None,
    recipe: Annotated[str | None, typer.Option(help="The recipe of the run, if it is yours: file.py:name.")] = None,
) -> None:
    """Apply the trained network of a run to image files.

    It predicts the most probable classes, label maps, or boxes and masks, depending on the run. All of
    them are in predictions.json; label maps, boxes and masks are drawn as pictures, too.

    Exit code 0: all images were predicted. 1: an image could not be read. 2: a name or an option is wrong.
    """
    facts = records.read(run, rows=False).facts
    trained = find_recipe(recipe) if recipe is not None else find_trained(run, facts)
    predictor = _open_predictor(trained, facts)
    files = find_images(images)
    own = None if recipe is None else trained.build(seed=0, classes=len(recorded_names(facts)) or None)
    model = load(run, model=own).to(own_device(find_device(device)))
    out.mkdir(parents=True, exist_ok=True)
    found: dict[Path, Prediction] = {}
    console = Console(highlight=False)
    stems = _output_names(files)
    for path in track(files, "predicting", console=console, transient=True, disable=not console.is_terminal):
        try:
            found[path] = prediction = predictor.predict(model, path)
        except ValueError as fault:  # a broken file must not lose the answers for the others
            typer.echo(f"micronorm predict: {one_line(fault)}", err=True)
            continue
        for ending, picture in prediction.pictures.items():
            picture.save(out / f"{stems[path]}{ending}.png")
    if not found:
        raise typer.Exit(FAILED)
    answers = [{"file": str(path), **prediction.answer} for path, prediction in found.items()]
    write_atomically(out / ANSWERS, json.dumps(answers, indent=1, ensure_ascii=False).encode())
    _show(console, found, out)
    if len(found) < len(files):
        raise typer.Exit(FAILED)


def find_images(paths: Sequence[Path]) -> list[Path]:
    """Return the image files among `paths` and in the folders among them, each once.

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: a file is of another kind, or a folder has no image.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"no image or folder {path}")
        inside = [path]
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and p.name[0] != ".")
        if not inside or inside[0].suffix.lower() not in SUFFIXES:
            raise ValueError(f"{path} must be an image ({', '.join(SUFFIXES)}) or a folder of images")
        found += inside
    return list(dict.fromkeys(found))


def _output_names(files: Sequence[Path]) -> dict[Path, str]:
    """Return the stem of the pictures of each file; with a number if two files have the same one."""
    often = Counter(path.stem for path in files)
    if max(often.values()) == 1:
        return {path: path.stem for path in files}
    return {path: f"{path.stem}-{k + 1}" for k, path in enumerate(files)}


def _open_predictor(recipe: Recipe, facts: dict[str, Any]) -> Predictor:
    """Return what prepares an image. The recipe says what was trained; the record may come from a stranger."""
    variation = facts.get("variation") or {}
    size = variation.get("size") if isinstance(variation, dict) else 0
    if size is not None and not (is_count(size) and 0 < size <= _LARGEST):
        raise ValueError(f"the run's record has a variation that micronorm train does not write: {str(variation)[:80]}")
    names = recorded_names(facts)
    # A classifier may have more outputs than its folder has classes.
    names += [str(k) for k in range(len(names), recipe.classes)]
    if not names:
        raise ValueError(f"the run's record has no names of classes, which {recipe.name} needs")
    return open_predictor(recipe.task, recipe.data, names=names, size=size or DATA[recipe.data].shape[1])


def _show(console: Console, found: dict[Path, Prediction], out: Path) -> None:
    rows = [(path.name, prediction.words) for path, prediction in found.items()]
    print_table(console, ("image", "prediction"), rows[:_MOST_SHOWN])
    more = f"{len(found) - _MOST_SHOWN} more images, " if len(found) > _MOST_SHOWN else ""
    pictures = " and pictures" if any(prediction.pictures for prediction in found.values()) else ""
    typer.echo(f"{more}all answers: {out / ANSWERS}{pictures}")
