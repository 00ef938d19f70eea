"""Projected gradient descent moves Ŵ like WS to first order (labels `eq:pgd_update`, `eq:ws_update`).

At ε = 0, with g = ∇Ŵ and its part along the constraint T·g = g − (1/I)⟨Ŵ, g⟩Ŵ − (1/I)⟨1, g⟩1:

    Proj(Ŵ − η·g)    = Ŵ − η·T·g + O(η²)          (the Lagrangian update; the paper's lacks 1/I before ⟨Ŵ, g⟩Ŵ)
    Proj(W − η·∇W)   = Proj(Ŵ − (η/σ²)·T·g)       (WS, whose W has the deviation σ)
    Proj(Ŵ − η·g)    = Proj(Ŵ − η/(1 − η·a)·T·g)  with a = (1/I)⟨Ŵ, g⟩, while η·a < 1.
"""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import micronorm as mn
from micronorm.diagnostics.lipschitz import effective_gradients
from micronorm.nn.reparameterized import rows_of
from tests.diagnostics.trained import LAYERS, loss_of, network
from tests.tolerances import assert_close_to_max


def standardize(w: Tensor) -> Tensor:
    return mn.functional.weight_standardize(w, eps=0.0)


class Updates(NamedTuple):
    """Ŵ after one step from W with the same ∇Ŵ, by four rules. All but WS use the rate η/σ² in each row."""

    projected: Tensor
    standardized: Tensor
    lagrangian: Tensor
    literal: Tensor  # the Lagrangian update as printed

    def error(self, rule: str) -> float:
        return float((self.projected - getattr(self, rule)).norm())


def updates(w: Tensor, g: Tensor, lr: float) -> Updates:
    raw = w.detach().flatten(1).requires_grad_()
    g = g.flatten(1)
    what = standardize(raw)
    (grad,) = torch.autograd.grad(what, raw, g)
    w, what = raw.detach(), what.detach()
    rate = lr / w.var(1, correction=0, keepdim=True)
    along, mean = what * (what * g).sum(1, keepdim=True), g.mean(1, keepdim=True)
    return Updates(
        standardize(what - rate * g),
        standardize(w - lr * grad),
        what - rate * (g - along / w.shape[1] - mean),
        what - rate * (g - along - mean),
    )


def trained_pairs():
    """Raw weights and the gradients of the effective ones, of a trained network and at random."""
    model = network(mn.WS(eps=0.0), steps=20)
    with effective_gradients(model) as captured:
        loss_of(model)().backward()
    pairs = {
        name: tuple(rows_of(model.get_submodule(name), t) for t in (model.get_submodule(name).weight.detach(), c.total))
        for name, c in captured.items()
        if name in LAYERS
    }
    return pairs | {"random": torch.randn(2, 8, 27, dtype=torch.float64).mul(3).add(0.5).unbind()}


def slope(w, g, rule):
    """The exponent of the rate in an error, measured between rates a hundred times apart."""
    reach = float((g.flatten(1).norm(dim=1) / w.flatten(1).var(1, correction=0)).max())
    near, far = (updates(w, g, lr / reach).error(rule) for lr in (1e-4, 1e-2))
    return math.log10(far / near) / 2


@pytest.mark.parametrize("key", [*LAYERS, "random"])
def test_projected_descent_moves_as_ws_up_to_the_square_of_the_rate(key):
    w, g = trained_pairs()[key]
    assert slope(w, g, "lagrangian") == pytest.approx(2, abs=0.05)
    if key == "up":
        # Before BatchNorm the loss ignores the size of the weight: ⟨Ŵ, g⟩, and the term in η² with it, is next to zero.
        assert updates(w, g, 1e-2).error("standardized") < 1e-8
    else:
        assert slope(w, g, "standardized") == pytest.approx(2, abs=0.05)


def test_the_lagrangian_update_as_printed_is_wrong_to_first_order():
    w, g = trained_pairs()["random"]
    assert slope(w, g, "literal") == pytest.approx(1, abs=0.05)


def test_projected_descent_is_ws_at_another_rate_exactly():
    w = standardize(torch.randn(1, 27, dtype=torch.float64))
    g = torch.randn(1, 27, dtype=torch.float64)
    along = float((w * g).mean())
    projected = updates(w, g, 0.2).projected
    assert_close_to_max(updates(w, g, 0.2 / (1 - 0.2 * along)).standardized, projected, tol=1e-12)
