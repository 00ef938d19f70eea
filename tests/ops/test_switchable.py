import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from micronorm.ops.batch import Running
from micronorm.ops.switchable import switchable_norm
from tests.tolerances import assert_close_to_max, tolerance

F64 = torch.float64


def parameters(channels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weight, bias, mean_weight, var_weight."""
    weight, bias = (torch.randn(channels, dtype=F64, requires_grad=True) for _ in range(2))
    mean_weight, var_weight = (torch.randn(3, dtype=F64, requires_grad=True) for _ in range(2))
    return weight, bias, mean_weight, var_weight


def fresh(channels: int) -> Running:
    return Running(torch.randn(channels, dtype=F64), torch.rand(channels, dtype=F64) + 0.5, torch.tensor(4))


def equation(x, weight, bias, mean_weight, var_weight, batch=None, eps=1e-5):
    """Luo et al. (2019), eq. 3, for one batch of N×C×H×W, every moment over its own axes; `batch` replaces BN's."""
    means, variances = [], []
    for axes in ((2, 3), (1, 2, 3), (0, 2, 3)):
        mean = x.mean(axes, keepdim=True)
        means.append(mean)
        variances.append((x - mean).square().mean(axes, keepdim=True))
    if batch is not None:
        means[2], variances[2] = batch.mean.view(1, -1, 1, 1), batch.var.view(1, -1, 1, 1)
    mean = sum((w * m for w, m in zip(mean_weight.softmax(0), means, strict=True)), torch.zeros((), dtype=F64))
    var = sum((w * v for w, v in zip(var_weight.softmax(0), variances, strict=True)), torch.zeros((), dtype=F64))
    return weight.view(1, -1, 1, 1) * (x - mean) / torch.sqrt(var + eps) + bias.view(1, -1, 1, 1)


@pytest.mark.parametrize("micro_batch", [1, 2, 5, 9, None])
def test_the_mixture_is_of_instance_layer_and_micro_batch_moments(micro_batch):
    x = torch.randn(5, 3, 4, 2, dtype=F64) * 2 + 1
    p = parameters(3)
    y, _ = switchable_norm(x, *p, fresh(3), micro_batch=micro_batch)
    expected = torch.cat([equation(part, *p) for part in x.split(micro_batch or 5)])
    assert_close_to_max(y, expected, tol=tolerance("one_step", F64))


def test_the_running_statistics_average_the_biased_batch_part():
    x = torch.randn(5, 3, 4, 2, dtype=F64)
    running = fresh(3)
    mean, var = running.mean, running.var
    for part in x.split(2):
        mean = 0.8 * mean + 0.2 * part.mean((0, 2, 3))
        var = 0.8 * var + 0.2 * part.var((0, 2, 3), unbiased=False)
    _, new = switchable_norm(x, *parameters(3), running, micro_batch=2, momentum=0.2)
    assert_close_to_max(new.mean, mean, tol=tolerance("one_step", F64))
    assert_close_to_max(new.var, var, tol=tolerance("one_step", F64))
    assert new.batches == 7


def test_inference_takes_the_running_statistics_as_the_batch_part():
    x, p, running = torch.randn(5, 3, 4, 2, dtype=F64), parameters(3), fresh(3)
    y, after = switchable_norm(x, *p, running, training=False)
    assert after is running
    assert_close_to_max(y, equation(x, *p, batch=running), tol=tolerance("one_step", F64))


@pytest.mark.parametrize("micro_batch", [2, None])
def test_gradients_are_right_to_second_order(micro_batch):
    x = torch.randn(3, 2, 2, dtype=F64, requires_grad=True)
    running = fresh(2)

    def output(x: Tensor, weight: Tensor, bias: Tensor, mean_weight: Tensor, var_weight: Tensor) -> Tensor:
        return switchable_norm(x, weight, bias, mean_weight, var_weight, running, micro_batch=micro_batch, eps=0.1)[0]

    assert gradcheck(output, (x, *parameters(2)))
    assert gradgradcheck(output, (x, *parameters(2)))


def test_an_empty_batch_moves_nothing_and_gives_zero_gradients():
    running, p = fresh(3), parameters(3)
    y, new = switchable_norm(torch.empty(0, 3, 2, 2), *p, running)
    y.sum().backward()
    assert new is running
    for tensor in p:
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_one_element_per_channel_is_defined():
    y, new = switchable_norm(torch.randn(1, 3, dtype=F64), *parameters(3), fresh(3))
    assert y.isfinite().all()
    assert all(t.isfinite().all() for t in new)
