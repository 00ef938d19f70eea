"""StatDiff (label `eq:sd`): its value by the equation, and what it is where the equation says nothing."""

import math

import pytest
import torch

from micronorm.diagnostics.norms import stat_diff
from tests.tolerances import assert_close_to_max, tolerance


def test_it_is_the_equation_group_by_group():
    mean, var = torch.randn(24, dtype=torch.float64) * 3, torch.rand(24, dtype=torch.float64)
    expected = []
    for g in range(4):
        m, s = mean[6 * g : 6 * g + 6].tolist(), var[6 * g : 6 * g + 6].sqrt().tolist()
        between = sum(v * v for v in m) / 6 - (sum(m) / 6) ** 2
        expected.append(math.sqrt(between) / (sum(s) / 6))
    # the equation as it is written cancels digits of the mean's square
    tol = tolerance("output", torch.float64, condition=10)
    assert_close_to_max(stat_diff(mean, var, 4), torch.tensor(expected, dtype=torch.float64), tol=tol)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_channels_that_batch_normalization_has_normalized_have_exactly_0(groups):
    x = torch.randn(16, 8, dtype=torch.float64) * 5 + 7
    normalized = torch.nn.functional.batch_norm(x, None, None, training=True, eps=1e-12)
    assert stat_diff(normalized.mean(0), normalized.var(0, correction=0), groups).abs().max() < 1e-15
    assert stat_diff(torch.zeros(8), torch.ones(8), groups).tolist() == [0.0] * groups


def test_it_does_not_change_with_the_common_scale_and_shift_of_a_group():
    mean, var = torch.randn(8, dtype=torch.float64), torch.rand(8, dtype=torch.float64) + 0.1
    moved = stat_diff(100 * mean + 5, 100**2 * var, 2)
    assert_close_to_max(moved, stat_diff(mean, var, 2), tol=tolerance("output", torch.float64, condition=10))


def test_a_group_of_one_channel_has_0_even_without_variance():
    assert stat_diff(torch.tensor([1.0, -3.0]), torch.tensor([0.0, 2.0]), 2).tolist() == [0.0, 0.0]


def test_constant_channels_have_0_where_they_are_equal_and_infinity_where_they_are_not():
    mean = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.2, 0.1])
    assert stat_diff(mean, torch.zeros(6), 2).tolist() == [0.0, math.inf]


def test_a_large_common_mean_does_not_drown_the_differences():
    mean = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    one = torch.ones(4, dtype=torch.float64)
    assert_close_to_max(stat_diff(mean + 1e8, one, 1), stat_diff(mean, one, 1), tol=1e-7)
