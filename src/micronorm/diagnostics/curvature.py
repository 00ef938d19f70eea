"""The curvature of the loss: its Hessians by a weight and by the centred weight, and smoothness along a step.

For one output channel with fan-in I, Ẇ = P·W with P = 1 − (1/I)·11ᵀ (label `eq:9`). The loss is a function of Ẇ by
Ŵ = Ẇ/sqrt(mean Ẇ² + ε) (label `eq:10`), for any Ẇ, centred or not. P is linear, so the Hessians H by W and Ḣ by Ẇ
satisfy, with or without ε,

    H = P·Ḣ·P,   H·1 = 0 and so Σ H = 0,
    ‖H‖² = ‖Ḣ‖² − (2/I)‖Ḣ·1‖² + (1/I²)(1ᵀḢ1)² ≤ ‖Ḣ‖² − (1/I²)(1ᵀḢ1)²,

in squared Frobenius norms. The inequality (label `eq:27`, where the squares are missing) follows from
‖Ḣ·1‖² ≥ (1/I)(1ᵀḢ1)². See Sec. `sec:eowotl`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from micronorm.commit.snapshot import preserved
from micronorm.diagnostics.lipschitz import over_rows, rows_of
from micronorm.nn.reparameterized import _WS
from micronorm.ops.weight import weight_standardize


class Bound(NamedTuple):
    """The terms of label `eq:27`, in squared Frobenius norms.

    Args:
        raw: ‖H‖².
        centered: ‖Ḣ‖².
        removed: ‖Ḣ‖² − ‖H‖² by the identity, (2/I)‖Ḣ·1‖² − (1/I²)(1ᵀḢ1)².
        least: the paper's lower bound of `removed`, (1/I²)(1ᵀḢ1)².
    """

    raw: float
    centered: float
    removed: float
    least: float

    @property
    def slack(self) -> float:
        """Return how far ‖H‖² is below the bound. It is never negative, apart from rounding."""
        return self.centered - self.least - self.raw


@dataclass(frozen=True, eq=False)
class Hessians:
    """The I×I Hessians of one output channel, by W (`raw`) and by Ẇ (`centered`), each from second derivatives."""

    raw: Tensor
    centered: Tensor

    def projection_error(self) -> float:
        """Return max|H − P·Ḣ·P|, relative to max|Ḣ|; NaN if Ḣ is zero."""
        return float((self.raw - project(self.centered)).abs().max() / self.centered.abs().max())

    def row_sum(self) -> float:
        """Return max|H·1|, relative to max|Ḣ|."""
        return float(self.raw.sum(1).abs().max() / self.centered.abs().max())

    def bound(self) -> Bound:
        """Return the terms of label `eq:27`."""
        of_ones, fan_in = self.centered.sum(1), len(self.centered)
        least = float(of_ones.sum()) ** 2 / fan_in**2
        removed = 2 / fan_in * float(of_ones.square().sum()) - least
        return Bound(float(self.raw.square().sum()), float(self.centered.square().sum()), removed, least)


def project(hessian: Tensor) -> Tensor:
    """Return P·H·P: the matrix with centred rows and columns.

    Example:
        >>> project(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
        tensor([[ 0.5000, -0.5000],
                [-0.5000,  0.5000]])
    """
    rows = hessian - hessian.mean(1, keepdim=True)
    return rows - rows.mean(0, keepdim=True)


def exact_hessians(model: nn.Module, loss: Callable[[], Tensor], layer: str, channel: int) -> Hessians:
    """Return the Hessians of one output channel of a WS layer that centers, by 2·I backward passes for a fan-in of I.

    The model is not changed. The computation uses the model's dtype; second derivatives need float64.

    Args:
        model: the network.
        loss: runs the model and returns the loss, one number; the same function of the parameters at each call.
        layer: the name of the layer.
        channel: the output channel.

    Example:
        >>> from micronorm.nn import WSLinear
        >>> model = WSLinear(5, 3).double()
        >>> x = torch.randn(4, 5, dtype=torch.float64)
        >>> found = exact_hessians(model, lambda: model(x).square().sum(), "", 0)
        >>> found.raw.shape, found.projection_error() < 1e-10
        (torch.Size([5, 5]), True)
    """
    module = _ws_layer(model, layer, channel)
    rows = rows_of(module, module.weight.detach())
    shared, found = module.shared_weight, []
    with preserved(model) as snapshot, torch.enable_grad():
        for centered in (False, True):
            snapshot.restore()
            mean = over_rows(rows.flatten(1).mean(1), rows) if centered else 0
            start = (rows - mean).requires_grad_()
            module.shared_weight = _effective_weight(module, start, centered=centered)
            try:
                value = _check_loss(loss())
            finally:
                module.shared_weight = shared
            found.append(_hessian(value, start, channel))
    return Hessians(*found)


def _ws_layer(model: nn.Module, name: str, channel: int) -> Any:
    layers = {key: module for key, module in model.named_modules() if isinstance(module, _WS) and module.center}
    layer: Any = layers.get(name)
    if layer is None:
        known = ", ".join(map(repr, list(layers)[:5])) + (", …" if len(layers) > 5 else "")
        raise ValueError(f"{name!r} is not a WS layer with center=True (eq:9); the model has {known or 'none'}")
    channels = rows_of(layer, layer.weight).shape[0]
    if not 0 <= channel < channels:
        raise ValueError(f"{name!r} has output channels 0 to {channels - 1}, got {channel}")
    return layer


def _effective_weight(layer: Any, rows: Tensor, *, centered: bool) -> Tensor:
    """Return the weight a layer computes with, as a function of W or of Ẇ (by rows)."""
    # Ẇ is not centred again: eq:10 alone applies to it.
    what = weight_standardize(rows, center=not centered, scale=layer.scale, eps=layer.eps, backend="reference")
    if layer.absorbed_mean is not None and layer.absorbed_scale is not None:
        kept, scale = (b.to(what.dtype) for b in (layer.absorbed_mean, layer.absorbed_scale))
        what = over_rows(kept, what) + what * over_rows(scale, what)
    return rows_of(layer, what)


def _hessian(value: Tensor, start: Tensor, channel: int) -> Tensor:
    """Return the Hessian of the loss by the weights of one output channel, one backward pass per row."""
    (grad,) = torch.autograd.grad(value, start, create_graph=True, allow_unused=True)
    if grad is None:
        raise ValueError("the loss does not depend on the layer's weight; does loss() run the layer?")
    gradient = grad[channel].flatten()
    rows = [torch.autograd.grad(one, start, retain_graph=True, materialize_grads=True)[0] for one in gradient]
    return torch.stack([row[channel].flatten() for row in rows])


# --- smoothness along a step -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Smoothness:
    """The loss and its gradient along a step against the gradient g.

    Args:
        steps: the step sizes η.
        loss: L(θ).
        gradient: ‖g‖.
        losses: L(θ − ηg) for each η.
        distances: ‖∇L(θ − ηg) − g‖ for each η (gradient predictiveness).
    """

    steps: tuple[float, ...]
    loss: float
    gradient: float
    losses: tuple[float, ...]
    distances: tuple[float, ...]

    @property
    def loss_range(self) -> tuple[float, float]:
        """Return the smallest and the largest loss along the step, without the start; NaN if any loss is NaN."""
        return _range(self.losses)

    @property
    def distance_range(self) -> tuple[float, float]:
        """Return the smallest and the largest distance of the gradient from g."""
        return _range(self.distances)

    @property
    def beta(self) -> float:
        """Return the largest distance per length moved, a lower bound of the gradient's Lipschitz constant."""
        moved = [step * self.gradient for step in self.steps]
        return _range([d / m if m else math.nan for d, m in zip(self.distances, moved, strict=True)])[1]


def smoothness(model: nn.Module, loss: Callable[[], Tensor], steps: Sequence[float]) -> Smoothness:
    """Return losses and gradients along a step, as in the literature on why BatchNorm works (ref. `whybnworks`).

    Each evaluation starts from the same buffers, windows and random states, and the model is not changed. `.grad` and
    the optimizer are not used: a step is η times the plain gradient. The cost is one forward and backward for each step
    size, and one more. Pass the `module` of a DDP model. `loss` must not keep its graph.

    Args:
        model: in the mode that the loss needs.
        loss: runs the model and returns the loss.
        steps: the step sizes η, above 0. Multiples of the learning rate are usual.

    Example:
        >>> model = nn.Linear(4, 1, bias=False)
        >>> x = torch.eye(4)
        >>> found = smoothness(model, lambda: model(x).square().sum() / 2, [0.5, 1.0])
        >>> round(found.beta, 4), found.losses[1] < 1e-10  # the Hessian is the identity
        (1.0, True)
    """
    sizes = tuple(float(step) for step in steps)
    if not sizes or not all(0 < size < math.inf for size in sizes):
        raise ValueError(f"steps must be one or more finite numbers above 0, got {list(steps)}")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("no parameter of the model requires a gradient")
    with preserved(model) as snapshot, torch.enable_grad():
        start, direction = _evaluate(loss, parameters)
        losses, distances = [], []
        for size in sizes:
            snapshot.restore()
            with torch.no_grad():
                for p, g in zip(parameters, direction, strict=True):
                    p.sub_(g, alpha=size)
            value, there = _evaluate(loss, parameters)
            losses.append(value)
            distances.append(_norm([a - b for a, b in zip(there, direction, strict=True)]))
    return Smoothness(sizes, start, _norm(direction), tuple(losses), tuple(distances))


def _evaluate(loss: Callable[[], Tensor], parameters: list[nn.Parameter]) -> tuple[float, list[Tensor]]:
    value = _check_loss(loss())
    grads = torch.autograd.grad(value, parameters, allow_unused=True)
    found = [torch.zeros_like(p) if g is None else g.detach() for g, p in zip(grads, parameters, strict=True)]
    return float(value.detach()), found


def _check_loss(value: Any) -> Tensor:
    """Return the loss as a scalar. Raise unless it is one number that depends on a parameter."""
    if not isinstance(value, Tensor):
        raise TypeError(f"loss() must return a tensor, got {type(value).__name__}")
    if value.numel() != 1:
        raise ValueError(f"loss() must return one number, got shape {tuple(value.shape)}; sum or average it")
    if not value.requires_grad:
        raise ValueError("the loss does not depend on any parameter: was it detached, or computed under no_grad?")
    return value.reshape(())


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(math.fsum(float(t.to(torch.float64).square().sum()) for t in tensors))


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = torch.tensor(values, dtype=torch.float64).aminmax()
    return float(low), float(high)
