"""What the demo measures: how far two trainings of one recipe are apart that differ in how their steps were cut.

Differences are the largest over all parameters and running statistics, each relative to its tensor's maximum.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from micronorm.engine.listener import Listener
from micronorm.engine.settings import Execution, Outcome
from micronorm.recipes import Recipe
from micronorm.recipes.run import Variation, run_recipe

State = Mapping[str, Tensor]


class Stopped(Exception):
    """A signal, `number`, has ended a run."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


def run(
    recipe: Recipe,
    variation: Variation,
    *,
    model: nn.Module | None = None,
    micro_batch: int | None = None,
    steps: int | None = None,
    out: Path | None = None,
    listener: Listener | None = None,
    command: str = "",
    observe: int | None = None,
) -> Outcome:
    """Train on the CPU, wherever a GPU might be: the figures are to be the same for everyone, up to rounding.

    Raises:
        Stopped: Ctrl-C or SIGTERM; the step in progress was finished.
    """
    execution = Execution(micro_batch=micro_batch, steps=steps, device=torch.device("cpu"), observe=observe)
    outcome = run_recipe(
        recipe, out=out, variation=variation, execution=execution, model=model, listener=listener, command=command
    )
    if outcome.signal is not None:
        raise Stopped(outcome.signal)
    return outcome


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters and running statistics.

    Counters are left out: that of a plain BatchNorm counts forwards, and would outweigh what a cut does to its
    statistics.
    """
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def difference(ended: State, expected: State) -> float:
    """How far two states of one network are apart; infinitely where a tensor was zero, NaN where one has a NaN.

    Example:
        >>> difference({"weight": torch.tensor([1.0, 3.5])}, {"weight": torch.tensor([1.0, 4.0])})
        0.125
    """
    found = [_relative(ended[name], tensor) for name, tensor in expected.items()]
    return math.nan if any(map(math.isnan, found)) else max(found)


def _relative(ended: Tensor, expected: Tensor) -> float:
    apart = (ended.double() - expected.double()).abs().max()
    return (apart / expected.double().abs().max()).item() if apart else 0.0


@torch.no_grad()
def nudge(model: nn.Module) -> nn.Module:
    """Move every parameter to the next number above it, in place: the least change that its dtype knows."""
    for parameter in model.parameters():
        parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))
    return model


def cut_difference(
    recipe: Recipe, variation: Variation, *, micro_batch: int, steps: int = 1, dtype: str = "float32"
) -> float:
    """How far the first steps of a run end from themselves when each is taken in micro-batches instead of whole."""
    # BatchNorm's recipe says that its samples belong together. Here it is to be seen what happens where they are not.
    free = replace(recipe, settings=replace(recipe.settings, unit=1, largest=None))
    ended = []
    for size in (variation.apply(recipe.settings).step_batch, micro_batch):
        model = free.build(variation.apply(recipe.settings).seed)
        run(free, replace(variation, dtype=dtype), model=model, micro_batch=size, steps=steps)
        ended.append(state_of(model))
    whole, cut = ended
    return difference(cut, whole)
