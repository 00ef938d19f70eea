"""Smoothness along the step: the loss and its gradient as the parameters move against the gradient.

The plots of the literature on why BatchNorm works (the paper's reference `whybnworks`): at θ with g = ∇L(θ) and for
step sizes η, the losses L(θ − ηg), the distances ‖∇L(θ − ηg) − g‖ (gradient predictiveness), and the largest distance
per length moved, ‖∇L(θ − ηg) − g‖/(η‖g‖), an estimate of the gradient's Lipschitz constant along that line.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.commit.snapshot import preserved

Loss = Callable[[], Tensor]
"""Runs the model and returns the loss, a tensor of one element; the same function of the parameters at every call."""


@dataclass(frozen=True)
class Smoothness:
    """The loss and its gradient along the step."""

    steps: tuple[float, ...]
    loss: float
    """L(θ)."""
    gradient: float
    """‖g‖."""
    losses: tuple[float, ...]
    """L(θ − ηg), one for each step size η."""
    distances: tuple[float, ...]
    """‖∇L(θ − ηg) − g‖."""

    @property
    def loss_range(self) -> tuple[float, float]:
        """The least and the largest loss along the step, the start not included; NaN where any loss is."""
        return _least(self.losses), _largest(self.losses)

    @property
    def distance_range(self) -> tuple[float, float]:
        """The least and the largest distance of the gradient from the one at the start."""
        return _least(self.distances), _largest(self.distances)

    @property
    def beta(self) -> float:
        """The largest distance of gradients per length moved: a lower bound of the gradient's Lipschitz constant."""
        moved = [step * self.gradient for step in self.steps]
        return _largest([d / m if m else math.nan for d, m in zip(self.distances, moved, strict=True)])

    def figures(self) -> dict[str, Any]:
        """Everything under plain names."""
        return {
            "loss": self.loss,
            "gradient": self.gradient,
            "loss_least": self.loss_range[0],
            "loss_largest": self.loss_range[1],
            "distance_least": self.distance_range[0],
            "distance_largest": self.distance_range[1],
            "beta": self.beta,
        }


def smoothness(
    model: nn.Module,
    loss: Loss,
    steps: Sequence[float],
    *,
    parameters: Iterable[nn.Parameter] | None = None,
) -> Smoothness:
    """The losses and gradients along the step from where the model is, which is left exactly as it was.

    Every evaluation starts from the same buffers, windows and random states, so that dropout drops the same units and
    no estimate remembers a look. `.grad` is not touched, and the optimizer is not asked: the step is η times the plain
    gradient. One forward and backward for each step size, and one more. DDP expects a backward of its own: give its
    `module`. A look may come between a forward of the training and its backward; `loss` must keep none of its own
    graphs, which belong to parameters that have moved since.

    Args:
        model: in the mode the loss is to be taken in.
        loss: runs the model and returns the loss.
        steps: the step sizes η, positive: multiples of the learning rate, as a rule.
        parameters: those that move and whose gradients count; all that require a gradient by default.

    Example:
        >>> model = nn.Linear(4, 1, bias=False)
        >>> x = torch.eye(4)
        >>> found = smoothness(model, lambda: model(x).square().sum() / 2, [0.5, 1.0])
        >>> round(found.beta, 4), found.losses[1] < 1e-10  # the Hessian is the identity
        (1.0, True)
    """
    sizes = _checked(steps)
    moving = list(model.parameters() if parameters is None else parameters)
    moving = [p for p in moving if p.requires_grad]
    if not moving:
        raise ValueError("no parameter requires a gradient; there is no step to look along")
    with preserved(model) as snapshot, torch.enable_grad():
        start, direction = _evaluate(loss, moving)
        losses, distances = [], []
        for size in sizes:
            snapshot.restore()
            with torch.no_grad():
                for p, g in zip(moving, direction, strict=True):
                    p.sub_(g, alpha=size)
            value, there = _evaluate(loss, moving)
            losses.append(value)
            distances.append(_norm([a - b for a, b in zip(there, direction, strict=True)]))
    return Smoothness(sizes, start, _norm(direction), tuple(losses), tuple(distances))


def _evaluate(loss: Loss, parameters: list[nn.Parameter]) -> tuple[float, list[Tensor]]:
    value = check_loss(loss())
    grads = torch.autograd.grad(value, parameters, allow_unused=True)
    found = [torch.zeros_like(p) if g is None else g.detach() for g, p in zip(grads, parameters, strict=True)]
    return float(value.detach()), found


def check_loss(value: Any) -> Tensor:
    """Refuse a loss that is not one number with a way back to the parameters."""
    if not isinstance(value, Tensor):
        raise TypeError(f"loss() must return a tensor, got {type(value).__name__}")
    if value.numel() != 1:
        raise ValueError(f"loss() must return one number, got shape {tuple(value.shape)}; sum or average it")
    if not value.requires_grad:
        raise ValueError("the loss does not depend on any parameter: was it detached, or taken under no_grad?")
    return value.reshape(())


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(math.fsum(float(t.to(torch.float64).square().sum()) for t in tensors))


def _checked(steps: Sequence[float]) -> tuple[float, ...]:
    sizes = tuple(float(step) for step in steps)
    if not sizes or not all(0 < size < math.inf for size in sizes):
        raise ValueError(f"steps must be one or more finite numbers above 0, got {list(steps)}")
    return sizes


def _least(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else min(values)


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)
