"""Train the demo's recipes, and measure how much the way a step is split changes a training."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from micronorm.engine.listener import Listener
from micronorm.engine.settings import Execution
from micronorm.recipes import Recipe
from micronorm.recipes.run import Variation, run_recipe


class Stopped(Exception):
    """Raised after a signal has ended a run; `number` is the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


def run(
    recipe: Recipe,
    variation: Variation,
    execution: Execution,
    *,
    model: nn.Module | None = None,
    out: Path | None = None,
    listener: Listener | None = None,
    command: str = "",
) -> None:
    """Train a recipe on the CPU, so that the figures are the same on every machine, up to rounding.

    Raises:
        Stopped: Ctrl-C or SIGTERM arrived; the step in progress was finished.
    """
    execution = replace(execution, device=torch.device("cpu"))
    outcome = run_recipe(
        recipe, out=out, variation=variation, execution=execution, model=model, listener=listener, command=command
    )
    if outcome.signal is not None:
        raise Stopped(outcome.signal)


def split_difference(recipe: Recipe, variation: Variation, *, micro_batch: int, steps: int) -> float:
    """Return how much the result of the first steps changes if each is split into micro-batches, in float64."""
    # BatchNorm's recipe keeps its 64 images together (`unit`). Without that, the measurement shows what a split does.
    free = replace(recipe, settings=replace(recipe.settings, unit=1, largest=None))
    settings = variation.apply(recipe.settings)
    states = []
    for size in (settings.step_batch, micro_batch):
        model = free.build(settings.seed)
        run(free, replace(variation, dtype="float64"), Execution(micro_batch=size, steps=steps), model=model)
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
    found = [_relative(actual[name], tensor) for name, tensor in expected.items()]
    return math.nan if any(map(math.isnan, found)) else max(found)


def _relative(actual: Tensor, expected: Tensor) -> float:
    difference = (actual - expected).abs().max()
    return (difference / expected.abs().max()).item() if difference else 0.0
