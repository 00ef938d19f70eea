"""Run directories as `micronorm train` leaves them, without training."""

from pathlib import Path
from typing import Any

from micronorm import recipes, records
from micronorm.engine.settings import describe
from micronorm.recipes.recipe import DATA


def write_run(
    folder: Path,
    name: str,
    *,
    seed: int = 0,
    figures: dict[str, Any] | None = None,
    finished: bool = True,
    settings: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    **facts: Any,
) -> Path:
    """A finished run of the recipe `name` as it stands in every fact that is not given otherwise."""
    recipe = recipes.find(name)
    own = {
        "recipe": name,
        "settings": describe(recipe.settings) | {"seed": seed} | (settings or {}),
        "execution": {"device": "cpu"},
        "data": {"name": recipe.data, "train": DATA[recipe.data].train, "test": DATA[recipe.data].test} | (data or {}),
        "environment": {"gpu": {"name": "Some GPU"}, "cpu": {"model": "Some CPU"}},
        "revision": None,
        "command": "micronorm train",
        "date": "2025-01-02T03:04:05+00:00",
        "definition": recipe.definition(),
    }
    run = records.Run.create(folder, own | facts)
    run.finish({"figures": figures or {"top1": 5.0, "loss": 0.5}, "finished": finished, "steps": 7, "digest": "0"})
    return folder
