"""Optimizers, parameter groups and learning-rate schedules as values: what a recipe defines and a record keeps.

A schedule is a function of the step's number. It has no state, so a resumed run has nothing to restore.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import nn


class OptimizerSpec(Protocol):
    """Builds a torch.optim optimizer whose learning rate `lr` is then scaled by the schedule."""

    @property
    def lr(self) -> float:
        """Return the learning rate that a schedule's factor multiplies."""
        ...

    def __call__(self, parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        """Return the optimizer of these parameters or groups; `options` are torch's own, such as fused=True."""
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

    def __call__(self, parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        """Return a torch.optim.SGD."""
        options.pop("capturable", None)  # it has no step counter that would need to be
        return torch.optim.SGD(parameters, **{**asdict(self), **options})


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

    def __call__(self, parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        """Return a torch.optim.AdamW."""
        return torch.optim.AdamW(parameters, **{**asdict(self), **options})


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters with another learning rate or weight decay than the rest.

    Args:
        names: a pattern that the parameter's name must match, such as "backbone.*".
        max_ndim: the most axes that a parameter may have; 1 selects biases and the weights of norms.
        lr_factor: multiplies the optimizer's learning rate.
        weight_decay: replaces the optimizer's; None keeps it.

    Example:
        >>> ParameterGroup(max_ndim=1, weight_decay=0.0).matches("bn1.weight", torch.ones(64))
        True
    """

    names: str = "*"
    max_ndim: int | None = None
    lr_factor: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        _check_rates(lr_factor=self.lr_factor, weight_decay=self.weight_decay or 0.0)

    def matches(self, name: str, parameter: torch.Tensor) -> bool:
        """Return whether this parameter belongs to the group."""
        return fnmatchcase(name, self.names) and (self.max_ndim is None or parameter.ndim <= self.max_ndim)


def build_optimizer(
    model: nn.Module, spec: OptimizerSpec, groups: Sequence[ParameterGroup] = (), *, captured: bool = False
) -> torch.optim.Optimizer:
    """Build the optimizer of a model. Each of its groups has an "lr_factor"; see `set_learning_rate`.

    Args:
        model: on its device.
        spec: the kind of optimizer and its rates.
        groups: a parameter belongs to the first group that matches it, or to the rest.
        captured: for a CUDA graph, with the learning rate in a tensor per group.

    Raises:
        ValueError: a group matches no parameter.
    """
    options: dict[str, Any] = {"fused": True, "capturable": True} if captured else {}
    members: list[list[nn.Parameter]] = [[] for _ in range(len(groups) + 1)]
    for name, parameter in model.named_parameters():
        members[next((k for k, group in enumerate(groups) if group.matches(name, parameter)), -1)].append(parameter)
    for group, found in zip(groups, members, strict=False):
        if not found:
            raise ValueError(f"{group} matches none of the parameters that the groups before it left; leave it out")
    chosen: list[dict[str, Any]] = []
    for group, found in zip((*groups, ParameterGroup()), members, strict=True):
        if found:
            decay = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
            # Fused kernels take the learning rate in float32, whatever the dtype of the parameters is.
            rate = {"lr": torch.tensor(spec.lr, dtype=torch.float32, device=found[0].device)} if captured else {}
            chosen.append({"params": found, "lr_factor": group.lr_factor, **decay, **rate})
    return spec(chosen, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give each parameter group of `build_optimizer` the rate times its factor; in place if the rate is a tensor."""
    for group in optimizer.param_groups:
        own = rate * group["lr_factor"]
        group["lr"] = group["lr"].fill_(own) if isinstance(group["lr"], torch.Tensor) else own


def _check_rates(**rates: float) -> None:
    """Raise ValueError for rates that torch would refuse later, when the model is built, or never."""
    for name, value in rates.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a finite number from 0 on, got {value}")


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
