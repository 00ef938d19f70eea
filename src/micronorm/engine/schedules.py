"""Learning-rate schedules as values: what a recipe defines and a record keeps.

A schedule is a function of the step's number. It has no state, so a resumed run has nothing to restore.
"""

import math
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """The learning rate of a step as a multiple of the optimizer's."""

    def factor(self, step: int, *, steps_per_epoch: int, total_steps: int) -> float:
        """Return the factor of step `step`, counted from 0 over the whole run of `total_steps` steps."""
        ...


@dataclass(frozen=True)
class Constant:
    """The same rate throughout."""

    def factor(self, step: int, *, steps_per_epoch: int, total_steps: int) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Milestones:
    """Multiply the rate by `factor_each` after each of the given epochs.

    Example:
        >>> schedule = Milestones((81, 122))
        >>> [schedule.factor(100 * epoch, steps_per_epoch=100, total_steps=16_400) for epoch in (0, 80, 81, 121)]
        [1.0, 1.0, 0.1, 0.1]
    """

    epochs: tuple[float, ...]
    factor_each: float = 0.1

    def __post_init__(self) -> None:
        _check_milestones(self.epochs, self.factor_each)

    def factor(self, step: int, *, steps_per_epoch: int, total_steps: int) -> float:
        """Return factor_each to the power of the number of milestones passed."""
        return self.factor_each ** sum(step >= epoch * steps_per_epoch for epoch in self.epochs)


@dataclass(frozen=True)
class StepMilestones:
    """Multiply the rate by `factor_each` after each of the given steps, as in (60_000, 80_000) of 90,000."""

    steps: tuple[int, ...]
    factor_each: float = 0.1

    def __post_init__(self) -> None:
        _check_milestones(self.steps, self.factor_each)

    def factor(self, step: int, *, steps_per_epoch: int, total_steps: int) -> float:
        """Return factor_each to the power of the number of milestones passed."""
        return self.factor_each ** sum(step >= milestone for milestone in self.steps)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from 1 to 0 over the run, after a linear rise over `warmup_epochs`."""

    warmup_epochs: float = 0.0

    def __post_init__(self) -> None:
        if not self.warmup_epochs >= 0:
            raise ValueError(f"warmup_epochs must not be negative, got {self.warmup_epochs}")

    def factor(self, step: int, *, steps_per_epoch: int, total_steps: int) -> float:
        """Return a factor above 0, in the last step too."""
        warmup = self.warmup_epochs * steps_per_epoch
        if step < warmup:
            return min((step + 1) / warmup, 1.0)  # a rise may end within a step
        return (1 + math.cos(math.pi * (step - warmup) / (total_steps - warmup))) / 2


@dataclass(frozen=True)
class Poly:
    """(1 − t)^power, with t from 0 to 1 over the run."""

    power: float = 0.9

    def __post_init__(self) -> None:
        if not self.power > 0:
            raise ValueError(f"power must be positive, got {self.power}: the rate falls over the run")

    def factor(self, step: int, *, steps_per_epoch: int, total_steps: int) -> float:
        """Return a factor above 0, in the last step too."""
        return (1 - step / total_steps) ** self.power


@dataclass(frozen=True)
class Warmup:
    """Lower the rate of another schedule at the start of the run.

    Args:
        schedule: the schedule of the whole run; its position is counted from the first step, warm-up included.
        steps: length of the warm-up in steps. Give either `steps` or `epochs`.
        epochs: length of the warm-up in epochs.
        start: the factor of the first step. A linear warm-up rises from there to 1.
        constant: keep `start` for the whole warm-up instead of rising.

    Example:
        >>> schedule = Warmup(Constant(), steps=4)
        >>> [schedule.factor(step, steps_per_epoch=10, total_steps=20) for step in range(5)]
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    schedule: Schedule
    steps: int | None = None
    epochs: float | None = None
    start: float = 0.0
    constant: bool = False

    def __post_init__(self) -> None:
        lengths = [length for length in (self.steps, self.epochs) if length is not None]
        if len(lengths) != 1 or not lengths[0] > 0:
            raise ValueError(f"a warm-up needs positive steps or epochs, got steps={self.steps}, epochs={self.epochs}")
        if not 0 <= self.start <= 1 or (self.constant and not self.start):
            raise ValueError(f"start must lie between 0 and 1, above 0 for a constant warm-up, got {self.start}")

    def factor(self, step: int, *, steps_per_epoch: int, total_steps: int) -> float:
        """Return the schedule's factor times that of the warm-up, which ends at 1."""
        factor = self.schedule.factor(step, steps_per_epoch=steps_per_epoch, total_steps=total_steps)
        length = self.steps if self.steps is not None else (self.epochs or 0) * steps_per_epoch
        if step >= length:
            return factor
        return factor * (self.start if self.constant else self.start + (1 - self.start) * min((step + 1) / length, 1.0))


def _check_milestones(milestones: tuple[float, ...], factor_each: float) -> None:
    if list(milestones) != sorted(set(milestones)) or any(milestone <= 0 for milestone in milestones):
        raise ValueError(f"milestones must be positive and increase, got {milestones}")
    if not 0 < factor_each <= 1:
        raise ValueError(f"factor_each must lie above 0 and not above 1, got {factor_each}")
