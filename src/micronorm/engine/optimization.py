"""Optimizers and schedules as values: what a recipe writes down and a record keeps.

A schedule is a function of the step's number. It has no state, so a resumed run has nothing to restore.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn


class Schedule(Protocol):
    """The learning rate of a step as a multiple of the optimizer's."""

    def factor(self, step: int, *, steps_per_epoch: int, epochs: int) -> float:
        """For step `step`, counted from 0 over the whole run of `epochs` epochs."""
        ...


@dataclass(frozen=True)
class Constant:
    """The same rate throughout."""

    def factor(self, step: int, *, steps_per_epoch: int, epochs: int) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True)
class Milestones:
    """The rate times `factor_each` after each of the epochs given.

    Example:
        >>> schedule = Milestones((81, 122))
        >>> [schedule.factor(100 * epoch, steps_per_epoch=100, epochs=164) for epoch in (0, 80, 81, 121)]
        [1.0, 1.0, 0.1, 0.1]
    """

    epochs: tuple[float, ...]
    factor_each: float = 0.1

    def __post_init__(self) -> None:
        if list(self.epochs) != sorted(set(self.epochs)) or any(epoch <= 0 for epoch in self.epochs):
            raise ValueError(f"milestones must be positive and rise from one to the next, got {self.epochs}")
        if not 0 < self.factor_each <= 1:
            raise ValueError(f"factor_each must lie above 0 and not above 1, got {self.factor_each}")

    def factor(self, step: int, *, steps_per_epoch: int, epochs: int) -> float:
        """factor_each to the power of the number of milestones passed."""
        return self.factor_each ** sum(step >= epoch * steps_per_epoch for epoch in self.epochs)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from 1 to 0 over the run, after a linear rise over `warmup_epochs`."""

    warmup_epochs: float = 0.0

    def __post_init__(self) -> None:
        if not self.warmup_epochs >= 0:
            raise ValueError(f"warmup_epochs must not be negative, got {self.warmup_epochs}")

    def factor(self, step: int, *, steps_per_epoch: int, epochs: int) -> float:
        """Never 0: the last step still moves."""
        warmup = self.warmup_epochs * steps_per_epoch
        if step < warmup:
            return min((step + 1) / warmup, 1.0)  # a rise may end within a step
        return (1 + math.cos(math.pi * (step - warmup) / (epochs * steps_per_epoch - warmup))) / 2


@dataclass(frozen=True)
class Poly:
    """(1 − t)^power, with t from 0 to 1 over the run."""

    power: float = 0.9

    def __post_init__(self) -> None:
        if not self.power > 0:
            raise ValueError(f"power must be positive, got {self.power}: the rate falls over the run")

    def factor(self, step: int, *, steps_per_epoch: int, epochs: int) -> float:
        """Never 0: the last step still moves."""
        return (1 - step / (epochs * steps_per_epoch)) ** self.power


class OptimizerSpec(Protocol):
    """Builds a torch.optim optimizer whose learning rate `lr` the schedule then scales."""

    @property
    def lr(self) -> float:
        """The learning rate that a schedule's factor multiplies."""
        ...

    def __call__(self, parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        """The optimizer; `options` are torch's own, such as fused=True."""
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum; weight decay is added to the gradient, as in the paper."""

    lr: float
    momentum: float = 0.9
    weight_decay: float = 1e-4
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_rates(lr=self.lr, weight_decay=self.weight_decay)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {self.momentum}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum, got momentum=0; leave it out")

    def __call__(self, parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        """torch.optim.SGD."""
        options.pop("capturable", None)  # it has no step counter that would need to be
        settings = {"momentum": self.momentum, "weight_decay": self.weight_decay, "nesterov": self.nesterov}
        return torch.optim.SGD(parameters, **{"lr": self.lr, **settings, **options})


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.05
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check_rates(lr=self.lr, weight_decay=self.weight_decay, eps=self.eps)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {self.betas}")

    def __call__(self, parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        """torch.optim.AdamW."""
        settings = {"betas": self.betas, "weight_decay": self.weight_decay, "eps": self.eps}
        return torch.optim.AdamW(parameters, **{"lr": self.lr, **settings, **options})


def _check_rates(**rates: float) -> None:
    """Refuse here what torch would refuse when the model is built, or not at all."""
    for name, value in rates.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a finite number from 0 on, got {value}")
