"""`mn.load`: return the trained network of a run directory."""

import os
from pathlib import Path
from typing import Any

from torch import nn

from micronorm import records
from micronorm.convert.checkpoint import load_state, read_state
from micronorm.engine.journal import WEIGHTS
from micronorm.recipes import find
from micronorm.recipes.recipe import Recipe

_NETWORK = ("network", "classes", "norm", "weight")  # the part of a recipe's definition that determines the network


def load(run: str | os.PathLike[str], *, model: nn.Module | None = None) -> nn.Module:
    """Return the trained network of a run directory, in eval mode on the CPU.

    Args:
        run: the folder that `micronorm train` or `micronorm.recipes.run.run_recipe` wrote.
        model: the untrained network, for a recipe of your own: `my_recipe.build(seed=0)`. It is changed in place. Run
            directories name recipes of micronorm only: loading a run never imports your code.

    Returns:
        The converted network with the weights of `model.safetensors`, computing what it computed at the end of the run.

    Raises:
        FileNotFoundError: the folder is not a run directory, or the run has not ended.
        ValueError: the recipe is unknown or has changed since, or the weights do not fit.

    Example:
        >>> import tempfile
        >>> from micronorm import recipes
        >>> from micronorm.engine.settings import Execution
        >>> from micronorm.recipes.run import run_recipe
        >>> out = Path(tempfile.mkdtemp()) / "run"
        >>> outcome = run_recipe(recipes.find("digits"), out=out, execution=Execution(steps=1))
        >>> load(out).training
        False
    """
    folder = Path(run)
    facts = records.read(folder, rows=False).facts
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise FileNotFoundError(f"{folder} has no {WEIGHTS}: the run has not ended; continue it with --resume")
    if model is None:
        model = _build(folder, facts)
    try:
        load_state(model, read_state(weights))
    except ValueError as error:
        raise ValueError(f"{weights}: {error}") from error
    return model.eval()


def find_trained(folder: Path, facts: dict[str, Any]) -> Recipe:
    """Return the recipe of micronorm that a run's record names. Raise ValueError if it is another one."""
    name = str(facts["recipe"])
    try:
        return find(name)
    except ValueError as error:
        raise ValueError(
            f"{folder}: the recipe {name!r} is not one of micronorm's. Give its network: "
            "mn.load(run, model=recipe.build(seed=0)), or --model FILE.py:NAME on the command line"
        ) from error


def _build(folder: Path, facts: dict[str, Any]) -> nn.Module:
    recipe = find_trained(folder, facts)
    was, now = facts.get("definition"), recipe.definition()
    was = was if isinstance(was, dict) else {}
    changes = [f"{key} was {was[key]} and is {now[key]}" for key in _NETWORK if was.get(key, now[key]) != now[key]]
    if changes:
        raise ValueError(
            f"{folder}: the recipe {recipe.name} has changed since the run: {', '.join(changes)}; give model="
        )
    return recipe.build(seed=0, classes=len(recorded_names(facts)) or None)


def facts_beside(weights: Path) -> dict[str, Any]:
    """Return the record of the run that wrote this file; an empty one if the file is in no run directory."""
    folder = weights.parent
    return records.read(folder, rows=False).facts if (folder / records.FACTS).is_file() else {}


def recorded_names(facts: dict[str, Any]) -> list[str]:
    """Return the names of the classes of a run's data set; an empty list if its record does not have them."""
    names = facts.get("data", {}).get("names")
    return list(map(str, names)) if isinstance(names, list) else []
