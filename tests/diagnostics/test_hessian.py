"""Centering a weight projects its Hessian: H = PḢP, ΣH = 0, and the bound of label eq:27 for squared norms."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import micronorm as mn
from tests.diagnostics.trained import EPS

IDENTITY = 1e-10  # what the project asks of its identities in float64


def project(hessian: torch.Tensor) -> torch.Tensor:
    """P·H·P with P = 1 − (1/I)·11ᵀ."""
    rows = hessian - hessian.mean(1, keepdim=True)
    return rows - rows.mean(0, keepdim=True)


def bound(centered: torch.Tensor) -> tuple[float, float]:
    """What centering removes from ‖Ḣ‖² by the identity, and the paper's lower bound of it (label eq:27)."""
    of_ones, fan_in = centered.sum(1), len(centered)
    least = float(of_ones.sum()) ** 2 / fan_in**2
    return 2 / fan_in * float(of_ones.square().sum()) - least, least


def hessians(weight: torch.Tensor, channel: int, *, scale: bool, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """H by W and Ḣ by Ẇ = W − mean of one output channel: eq:10 alone is applied to Ẇ, centred or not."""
    x = torch.randn(4, weight.shape[1], dtype=weight.dtype)

    def loss(row: torch.Tensor, center: bool) -> torch.Tensor:
        rows = torch.cat([weight[:channel], row[None], weight[channel + 1 :]])
        what = mn.functional.weight_standardize(rows, center=center, scale=scale, eps=eps)
        return F.linear(x, what).tanh().square().sum()

    row = weight[channel]
    hessian: Any = torch.autograd.functional.hessian
    return hessian(lambda w: loss(w, True), row), hessian(lambda w: loss(w, False), row - row.mean())


@pytest.mark.parametrize("scale", [True, False], ids=["center and scale", "center"])
@pytest.mark.parametrize("eps", EPS)
def test_centering_projects_the_hessian(eps, scale):
    raw, centered = hessians(torch.randn(3, 7, dtype=torch.float64), 1, scale=scale, eps=eps)
    assert centered.abs().max() > 0
    assert (raw - project(centered)).abs().max() < IDENTITY * centered.abs().max()
    assert raw.sum(1).abs().max() < IDENTITY * centered.abs().max()
    removed, least = bound(centered)
    square = float(centered.square().sum())
    assert abs(square - removed - float(raw.square().sum())) < IDENTITY * square
    assert removed >= least - IDENTITY * square


def test_the_bound_as_printed_fails_for_norms_that_are_not_squared():
    # Ḣ = 4·11ᵀ/I has one eigenvalue, of the constant vector: all of it is removed, and Σ Ḣ = 4·I
    fan_in = 9
    centered = torch.full((fan_in, fan_in), 4.0 / fan_in, dtype=torch.float64)
    raw, (_, least) = project(centered), bound(centered)
    assert float(raw.square().sum()) == pytest.approx(float(centered.square().sum()) - least, abs=1e-12)
    assert raw.norm() > centered.norm() - least + 1
