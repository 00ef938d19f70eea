"""Projected gradient descent, the alternative to WS: standardize the weights themselves after each step.

WS keeps Σ Ŵ = 0 and Σ Ŵ² = I by reparameterization; Proj keeps the weight there by moving it back (labels
`eq:pgd_constraint`, `eq:pgd_update`). At ε = 0, with g = ∇Ŵ and T·g = g − (1/I)⟨Ŵ, g⟩Ŵ − (1/I)⟨1, g⟩1 its part along
the constraint:

    Proj(Ŵ − η·g)    = Ŵ − η·T·g + O(η²)          (the Lagrangian update; the paper's lacks 1/I before ⟨Ŵ, g⟩Ŵ)
    Proj(W − η·∇W)   = Proj(Ŵ − (η/σ²)·T·g)       (WS, whose W has the deviation σ)
    Proj(Ŵ − η·g)    = Proj(Ŵ − η/(1 − η·a)·T·g)  with a = (1/I)⟨Ŵ, g⟩, while η·a < 1.

So WS at rate η moves Ŵ as projected descent at η/σ² does, up to O(η²).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from micronorm.diagnostics.layers import Filter, from_rows, rows_of, weight_layers
from micronorm.nn.reparameterized import Reparameterized
from micronorm.nn.weight import WS
from micronorm.ops.weight import row_statistics, weight_standardize
from micronorm.ops.weight.reference import check_weight, gradient

_DEFAULT = WS()


def project_(
    weights: nn.Module | Tensor | Iterable[Tensor], *, weight: WS = _DEFAULT, filter: Filter | None = None
) -> int:
    """Standardize weights in place: each output channel to mean 0 and variance 1 (with ε: var/(var + ε)).

    Args:
        weights: a model, of which the plain convolutions are meant; or tensors, O×….
        weight: what to do: `mn.WS(scale=False)` centers only.
        filter: says of any plain layer of a model, linear ones included, and its name whether to take it.

    Returns:
        How many weights were projected.

    Example:
        >>> conv = nn.Conv2d(3, 8, 3)
        >>> project_(conv), conv.weight.flatten(1).std(1, correction=0).allclose(torch.ones(8), atol=1e-2)
        (1, True)
    """
    if isinstance(weights, nn.Module):
        layers = _plain_layers(weights, filter)
        for layer in layers:
            _project_layer(layer, weight)
        return len(layers)
    if filter is not None:
        raise ValueError("filter chooses among the layers of a model; tensors have none")
    tensors = [weights] if isinstance(weights, Tensor) else list(weights)
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(_standardized(tensor, weight))
    return len(tensors)


class ProjectedWeights:
    """Keeps the weights of plain convolutions standardized, by projecting them after each step of an optimizer.

    Momentum and the like are left alone. Weight decay pulls toward zero and is undone by the projection, as far as it
    is along the weight. A layer to be projected needs a norm after it, as with WS: its scale is no longer its own.

    Args:
        model: whose plain convolutions are meant.
        weight: what the projection does.
        filter: says of any plain layer, linear ones included, and its name whether to take it.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> projected = ProjectedWeights(model).attach(optimizer)
        >>> model(torch.randn(2, 3, 8, 8)).square().sum().backward()
        >>> optimizer.step()
        >>> bool(model[0].weight.flatten(1).mean(1).abs().max() < 1e-6)
        True
        >>> projected.detach()
    """

    def __init__(self, model: nn.Module, *, weight: WS = _DEFAULT, filter: Filter | None = None) -> None:
        self.layers = _plain_layers(model, filter)
        self.weight = weight
        self._handles: list[Any] = []

    def project(self) -> None:
        """Standardize all weights now."""
        for layer in self.layers:
            _project_layer(layer, self.weight)

    def attach(self, optimizer: torch.optim.Optimizer) -> Self:
        """Project now, since descent starts on the constraint, and after each step of this optimizer."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = sum(id(layer.weight) not in held for layer in self.layers)
        if missing:
            raise ValueError(
                f"the optimizer holds {len(held)} parameters, but not the weights of {missing} of the "
                f"{len(self.layers)} layers to project; build it from model.parameters(), or leave them out by filter="
            )
        self.project()
        self._handles.append(optimizer.register_step_post_hook(lambda *_: self.project()))
        return self

    def detach(self) -> None:
        """Let the weights go."""
        while self._handles:
            self._handles.pop().remove()


class Updates(NamedTuple):
    """Where one step takes Ŵ (O×I, at ε = 0), by each of four rules."""

    projected: Tensor
    """Proj(Ŵ − (η/σ²)·∇Ŵ), label `eq:pgd_update` at the rate that corresponds to WS's."""
    standardized: Tensor
    """WS(W − η·∇W), label `eq:ws_update`."""
    lagrangian: Tensor
    """Ŵ − (η/σ²)·(∇Ŵ − (1/I)⟨Ŵ, ∇Ŵ⟩Ŵ − (1/I)⟨1, ∇Ŵ⟩1): label `eq:pgd_update_lagrangian`, corrected."""
    literal: Tensor
    """The same as printed, without 1/I before ⟨Ŵ, ∇Ŵ⟩Ŵ."""

    @property
    def distance(self) -> float:
        """‖projected − standardized‖: O(η²)."""
        return float((self.projected - self.standardized).norm())

    @property
    def lagrangian_error(self) -> float:
        """‖projected − lagrangian‖: O(η²)."""
        return float((self.projected - self.lagrangian).norm())

    @property
    def literal_error(self) -> float:
        """‖projected − literal‖: O(η) wherever ⟨Ŵ, ∇Ŵ⟩ is not zero."""
        return float((self.projected - self.literal).norm())


def compare_updates(weight: Tensor, grad_effective: Tensor, *, lr: float) -> Updates:
    """One step from the same place with the same ∇Ŵ, by projected descent, by WS, and to first order.

    Args:
        weight: the raw W that WS keeps, O×….
        grad_effective: ∇Ŵ, of the same shape.
        lr: WS's learning rate η; projected descent takes η/σ² in each row.

    Example:
        >>> w, g = torch.randn(2, 8, 27, dtype=torch.float64)
        >>> near, far = (compare_updates(w, g, lr=lr) for lr in (1e-3, 1e-2))
        >>> 90 < far.distance / near.distance < 110, 9 < far.literal_error / near.literal_error < 11  # η² and η
        (True, True)
    """
    check_weight(weight)
    if grad_effective.shape != weight.shape:
        raise ValueError(
            f"grad_effective must have the weight's shape {tuple(weight.shape)}, got {tuple(grad_effective.shape)}"
        )
    if not 0 <= lr < float("inf"):
        raise ValueError(f"lr must be finite and at least 0, got {lr}")
    options: dict[str, Any] = {"center": True, "scale": True, "eps": 0.0}
    w, g = weight.detach().flatten(1), grad_effective.detach().flatten(1)
    what = weight_standardize(w, **options)
    rate = lr / row_statistics(w, **options)[1].square().unsqueeze(1)
    along = what * (what * g).sum(1, keepdim=True)
    mean = g.mean(1, keepdim=True)
    return Updates(
        weight_standardize(what - rate * g, **options),
        weight_standardize(w - lr * gradient(w, g, **options), **options),
        what - rate * (g - along / w.shape[1] - mean),
        what - rate * (g - along - mean),
    )


def _plain_layers(model: nn.Module, filter: Filter | None) -> list[Any]:
    layers = weight_layers(model, filter)
    found = [
        layer
        for layer in layers.values()
        if not isinstance(layer, Reparameterized) and (filter is not None or not isinstance(layer, nn.Linear))
    ]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no plain layer to project among {len(layers)} with a weight of fan-in 2 or "
            "more: WS layers standardize already, and linear ones are taken only where filter= says so"
        )
    return found


def _project_layer(layer: Any, weight: WS) -> None:
    with torch.no_grad():
        rows = rows_of(layer, layer.weight)
        layer.weight.copy_(from_rows(layer, _standardized(rows, weight)))


def _standardized(rows: Tensor, weight: WS) -> Tensor:
    return weight_standardize(rows, center=weight.center, scale=weight.scale, eps=weight.eps)
