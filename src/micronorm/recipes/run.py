"""Train a recipe: build its network, open its data, and call the engine."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from micronorm import records
from micronorm.convert.checkpoint import read_header
from micronorm.diagnostics.observe import observe
from micronorm.engine.checkpoint import newest
from micronorm.engine.journal import CHECKPOINTS
from micronorm.engine.loop import train
from micronorm.engine.parallel import own_device
from micronorm.engine.settings import DTYPES, Execution, Outcome, Settings
from micronorm.engine.task import Listener
from micronorm.engine.weights import load_weights, read_weights
from micronorm.recipes.recipe import Recipe
from micronorm.tasks import open_task

_KINDS: Mapping[str, Any] = {"lr": (int, float), "dtype": str, "weights": str}  # the others are whole numbers


@dataclass(frozen=True, kw_only=True)
class Variation:
    """How a run departs from its recipe; None keeps what the recipe says. A resumed run keeps its variation."""

    step_batch: int | None = None
    epochs: int | None = None
    lr: float | None = None
    dtype: str | None = None
    seed: int | None = None
    size: int | None = None
    unverified: bool | None = None
    weights: str | None = None
    """A file of weights to start from."""

    def __post_init__(self) -> None:
        for name, value in self.given().items():  # the record of a run to be resumed may be damaged
            if not isinstance(value, _KINDS.get(name, int)) or (name == "dtype" and value not in DTYPES):
                raise ValueError(f"the run's variation {name}={str(value)[:40]!r} is not valid")

    def apply(self, settings: Settings) -> Settings:
        """Return the recipe's settings with these changes."""
        changes: dict[str, Any] = {
            "step_batch": self.step_batch,
            "epochs": self.epochs,
            "seed": self.seed,
            "dtype": None if self.dtype is None else DTYPES[self.dtype],
            "optimizer": None if self.lr is None else replace(settings.optimizer, lr=self.lr),  # type: ignore[type-var]
        }
        given = {name: value for name, value in changes.items() if value is not None}
        return replace(settings, **given, **({"steps": None} if "epochs" in given else {}))

    def over(self, earlier: "Variation") -> "Variation":
        """Return the earlier variation with what is given here in its place."""
        return replace(earlier, **self.given())

    def given(self) -> dict[str, Any]:
        """Return the fields that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}


def run_recipe(
    recipe: Recipe,
    *,
    out: Path | None,
    variation: Variation | None = None,
    execution: Execution | None = None,
    data: Path | None = None,
    download: bool = False,
    workers: int = 0,
    task: Any = None,
    resume: bool = False,
    model: nn.Module | None = None,
    listener: Listener | None = None,
    command: str = "",
) -> Outcome:
    """Train one recipe into a run directory.

    Args:
        recipe: what to train.
        out: the run directory; None writes nothing.
        variation: how the run departs from the recipe.
        execution: how to compute it.
        data: the folder of the data set; None searches ./data and ~/data.
        download: download the data set if it is not found.
        workers: processes that decode files.
        task: the data, opened for this recipe before; None opens them.
        resume: continue from the newest checkpoint in `out`.
        model: trained in place instead of a new network: what `recipe.build` returned, perhaps changed. Do not record
            a run of a changed network.
        listener: receives steps, epochs and messages.
        command: the command line, for the record.

    Raises:
        FileNotFoundError: the data set or the file of weights does not exist.
        FileExistsError: `out` holds a run already, and `resume` is False.
        ValueError: the row cannot be run, or its settings contradict one another or the run to be resumed.
    """
    if recipe.unavailable is not None:
        raise ValueError(f"{recipe.name} cannot be run: {recipe.unavailable}")
    variation, execution = variation or Variation(), execution or Execution()
    if execution.parallel == "fsdp" and recipe.task not in ("classification", "video"):
        raise ValueError(
            "shards need equally many forwards on every rank, and those of this task depend on the sizes of its "
            "samples; use --parallel ddp"
        )
    listener = listener or Listener()
    if resume and out is not None and (out / records.FACTS).exists():
        earlier = _earlier_variation(out, recipe)
        if variation.weights not in (None, earlier.weights):
            raise ValueError(
                f"{out} holds a run that started from {earlier.weights or 'initial weights'}; leave --weights out, or "
                "give another --out"
            )
        variation = variation.over(earlier)
    settings = variation.apply(recipe.settings)
    if task is None:
        task = open_task(
            recipe.task,
            recipe.data,
            data,
            classes=recipe.classes or None,
            device=own_device(execution.device),
            download=download,
            workers=workers,
            size=variation.size,
            verify=not variation.unverified,
        )
    names = getattr(task, "names", None)
    if model is None:
        model = recipe.build(settings.seed, classes=None if names is None else len(names))
    facts = _describe(recipe, variation, command)
    started = resume and out is not None and newest(out / CHECKPOINTS) is not None
    if variation.weights is not None:
        if not started:  # a checkpoint already contains what was learned from them
            facts["weights"] = _start_from(model, Path(variation.weights), listener)
        recipe.freeze(model)
    elif recipe.start is not None:
        listener.on_message(f"{recipe.name} starts from {recipe.start}: without --weights the run does not count")
    facts["data"] = {"name": recipe.data, "train": len(task.train), "test": len(task.test), "sample": task.sample}
    if names is not None:
        facts["data"]["names"] = list(names)
    if variation.unverified:
        facts["data"]["verified"] = False
    outcome = train(
        model, task, settings, execution, out=out, resume=resume, facts=facts, listener=listener, observer=observe
    )
    # Forwards of shards are collective, and compiled code would be compiled again for one image.
    can_predict = execution.parallel != "fsdp" and not execution.compile and outcome.signal is None
    # Existing predictions belong to a finished run that was resumed without taking a step.
    if can_predict and outcome.first and out is not None and not (out / records.PREDICTIONS).exists():
        records.write_predictions(out, task.examples(model))
    return outcome


def _earlier_variation(out: Path, recipe: Recipe) -> Variation:
    """Return the variation of the run to be resumed. Raise ValueError if that run is of another recipe."""
    earlier = records.read(out, rows=False).facts
    if earlier["recipe"] != recipe.name:
        raise ValueError(f"{out} holds a run of {earlier['recipe']}, not of {recipe.name}; give another --out")
    return Variation(**earlier.get("variation", {}))


def _describe(recipe: Recipe, variation: Variation, command: str) -> dict[str, Any]:
    """Return the facts for the record that are known before the data are opened."""
    return {
        "recipe": recipe.name,
        "command": command,
        "definition": recipe.definition(),
        "variation": asdict(variation),
        "title": recipe.title,
        "paper": None if recipe.paper is None else dict(recipe.paper),
    }


def _start_from(model: nn.Module, path: Path, listener: Listener) -> Mapping[str, Any]:
    """Load weights into the model. Report to the listener, and return for the record, what was dropped or missing."""
    found = load_weights(model, read_weights(path))
    listener.on_message(f"weights of {path}: {found}")
    if any(name.endswith(".group_weight") and name.replace(".group_", ".") in found.loaded for name in found.missing):
        listener.on_message(
            "the file is of a network without BCN: this network computes something else with its weights, until it has "
            "trained; mn.convert(model, warm_steps=...) starts from the old function"
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    origin = read_header(path).get("model", "").removeprefix("recipe:")
    names = {kind: list(names) for kind, names in vars(found).items()}
    return {"file": path.name, "sha256": digest, "recipe": origin, **names}
