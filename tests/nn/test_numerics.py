"""Inputs that broke others: a mean far above the spread, and values near the end of the range."""

import copy

import pytest
import torch
from torch import nn

import micronorm as mn

INPUTS = {
    "mean 100, std 0.01": lambda g: 100 + 0.01 * g,
    "40000 … 40003": lambda g: 40000 + (g.abs() * 2).clamp(max=3).round(),
    "mean 10000, std 1": lambda g: 10000 + g,
}


def stacks(mode, x, channels=8, groups=2):
    """BCN, torch's BatchNorm then GroupNorm, and the same in float64, all with one set of statistics."""
    ours = mn.nn.BatchChannelNorm(channels, groups, statistics=mode, rate=0.1)
    bn = nn.BatchNorm2d(channels)
    gn = nn.GroupNorm(groups, channels)
    with torch.no_grad():
        for a, b in ((ours.weight, bn.weight), (ours.bias, bn.bias)):
            a.normal_()
            b.copy_(a)
        if mode == "step":  # statistics learned from the data, as after training
            for norm in (ours, bn):
                norm.running_mean.copy_(x.double().mean((0, 2, 3)))
                norm.running_var.copy_(x.double().var((0, 2, 3), correction=0))
            bn.eval()
    return ours, nn.Sequential(bn, gn)


def errors(model, exact, x, g):
    """Largest error of output and input gradient, relative to the largest exact value."""
    exact = copy.deepcopy(exact).double()
    results = []
    for net, dtype in ((model, x.dtype), (exact, torch.float64)):
        x_in = x.detach().to(dtype, copy=True).requires_grad_()
        y = net(x_in)
        y.backward(g.to(y.dtype))
        assert x_in.grad is not None
        results.append((y.detach().double(), x_in.grad.double()))
    return [((a - e).abs().max() / e.abs().max()).item() for a, e in zip(*results, strict=True)]


@pytest.mark.parametrize("mode", ["step", "batch"])
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_mean_far_above_the_spread_costs_no_more_than_in_torch(mode, name, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = INPUTS[name](torch.randn(4, 8, 9, 7, generator=generator, dtype=torch.float64)).to(dtype)
    g = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype)
    ours, torchs = stacks(mode, x)
    half = dtype == torch.bfloat16
    (y_error, dx_error), (y_theirs, dx_theirs) = (
        errors(net.to(dtype) if half and net is torchs else net, exact, x, g)
        for net, exact in ((ours, torchs), (torchs, torchs))
    )
    # Half an ulp of the result's dtype is what the last rounding costs anyone.
    floor = torch.finfo(dtype).eps
    assert y_error <= max(y_theirs, floor)
    assert dx_error <= max(dx_theirs, floor)


@pytest.mark.parametrize("mode", ["step", "sequential", "batch"])
def test_values_near_1e30_give_finite_outputs_and_leave_the_estimates(mode):
    norm = mn.nn.BatchChannelNorm(8, 2, statistics=mode, rate=0.5)
    handle = mn.attach(norm)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    y = norm(torch.randn(4, 8, 5, 5) * 1e30)
    assert torch.isfinite(y).all()
    optimizer.step()
    assert torch.equal(norm.running_mean, torch.zeros(8))
    assert torch.equal(norm.running_var, torch.ones(8))
    with pytest.warns(RuntimeWarning, match="not finite"):
        assert handle.report()[0].lost_samples == 4


def test_fewer_than_four_elements_per_group_warn_once():
    norm = mn.nn.BatchChannelNorm(6, 3)
    with pytest.warns(UserWarning, match="groups of 2 elements"):
        norm(torch.randn(2, 6))
    norm(torch.randn(2, 6))  # a second warning would be an error
    mn.nn.BatchChannelNorm(6, 3)(torch.randn(2, 6, 1, 2))
    mn.nn.BatchChannelNorm(6, 3).eval()(torch.randn(2, 6))
