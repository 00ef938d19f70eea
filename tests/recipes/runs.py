"""Run directories as `micronorm train` leaves them, without training."""

import json
from pathlib import Path
from typing import Any

from micronorm import recipes
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
    folder.mkdir(parents=True)
    own = {"epochs": recipe.settings.epochs, "step_batch": recipe.settings.step_batch, "seed": seed, "dtype": "float32"}
    sizes = {"name": recipe.data, "train": DATA[recipe.data].train, "test": DATA[recipe.data].test}
    run = {
        "recipe": name,
        "settings": own | (settings or {}),
        "data": sizes | (data or {}),
        "environment": {"gpu": None, "cpu": {"model": "Some CPU"}},
        "date": "2025-01-02T03:04:05+00:00",
    }
    (folder / "run.json").write_text(json.dumps(run | facts), "utf-8")
    outcome = {"figures": figures or {"top1": 5.0, "loss": 0.5}, "finished": finished, "steps": 7, "digest": "0"}
    (folder / "outcome.json").write_text(json.dumps(outcome), "utf-8")
    return folder
