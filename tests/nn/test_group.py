import pytest
import torch
from torch import nn

from micronorm.nn.group import GN, IN, LN, InstanceNorm
from tests.tolerances import assert_close_to_max, tolerance

F64 = torch.float64


@pytest.mark.parametrize("channels, groups", [(64, 32), (48, 12), (16, 4), (3, 1)])
def test_group_norm_is_torchs_with_the_groups_of_the_one_rule(channels, groups):
    norm = GN(eps=1e-3)(channels)
    assert isinstance(norm, nn.GroupNorm)
    assert (norm.num_groups, norm.num_channels, norm.eps) == (groups, channels, 1e-3)
    assert GN(min_channels_per_group=4)(64).num_groups == 16


def test_layer_norm_is_over_channels_and_space_with_an_affine_per_channel():
    norm = LN(eps=1e-3)(6).double()
    x = torch.randn(2, 6, 3, 4, dtype=F64)
    assert_close_to_max(norm(x), nn.functional.layer_norm(x, x.shape[1:], eps=1e-3), tol=tolerance("output", F64))
    assert norm.weight.shape == (6,)


@pytest.mark.parametrize("size", [(4,), (3, 4), (2, 3, 2)])
def test_instance_norm_is_over_the_space_of_each_channel(size):
    norm = IN(eps=1e-3)(6).double()
    x = torch.randn(2, 6, *size, dtype=F64)
    assert_close_to_max(norm(x), nn.functional.instance_norm(x, eps=1e-3), tol=tolerance("output", F64))
    assert isinstance(norm, nn.GroupNorm)
    assert list(norm.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("shape", [(1, 4), (1, 4, 1, 1), (3, 4, 1)])
def test_instance_norm_of_one_position_is_the_bias(shape):
    norm = InstanceNorm(4)
    nn.init.normal_(norm.bias)
    x = torch.randn(shape, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    # torch's kernel folds the mean into its constant, so that x/sqrt(eps) is what it rounds
    tol = tolerance("output", torch.float32, condition=max(1.0, x.abs().max().item() / norm.eps**0.5))
    assert_close_to_max(y.flatten(1), norm.bias.expand(shape[0], 4), tol=tol)
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("spec", [GN, LN, IN])
def test_a_negative_eps_is_refused_where_it_is_written(spec):
    with pytest.raises(ValueError, match=r"eps must be finite and at least 0, got -1\.0; try 1e-5"):
        spec(eps=-1.0)
