import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from micronorm.ops.batch import Running, batch_norm
from micronorm.ops.batch_renorm import batch_renorm
from tests.tolerances import assert_close_to_max, tolerance

F64 = torch.float64
ZERO, ONE, FREE = torch.tensor([0.0, 1.0, 1e6])


def fresh(channels: int) -> Running:
    return Running(torch.randn(channels, dtype=F64), torch.rand(channels, dtype=F64) + 0.5, torch.tensor(4))


def algorithm1(x, weight, bias, running, r_max, d_max, momentum, eps):
    """Ioffe (2017), Algorithm 1, on N×C×H×W; returns y, μ and σ."""
    mean, sigma = running.mean, torch.sqrt(running.var + eps)
    batch_mean = x.mean((0, 2, 3))
    batch_sigma = torch.sqrt(eps + (x - batch_mean.view(1, -1, 1, 1)).square().mean((0, 2, 3)))
    r = (batch_sigma / sigma).clamp(1 / r_max, r_max).detach()
    d = ((batch_mean - mean) / sigma).clamp(-d_max, d_max).detach()
    normalized = (x - batch_mean.view(1, -1, 1, 1)) / batch_sigma.view(1, -1, 1, 1)
    corrected = normalized * r.view(1, -1, 1, 1) + d.view(1, -1, 1, 1)
    y = weight.view(1, -1, 1, 1) * corrected + bias.view(1, -1, 1, 1)
    moved = mean + momentum * (batch_mean - mean), sigma + momentum * (batch_sigma - sigma)
    return y, *(t.detach() for t in moved)


@pytest.mark.parametrize("r_max, d_max", [(1.0, 0.0), (1.1, 0.2), (3.0, 5.0), (1e6, 1e6)])
def test_output_gradients_and_statistics_are_those_of_algorithm_1(r_max, d_max):
    x = (torch.randn(4, 3, 2, 3, dtype=F64) * 2 + 1).requires_grad_()
    weight, bias = (torch.randn(3, dtype=F64, requires_grad=True) for _ in range(2))
    running = fresh(3)
    y, new = batch_renorm(
        x, weight, bias, running, r_max=torch.tensor(r_max), d_max=torch.tensor(d_max), momentum=0.2, eps=1e-3
    )
    # the limits are 0-d float32 tensors here, and 1.1 is not the same number there
    limits = torch.tensor(r_max).item(), torch.tensor(d_max).item()
    expected, mean, sigma = algorithm1(x, weight, bias, running, *limits, momentum=0.2, eps=1e-3)
    assert_close_to_max(y, expected, tol=tolerance("one_step", F64))
    assert_close_to_max(new.mean, mean, tol=tolerance("one_step", F64))
    assert_close_to_max(torch.sqrt(new.var + 1e-3), sigma, tol=tolerance("one_step", F64))
    assert new.batches == 5
    g = torch.randn_like(y)
    ours = torch.autograd.grad(y, (x, weight, bias), g)
    theirs = torch.autograd.grad(expected, (x, weight, bias), g)
    for a, b in zip(ours, theirs, strict=True):
        assert_close_to_max(a, b, tol=tolerance("one_step", F64))


def test_without_correction_it_is_batch_normalization():
    x, weight, bias, running = torch.randn(4, 3, 5, dtype=F64), *torch.randn(2, 3, dtype=F64), fresh(3)
    y, _ = batch_renorm(x, weight, bias, running, r_max=ONE, d_max=ZERO)
    expected, _ = batch_norm(x, weight, bias, running)
    assert_close_to_max(y, expected, tol=tolerance("one_step", F64))


def test_with_free_correction_the_output_is_that_of_inference():
    x, running = torch.randn(4, 3, 5, dtype=F64), fresh(3)
    y, _ = batch_renorm(x, torch.ones(3), torch.zeros(3), running, r_max=FREE, d_max=FREE, eps=1e-3)
    expected = (x - running.mean[:, None]) / torch.sqrt(running.var[:, None] + 1e-3)
    assert_close_to_max(y, expected, tol=tolerance("one_step", F64))


@pytest.mark.parametrize("mean, var", [(0.0, 1.0), (50.0, 1e-4), (-50.0, 1e4)])
def test_gradients_are_right_to_second_order_where_r_and_d_are_constant(mean, var):
    # At or beyond the limits r and d are constants of x, so that finite differences see what autograd sees.
    x = torch.randn(3, 2, 2, dtype=F64, requires_grad=True)
    weight, bias = (torch.randn(2, dtype=F64, requires_grad=True) for _ in range(2))
    running = Running(torch.full((2,), mean, dtype=F64), torch.full((2,), var, dtype=F64), torch.tensor(0))
    r_max, d_max = (ONE, ZERO) if mean == 0 else torch.tensor([1.5, 0.25])

    def output(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return batch_renorm(x, weight, bias, running, r_max=r_max, d_max=d_max, eps=0.1)[0]

    assert gradcheck(output, (x, weight, bias))
    assert gradgradcheck(output, (x, weight, bias))


def test_an_empty_batch_moves_nothing_and_gives_zero_gradients():
    running = fresh(3)
    weight, bias = (torch.randn(3, requires_grad=True) for _ in range(2))
    y, new = batch_renorm(torch.empty(0, 3, 4, 4), weight, bias, running, r_max=FREE, d_max=FREE)
    y.sum().backward()
    assert new is running
    for tensor in (weight, bias):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.zeros(3))


def test_one_element_per_channel_is_defined():
    y, new = batch_renorm(torch.randn(1, 3, dtype=F64), torch.ones(3), torch.zeros(3), fresh(3), r_max=FREE, d_max=FREE)
    assert y.isfinite().all()
    assert all(t.isfinite().all() for t in new)
    assert (new.var >= 0).all()
