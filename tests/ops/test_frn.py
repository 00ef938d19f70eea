import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from micronorm.ops.frn import filter_response_norm
from tests.tolerances import assert_close_to_max, tolerance

F64 = torch.float64


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 2, 5), (4, 3, 2, 2, 2)])
@pytest.mark.parametrize("thresholded", [True, False])
def test_each_channel_of_each_sample_is_divided_by_its_root_mean_square(shape, thresholded):
    x = torch.randn(shape, dtype=F64)
    weight, bias, tau = torch.randn(3, 3, dtype=F64)
    y = filter_response_norm(x, weight, bias, tau if thresholded else None, eps=1e-3)
    for n in range(4):
        for c in range(3):
            nu2 = sum(v * v for v in x[n, c].flatten()) / x[n, c].numel()
            expected = weight[c] * x[n, c] / (nu2 + 1e-3) ** 0.5 + bias[c]
            expected = torch.maximum(expected, tau[c]) if thresholded else expected
            assert_close_to_max(y[n, c], expected, tol=tolerance("output", F64), scale=y.abs().max().item())


def test_gradients_are_right_to_second_order():
    x = torch.randn(2, 3, 4, dtype=F64, requires_grad=True)
    weight, bias, tau = (torch.randn(3, dtype=F64, requires_grad=True) for _ in range(3))

    def output(x, weight, bias, tau):
        return filter_response_norm(x, weight, bias, tau, eps=0.1)

    assert gradcheck(output, (x, weight, bias, tau))
    assert gradgradcheck(output, (x, weight, bias, tau))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_inputs_are_computed_in_float32_and_rounded_once(dtype):
    x = (torch.randn(2, 3, 8, 8) * 1000).to(dtype)  # squares of these overflow float16
    weight, bias, tau = torch.randn(3, 3)
    y = filter_response_norm(x, weight, bias, tau)
    expected = filter_response_norm(x.double(), weight.double(), bias.double(), tau.double())
    assert y.dtype == dtype
    assert_close_to_max(y, expected, tol=tolerance("output", dtype))


def test_an_empty_batch_gives_zero_gradients():
    weight, bias, tau = (torch.randn(3, requires_grad=True) for _ in range(3))
    filter_response_norm(torch.empty(0, 3, 2, 2), weight, bias, tau).sum().backward()
    for tensor in (weight, bias, tau):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.zeros(3))


def test_a_map_of_zeros_gives_the_bias():
    bias = torch.randn(3)
    assert torch.equal(filter_response_norm(torch.zeros(1, 3, 1, 1), torch.ones(3), bias).flatten(), bias)
