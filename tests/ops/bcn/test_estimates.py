"""The kernels that derive statistics from their input, against the same in PyTorch operations in float64."""

import pytest
import torch

from micronorm.ops.bcn import move_by_batch, scan
from micronorm.ops.bcn.triton import run, tiling
from micronorm.ops.moments import Moments, moments, pool, pool_micro_batches
from tests.ops.bcn.layers import LAYOUTS, poison, set_scheme
from tests.tolerances import assert_close_to_max, tolerance

TOL = tolerance("one_step", torch.float64)
# Samples, channels, size, layout, scheme: one sample, one position, more rows than a tile has, more channels than one
# program takes, and pieces of space.
SHAPES = [
    ((1, 3, 5, 4), "contiguous", "whole"),
    ((7, 5), "contiguous", "split"),
    ((5, 6, 9, 7), "channels_last", "pieces"),
    ((5, 70, 2), "contiguous", "finish"),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    poison(monkeypatch)
    monkeypatch.setattr(tiling, "ESTIMATES_TILE", 32)
    monkeypatch.setattr(run, "_forwards", {})


def prepare(shape, layout, device, dtype=torch.float64):
    """An input whose means differ by sample and channel, running statistics, and a counter."""
    x = torch.randn(shape, dtype=torch.float64) + 2 * torch.randn(shape[:2], dtype=torch.float64).reshape(
        *shape[:2], *(1 for _ in shape[2:])
    )
    x = LAYOUTS[layout](x.to(device, dtype))
    running = Moments(torch.randn(shape[1]).to(device, dtype), torch.rand(shape[1]).to(device, dtype) + 0.5)
    return x, running, torch.zeros(2, dtype=torch.int64, device=device)


def estimates_by_kernel(x, running, lost, *, rate, micro_batch, moves=True):
    return run.estimates(x, running, lost, rate, 1, micro_batch or 0, moves)


def expected_estimates(x, running, *, rate, micro_batch):
    """The statistics to normalize with, and the running ones after it."""
    data = moments(x)
    if micro_batch is None:
        batch = pool(data, dim=0)
        elements = x.numel() // x.shape[1]
        return batch, move_by_batch(running, batch, elements=elements, momentum=rate)
    rows, _ = scan(running, data, rate=rate, micro_batch=micro_batch)
    return rows, Moments(*(r[-1] for r in rows))


@pytest.mark.parametrize("micro_batch", [None, 1, 3])
@pytest.mark.parametrize("shape, layout, scheme", SHAPES, ids=str)
def test_estimates_are_those_of_the_pooled_batch_and_of_algorithm_1(
    device, shape, layout, scheme, micro_batch, monkeypatch
):
    set_scheme(monkeypatch, scheme)
    x, running, lost = prepare(shape, layout, device)
    before = Moments(*(r.clone() for r in running))
    expected, after = expected_estimates(x, before, rate=0.3, micro_batch=micro_batch)
    _, found, data = estimates_by_kernel(x, running, lost, rate=0.3, micro_batch=micro_batch)
    for a, b in zip((*found, *running), (*expected, *after), strict=True):
        assert_close_to_max(a, b, tol=TOL, scale=max(1.0, b.abs().max().item()))
    if micro_batch is not None:
        for a, b in zip(data, pool_micro_batches(moments(x), micro_batch=micro_batch), strict=True):
            assert_close_to_max(a, b, tol=TOL, scale=max(1.0, b.abs().max().item()))
    assert lost.tolist() == [0, 0]


@pytest.mark.parametrize("micro_batch", [None, 1])
@pytest.mark.parametrize("rate", [torch.tensor(0.1), torch.tensor([2.5], dtype=torch.float64), torch.tensor(-1.0)])
def test_a_rate_in_a_tensor_counts_in_full_and_is_limited(device, rate, micro_batch):
    x, running, lost = prepare((4, 3, 2), "contiguous", device)
    number = min(max(rate.double().item(), 0.0), 1.0)
    twin = Moments(*(r.clone() for r in running))
    _, expected, _ = estimates_by_kernel(x, twin, lost, rate=number, micro_batch=micro_batch)
    _, found, _ = estimates_by_kernel(x, running, lost, rate=rate.to(device), micro_batch=micro_batch)
    assert all(map(torch.equal, (*found, *running), (*expected, *twin)))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("channels", [3, 70])
@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e200])
def test_a_channel_that_is_not_finite_is_left_out_with_all_channels(device, bad, micro_batch, channels):
    x, running, lost = prepare((5, channels, 2), "contiguous", device)
    x[2, 1, 0] = bad
    before = Moments(*(r.clone() for r in running))
    expected, after = expected_estimates(x, before, rate=0.3, micro_batch=micro_batch)
    _, found, _ = estimates_by_kernel(x, running, lost, rate=0.3, micro_batch=micro_batch)
    if micro_batch is None:  # the batch, all of it
        assert all(map(torch.equal, running, before))
        assert lost.tolist() == [5, 0]
    else:  # the micro-batch
        assert lost.tolist() == [2, 0]
        for a, b in zip((*found, *running), (*expected, *after), strict=True):
            assert_close_to_max(a, b, tol=TOL, scale=max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_running_statistics_may_lie_in_memory_in_any_way_and_stay_without_moves(device, micro_batch):
    x, running, lost = prepare((4, 3, 2), "contiguous", device)
    table = torch.stack(running, 1)
    columns = Moments(*table.unbind(1))
    options = {"rate": 0.3, "micro_batch": micro_batch}
    estimates_by_kernel(x, columns, lost, **options, moves=False)
    assert all(map(torch.equal, columns, running))
    estimates_by_kernel(x, running, lost, **options)
    estimates_by_kernel(x, columns, lost, **options)
    assert all(map(torch.equal, columns, running))


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_mean_that_float32_cannot_hold_costs_the_estimates_no_digits(device, micro_batch):
    x, running, lost = prepare((6, 2, 3, 5), "channels_last", device, torch.float32)
    x = 10000 + 0.01 * x
    running = Moments(torch.full_like(running.mean, 10000), torch.full_like(running.var, 1e-4))
    expected, _ = expected_estimates(
        x.double(), Moments(*(r.double() for r in running)), rate=0.5, micro_batch=micro_batch
    )
    _, found, _ = estimates_by_kernel(x, running, lost, rate=0.5, micro_batch=micro_batch)
    tol = tolerance("output", torch.float32)
    assert_close_to_max(found[0] - 10000, expected.mean - 10000, tol=tol, scale=0.01)
    assert_close_to_max(found[1], expected.var, tol=tol)
