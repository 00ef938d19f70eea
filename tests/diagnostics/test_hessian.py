"""Centering a weight projects its Hessian: H = PḢP, ΣH = 0, and the bound of label eq:27 for squared norms."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import micronorm as mn
from micronorm.diagnostics.curvature import Hessians, exact_hessians, project
from tests.commit.test_snapshot import assert_untouched, everything
from tests.diagnostics.trained import EPS, LAYERS, loss_of, network
from tests.tolerances import assert_close_to_max

IDENTITY = 1e-10  # what the project asks of its identities in float64


def assert_identities(found: Hessians) -> None:
    assert found.centered.abs().max() > 0
    assert found.projection_error() < IDENTITY
    assert found.row_sum() < IDENTITY
    bound = found.bound()
    assert abs(bound.centered - bound.removed - bound.raw) < IDENTITY * bound.centered
    assert bound.slack > -IDENTITY * bound.centered
    assert bound.removed >= bound.least - IDENTITY * bound.centered


@pytest.mark.parametrize("steps", [0, 20], ids=["random", "trained"])
@pytest.mark.parametrize("eps", EPS)
def test_the_identities_hold_in_every_kind_of_layer(eps, steps):
    model = network(mn.WS(eps=eps), steps=steps)
    for name, channel in zip(LAYERS[:3], (0, 5, 3), strict=True):
        assert_identities(exact_hessians(model, loss_of(model, samples=4), name, channel))


def test_the_identities_hold_for_centering_alone():
    model = network(mn.WS(scale=False), steps=3)
    assert_identities(exact_hessians(model, loss_of(model, samples=4), "up", 1))


def test_the_identities_hold_with_an_absorbed_mean_and_scale():
    model = network(mn.WS(), steps=3)
    model.up.absorb()
    assert_identities(exact_hessians(model, loss_of(model, samples=4), "up", 0))


def test_both_hessians_are_of_the_same_function_where_forwards_draw_or_remember():
    model = network(mn.WS(), steps=1)
    norm = mn.nn.BatchChannelNorm(6, 2, statistics="sequential", rate=0.5).double()
    model.norm2 = nn.Sequential(norm, nn.Dropout(0.5))
    assert_identities(exact_hessians(model, loss_of(model, samples=4), "up", 1))


def smooth_loss(layer, x):
    return lambda: layer(x).tanh().square().sum()


@pytest.mark.parametrize("eps", EPS)
def test_the_hessians_are_those_of_the_written_out_function(eps):
    layer = mn.nn.WSLinear(5, 3, eps=eps, bias=False).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    found = exact_hessians(layer, smooth_loss(layer, x), "", 1)

    def loss(row, center):
        dot = row - row.mean() if center else row
        what = layer.effective_weight().detach().clone()
        what[1] = dot / (dot.square().mean() + eps).sqrt()
        return F.linear(x, what).tanh().square().sum()

    row = layer.weight.detach()[1]
    hessian = torch.autograd.functional.hessian
    assert_close_to_max(found.raw, hessian(lambda w: loss(w, True), row), tol=IDENTITY)
    assert_close_to_max(found.centered, hessian(lambda w: loss(w, False), row - row.mean()), tol=IDENTITY)


def test_the_bound_as_printed_fails_for_norms_that_are_not_squared():
    # Ḣ = 11ᵀ/I has one eigenvalue, of the constant vector: all of it is removed, and Σ Ḣ = I
    fan_in = 9
    large = torch.full((fan_in, fan_in), 4.0 / fan_in, dtype=torch.float64)
    found = Hessians(project(large), large)
    bound = found.bound()
    assert bound.slack == pytest.approx(0, abs=1e-12)
    assert bound.raw**0.5 > bound.centered**0.5 - bound.least + 1


def test_computing_the_hessian_leaves_no_trace():
    model = network(mn.WS(), steps=1)
    loss_of(model)().backward()
    grad = model.up.weight.grad.clone()
    before = everything(model)
    exact_hessians(model, loss_of(model), "up", 0)
    assert_untouched(before, everything(model))
    assert torch.equal(model.up.weight.grad, grad)
    assert model.up.shared_weight is None


def test_a_backward_that_is_still_to_come_is_the_one_it_would_have_been():
    model = network(mn.WS(), steps=2)
    loss = loss_of(model)
    loss().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    pending = loss()
    exact_hessians(model, loss, "up", 1)
    pending.backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, grad)


def test_the_hessian_of_a_quadratic_loss_in_the_centred_weight_is_constant():
    layer = mn.nn.WSLinear(3, 1, scale=False, bias=False).double()
    x = torch.eye(3, dtype=torch.float64)
    found = exact_hessians(layer, lambda: layer(x).square().sum(), "", 0)
    assert_close_to_max(found.centered, 2 * x, tol=IDENTITY)


def layer_of(weight):
    return nn.Sequential(weight(nn.Linear(4, 2)))


@pytest.mark.parametrize(
    "model, layer, channel, message",
    [
        (layer_of(mn.WS()), "1", 0, "'1' is not a WS layer with center=True .*; the model has '0'"),
        (layer_of(mn.WS()), "0", 2, "output channels 0 to 1, got 2"),
        (layer_of(mn.WS(center=False)), "0", 0, "'0' is not a WS layer .*; the model has none"),
        (layer_of(mn.CWN()), "0", 0, "not a WS layer with center=True"),
        (layer_of(lambda layer: layer), "0", 0, "not a WS layer with center=True"),
    ],
)
def test_what_has_no_such_hessian_is_refused(model, layer, channel, message):
    with pytest.raises(ValueError, match=message):
        exact_hessians(model, lambda: model(torch.ones(1, 4)).square().sum(), layer, channel)


@pytest.mark.parametrize(
    "loss, error, message",
    [
        (lambda y: 1.0, TypeError, "must return a tensor, got float"),
        (lambda y: y, ValueError, "must return one number"),
        (lambda y: y.sum().detach(), ValueError, "does not depend on any parameter"),
        (lambda y: nn.Linear(4, 2)(torch.ones(1, 4)).sum(), ValueError, "does not depend on the layer's weight"),
    ],
)
def test_a_loss_that_makes_no_sense_is_refused(loss, error, message):
    model = layer_of(mn.WS())
    with pytest.raises(error, match=message):
        exact_hessians(model, lambda: loss(model(torch.ones(1, 4))), "0", 0)
