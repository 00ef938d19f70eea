"""The results of a recipe: those that come with the package, and run directories in a folder.

A result counts for a recipe if the run finished with the recipe's settings and data. Results that do not count are kept
with the reason.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from micronorm import records
from micronorm.engine.settings import describe
from micronorm.recipes import tables
from micronorm.recipes.recipe import DATA, Recipe

RECORDED = "recorded.json"
_SETTINGS = ("seed", "epochs", "step_batch", "dtype")
_REQUIRED = ("recipe", "figures", "data", "versions", "date", "command", "digest", *_SETTINGS)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of one run.

    Args:
        recipe: the recipe's name.
        seed: the run's seed, for weights, order and augmentation.
        figures: errors in % and others, by name.
        settings: the run's own, as `engine.settings.describe` gives them; "epochs" and "step_batch" at least.
        data: "name", "train" and "test" (counts); perhaps "verified", whether files were compared with the published
            ones, and "size", the size of the images if it is not the recipe's.
        where: the run directory, or the entry of the packaged file.
        date: ISO 8601.
        device: the name of the GPU or processor.
        finished: whether the run was completed.
        definition: `Recipe.definition` at that time; None if the record has none.
        weights: the recipe or the file of the weights that the run started from; None for initial weights.
    """

    recipe: str
    seed: int
    figures: Mapping[str, float]
    settings: Mapping[str, Any]
    data: Mapping[str, Any]
    where: str
    date: str = ""
    device: str | None = None
    finished: bool = True
    definition: Mapping[str, Any] | None = None
    weights: str | None = None


@dataclass(frozen=True)
class Findings:
    """The results of one recipe."""

    recipe: Recipe
    counted: tuple[RunResult, ...]
    """One per seed, sorted by seed."""
    rejected: tuple[tuple[RunResult, str], ...]
    """Results that do not count, with the reason."""

    @property
    def seeds(self) -> list[int]:
        """The seeds of the results that count."""
        return [result.seed for result in self.counted]

    def mean(self) -> dict[str, float] | None:
        """Return each figure that all runs have, averaged over seeds; None if no run counts."""
        return self._over_seeds(statistics.fmean)

    def deviation(self) -> dict[str, float] | None:
        """Return the sample standard deviation over seeds of each figure; None for fewer than two seeds."""
        return self._over_seeds(statistics.stdev) if len(self.counted) > 1 else None

    @property
    def reason(self) -> str | None:
        """Return why we have no result for this row, or None if we have one."""
        if self.counted:
            return None
        if self.recipe.unavailable is not None:
            return self.recipe.unavailable
        if self.rejected:
            return "; ".join(f"{result.where} does not count: {why}" for result, why in self.rejected)
        return "not run"

    def to_dict(self) -> dict[str, Any]:
        """Return the row as `--json` prints it. Values that are not finite become null."""
        mean = self.mean()
        record = {
            "row": self.recipe.row,
            "paper": None if self.recipe.paper is None else dict(self.recipe.paper),
            "ours": mean and {name: value if math.isfinite(value) else None for name, value in mean.items()},
            "seeds": self.seeds,
            "run": [result.where for result in self.counted] or None,
        }
        return record if self.reason is None else {**record, "reason": self.reason}

    def _over_seeds(self, over: Any) -> dict[str, float] | None:
        if not self.counted:
            return None
        names = [name for name in self.counted[0].figures if all(name in r.figures for r in self.counted)]
        values = {name: [result.figures[name] for result in self.counted] for name in names}
        # A diverged run has figures that are not finite, which `statistics` refuses.
        return {name: over(v) if all(map(math.isfinite, v)) else math.nan for name, v in values.items()}


def fault(result: RunResult, recipe: Recipe) -> str | None:
    """Return why the result does not count for the recipe, or None if it does. Any seed and dtype count.

    Example:
        >>> from micronorm import recipes
        >>> found = RunResult(
        ...     recipe="digits/gn",
        ...     seed=0,
        ...     figures={"top1": 2.0},
        ...     settings={"epochs": 1, "step_batch": 64},
        ...     data={"name": "digits", "train": 1297, "test": 500},
        ...     where="runs/a",
        ... )
        >>> fault(found, recipes.find("digits/gn"))
        'epochs 1 where the recipe has 15'
    """
    if not result.finished:
        return "not finished"
    facts = DATA[recipe.data]
    settings = {name: value for name, value in describe(recipe.settings).items() if name not in ("seed", "dtype")}
    data = {"name": recipe.data, "train": facts.train, "test": facts.test, "size": facts.shape[1]}
    for kind, found, wanted in (("", result.settings, settings), ("data ", result.data, data)):
        for name, value in wanted.items():
            # a packaged result has only the required settings, which `_result` has checked
            if found.get(name, value) != value:
                return f"{kind}{name} {found[name]} where the recipe has {value}"
    if result.data.get("verified") is False:
        return "data that were not compared with the published files"
    if result.weights != recipe.start:
        wanted = f" where the recipe starts from {recipe.start}" if recipe.start else ""
        return f"started from {f'the weights of {result.weights}' if result.weights else 'initial weights'}{wanted}"
    now = recipe.definition()
    then = now if result.definition is None else result.definition
    changed = [name for name in {**now, **then} if then.get(name, ...) != now.get(name, ...)]
    return f"made before the recipe changed in {', '.join(changed)}" if changed else None


def gather(recipe: Recipe, results: Iterable[RunResult]) -> Findings:
    """Return the results of `recipe`, including those of the same experiment in other tables.

    Of several results with one seed the latest counts, and a run directory replaces a packaged result.
    """
    names = _names(recipe)
    counted: dict[int, RunResult] = {}
    rejected = []
    for result in sorted(results, key=lambda r: (not r.where.startswith(RECORDED), r.date, r.where)):
        if result.recipe not in names:
            continue
        reason = fault(result, recipe)
        if reason is None:
            counted[result.seed] = result
        else:
            rejected.append((result, reason))
    return Findings(recipe, tuple(counted[seed] for seed in sorted(counted)), tuple(rejected))


def _names(recipe: Recipe) -> set[str]:
    """Return the names of all recipes that are the same experiment."""
    same = {recipe.name: recipe}
    if recipe.unavailable is None:
        own = recipe.definition()
        others = (other for table in tables().values() for other in table.rows if other.unavailable is None)
        same |= {other.name: other for other in others if other.definition() == own}
    short = {table.name for table in tables().values() if f"{table.name}/{table.default}" in same}
    return set(same) | short


def packaged() -> list[RunResult]:
    """Return the results that come with the package.

    Example:
        >>> all(result.where.startswith("recorded.json#") for result in packaged())
        True
    """
    return parse_packaged((resources.files("micronorm.recipes") / RECORDED).read_text("utf-8"))


def parse_packaged(text: str) -> list[RunResult]:
    """Return the results in the text of a file like recorded.json: a list of objects with the keys `_REQUIRED`."""
    entries = json.loads(text)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{RECORDED} must be a list of objects")
    found = []
    for index, entry in enumerate(entries):
        missing = [key for key in _REQUIRED if key not in entry]
        if missing:
            raise ValueError(f"{RECORDED}#{index} lacks {', '.join(missing)}")
        settings = {name: entry[name] for name in _SETTINGS}
        facts = {**entry, "settings": settings, "environment": entry}
        found.append(_result(facts, {"figures": entry["figures"], "finished": True}, where=f"{RECORDED}#{index}"))
    return found


def read_runs(folder: Path) -> tuple[list[RunResult], list[tuple[Path, str]]]:
    """Return the results of all run directories in or below `folder`, and unreadable directories with the reason.

    A folder that does not exist has no runs.
    """
    found, damaged = [], []
    for path in records.find_runs(folder) if folder.is_dir() else []:
        try:
            record = records.read(path, rows=False)
            found.append(_result(record.facts, record.outcome or {}, where=str(path)))
        except (OSError, ValueError) as error:
            damaged.append((path, str(error)))
    return found, damaged


def _result(facts: Mapping[str, Any], outcome: Mapping[str, Any], *, where: str) -> RunResult:
    try:
        settings, data = facts["settings"], facts["data"]
        _ = settings["epochs"], settings["step_batch"], data["name"], data["train"]  # `fault` compares them
        size = (facts.get("variation") or {}).get("size")
        return RunResult(
            recipe=facts["recipe"],
            seed=int(settings["seed"]),
            figures={name: float(value) for name, value in (outcome.get("figures") or {}).items()},
            settings=settings,
            data={**data, **({} if size is None else {"size": size})},
            where=where,
            date=str(facts.get("date") or ""),
            device=_device(facts),
            finished=outcome.get("finished") is True and bool(outcome.get("figures")),
            definition=facts.get("definition"),
            weights=(facts.get("weights") or {}).get("recipe") or (facts.get("variation") or {}).get("weights"),
        )
    except KeyError as error:
        raise ValueError(f"the record lacks {error}") from None
    except (AttributeError, TypeError, OverflowError) as error:
        raise ValueError(f"the record is not of the known form: {error}") from None


def _device(facts: Mapping[str, Any]) -> str | None:
    """Return the name of the GPU, or of the processor if the run used the CPU."""
    on_cpu = str((facts.get("execution") or {}).get("device")) == "cpu"
    for kind, key in (("cpu", "model"),) if on_cpu else (("gpu", "name"), ("cpu", "model")):
        value = facts["environment"].get(kind)
        name = value.get(key) if isinstance(value, Mapping) else value
        if name:
            return str(name)
    return None
