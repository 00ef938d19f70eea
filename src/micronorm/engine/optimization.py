"""Optimizers and parameter groups as values: what a recipe defines and a record keeps."""

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
        """The learning rate that a schedule's factor multiplies."""
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
