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


@pytest.mark.parametrize("weight", [mn.WS(scale=False), lambda layer: layer], ids=["center only", "plain"])
def test_the_identities_hold_for_centering_alone_and_for_plain_layers(weight):
    model = network(weight, steps=3)
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


def test_a_plain_layer_s_centered_hessian_is_its_own():
    layer = nn.Linear(5, 3).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    found = exact_hessians(layer, smooth_loss(layer, x), "", 2)
    expected = torch.autograd.functional.hessian(
        lambda row: F.linear(x, torch.cat([layer.weight.detach()[:2], row[None]]), layer.bias).tanh().square().sum(),
        layer.weight.detach()[2],
    )
    assert_close_to_max(found.centered, expected, tol=IDENTITY)
    assert list(layer._parameters) == ["weight", "bias"]
    assert layer.weight is layer._parameters["weight"]


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


def test_a_loss_linear_in_the_weight_has_no_curvature():
    layer = nn.Linear(3, 1)
    found = exact_hessians(layer, lambda: layer(torch.ones(1, 3)).sum(), "", 0)
    assert found.centered.abs().max() == 0 == found.raw.abs().max()


def layer_of(weight=lambda layer: layer):
    return nn.Sequential(weight(nn.Linear(4, 2)))


@pytest.mark.parametrize(
    "model, layer, channel, message",
    [
        (layer_of(), "1", 0, "no convolution or linear layer '1'; it has '0'"),
        (layer_of(), "0", 2, "output channels 0 to 1, got 2"),
        (layer_of(mn.WS(center=False)), "0", 0, "a WSLinear that does not center"),
        (layer_of(mn.CWN()), "0", 0, "a CWNLinear that does not center its weight by eq:9"),
    ],
)
def test_what_has_no_such_hessian_is_refused(model, layer, channel, message):
    with pytest.raises(ValueError, match=message):
        exact_hessians(model, lambda: model(torch.ones(1, 4)).square().sum(), layer, channel)


def test_a_loss_that_does_not_run_the_layer_is_refused():
    model = layer_of()
    other = nn.Linear(4, 2)
    with pytest.raises(ValueError, match="does not depend on the layer's weight"):
        exact_hessians(model, lambda: other(torch.ones(1, 4)).sum(), "0", 0)
