"""What was measured for a recipe: results that come with the package, and run directories in a folder.

A result counts for a recipe when the run finished and its epochs, samples per step and data are the recipe's. Whatever
does not count is kept with the reason, to be told.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from micronorm.recipes.recipe import DATA, Recipe
from micronorm.recipes.registry import tables

RECORDED = "recorded.json"
_REQUIRED = (
    "recipe",
    "seed",
    "figures",
    "epochs",
    "step_batch",
    "data",
    "dtype",
    "versions",
    "date",
    "command",
    "digest",
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run, wherever its record lies.

    Args:
        recipe: the recipe's name.
        seed: of weights, order and augmentation.
        figures: errors in % and others, by name.
        epochs: that it ran for.
        step_batch: samples per optimizer step.
        data: "name", "train" and "test" (counts), and "verified" where files were or were not compared with the
            published ones.
        where: the run directory, or the entry of the packaged file.
        date: ISO 8601.
        device: what it ran on, for people.
        dtype: of the computation.
        finished: whether it came to its end.
        definition: of the recipe at that time (`Recipe.definition`); None where the record does not say.
    """

    recipe: str
    seed: int
    figures: Mapping[str, float]
    epochs: int
    step_batch: int
    data: Mapping[str, Any]
    where: str
    date: str
    device: str | None
    dtype: str | None
    finished: bool
    definition: Mapping[str, Any] | None


@dataclass(frozen=True)
class Findings:
    """What was found for one recipe."""

    counted: tuple[Result, ...]
    """One per seed, in the order of seeds."""
    rejected: tuple[tuple[Result, str], ...]
    """Those that do not count, with the reason."""

    @property
    def seeds(self) -> list[int]:
        """Of the runs that count."""
        return [result.seed for result in self.counted]

    def mean(self) -> dict[str, float] | None:
        """Each figure that all runs have, averaged over seeds; None where no run counts."""
        return self._over_seeds(statistics.fmean)

    def deviation(self) -> dict[str, float] | None:
        """The sample standard deviation over seeds of each figure; None for fewer than two."""
        return self._over_seeds(statistics.stdev) if len(self.counted) > 1 else None

    def _over_seeds(self, over: Any) -> dict[str, float] | None:
        if not self.counted:
            return None
        names = [name for name in self.counted[0].figures if all(name in r.figures for r in self.counted)]
        values = {name: [result.figures[name] for result in self.counted] for name in names}
        # statistics refuses infinities and NaN, which are what a diverged run gives
        return {name: over(v) if all(map(math.isfinite, v)) else math.nan for name, v in values.items()}


def fault(result: Result, recipe: Recipe) -> str | None:
    """Why the result does not count for the recipe; None where it does.

    Example:
        >>> from micronorm import recipes
        >>> found = Result(
        ...     recipe="digits/gn",
        ...     seed=0,
        ...     figures={"top1": 2.0},
        ...     epochs=1,
        ...     step_batch=64,
        ...     data={"name": "digits", "train": 1297, "test": 500},
        ...     where="runs/a",
        ...     date="2025-01-01",
        ...     device=None,
        ...     dtype="float32",
        ...     finished=True,
        ...     definition=None,
        ... )
        >>> fault(found, recipes.find("digits/gn"))
        '1 epochs where the recipe has 8'
    """
    if not result.finished:
        return "not finished"
    for name, found in (("epochs", result.epochs), ("step_batch", result.step_batch)):
        wanted = getattr(recipe.settings, name)
        if found != wanted:
            return f"{found} {'epochs' if name == 'epochs' else 'samples per step'} where the recipe has {wanted}"
    facts = DATA[recipe.data]
    wanted_data = {"name": recipe.data, "train": facts.train, "test": facts.test}
    for name, wanted in wanted_data.items():
        found = result.data.get(name)
        if found != wanted:
            return f"data with {name} {found!r} where the recipe has {wanted!r}"
    if result.data.get("verified") is False:
        return "data that were not compared with the published files"
    if result.definition is not None and dict(result.definition) != recipe.definition():
        new = recipe.definition()
        changed = [key for key in {**new, **result.definition} if result.definition.get(key, ...) != new.get(key, ...)]
        return f"made before the recipe changed in {', '.join(changed)}"
    return None


def gather(recipe: Recipe, results: Iterable[Result]) -> Findings:
    """What counts for `recipe`: of its own name, or of a row in another table that is the same experiment.

    Of several with one seed the latest counts, a run directory before a packaged result.
    """
    names = _names(recipe)
    counted: dict[int, Result] = {}
    rejected = []
    for result in sorted(results, key=lambda r: (not r.where.startswith(RECORDED), r.date, r.where)):
        if result.recipe not in names:
            continue
        reason = fault(result, recipe)
        if reason is None:
            counted[result.seed] = result
        else:
            rejected.append((result, reason))
    return Findings(tuple(counted[seed] for seed in sorted(counted)), tuple(rejected))


def _names(recipe: Recipe) -> set[str]:
    """What a record of this experiment may call it."""
    same = {recipe.name: recipe}
    if recipe.unavailable is None:
        own = recipe.definition()
        others = (other for table in tables().values() for other in table.rows if other.unavailable is None)
        same |= {other.name: other for other in others if other.definition() == own}
    short = {table.name for table in tables().values() if f"{table.name}/{table.default}" in same}
    return set(same) | short


def packaged() -> list[Result]:
    """The results that come with the package.

    Example:
        >>> all(result.where.startswith("recorded.json#") for result in packaged())
        True
    """
    return parse_packaged((resources.files("micronorm.recipes") / RECORDED).read_text("utf-8"))


def parse_packaged(text: str) -> list[Result]:
    """Results from the text of a file like recorded.json: a list of objects, each with the keys `_REQUIRED`."""
    entries = _load(text)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{RECORDED} must be a list of objects")
    found = []
    for index, entry in enumerate(entries):
        missing = [key for key in _REQUIRED if key not in entry]
        if missing:
            raise ValueError(f"{RECORDED}#{index} lacks {', '.join(missing)}")
        found.append(
            _result(
                {**entry, "environment": entry, "settings": entry},
                {"figures": entry["figures"], "finished": True},
                where=f"{RECORDED}#{index}",
            )
        )
    return found


def read_runs(folder: Path) -> tuple[list[Result], list[tuple[Path, str]]]:
    """Every run directory at or under `folder`, and those that could not be read, with the reason.

    A folder that does not exist holds no runs.
    """
    found, damaged = [], []
    for file in sorted(folder.rglob("run.json")):
        try:
            found.append(_result(*_read_run(file.parent), where=str(file.parent)))
        except (OSError, ValueError) as error:
            damaged.append((file.parent, str(error)))
    return found, damaged


def _read_run(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts and the outcome of a run directory; the outcome is empty while there is none."""
    outcome = directory / "outcome.json"
    facts = _load((directory / "run.json").read_text("utf-8"))
    return facts, _load(outcome.read_text("utf-8")) if outcome.exists() else {}


def _load(text: str) -> Any:
    # records write what JSON lacks, NaN and the infinities, as {"float": "nan"}
    return json.loads(text, object_hook=lambda row: float(row["float"]) if row.keys() == {"float"} else row)


def _result(facts: Mapping[str, Any], outcome: Mapping[str, Any], *, where: str) -> Result:
    try:
        settings, environment = facts["settings"], facts.get("environment") or {}
        return Result(
            recipe=str(facts["recipe"]),
            seed=int(settings["seed"]),
            figures={name: float(value) for name, value in (outcome.get("figures") or {}).items()},
            epochs=int(settings["epochs"]),
            step_batch=int(settings["step_batch"]),
            data=dict(facts["data"]),
            where=where,
            date=str(facts.get("date") or ""),
            device=_device(environment),
            dtype=settings.get("dtype"),
            finished=outcome.get("finished") is True and bool(outcome.get("figures")),
            definition=facts.get("definition"),
        )
    except KeyError as error:
        raise ValueError(f"the record lacks {error}") from None
    except (AttributeError, TypeError) as error:
        raise ValueError(f"the record is not of the known form: {error}") from None


def _device(environment: Mapping[str, Any]) -> str | None:
    for kind, key in (("gpu", "name"), ("cpu", "model")):
        value = environment.get(kind)
        name = value.get(key) if isinstance(value, Mapping) else value
        if name:
            return str(name)
    return None
