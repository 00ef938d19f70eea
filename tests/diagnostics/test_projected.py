"""Projected gradient descent keeps its constraint, and moves as WS does to first order."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import micronorm as mn
from micronorm.diagnostics.lipschitz import effective_gradients
from micronorm.diagnostics.projected import ProjectedWeights, compare_updates
from micronorm.diagnostics.weights import rows_of
from tests.diagnostics.trained import LAYERS, images, loss_of, network
from tests.tolerances import assert_close_to_max

CONVOLUTIONS = LAYERS[:3]
EXACT = mn.WS(eps=0.0)


def assert_on_the_constraint(model, names, *, tol=1e-12):
    for name in names:
        layer = model.get_submodule(name)
        rows = rows_of(layer, layer.weight.detach()).flatten(1)
        assert rows.mean(1).abs().max() < tol, name
        assert (rows.square().mean(1) - 1).abs().max() < tol, name


def test_projection_standardizes_the_plain_convolutions_and_nothing_else():
    model = network()
    others = {name: p.clone() for name, p in model.named_parameters() if name.split(".")[0] not in CONVOLUTIONS}
    kept = model.up.weight
    ProjectedWeights(model, weight=EXACT).project()
    assert_on_the_constraint(model, CONVOLUTIONS)
    assert model.up.weight is kept
    assert all(torch.equal(model.get_parameter(name), p) for name, p in others.items())
    ProjectedWeights(model, weight=EXACT, filter=lambda layer, name: name == "narrow").project()
    assert_on_the_constraint(model, LAYERS)


def test_with_eps_repeated_projection_settles_at_variance_one_minus_eps():
    layer = nn.Conv1d(60, 4, 1).double()
    projected = ProjectedWeights(layer, weight=mn.WS(eps=0.1))
    for _ in range(20):
        projected.project()
    variance = layer.weight.detach().flatten(1).var(1, correction=0)
    assert_close_to_max(variance, torch.full((4,), 0.9, dtype=torch.float64), tol=1e-12)


def test_every_step_of_the_optimizer_ends_on_the_constraint_and_learns():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    projected = ProjectedWeights(model, weight=EXACT).attach(optimizer)
    assert_on_the_constraint(model, CONVOLUTIONS)
    x, labels = images()
    losses = []
    for step in range(30):
        part = slice(32 * step, 32 * step + 32)
        loss = F.cross_entropy(model(x[part]), labels[part])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert_on_the_constraint(model, CONVOLUTIONS)
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    projected.detach()
    loss_of(model)().backward()
    optimizer.step()
    with pytest.raises(AssertionError):
        assert_on_the_constraint(model, CONVOLUTIONS)


def test_what_would_never_be_projected_is_an_error():
    with pytest.raises(ValueError, match="no plain convolution to project among 5"):
        ProjectedWeights(network(mn.WS()))
    model = network()
    with pytest.raises(ValueError, match="does not hold the weights of 3 of the 3 layers"):
        ProjectedWeights(model).attach(torch.optim.SGD(model.head.parameters(), lr=0.1))


# --- the first-order relation ----------------------------------------------------------------------------------------


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


def slopes(w, g, name):
    """The exponent of the rate in an error, measured between rates a hundred times apart."""
    reach = float((g.flatten(1).norm(dim=1) / w.flatten(1).var(1, correction=0)).max())
    near, far = (getattr(compare_updates(w, g, lr=lr / reach), name) for lr in (1e-4, 1e-2))
    return math.log10(far / near) / 2


@pytest.mark.parametrize("key", [*LAYERS, "random"])
def test_projected_descent_moves_as_ws_up_to_the_square_of_the_rate(key):
    w, g = trained_pairs()[key]
    assert slopes(w, g, "lagrangian_error") == pytest.approx(2, abs=0.05)
    if key == "up":
        # Before BatchNorm the loss ignores the size of the weight: ⟨Ŵ, g⟩, and the term in η² with it, is next to zero.
        assert compare_updates(w, g, lr=1e-2).distance < 1e-8
    else:
        assert slopes(w, g, "distance") == pytest.approx(2, abs=0.05)


def test_the_lagrangian_update_as_printed_is_wrong_to_first_order():
    w, g = trained_pairs()["random"]
    assert slopes(w, g, "literal_error") == pytest.approx(1, abs=0.05)


def test_the_updates_are_those_of_optimizers():
    w, g = trained_pairs()["random"]
    found = compare_updates(w, g, lr=0.3)
    raw = w.clone().requires_grad_()
    optimizer = torch.optim.SGD([raw], lr=0.3)
    mn.functional.weight_standardize(raw, eps=0.0).backward(g)
    optimizer.step()
    assert_close_to_max(found.standardized, mn.functional.weight_standardize(raw.detach(), eps=0.0), tol=1e-12)
    one = mn.functional.weight_standardize(w, eps=0.0)  # deviation 1: the rates are equal
    direct = compare_updates(one, g, lr=0.3).projected
    moved = mn.functional.weight_standardize(one - 0.3 * g, eps=0.0)
    assert_close_to_max(direct, moved, tol=1e-12)


def test_projected_descent_is_ws_at_another_rate_exactly():
    w = mn.functional.weight_standardize(torch.randn(1, 27, dtype=torch.float64), eps=0.0)
    g = torch.randn(1, 27, dtype=torch.float64)
    along = float((w * g).mean())
    projected = compare_updates(w, g, lr=0.2).projected
    assert_close_to_max(compare_updates(w, g, lr=0.2 / (1 - 0.2 * along)).standardized, projected, tol=1e-12)


def test_a_rate_of_zero_moves_nothing():
    w, g = trained_pairs()["random"]
    found = compare_updates(w, g, lr=0.0)
    assert found.distance == pytest.approx(0, abs=1e-12)
    assert found.literal_error == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    "weight, grad, lr, message",
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), 0.1, "grad_effective must have the weight's shape"),
        (torch.zeros(2, 3), torch.zeros(2, 3), -0.1, "lr must be finite and at least 0"),
        (nn.Parameter(torch.zeros(2, 1)), torch.zeros(2, 1), 0.1, "fan-in"),
    ],
)
def test_updates_of_what_is_no_weight_are_refused(weight, grad, lr, message):
    with pytest.raises(ValueError, match=message):
        compare_updates(weight, grad, lr=lr)
