"""The loss and its gradient along the step, and the model left where it was."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import micronorm as mn
from micronorm.diagnostics.curvature import Smoothness, exact_hessians, smoothness
from tests.commit.test_snapshot import assert_untouched, everything
from tests.diagnostics.trained import images, loss_of, network


def test_a_quadratic_loss_has_the_known_curvature_along_its_gradient():
    weight = torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.float64)
    diagonal = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(weight)
    found = smoothness(model, lambda: (diagonal * model.weight[0].square()).sum() / 2, [0.01, 0.1, 0.2])
    g = diagonal * weight[0]
    for eta, loss, distance in zip(found.steps, found.losses, found.distances, strict=True):
        there = weight[0] - eta * g
        assert loss == pytest.approx(float((diagonal * there.square()).sum() / 2), rel=1e-12)
        assert distance == pytest.approx(eta * float((diagonal * g).norm()), rel=1e-12)
    assert found.beta == pytest.approx(float((diagonal * g).norm() / g.norm()), rel=1e-12)
    assert found.gradient == pytest.approx(float(g.norm()), rel=1e-12)
    assert found.loss_range == (min(found.losses), max(found.losses))
    assert found.distance_range[1] == found.distances[2]


@pytest.mark.parametrize("statistics", ["step", "batch", "sequential"])
def test_the_measurement_repeats_itself_and_leaves_no_trace(statistics):
    model = network(mn.WS(), steps=2)
    model.norm2 = nn.Sequential(mn.nn.BatchChannelNorm(6, 2, statistics=statistics, rate=0.1).double(), nn.Dropout(0.5))
    loss = loss_of(model)
    loss().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    before = everything(model)
    first, second = (smoothness(model, loss, [1e-3, 1e-1]) for _ in range(2))
    assert_untouched(before, everything(model))
    assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters())
    assert first == second
    assert first.distances[1] > first.distances[0] > 0


def test_the_evaluations_are_those_of_a_model_that_took_the_step():
    model = network(mn.WS(), steps=2)
    x, labels = images()
    found = smoothness(model, loss_of(model), [0.3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    loss = F.cross_entropy(model(x[-16:]), labels[-16:])
    loss.backward()
    start = [p.grad.clone() for p in model.parameters()]
    assert found.loss == loss.item()
    with mn.attach(model).paused():  # the commit would move the estimates, which the measurement restores
        running = [b.clone() for b in model.buffers()]
        optimizer.step()
        for b, old in zip(model.buffers(), running, strict=True):
            b.copy_(old)
        optimizer.zero_grad()
        moved = F.cross_entropy(model(x[-16:]), labels[-16:])
        moved.backward()
    distance = math.sqrt(
        sum(float((p.grad - g).square().sum()) for p, g in zip(model.parameters(), start, strict=True))
    )
    assert found.losses[0] == pytest.approx(moved.item(), rel=1e-12)
    assert found.distances[0] == pytest.approx(distance, rel=1e-10)


def test_a_loss_that_is_not_a_number_shows_in_every_range():
    found = Smoothness((0.1, 0.2), 1.0, 2.0, (1.0, math.nan), (0.5, math.nan))
    assert all(math.isnan(v) for v in (*found.loss_range, *found.distance_range, found.beta))


def test_at_a_stationary_point_there_is_no_line_to_measure_along():
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    assert math.isnan(smoothness(model, lambda: model.weight.square().sum(), [0.1]).beta)


@pytest.mark.parametrize(
    "loss, steps, error, message",
    [
        (lambda model: model.weight.sum(), [], ValueError, "one or more finite numbers above 0"),
        (lambda model: model.weight.sum(), [0.1, -1], ValueError, "one or more finite numbers above 0"),
        (lambda model: 1.0, [0.1], TypeError, "must return a tensor, got float"),
        (lambda model: model.weight, [0.1], ValueError, "must return one number"),
        (lambda model: model.weight.sum().detach(), [0.1], ValueError, "does not depend on any parameter"),
    ],
)
def test_a_step_or_loss_that_makes_no_sense_is_refused(loss, steps, error, message):
    model = nn.Linear(2, 1)
    with pytest.raises(error, match=message):
        smoothness(model, lambda: loss(model), steps)


def test_a_frozen_model_has_no_step():
    model = nn.Linear(2, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        smoothness(model, lambda: model.weight.sum(), [0.1])


@pytest.mark.parametrize("measurement", ["smoothness", "hessians"])
def test_a_backward_that_is_still_to_come_is_the_one_it_would_have_been(measurement):
    model = network(mn.WS(), steps=2)
    loss = loss_of(model)
    loss().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    pending = loss()
    if measurement == "smoothness":
        smoothness(model, loss, [0.1, 1.0])
    else:
        exact_hessians(model, loss, "up", 1)
    pending.backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, grad)


def test_a_write_that_stays_is_still_noticed_by_a_backward_after_a_measurement():
    model = network(mn.WS())
    pending = loss_of(model)()
    smoothness(model, loss_of(model), [0.1])
    with torch.no_grad():
        model.head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pending.backward()
