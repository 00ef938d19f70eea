"""First and second derivatives of every layer, against finite differences."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from micronorm.functional import Moments, batch_channel_norm
from tests.contract.layers import ALL, CHANNELS, NORMS, as_function

# torch's GroupNorm takes its second derivative apart into many operations; ours need not be slower than that
SMALL = (3, CHANNELS, 3, 1)


def constant_estimates(layer):
    """A "sequential" layer's estimates follow x but receive no gradient; at rate 0 they stand still."""
    if getattr(layer, "statistics", "") == "sequential":
        layer.rate = 0.0
    return layer


@pytest.mark.parametrize("case", ALL, ids=str)
def test_gradients_agree_with_finite_differences(case):
    function, parameters = as_function(constant_estimates(case.layer()))
    x = case.input(shape=SMALL if case in NORMS else None).requires_grad_()
    assert gradcheck(function, (x, *parameters), fast_mode=True)
    assert gradgradcheck(function, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("case", [c for c in NORMS if c.name.startswith("BCN")], ids=str)
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("blend", [1.0, 0.3])
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_batch_channel_norm_in_full(case, activation, blend, fast):
    layer = constant_estimates(case.layer())
    layer.activation = activation
    layer.blend.fill_(blend)
    function, parameters = as_function(layer)
    x = case.input(shape=SMALL).requires_grad_()
    assert gradcheck(function, (x, *parameters), fast_mode=fast)
    assert gradgradcheck(function, (x, *parameters), fast_mode=fast or activation is not None)


def test_estimates_of_each_samples_own_receive_no_gradient_and_disturb_none():
    x = torch.randn(SMALL, dtype=torch.float64, requires_grad=True)
    parameters = [torch.randn(n, dtype=torch.float64, requires_grad=True) for n in (CHANNELS, CHANNELS, 4, 4)]
    estimates = Moments(torch.randn(SMALL[:2], dtype=torch.float64), torch.rand(SMALL[:2], dtype=torch.float64) + 0.5)

    def function(x, *parameters):
        return batch_channel_norm(x, estimates, *parameters, groups=4)

    assert gradcheck(function, (x, *parameters))
    assert gradgradcheck(function, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("case", [c for c in NORMS if c.name.startswith("BCN")], ids=str)
def test_gradients_do_not_depend_on_create_graph(case):
    """Without it the backward uses saved numbers, with it it recomputes them."""
    layer = case.layer()
    layer.activation = "relu"
    function, parameters = as_function(layer)
    x = case.input().requires_grad_()
    y = function(x, *parameters)
    g = torch.randn_like(y)
    kept = torch.autograd.grad(y, (x, *parameters), g, retain_graph=True)
    graphed = torch.autograd.grad(y, (x, *parameters), g, create_graph=True)
    for a, b in zip(kept, graphed, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)
