"""Projected gradient descent, the alternative to WS: standardize the weights themselves after each step.

WS keeps Σ Ŵ = 0 and Σ Ŵ² = I by reparameterization; Proj keeps the weight there by moving it back (labels
`eq:pgd_constraint`, `eq:pgd_update`). At ε = 0, with g = ∇Ŵ and its part along the constraint
T·g = g − (1/I)⟨Ŵ, g⟩Ŵ − (1/I)⟨1, g⟩1:

    Proj(Ŵ − η·g)    = Ŵ − η·T·g + O(η²)          (the Lagrangian update; the paper's lacks 1/I before ⟨Ŵ, g⟩Ŵ)
    Proj(W − η·∇W)   = Proj(Ŵ − (η/σ²)·T·g)       (WS, whose W has the deviation σ)
    Proj(Ŵ − η·g)    = Proj(Ŵ − η/(1 − η·a)·T·g)  with a = (1/I)⟨Ŵ, g⟩, while η·a < 1.

So WS at rate η moves Ŵ like projected descent at rate η/σ², up to O(η²).
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from micronorm.diagnostics.weights import Filter, from_rows, rows_of, weight_layers
from micronorm.nn.reparameterized import Reparameterized
from micronorm.nn.weight import WS
from micronorm.ops.weight import row_statistics, weight_standardize
from micronorm.ops.weight.reference import check_weight, gradient


class ProjectedWeights:
    """Keep the weights of plain convolutions standardized, by a projection after each step of an optimizer.

    Momentum and other optimizer state do not change. A projected layer needs a norm behind it, as with WS, because its
    scale is fixed.

    Args:
        model: the model. WS layers in it are not projected.
        weight: the projection; `mn.WS(scale=False)` centers only.
        filter: selects plain layers by module and name. By default all plain convolutions, but no linear layers.

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

    def __init__(self, model: nn.Module, *, weight: WS | None = None, filter: Filter | None = None) -> None:
        layers = weight_layers(model, filter).values()
        self.layers = [
            layer
            for layer in layers
            if not isinstance(layer, Reparameterized) and (filter is not None or not isinstance(layer, nn.Linear))
        ]
        if not self.layers:
            raise ValueError(
                f"{type(model).__name__} has no plain convolution to project among {len(layers)} layers; WS layers are "
                "standardized already, and linear layers need filter="
            )
        self.weight = weight or WS()
        self._hooks: list[Any] = []

    @torch.no_grad()
    def project(self) -> None:
        """Standardize all weights in place."""
        spec = self.weight
        for layer in self.layers:
            rows = rows_of(layer, layer.weight)
            projected = weight_standardize(rows, center=spec.center, scale=spec.scale, eps=spec.eps)
            layer.weight.copy_(from_rows(layer, projected))

    def attach(self, optimizer: torch.optim.Optimizer) -> Self:
        """Project now and after each step of this optimizer."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = sum(id(layer.weight) not in held for layer in self.layers)
        if missing:
            raise ValueError(
                f"the optimizer does not hold the weights of {missing} of the {len(self.layers)} layers to project; "
                "build it from model.parameters(), or leave these layers out with filter="
            )
        self.project()
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.project()))
        return self

    def detach(self) -> None:
        """Stop projecting."""
        while self._hooks:
            self._hooks.pop().remove()


class Updates(NamedTuple):
    """Ŵ (O×I, at ε = 0) after one step by each of four rules.

    Args:
        projected: Proj(Ŵ − (η/σ²)·∇Ŵ), label `eq:pgd_update` at the rate that corresponds to WS.
        standardized: WS(W − η·∇W), label `eq:ws_update`.
        lagrangian: Ŵ − (η/σ²)·(∇Ŵ − (1/I)⟨Ŵ, ∇Ŵ⟩Ŵ − (1/I)⟨1, ∇Ŵ⟩1), label `eq:pgd_update_lagrangian`, corrected.
        literal: the same as printed, without 1/I before ⟨Ŵ, ∇Ŵ⟩Ŵ.
    """

    projected: Tensor
    standardized: Tensor
    lagrangian: Tensor
    literal: Tensor

    @property
    def distance(self) -> float:
        """Return ‖projected − standardized‖, which is O(η²)."""
        return float((self.projected - self.standardized).norm())

    @property
    def lagrangian_error(self) -> float:
        """Return ‖projected − lagrangian‖, which is O(η²)."""
        return float((self.projected - self.lagrangian).norm())

    @property
    def literal_error(self) -> float:
        """Return ‖projected − literal‖, which is O(η) if ⟨Ŵ, ∇Ŵ⟩ is not zero."""
        return float((self.projected - self.literal).norm())


def compare_updates(weight: Tensor, grad_effective: Tensor, *, lr: float) -> Updates:
    """Return one step from the same weight with the same ∇Ŵ, by projected descent, by WS, and to first order.

    Args:
        weight: the raw W of WS, O×….
        grad_effective: ∇Ŵ, of the same shape.
        lr: the learning rate η of WS. Projected descent uses η/σ² in each row.

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
