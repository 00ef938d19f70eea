"""The Lipschitz constant of the gradient: Hessians of a weight and of the centred weight (Sec. `sec:eowotl`).

For one output channel with fan-in I, Ẇ = P·W with P = 1 − (1/I)·11ᵀ (label `eq:9`), and the loss is a function of Ẇ by
Ŵ = Ẇ/sqrt(mean Ẇ² + ε) (label `eq:10`), for any Ẇ, centred or not. Since P is linear, the Hessians H by W and Ḣ by Ẇ
obey, with or without ε,

    H = P·Ḣ·P,   H·1 = 0 and so Σ H = 0,
    ‖H‖² = ‖Ḣ‖² − (2/I)‖Ḣ·1‖² + (1/I²)(1ᵀḢ1)² ≤ ‖Ḣ‖² − (1/I²)(1ᵀḢ1)²,

in squared Frobenius norms; the last (label `eq:27`, where the squares are missing) by ‖Ḣ·1‖² ≥ (1/I)(1ᵀḢ1)².
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from micronorm.commit.snapshot import preserved
from micronorm.diagnostics.layers import from_rows, over_rows, rows_of, weight_layers
from micronorm.diagnostics.smoothness import Loss, check_loss
from micronorm.nn.inputs import check_count
from micronorm.nn.reparameterized import _WS, Reparameterized
from micronorm.ops.weight import weight_standardize

EXACT = 1024
"""The largest fan-in that `exact_hessians` takes without being told to: it costs that many backward passes, twice."""


class Bound(NamedTuple):
    """The terms of label `eq:27`, in squared Frobenius norms."""

    raw: float
    """‖H‖²."""
    centered: float
    """‖Ḣ‖²."""
    removed: float
    """‖Ḣ‖² − ‖H‖² by the identity: (2/I)‖Ḣ·1‖² − (1/I²)(1ᵀḢ1)²."""
    least: float
    """What the paper's bound says is removed at least: (1/I²)(1ᵀḢ1)²."""

    @property
    def slack(self) -> float:
        """By how much ‖H‖² is below the bound; never negative, beyond rounding."""
        return self.centered - self.least - self.raw


@dataclass(frozen=True, eq=False)
class Hessians:
    """The I×I Hessians of one output channel, by W and by Ẇ, each found by differentiating twice."""

    raw: Tensor
    centered: Tensor

    def projection_error(self) -> float:
        """max|H − P·Ḣ·P|, relative to max|Ḣ|; NaN where Ḣ is zero."""
        return float((self.raw - project(self.centered)).abs().max() / self.centered.abs().max())

    def row_sum(self) -> float:
        """max|H·1|, relative to max|Ḣ|."""
        return float(self.raw.sum(1).abs().max() / self.centered.abs().max())

    def total(self) -> float:
        """|Σ H|, relative to max|Ḣ|."""
        return float(self.raw.sum().abs() / self.centered.abs().max())

    def bound(self) -> Bound:
        """The terms of label `eq:27`."""
        squares = float(self.raw.square().sum()), float(self.centered.square().sum())
        return Bound(*squares, *_removed(self.centered.sum(1)))


class Estimate(NamedTuple):
    """A mean over random probes and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class HessianEstimates:
    """Hutchinson's estimates for one output channel: tr H = E[vᵀHv], ‖H‖² = E[‖Hv‖²] for v of random signs.

    H and Ḣ meet the same probes, so that their difference is less noisy than either.
    """

    raw_trace: Estimate
    centered_trace: Estimate
    raw_square: Estimate
    """Of ‖H‖²."""
    centered_square: Estimate
    """Of ‖Ḣ‖²."""
    removed: float
    """‖Ḣ‖² − ‖H‖², exact: one product Ḣ·1 gives it."""
    least: float
    """The paper's lower bound of it, (1/I²)(1ᵀḢ1)², exact too."""
    probes: int


def project(hessian: Tensor) -> Tensor:
    """P·H·P: rows and columns centred.

    Example:
        >>> project(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
        tensor([[ 0.5000, -0.5000],
                [-0.5000,  0.5000]])
    """
    rows = hessian - hessian.mean(1, keepdim=True)
    return rows - rows.mean(0, keepdim=True)


def exact_hessians(model: nn.Module, loss: Loss, layer: str, channel: int, *, largest: int = EXACT) -> Hessians:
    """The Hessians of one output channel of a layer, entry by entry: 2·I backward passes through the network.

    The layer is a WS layer that centers, or a plain one; of a plain one Ḣ is the Hessian of its own weight, and H what
    centering would make of it, with the mean absorbed. The model is left as it was, in whatever mode it is. Computed in
    the model's dtype: second derivatives want float64.

    Args:
        model: the network.
        loss: runs the model and returns the loss.
        layer: the layer's name.
        channel: the output channel.
        largest: the largest fan-in to do this for; `estimate_hessians` is for larger ones.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> found = exact_hessians(model, lambda: model(torch.eye(3)).square().sum(), "", 0)
        >>> found.centered.diagonal()
        tensor([2., 2., 2.])
        >>> round(found.bound().least, 3), round(found.bound().removed, 3)  # Σ Ḣ = 6, and all of it goes
        (4.0, 4.0)
    """
    module = _layer(model, layer, channel)
    fan_in = rows_of(module, module.weight)[0].numel()
    if fan_in > largest:
        raise ValueError(
            f"{layer!r} has a fan-in of {fan_in}, above largest={largest}: its Hessians would take {2 * fan_in} "
            "backward passes; use estimate_hessians, or raise `largest`"
        )
    identity = torch.eye(fan_in, dtype=module.weight.dtype, device=module.weight.device)
    return Hessians(*_products(model, loss, module, channel, identity, identity))


def estimate_hessians(
    model: nn.Module,
    loss: Loss,
    layer: str,
    channel: int,
    *,
    probes: int = 32,
    generator: torch.Generator | None = None,
) -> HessianEstimates:
    """Traces and squared Frobenius norms of one output channel's Hessians, by 2·probes + 1 backward passes.

    Args:
        model: the network, left as it was.
        loss: runs the model and returns the loss.
        layer: the layer's name; which layers, `exact_hessians` says.
        channel: the output channel.
        probes: how many random vectors, at least 2; errors fall as 1/sqrt(probes).
        generator: on the CPU, for the signs; torch's own by default.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> found = estimate_hessians(model, lambda: model(torch.eye(3)).square().sum(), "", 0, probes=4)
        >>> found.centered_trace  # a diagonal Hessian is the same for all signs
        Estimate(value=6.0, error=0.0)
    """
    check_count("probes", probes)
    if probes < 2:
        raise ValueError(f"an error needs at least 2 probes, got {probes}")
    module = _layer(model, layer, channel)
    fan_in = rows_of(module, module.weight)[0].numel()
    signs = torch.randint(2, (probes, fan_in), generator=generator).mul_(2).sub_(1).to(module.weight)
    ones = torch.ones_like(signs[:1])
    raw, centered = _products(model, loss, module, channel, signs, torch.cat([signs, ones]))
    centered, of_ones = centered[:-1], centered[-1]
    return HessianEstimates(
        _estimate((raw * signs).sum(1)),
        _estimate((centered * signs).sum(1)),
        _estimate(raw.square().sum(1)),
        _estimate(centered.square().sum(1)),
        *_removed(of_ones),
        probes,
    )


def _estimate(samples: Tensor) -> Estimate:
    samples = samples.to("cpu", torch.float64)
    return Estimate(float(samples.mean()), float(samples.std() / len(samples) ** 0.5))


def _removed(of_ones: Tensor) -> tuple[float, float]:
    """What centering removes from ‖Ḣ‖², and the least that the paper says, by Ḣ·1."""
    fan_in, total = len(of_ones), float(of_ones.sum())
    least = total**2 / fan_in**2
    return 2 / fan_in * float(of_ones.square().sum()) - least, least


def _layer(model: nn.Module, name: str, channel: int) -> Any:
    layers = weight_layers(model)
    layer = layers.get(name)
    if layer is None:
        known = ", ".join(map(repr, list(layers)[:5])) + (", …" if len(layers) > 5 else "")
        raise ValueError(
            f"no convolution or linear layer {name!r} with a weight to look at; there is {known or 'none'}"
        )
    if isinstance(layer, Reparameterized) and not (isinstance(layer, _WS) and layer.center):
        raise ValueError(
            f"{name!r} is a {type(layer).__name__} that centers no weight by eq:9; Ẇ is defined for WS layers with "
            "center=True and for plain ones"
        )
    channels = rows_of(layer, layer.weight).shape[0]
    if not 0 <= channel < channels:
        raise ValueError(f"{name!r} has output channels 0 to {channels - 1}, got {channel}")
    return layer


def _products(
    model: nn.Module, loss: Loss, layer: Any, channel: int, by_raw: Tensor, by_centered: Tensor
) -> tuple[Tensor, Tensor]:
    """H·v for each row v of `by_raw`, and Ḣ·v for each of `by_centered`: one forward for each of the two."""
    rows = rows_of(layer, layer.weight.detach())
    mean = rows.flatten(1).mean(1)
    found = []
    with preserved(model) as snapshot, torch.enable_grad():
        for centered, vectors in ((False, by_raw), (True, by_centered)):
            snapshot.restore()
            start = (rows - over_rows(mean, rows) if centered else rows).clone().requires_grad_()
            with _computing_with(layer, _effective(layer, mean, centered)(start)):
                value = check_loss(loss())
            found.append(_curvature(value, start, channel, vectors))
    return found[0], found[1]


def _effective(layer: Any, mean: Tensor, centered: bool) -> Callable[[Tensor], Tensor]:
    """The weight a layer computes with, as a function of W or of Ẇ (both by rows)."""

    def of(rows: Tensor) -> Tensor:
        if not isinstance(layer, _WS):  # centering alone, its mean kept
            moved = rows if centered else rows - rows.mean(tuple(range(1, rows.ndim)), keepdim=True)
            return from_rows(layer, moved + over_rows(mean, rows))
        # Ẇ goes by eq:10 alone: to center it once more would hide what centering does
        options = {"center": not centered, "scale": layer.scale, "eps": layer.eps, "backend": "reference"}
        what = weight_standardize(rows, **options)
        if layer.absorbed_mean is not None and layer.absorbed_scale is not None:
            kept, scale = (b.to(what.dtype) for b in (layer.absorbed_mean, layer.absorbed_scale))
            what = over_rows(kept, what) + what * over_rows(scale, what)
        return from_rows(layer, what)

    return of


def _curvature(value: Tensor, start: Tensor, channel: int, vectors: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(value, start, create_graph=True, allow_unused=True)
    if grad is None:
        raise ValueError("the loss does not depend on the layer's weight: is the layer part of what loss() runs?")
    if not grad.requires_grad:  # linear: no second derivative
        return torch.zeros_like(vectors)
    products = []
    for vector in vectors:
        (product,) = torch.autograd.grad(
            grad[channel].flatten(), start, vector, retain_graph=True, materialize_grads=True
        )
        products.append(product[channel].flatten())
    return torch.stack(products)


@contextlib.contextmanager
def _computing_with(layer: Any, weight: Tensor) -> Iterator[None]:
    """Within this block the layer computes with this weight, in place of the one it has or makes."""
    if isinstance(layer, Reparameterized):
        before = layer.shared_weight
        layer.shared_weight = weight
        try:
            yield
        finally:
            layer.shared_weight = before
        return
    parameters = dict(layer._parameters)
    del layer._parameters["weight"]
    vars(layer)["weight"] = weight
    try:
        yield
    finally:
        del vars(layer)["weight"]
        layer._parameters.clear()  # in the old order: optimizers and state dicts know parameters by it
        layer._parameters.update(parameters)
