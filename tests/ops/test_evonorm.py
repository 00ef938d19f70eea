import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from micronorm.ops.evonorm import evonorm_s0
from tests.tolerances import assert_close_to_max, tolerance

F64 = torch.float64


@pytest.mark.parametrize("shape", [(3, 6), (3, 6, 5), (3, 6, 2, 5), (3, 6, 2, 2, 2)])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_each_group_of_each_sample_is_divided_by_its_own_deviation(shape, groups):
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


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gradients_are_right_to_second_order(groups):
    x = torch.randn(2, 4, 2, dtype=F64, requires_grad=True)
    weight, bias, v = (torch.randn(4, dtype=F64, requires_grad=True) for _ in range(3))

    def output(x, weight, bias, v):
        return evonorm_s0(x, weight, bias, v, groups=groups, eps=0.1)

    assert gradcheck(output, (x, weight, bias, v))
    assert gradgradcheck(output, (x, weight, bias, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_inputs_are_computed_in_float32_and_rounded_once(dtype):
    x = torch.randn(2, 4, 8, 8).to(dtype)
    weight, bias, v = torch.randn(3, 4)
    y = evonorm_s0(x, weight, bias, v, groups=2)
    assert y.dtype == dtype
    expected = evonorm_s0(x.double(), weight.double(), bias.double(), v.double(), groups=2)
    assert_close_to_max(y, expected, tol=tolerance("output", dtype))


def test_one_element_per_group_is_divided_by_the_root_of_eps():
    x = torch.randn(1, 4, 1, 1, dtype=F64)
    ones = torch.ones(4, dtype=F64)
    y = evonorm_s0(x, ones, 0 * ones, ones, groups=4, eps=0.25)
    assert_close_to_max(y, x * torch.sigmoid(x) / 0.5, tol=tolerance("output", F64))


def test_an_empty_batch_gives_zero_gradients():
    weight, bias, v = (torch.randn(4, requires_grad=True) for _ in range(3))
    evonorm_s0(torch.empty(0, 4, 2, 2), weight, bias, v, groups=2).sum().backward()
    for tensor in (weight, bias, v):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.zeros(4))
