import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from micronorm.nn.batch_renorm import BRN, BatchRenorm, RenormSchedule
from tests.tolerances import assert_close_to_max, tolerance

F64 = torch.float64
TOL = tolerance("one_step", F64)
AT_ONCE = RenormSchedule(warmup=0, r_until=0, d_until=0)


@pytest.mark.parametrize(
    "step, r_max, d_max",
    [
        (0, 1, 0),
        (5_000, 1, 0),
        (15_000, 1 + 2 * 10 / 35, 2.5),
        (25_000, 1 + 2 * 20 / 35, 5),
        (40_000, 3, 5),
        (10**6, 3, 5),
    ],
)
def test_the_default_schedule_is_the_papers(step, r_max, d_max):
    r, d = RenormSchedule().limits(torch.tensor(step))
    assert (r.item(), d.item()) == pytest.approx((r_max, d_max))


def test_a_ramp_of_no_length_is_a_jump_after_the_warm_up():
    schedule = RenormSchedule(warmup=2, r_until=2, d_until=2, r_max=4.0, d_max=6.0)
    limits = [tuple(v.item() for v in schedule.limits(torch.tensor(step))) for step in range(4)]
    assert limits == [(1, 0), (1, 0), (1, 0), (4, 6)]


@pytest.mark.parametrize(
    "arguments", [{"warmup": -1}, {"warmup": 30_000}, {"r_max": 0.5}, {"d_max": -1.0}, {"r_max": float("nan")}]
)
def test_an_impossible_schedule_is_refused(arguments):
    with pytest.raises(ValueError, match=r"got RenormSchedule\(warmup="):
        RenormSchedule(**arguments)


def test_the_warm_up_is_batch_normalization():
    norm, plain = BatchRenorm(3, schedule=RenormSchedule(warmup=3), dtype=F64), nn.BatchNorm2d(3, dtype=F64)
    for step in range(3):
        x = torch.randn(4, 3, 2, 2, dtype=F64) * 2 + 1
        assert_close_to_max(norm(x), plain(x), tol=TOL)
        assert norm.num_batches_tracked == step + 1


def test_the_correction_follows_the_number_of_batches_seen():
    schedule = RenormSchedule(warmup=1, r_until=3, d_until=5, r_max=1.5, d_max=0.5)
    norm = BatchRenorm(2, schedule=schedule, momentum=0.0, eps=0.0, dtype=F64)
    x = torch.randn(8, 2, 4, dtype=F64)
    x = (x - x.mean((0, 2), keepdim=True)) / x.std((0, 2), keepdim=True, unbiased=False) * 10 + 10
    for r, d in [(1, 0), (1, 0), (1.25, 0.125), (1.5, 0.25), (1.5, 0.375), (1.5, 0.5), (1.5, 0.5)]:
        # σ_B/σ = 10 and (μ_B − μ)/σ = 10 are beyond every limit
        assert_close_to_max(norm(x), (x - 10) / 10 * r + d, tol=TOL)


def test_evaluation_is_batch_normalization_with_the_averaged_deviation():
    norm = BatchRenorm(3, momentum=0.25, eps=1e-2, dtype=F64)
    mean, sigma = torch.zeros(3, dtype=F64), torch.full((3,), 1.01, dtype=F64).sqrt()
    for _ in range(4):
        x = torch.randn(4, 3, 2, 2, dtype=F64) * 2 + 1
        norm(x)
        mean = 0.75 * mean + 0.25 * x.mean((0, 2, 3))
        sigma = 0.75 * sigma + 0.25 * torch.sqrt(x.var((0, 2, 3), unbiased=False) + 1e-2)
    plain = nn.BatchNorm2d(3, eps=1e-2, dtype=F64).eval()
    plain.load_state_dict(norm.state_dict())
    norm.eval()
    x = torch.randn(4, 3, 2, 2, dtype=F64)
    assert_close_to_max(norm(x), (x - mean.view(3, 1, 1)) / sigma.view(3, 1, 1), tol=TOL)
    assert_close_to_max(norm(x), plain(x), tol=TOL)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_repeated_forward_corrects_as_the_first_did(use_reentrant):
    # limits that bind, so that the step they are read at shows, but not in all channels, so that the statistics do
    schedule = RenormSchedule(warmup=0, r_until=20, d_until=20, r_max=2.0, d_max=2.0)
    plain = BatchRenorm(3, momentum=0.3, schedule=schedule, dtype=F64)
    for _ in range(2):
        plain(torch.randn(4, 3, 2, 2, dtype=F64))
    checkpointed = copy.deepcopy(plain)
    for _ in range(3):
        x = torch.randn(4, 3, 2, 2, dtype=F64) * 1.5 + 0.5
        ours, theirs, g = x.clone().requires_grad_(), x.clone().requires_grad_(), torch.randn_like(x)
        y = checkpoint(checkpointed, ours, use_reentrant=use_reentrant)
        assert isinstance(y, torch.Tensor)
        y.backward(g)
        plain(theirs).backward(g)
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
        for name, value in plain.state_dict().items():
            assert torch.equal(value, checkpointed.state_dict()[name])


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 7, 9])
def test_micro_batches_of_a_batch_equal_the_loop_over_them(micro_batch):
    schedule = RenormSchedule(warmup=2, r_until=20, d_until=20, r_max=2.0, d_max=2.0)
    batched = BatchRenorm(3, micro_batch=micro_batch, momentum=0.3, schedule=schedule, dtype=F64)
    loop = BatchRenorm(3, momentum=0.3, schedule=schedule, dtype=F64)
    for _ in range(4):
        x = torch.randn(7, 3, 2, 3, dtype=F64) * 1.5 + 0.5
        ours, theirs, g = x.clone().requires_grad_(), x.clone().requires_grad_(), torch.randn_like(x)
        expected = torch.cat([loop(part) for part in theirs.split(micro_batch)])
        y = batched(ours)
        assert_close_to_max(y, expected, tol=TOL)
        y.backward(g)
        expected.backward(g)
        assert_close_to_max(ours.grad, theirs.grad, tol=TOL)
        for name, value in loop.state_dict().items():
            assert_close_to_max(batched.state_dict()[name], value, tol=TOL)
    assert loop.num_batches_tracked == 4 * -(-7 // micro_batch)


def test_what_it_remembers_for_checkpointing_is_not_saved():
    assert list(BatchRenorm(3).state_dict()) == list(nn.BatchNorm2d(3).state_dict())


def test_the_spec_hands_its_arguments_on():
    assert repr(BRN(eps=1e-3, momentum=0.2, schedule=AT_ONCE, micro_batch=2)(8)) == repr(
        BatchRenorm(8, eps=1e-3, momentum=0.2, schedule=AT_ONCE, micro_batch=2)
    )
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        BRN(micro_batch=0)
    with pytest.raises(ValueError, match=r"got None; try 0\.01"):
        BRN(momentum=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"got None; try 0\.01"):
        BatchRenorm(8, momentum=None)  # pyright: ignore[reportArgumentType]
