import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from micronorm.ops.batch import (
    Running,
    absorb,
    batch_norm,
    merge_micro_batches,
    normalize,
    scale_about,
    split_micro_batches,
    unbiased,
)
from micronorm.ops.batch_renorm import batch_renorm
from micronorm.ops.moments import Moments
from tests.devices import KERNEL_DEVICES, require_kernels
from tests.tolerances import assert_close_to_max, tolerance

F64 = torch.float64
SHAPES = [(5, 3), (5, 3, 4), (5, 3, 2, 3), (5, 3, 2, 1, 3)]


def fresh(channels: int) -> Running:
    return Running(torch.randn(channels, dtype=F64), torch.rand(channels, dtype=F64) + 0.5, torch.tensor(4))


def equation(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Batch normalization of one batch, element sums written out."""
    axes = (0, *range(2, x.ndim))
    shape = (1, -1) + (1,) * (x.ndim - 2)
    mean = x.mean(axes).view(shape)
    var = (x - mean).square().mean(axes).view(shape)
    return weight.view(shape) * (x - mean) / torch.sqrt(var + eps) + bias.view(shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("micro_batch", [1, 2, 5, 7, None])
def test_each_micro_batch_is_normalized_by_its_own_moments(shape, micro_batch):
    x = torch.randn(shape, dtype=F64)
    weight, bias = torch.randn(2, 3, dtype=F64)
    y, _ = batch_norm(x, weight, bias, fresh(3), micro_batch=micro_batch, eps=1e-3)
    parts = x.split(micro_batch or shape[0])
    expected = torch.cat([equation(part, weight, bias, 1e-3) for part in parts])
    assert_close_to_max(y, expected, tol=tolerance("one_step", F64))


@given(
    steps=st.integers(1, 40),
    seen=st.integers(0, 10),
    momentum=st.one_of(st.none(), st.sampled_from([0.0, 1.0]), st.floats(0, 1)),
)
@settings(max_examples=30)
def test_the_closed_form_is_the_recurrence(steps, seen, momentum):
    new_tc = Moments(torch.randn(steps, 2, dtype=F64), torch.rand(steps, 2, dtype=F64))
    running = fresh(2)._replace(batches=torch.tensor(seen))
    mean, var, _ = running
    for t in range(steps):
        share = 1 / (seen + t + 1) if momentum is None else momentum
        mean = (1 - share) * mean + share * new_tc.mean[t]
        var = (1 - share) * var + share * new_tc.var[t]
    moved = absorb(running, new_tc, momentum=momentum)
    assert_close_to_max(moved.mean, mean, tol=tolerance("one_step", F64))
    assert_close_to_max(moved.var, var, tol=tolerance("one_step", F64))
    assert moved.batches == seen + steps


@given(samples=st.integers(1, 9), micro_batch=st.one_of(st.none(), st.integers(1, 12)), positions=st.integers(1, 4))
@settings(max_examples=30)
def test_each_micro_batch_is_corrected_for_its_own_count(samples, micro_batch, positions):
    counts = [len(part) * positions for part in range_parts(samples, micro_batch or samples)]
    biased = Moments(torch.zeros(len(counts), 1, dtype=F64), torch.ones(len(counts), 1, dtype=F64))
    corrected = unbiased(biased, samples=samples, micro_batch=micro_batch, positions=positions)
    assert corrected.var.flatten().tolist() == [n / max(n - 1, 1) for n in counts]


def range_parts(samples: int, size: int) -> list[range]:
    return [range(start, min(start + size, samples)) for start in range(0, samples, size)]


@pytest.mark.parametrize("micro_batch", [1, 2, None])
def test_gradients_are_right_to_second_order(micro_batch):
    x = torch.randn(3, 2, 2, dtype=F64, requires_grad=True)
    weight, bias = (torch.randn(2, dtype=F64, requires_grad=True) for _ in range(2))
    running = fresh(2)

    def output(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return batch_norm(x, weight, bias, running, micro_batch=micro_batch, eps=0.1)[0]

    assert gradcheck(output, (x, weight, bias))
    assert gradgradcheck(output, (x, weight, bias))


def test_statistics_carry_no_gradient_and_the_old_ones_are_left_alone():
    running = fresh(3)
    before = Running(*(t.clone() for t in running))
    x = torch.randn(4, 3, 2, dtype=F64, requires_grad=True)
    _, new = batch_norm(x, torch.ones(3, dtype=F64), torch.zeros(3, dtype=F64), running, micro_batch=3)
    assert not any(t.requires_grad for t in new)
    assert all(torch.equal(a, b) for a, b in zip(running, before, strict=True))


def test_an_empty_batch_moves_nothing_and_gives_zero_gradients():
    running = fresh(3)
    weight, bias = (torch.randn(3, requires_grad=True) for _ in range(2))
    y, new = batch_norm(torch.empty(0, 3, 4, 4), weight, bias, running, micro_batch=2)
    y.sum().backward()
    assert y.shape == (0, 3, 4, 4)
    assert new is running
    assert weight.grad is not None
    assert bias.grad is not None
    assert torch.equal(weight.grad, torch.zeros(3))
    assert torch.equal(bias.grad, torch.zeros(3))


def test_one_element_per_channel_has_variance_zero():
    bias = torch.randn(3)
    running = Running(torch.zeros(3), torch.ones(3), torch.tensor(0))
    y, new = batch_norm(torch.randn(1, 3), torch.ones(3), bias, running, momentum=0.25)
    assert torch.equal(y, bias[None])
    assert torch.equal(new.var, torch.full((3,), 0.75, dtype=F64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_inputs_are_computed_in_float32_and_rounded_once(dtype):
    x = torch.randn(4, 3, 5, 5).to(dtype)
    weight, bias = torch.randn(2, 3)
    running = Running(torch.zeros(3), torch.ones(3), torch.tensor(0))
    y, _ = batch_norm(x, weight, bias, running, micro_batch=2)
    expected, _ = batch_norm(x.double(), weight.double(), bias.double(), running, micro_batch=2)
    assert y.dtype == dtype
    assert_close_to_max(y, expected, tol=tolerance("output", dtype))


def test_a_mean_far_above_the_spread_costs_no_digits():
    x = torch.randn(4, 2, 8, 8) * 0.01 + 1e4
    weight, bias = torch.ones(2), torch.zeros(2)
    running = Running(torch.zeros(2), torch.ones(2), torch.tensor(0))
    y, _ = batch_norm(x, weight, bias, running)
    expected, _ = batch_norm(x.double(), weight, bias, running)
    assert_close_to_max(y, expected, tol=tolerance("output", torch.float32))


def test_scaling_about_a_mean_that_float32_cannot_hold_is_exact_to_the_last_digit():
    mean = torch.tensor([10_000.000123], dtype=F64)
    x = torch.tensor([[10_000.0]])
    y = scale_about(x, mean, torch.ones(1, dtype=F64), torch.zeros(1, dtype=F64))
    assert y.item() == pytest.approx(-0.000123, rel=1e-5)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_normalizing_by_given_moments_keeps_the_memory_format(memory_format):
    x = torch.randn(2, 3, 4, 5).to(memory_format=memory_format)
    y = normalize(x, Moments(torch.zeros(3), torch.ones(3)), torch.ones(3), torch.zeros(3), eps=0.0)
    assert y.is_contiguous(memory_format=memory_format)
    assert torch.equal(y, x)


# --- by the kernels ---------------------------------------------------------------------------------------------------

BY_KERNELS = [((6, 3, 2, 5), 1), ((6, 3, 2, 5), 2), ((6, 3, 2, 5), 6), ((6, 3, 2, 5), None), ((4, 3), 2), ((4, 3), 1)]
BY_KERNELS += [((4, 3, 2, 1, 3), 2)]


def channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("shape, micro_batch", BY_KERNELS, ids=str)
@pytest.mark.parametrize("operation", [batch_norm, batch_renorm])
def test_the_kernels_give_outputs_statistics_and_gradients_of_the_plain_operations(
    device, operation, shape, micro_batch
):
    require_kernels(device)
    inputs = [channels_last(torch.randn(shape, dtype=F64) + 3), *torch.randn(2, 3, dtype=F64)]
    inputs = [t.to(device).requires_grad_() for t in inputs]
    running = Running(*(t.to(device) for t in fresh(3)))
    r_max, d_max = torch.tensor([1.1, 0.2], device=device)
    limits = {} if operation is batch_norm else {"r_max": r_max, "d_max": d_max}
    g = torch.randn(shape, dtype=F64, device=device)
    found = []
    for fused in (True, False):
        y, new = operation(*inputs, running, micro_batch=micro_batch, eps=1e-3, fused=fused, **limits)
        found.append([y.detach(), *new, *torch.autograd.grad(y, inputs, g)])
    assert found[0][0].stride() == inputs[0].stride()
    # A gradient of x is a difference of terms of the size of g, and one of a parameter a sum of them.
    terms = {1: g.numel() // 3}
    for actual, expected in zip(*found, strict=True):
        scale = terms.get(expected.ndim, 1) * float(g.abs().max()) + float(expected.abs().max())
        assert_close_to_max(actual, expected, tol=tolerance("gradient", F64), scale=scale)


@pytest.mark.parametrize("x", [channels_last(torch.randn(5, 3, 2, 2)), torch.randn(4, 3, 2, 2)], ids=["rest", "nchw"])
def test_micro_batches_that_are_no_view_are_not_merged(x):
    assert merge_micro_batches(x, micro_batch=2) is None


def test_a_merged_batch_is_a_view_with_each_micro_batch_as_one_sample():
    x = channels_last(torch.randn(6, 3, 2, 5))
    merged = merge_micro_batches(x, micro_batch=2)
    assert merged is not None
    assert merged.data_ptr() == x.data_ptr()
    assert merged.shape == (3, 3, 20)
    assert torch.equal(merged.mean(2), torch.stack([part.mean((0, 2, 3)) for part in x.split(2)]))
    assert torch.equal(split_micro_batches(merged, like=x), x)
