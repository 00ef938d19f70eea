"""Moments around a pivot, their pooling, and micro-batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from micronorm.functional import Moments, moments
from micronorm.ops.moments import bounded, merge, pool, pool_micro_batches, spread_to_samples, wide_dtype
from tests.tolerances import assert_close_to_max


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5), (3, 4, 5, 2), (2, 3, 2, 3, 2)])
def test_moments_are_the_mean_and_biased_variance_over_space(shape):
    x = torch.randn(shape, dtype=torch.float64)
    mean, var = moments(x)
    flat = x.reshape(*shape[:2], -1)
    assert_close_to_max(mean, flat.mean(2), tol=1e-15)
    assert_close_to_max(var, flat.var(2, correction=0), tol=1e-14, scale=1.0)


@pytest.mark.parametrize("mean, std", [(100, 0.01), (1e4, 1.0), (1e6, 1.0)])
def test_float32_moments_keep_the_digits_the_input_has(mean, std):
    x = (torch.randn(2, 3, 1000, dtype=torch.float64) * std + mean).float()
    exact = moments(x.double())
    got = moments(x)
    # relative to the spread, not to the mean: the pivot's rounding is given back in float64
    assert_close_to_max(got.mean - mean, exact.mean - mean, tol=1e-5, scale=std)
    assert_close_to_max(got.var, exact.var, tol=16 * torch.finfo(torch.float32).eps)


@given(samples=st.integers(1, 9), micro_batch=st.integers(1, 10))
def test_pooled_micro_batches_are_the_moments_of_their_samples(samples, micro_batch):
    x = torch.randn(samples, 2, 3, dtype=torch.float64)
    pooled = pool_micro_batches(moments(x), micro_batch=micro_batch)
    parts = x.split(micro_batch)
    assert pooled.mean.shape == (len(parts), 2)
    for row, part in enumerate(parts):
        assert_close_to_max(pooled.mean[row], part.mean((0, 2)), tol=1e-14, scale=1.0)
        assert_close_to_max(pooled.var[row], part.var((0, 2), correction=0), tol=1e-14, scale=1.0)
    rows = spread_to_samples(pooled.mean, micro_batch=micro_batch, samples=samples)
    assert rows.shape == (samples, 2)
    assert torch.equal(rows[-1], pooled.mean[-1])


@given(first=st.integers(1, 9), second=st.integers(1, 9))
def test_merged_moments_are_those_of_all_the_elements(first, second):
    x = torch.randn(2, first + second, dtype=torch.float64) + 100
    parts = (Moments(part.mean(1), part.var(1, correction=0)) for part in x.split([first, second], dim=1))
    mean, var = merge(*parts, share=second / (first + second))
    assert_close_to_max(mean, x.mean(1), tol=1e-14)
    assert_close_to_max(var, x.var(1, correction=0), tol=1e-12, scale=1.0)


def test_pooling_carries_the_gradient():
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: tuple(pool(moments(x), dim=0)), (x,))


def test_overflowed_variances_are_bounded_by_the_dtype():
    data = moments(torch.tensor([[[1e30, -1e30]]]))
    assert data.var.isinf().all()
    assert bounded(data, torch.float32).var.item() == torch.finfo(torch.float32).max
    fine = Moments(torch.zeros(1), torch.full((1,), 1e40, dtype=torch.float64))
    assert torch.equal(bounded(fine, torch.float64).var, fine.var)


def test_statistics_are_float64_where_the_device_has_it():
    assert wide_dtype(torch.device("cpu")) == torch.float64
    assert wide_dtype(torch.device("mps")) == torch.float32
