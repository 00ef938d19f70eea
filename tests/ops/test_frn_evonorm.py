from functools import partial

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from micronorm.ops.frn_evonorm import evonorm_s0, filter_response_norm
from tests.tolerances import assert_close_to_max, tolerance

F64 = torch.float64
NORMS = pytest.mark.parametrize(
    "norm",
    [filter_response_norm, *(partial(evonorm_s0, groups=groups) for groups in (1, 2, 4))],
    ids=["FRN", "EvoNorm-1", "EvoNorm-2", "EvoNorm-4"],
)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 2, 5), (4, 3, 2, 2, 2)])
@pytest.mark.parametrize("thresholded", [True, False])
def test_frn_divides_each_channel_of_each_sample_by_its_root_mean_square(shape, thresholded):
    x = torch.randn(shape, dtype=F64)
    weight, bias, tau = torch.randn(3, 3, dtype=F64)
    y = filter_response_norm(x, weight, bias, tau if thresholded else None, eps=1e-3)
    for n in range(4):
        for c in range(3):
            nu2 = sum(v * v for v in x[n, c].flatten()) / x[n, c].numel()
            expected = weight[c] * x[n, c] / (nu2 + 1e-3) ** 0.5 + bias[c]
            expected = torch.maximum(expected, tau[c]) if thresholded else expected
            assert_close_to_max(y[n, c], expected, tol=tolerance("output", F64), scale=y.abs().max().item())


@pytest.mark.parametrize("shape", [(3, 6), (3, 6, 5), (3, 6, 2, 5), (3, 6, 2, 2, 2)])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_evonorm_divides_each_group_of_each_sample_by_its_own_deviation(shape, groups):
    x = torch.randn(shape, dtype=F64)
    weight, bias, v = torch.randn(3, 6, dtype=F64)
    y = evonorm_s0(x, weight, bias, v, groups=groups, eps=1e-2)
    k = 6 // groups
    for n in range(3):
        for c in range(6):
            group = x[n, c // k * k : (c // k + 1) * k]
            deviation = torch.sqrt((group - group.mean()).square().mean() + 1e-2)
            expected = x[n, c] * torch.sigmoid(v[c] * x[n, c]) / deviation * weight[c] + bias[c]
            assert_close_to_max(y[n, c], expected, tol=tolerance("output", F64), scale=y.abs().max().item())


@NORMS
def test_gradients_are_right_to_second_order(norm):
    x = torch.randn(2, 4, 2, dtype=F64, requires_grad=True)
    parameters = (torch.randn(4, dtype=F64, requires_grad=True) for _ in range(3))
    inputs = (x, *parameters)
    assert gradcheck(partial(norm, eps=0.1), inputs)
    assert gradgradcheck(partial(norm, eps=0.1), inputs)


@NORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_inputs_are_computed_in_float32_and_rounded_once(norm, dtype):
    # Squares of FRN's inputs overflow float16.
    x = (torch.randn(2, 4, 8, 8) * (1000 if norm is filter_response_norm else 1)).to(dtype)
    parameters = torch.randn(3, 4)
    y = norm(x, *parameters)
    assert y.dtype == dtype
    assert_close_to_max(y, norm(x.double(), *parameters.double()), tol=tolerance("output", dtype))


@NORMS
def test_an_empty_batch_gives_zero_gradients(norm):
    parameters = [torch.randn(4, requires_grad=True) for _ in range(3)]
    norm(torch.empty(0, 4, 2, 2), *parameters).sum().backward()
    for tensor in parameters:
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.zeros(4))


def test_frn_of_a_map_of_zeros_is_the_bias():
    bias = torch.randn(3)
    assert torch.equal(filter_response_norm(torch.zeros(1, 3, 1, 1), torch.ones(3), bias).flatten(), bias)


def test_evonorm_divides_one_element_per_group_by_the_root_of_eps():
    x = torch.randn(1, 4, 1, 1, dtype=F64)
    ones = torch.ones(4, dtype=F64)
    y = evonorm_s0(x, ones, 0 * ones, ones, groups=4, eps=0.25)
    assert_close_to_max(y, x * torch.sigmoid(x) / 0.5, tol=tolerance("output", F64))
