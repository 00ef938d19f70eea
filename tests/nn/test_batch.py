import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from micronorm.nn.batch import BN, GhostBatchNorm
from tests.tolerances import assert_close_to_max, tolerance

F64 = torch.float64
TOL = tolerance("one_step", F64)


def pair(channels: int, *, micro_batch: int, momentum: float | None = 0.1) -> tuple[GhostBatchNorm, nn.BatchNorm2d]:
    """A ghost layer and torch's layer with the same state, not the initial one."""
    loop = nn.BatchNorm2d(channels, eps=1e-3, momentum=momentum, dtype=F64)
    with torch.no_grad():
        for p in (*loop.parameters(), loop.running_mean):
            assert p is not None
            p.normal_()
    ghost = GhostBatchNorm(channels, micro_batch=micro_batch, eps=1e-3, momentum=momentum, dtype=F64)
    ghost.load_state_dict(loop.state_dict())
    return ghost, loop


def assert_same_state(ghost: nn.Module, loop: nn.Module) -> None:
    assert list(ghost.state_dict()) == list(loop.state_dict())
    for name, value in loop.state_dict().items():
        assert_close_to_max(ghost.state_dict()[name], value, tol=TOL)


@given(
    samples=st.integers(1, 9),
    micro_batch=st.integers(1, 11),
    size=st.tuples(st.integers(1, 3), st.integers(2, 3)),
    momentum=st.sampled_from([0.1, None, 0.0, 1.0]),
)
@settings(max_examples=25)
def test_ghost_batch_norm_equals_the_loop_over_micro_batches(samples, micro_batch, size, momentum):
    ghost, loop = pair(3, micro_batch=micro_batch, momentum=momentum)
    for _ in range(3):
        x = torch.randn(samples, 3, *size, dtype=F64) * 2 + 1
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        g = torch.randn_like(x)
        ghost.zero_grad()
        loop.zero_grad()
        y = ghost(ours)
        expected = torch.cat([loop(part) for part in theirs.split(micro_batch)])
        y.backward(g)
        expected.backward(g)
        assert_close_to_max(y, expected, tol=TOL)
        assert ours.grad is not None
        assert theirs.grad is not None
        # a gradient is a difference of terms of the size of g·weight/σ; of two elements nearly nothing is left of it
        scale = (loop.weight.abs().max() * g.abs().max()).item() / 1e-3**0.5
        assert_close_to_max(ours.grad, theirs.grad, tol=TOL, scale=scale)
        for a, b in zip(ghost.parameters(), loop.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert_close_to_max(a.grad, b.grad, tol=TOL, scale=g.abs().sum().item())
        assert_same_state(ghost, loop)
    ghost.eval()
    loop.eval()
    x = torch.randn(samples, 3, *size, dtype=F64)
    assert_close_to_max(ghost(x), loop(x), tol=TOL)


@pytest.mark.parametrize("micro_batch", [8, 9])
def test_one_micro_batch_of_all_samples_is_torchs_batch_norm(micro_batch):
    ghost, loop = pair(3, micro_batch=micro_batch)
    x = torch.randn(8, 3, 4, 4, dtype=F64)
    assert_close_to_max(ghost(x), loop(x), tol=TOL)
    assert_same_state(ghost, loop)


def test_one_element_per_channel_which_torch_refuses_gives_the_bias():
    ghost, loop = pair(3, micro_batch=1)
    x = torch.randn(2, 3, 1, 1, dtype=F64)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        loop(x[:1])
    assert_close_to_max(ghost(x), ghost.bias.view(1, 3, 1, 1).expand(2, 3, 1, 1), tol=TOL)
    assert torch.equal(ghost.running_var, torch.full((3,), 0.81, dtype=F64))


@pytest.mark.parametrize(
    "dims, layer", [(0, nn.BatchNorm1d), (1, nn.BatchNorm1d), (2, nn.BatchNorm2d), (3, nn.BatchNorm3d)]
)
def test_without_micro_batch_the_spec_builds_torchs_layer(dims, layer):
    built = BN(eps=1e-3, momentum=None)(8, dims=dims)
    assert type(built) is layer
    assert (built.num_features, built.eps, built.momentum) == (8, 1e-3, None)


@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_with_micro_batch_the_spec_builds_a_ghost_layer_for_any_rank(dims):
    built = BN(micro_batch=2, eps=1e-3, momentum=0.3)(8, dims=dims)
    assert repr(built) == "GhostBatchNorm(8, eps=0.001, momentum=0.3, micro_batch=2)"
    assert built(torch.randn(3, 8, *[2] * dims)).shape == (3, 8, *[2] * dims)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"micro_batch": 0}, "micro_batch .* must be at least 1, got 0"),
        ({"eps": -1.0}, r"eps must be finite and at least 0, got -1\.0"),
        ({"momentum": 1.5}, r"between 0 and 1, got 1\.5; try 0\.1"),
    ],
)
def test_a_bad_argument_is_refused_where_it_is_written(arguments, message):
    with pytest.raises(ValueError, match=message):
        BN(**arguments)
    with pytest.raises(ValueError, match=message):
        GhostBatchNorm(8, **{"micro_batch": 1, **arguments})


def test_bad_dimensions_and_types_are_refused():
    with pytest.raises(ValueError, match="0 to 3 spatial dimensions, got dims=4"):
        BN()(8, dims=4)
    with pytest.raises(TypeError, match=r"micro_batch .* must be an int, got 2\.0"):
        GhostBatchNorm(8, micro_batch=2.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="num_channels must be at least 1, got 0"):
        GhostBatchNorm(0, micro_batch=2)
