"""Centering a weight projects its Hessian: H = P·Ḣ·P, H·1 = 0, and the bound of label eq:27 for squared norms.

H is the Hessian of the loss by the weight W of one output channel with fan-in I, Ḣ the one by Ẇ = P·W, where
P = 1 − (1/I)·11ᵀ (label `eq:9`). The loss depends on Ẇ through Ŵ = Ẇ/sqrt(mean Ẇ² + ε) (label `eq:10`).
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import micronorm as mn
from micronorm.diagnostics.weights import over_rows, rows_of
from tests.diagnostics.trained import EPS, LAYERS, network

IDENTITY = 1e-10  # what the project asks of its identities in float64


def hessian(model: nn.Module, name: str, channel: int) -> Tensor:
    """The Hessian of a smooth loss by the weight of one output channel, I×I."""
    layer = model.get_submodule(name)
    rows, x = rows_of(layer, layer.weight.detach()), torch.randn(4, 1, 8, 8, dtype=torch.float64)

    def loss(row: Tensor) -> Tensor:
        moved = torch.cat([rows[:channel], row.reshape(1, *rows.shape[1:]), rows[channel + 1 :]])
        return functional_call(model, {f"{name}.weight": rows_of(layer, moved)}, (x,)).tanh().square().sum()

    found = torch.autograd.functional.hessian(loss, rows[channel].flatten())
    assert isinstance(found, Tensor)
    return found


def both_hessians(model: nn.Module, name: str, channel: int) -> tuple[Tensor, Tensor]:
    """H by W and Ḣ by Ẇ. A layer that does not center, with Ẇ as its weight, computes eq:10 alone."""
    model = model.eval()
    centered = copy.deepcopy(model)
    layer = centered.get_submodule(name)
    rows = rows_of(layer, layer.weight.detach())
    layer.center = False
    layer.weight.data = rows_of(layer, rows - over_rows(rows.flatten(1).mean(1), rows))
    state = torch.get_rng_state()
    raw = hessian(model, name, channel)
    torch.set_rng_state(state)
    return raw, hessian(centered, name, channel)


def project(centered: Tensor) -> Tensor:
    """P·Ḣ·P."""
    rows = centered - centered.mean(1, keepdim=True)
    return rows - rows.mean(0, keepdim=True)


@pytest.mark.parametrize("steps", [0, 20], ids=["random", "trained"])
@pytest.mark.parametrize("eps", EPS)
def test_centering_projects_the_hessian_and_keeps_its_norm_below_the_bound(eps, steps):
    model = network(mn.WS(eps=eps), steps=steps)
    for name, channel in zip(LAYERS[:3], (0, 5, 3), strict=True):
        raw, centered = both_hessians(model, name, channel)
        size, fan_in = centered.abs().max(), len(centered)
        assert size > 0
        assert (raw - project(centered)).abs().max() < IDENTITY * size
        assert raw.sum(1).abs().max() < IDENTITY * size
        least = centered.sum().square() / fan_in**2
        removed = 2 / fan_in * centered.sum(1).square().sum() - least
        square = centered.square().sum()
        assert abs(raw.square().sum() - (square - removed)) < IDENTITY * square
        assert raw.square().sum() <= square - least + IDENTITY * square  # eq:27, with the squares that it lacks


def test_the_bound_as_printed_fails_for_norms_that_are_not_squared():
    # Ḣ = 4·11ᵀ/I has one eigenvalue, of the constant vector: all of it is removed, and Σ Ḣ = 4·I
    fan_in = 9
    centered = torch.full((fan_in, fan_in), 4.0 / fan_in, dtype=torch.float64)
    least = centered.sum().square() / fan_in**2
    assert abs(project(centered).square().sum() - (centered.square().sum() - least)) < 1e-12
    assert project(centered).norm() > centered.norm() - least + 1
