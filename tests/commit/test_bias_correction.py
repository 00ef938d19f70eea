"""The bias-corrected start: estimates are weighted averages of the windows alone, without the initial (0, 1)."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import micronorm as mn
from tests.networks import SmallResNet, assert_same_state, samples
from tests.tolerances import assert_close_to_max, tolerance


def layer(rate: float = 0.25, **options: Any) -> Any:
    return mn.nn.BatchChannelNorm(4, 2, rate=rate, bias_correction=True, **options).double()


def window(seed: int) -> Tensor:
    """Images whose mean is far from 0, and moves from step to step."""
    return torch.randn(6, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 10 + seed


def commit(norm: Any, x: Tensor) -> None:
    norm(x)
    torch.optim.SGD(norm.parameters(), lr=0.1).step()


def test_the_first_window_sets_the_estimates_at_any_rate():
    for rate in (1e-6, 0.25, 1.0):
        norm = layer(rate)
        x = window(0)
        commit(norm, x)
        tol = tolerance("output", torch.float64, condition=10**2)  # a variance of 1 beside a squared mean of 100
        assert_close_to_max(norm.running_mean, x.mean((0, 2, 3)), tol=tol)
        assert_close_to_max(norm.running_var, x.var((0, 2, 3), correction=0), tol=tol)


def test_the_estimates_are_the_mean_and_variance_of_all_windows_with_exponential_weights():
    norm, rate = layer(), 0.25
    windows = [window(seed) for seed in range(5)]
    for x in windows:
        commit(norm, x)
    weights = torch.tensor([rate * (1 - rate) ** (4 - k) for k in range(5)], dtype=torch.float64)
    assert_close_to_max(norm.estimates_weight, weights.sum(), tol=1e-14)
    weights = (weights / weights.sum())[:, None]
    means = torch.stack([x.mean((0, 2, 3)) for x in windows])
    mean = (weights * means).sum(0)
    spread = torch.stack([x.var((0, 2, 3), correction=0) for x in windows]) + (means - mean).square()
    tol = tolerance("output", torch.float64, condition=10**2)
    assert_close_to_max(norm.running_mean, mean, tol=tol)
    assert_close_to_max(norm.running_var, (weights * spread).sum(0), tol=tol)


def test_a_rate_of_zero_and_a_step_without_samples_change_nothing():
    for norm, x in ((layer(0.0), window(0)), (layer(), window(0)[:0])):
        commit(norm, x)
        assert norm.running_mean.eq(0).all()
        assert norm.running_var.eq(1).all()
        assert norm.estimates_weight == 0


def test_training_continues_from_a_state_dict_with_the_same_bits():
    model = SmallResNet(mn.BCN(groups=4, rate=0.25, bias_correction=True))

    def train(net: nn.Module, steps: range) -> nn.Module:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
        for k in steps:
            x, _ = samples(torch.float32, seed=k)
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        return net

    half = train(copy.deepcopy(model), range(2))
    resumed = SmallResNet(mn.BCN(groups=4, rate=0.25, bias_correction=True))
    resumed.load_state_dict(half.state_dict())
    whole = train(model, range(4))
    assert_same_state(train(resumed, range(2, 4)).state_dict(), whole.state_dict(), tol=0)


def test_estimates_from_elsewhere_count_as_an_average_of_windows_and_initial_ones_do_not():
    trained = nn.BatchNorm2d(4)
    trained(torch.randn(8, 4, 3, 3) + 3)
    plain = mn.nn.BatchChannelNorm(4, 2)
    assert "estimates_weight" not in plain.state_dict()
    for state, weight in ((trained.state_dict(), 1), (nn.BatchNorm2d(4).state_dict(), 0), (plain.state_dict(), 0)):
        norm = mn.nn.BatchChannelNorm(4, 2, bias_correction=True)
        norm.load_state_dict(state)
        assert norm.estimates_weight == weight
    spec = mn.BCN(groups=2, bias_correction=True)
    for source, weight in ((trained, 1), (nn.BatchNorm2d(4), 0)):
        assert mn.convert(nn.Sequential(nn.Conv2d(3, 4, 1), source), spec)[1].estimates_weight == weight
    norm = mn.nn.BatchChannelNorm(4, 2, bias_correction=True)
    mn.calibrate(norm, [torch.randn(8, 4, 3, 3) + 3])
    assert norm.estimates_weight == 1


def test_a_recorded_definition_without_the_correction_reads_as_before():
    assert "bias_correction" not in repr(mn.BCN())
    assert "bias_correction=True" in repr(mn.BCN(bias_correction=True))
    assert "bias_correction=True" in repr(layer())


def test_other_modes_keep_the_start_of_algorithm_1():
    for statistics in ("sequential", "batch"):
        with pytest.raises(ValueError, match='bias_correction=True is for statistics="step"'):
            mn.BCN(statistics=statistics, bias_correction=True)
    with pytest.raises(TypeError, match="bias_correction must be True or False"):
        mn.BCN(bias_correction=1)  # type: ignore[arg-type]
