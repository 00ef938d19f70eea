import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from micronorm.nn.switchable import SN, SwitchableNorm
from tests.tolerances import assert_close_to_max, tolerance

F64 = torch.float64
TOL = tolerance("one_step", F64)


def layer(micro_batch: int | None) -> SwitchableNorm:
    norm = SwitchableNorm(3, micro_batch=micro_batch, eps=1e-3, dtype=F64)
    with torch.no_grad():
        for p in norm.parameters():
            p.normal_()
    return norm


@given(samples=st.integers(1, 9), micro_batch=st.integers(1, 11))
@settings(max_examples=20)
def test_micro_batches_equal_the_loop_over_whole_batches(samples, micro_batch):
    norm, loop = layer(micro_batch), layer(None)
    loop.load_state_dict(norm.state_dict())
    for _ in range(3):
        x = torch.randn(samples, 3, 2, 3, dtype=F64) + 1
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        g = torch.randn_like(x)
        norm.zero_grad()
        loop.zero_grad()
        y = norm(ours)
        expected = torch.cat([loop(part) for part in theirs.split(micro_batch)])
        y.backward(g)
        expected.backward(g)
        assert_close_to_max(y, expected, tol=TOL)
        for a, b in zip((ours, *norm.parameters()), (theirs, *loop.parameters()), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert_close_to_max(a.grad, b.grad, tol=TOL, scale=g.abs().sum().item())
        for name, value in loop.state_dict().items():
            assert_close_to_max(norm.state_dict()[name], value, tol=TOL)


@pytest.mark.parametrize("chosen", [0, 1, 2])
def test_all_weight_on_one_part_gives_that_norm(chosen):
    norm = SwitchableNorm(4, dtype=F64)
    with torch.no_grad():
        for w in (norm.mean_weight, norm.var_weight):
            w.fill_(-1e9)[chosen] = 0
    x = torch.randn(5, 4, 3, 3, dtype=F64)
    instance, whole_sample, batch = (
        torch.nn.GroupNorm(4, 4, dtype=F64),
        torch.nn.GroupNorm(1, 4, dtype=F64),
        torch.nn.BatchNorm2d(4, dtype=F64),
    )
    assert_close_to_max(norm(x), (instance, whole_sample, batch)[chosen](x), tol=TOL)


def test_evaluation_uses_the_moving_averages_and_leaves_them():
    norm = layer(None)
    for _ in range(3):
        norm(torch.randn(4, 3, 2, 2, dtype=F64) + 2)
    state = {name: value.clone() for name, value in norm.state_dict().items()}
    norm.eval()
    x = torch.randn(4, 3, 2, 2, dtype=F64)
    assert_close_to_max(norm(x)[:1], norm(x[:1]), tol=TOL)  # no sample sees another
    assert all(torch.equal(value, norm.state_dict()[name]) for name, value in state.items())
    before = norm(x)
    norm.running_mean += 1
    assert not torch.equal(norm(x), before)


def test_the_shares_are_equal_at_the_start_and_after_a_reset():
    norm = layer(None)
    norm.reset_parameters()
    third = torch.full((3,), 1 / 3, dtype=F64)
    assert_close_to_max(norm.mean_weight.softmax(0), third, tol=TOL)
    assert_close_to_max(norm.var_weight.softmax(0), third, tol=TOL)
    assert_close_to_max(SwitchableNorm(3, dtype=F64).var_weight.softmax(0), third, tol=TOL)


def test_the_spec_hands_its_arguments_on():
    assert repr(SN(micro_batch=2, eps=1e-3, momentum=None)(8)) == repr(
        SwitchableNorm(8, micro_batch=2, eps=1e-3, momentum=None)
    )
    with pytest.raises(ValueError, match=r"micro_batch .* must be at least 1, got -1"):
        SN(micro_batch=-1)
