"""Channels: merged moments, activity, the distance to BN, and normalization told from moments alone."""

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from micronorm.diagnostics.norms import (
    NormMoments,
    as_norm_layer,
    channel_normalized,
    count_positive,
    distance_to_bn,
    group_normalized,
    rare_channels,
)
from micronorm.ops.moments import Moments, moments
from tests.tolerances import assert_close_to_max, tolerance

WIDE = torch.float64
EXACT = tolerance("output", WIDE) * 10


def input_moments(parts: Sequence[torch.Tensor]) -> NormMoments:
    """Return the moments of these inputs of a norm; the values that it normalizes together are its input."""
    norm = as_norm_layer(torch.nn.GroupNorm(1, parts[0].shape[1]))
    assert norm is not None
    sums = NormMoments(norm)
    for part in parts:
        sums.add_input(part, moments(part))
    return sums


@pytest.mark.parametrize("cut", [(10,), (1,) * 10, (3, 7), (9, 1)])
def test_merged_moments_are_those_of_all_elements_however_they_were_cut(cut):
    x = torch.randn(10, 4, 5, 3, dtype=WIDE) * torch.tensor([1.0, 2, 3, 4]).view(4, 1, 1) + 100
    sums = input_moments(x.split(cut))
    assert sums.count == 150
    grouped, _ = sums.halves(sums.moments)
    assert_close_to_max(grouped.mean, x.mean((0, 2, 3)), tol=EXACT)
    condition = 100.0
    assert_close_to_max(grouped.var, x.var((0, 2, 3), correction=0), tol=EXACT * condition)


def test_a_mean_far_from_zero_costs_no_digits_of_the_variance():
    x = torch.randn(40, 2, 6, dtype=WIDE) * 1e-3 + 1e4
    sums = input_moments(x.split(8))
    grouped, _ = sums.halves(sums.moments)
    assert_close_to_max(grouped.var, (x - 1e4).var((0, 2), correction=0), tol=1e-6)


@pytest.mark.parametrize("axis", [1, -1, 2])
def test_positives_are_counted_along_any_axis_and_zero_is_none(axis):
    y = torch.randn(3, 4, 5)
    y[0] = 0
    expected = [int((part > 0).sum()) for part in y.unbind(axis)]
    assert count_positive(y, axis=axis).tolist() == expected


def test_a_channel_is_rare_if_it_is_active_in_less_than_one_position_of_a_hundred():
    rate = torch.tensor([0.0, 1e-6, 0.0099, 0.01, 0.5])
    assert rare_channels(rate).tolist() == [False, True, True, False, False]


def test_the_distance_to_bn_recovers_the_deviations_that_the_paper_draws_from():
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2, 200_000, generator=generator, dtype=WIDE)
    mean, log_std = 0.7 * draws[0], 1.3 * draws[1]
    sigma_mean, sigma_std = distance_to_bn(mean, (2 * log_std).exp(), eps=0.0)
    assert abs(sigma_mean - 0.7) < 0.01  # a standard error is σ/sqrt(2n), 0.001 and 0.002
    assert abs(sigma_std - 1.3) < 0.015


def test_a_constant_channel_counts_as_one_of_deviation_root_eps():
    sigma_mean, sigma_std = distance_to_bn(torch.zeros(2), torch.tensor([1.0, 0.0]), eps=1e-4)
    assert sigma_mean == 0
    assert math.isclose(sigma_std, math.log(100) / 2)
    assert math.isfinite(distance_to_bn(torch.zeros(2), torch.tensor([1.0, 0.0]), eps=0.0)[1])


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_group_normalization_of_moments_is_that_of_the_data(groups):
    x = torch.randn(5, 8, 6, dtype=WIDE) * 3 + torch.arange(8.0).view(8, 1)
    found = group_normalized(moments(x), groups=groups, eps=1e-3)
    y = F.group_norm(x, groups, eps=1e-3)
    assert_close_to_max(found.mean, y.mean(-1), tol=EXACT, scale=1.0)
    assert_close_to_max(found.var, y.var(-1, correction=0), tol=EXACT)


def test_a_blend_of_0_is_the_identity():
    data = moments(torch.randn(5, 8, 6, dtype=WIDE))
    found = group_normalized(data, groups=2, eps=1e-3, blend=0.0)
    assert torch.equal(found.mean, data.mean)
    assert torch.equal(found.var, data.var)


def test_channel_normalization_of_moments_is_that_of_the_data():
    x = torch.randn(5, 3, 6, dtype=WIDE) + 2
    statistics = Moments(torch.randn(3, dtype=WIDE), torch.rand(3, dtype=WIDE))
    found = channel_normalized(moments(x), statistics, eps=1e-3)
    y = F.batch_norm(x, *statistics, eps=1e-3)
    assert_close_to_max(found.mean, y.mean(-1), tol=EXACT, scale=1.0)
    assert_close_to_max(found.var, y.var(-1, correction=0), tol=EXACT)
