import pytest
import torch

from micronorm.nn.frn_evonorm import FRN, EvoNorm, EvoNormS0, FilterResponseNorm
from micronorm.ops.frn_evonorm import evonorm_s0, filter_response_norm


def randomized(norm):
    with torch.no_grad():
        for p in norm.parameters():
            p.normal_()
    return norm


@pytest.mark.parametrize("tlu", [True, False])
def test_frn_is_the_function_of_its_parameters(tlu):
    norm, x = randomized(FilterResponseNorm(3, tlu=tlu)), torch.randn(2, 3, 4, 4)
    assert torch.equal(norm(x), filter_response_norm(x, norm.weight, norm.bias, norm.tau, eps=1e-6))
    assert list(norm.state_dict()) == ["weight", "bias"] + ["tau"] * tlu
    norm.reset_parameters()
    assert [p.unique().item() for p in norm.parameters()] == [1.0, 0.0] + [0.0] * tlu


def test_evonorm_is_the_function_of_its_parameters():
    norm, x = randomized(EvoNorm(8, 4, eps=1e-3)), torch.randn(2, 8, 3, 3)
    assert torch.equal(norm(x), evonorm_s0(x, norm.weight, norm.bias, norm.v, groups=4, eps=1e-3))
    assert list(norm.state_dict()) == ["weight", "bias", "v"]
    norm.reset_parameters()
    assert [p.unique().item() for p in norm.parameters()] == [1.0, 0.0, 1.0]


def test_at_the_start_the_threshold_is_a_rectifier():
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(FilterResponseNorm(3)(x), FilterResponseNorm(3, tlu=False)(x).relu())


@pytest.mark.parametrize("norm", [FilterResponseNorm(8), EvoNorm(8)], ids=repr)
def test_training_and_evaluation_agree_and_no_sample_sees_another(norm):
    x = torch.randn(4, 8, 2, 2)
    y = norm(x)
    assert torch.equal(norm.eval()(x), y)
    assert torch.equal(norm(x[:1]), y[:1])


@pytest.mark.parametrize("channels, groups", [(64, 32), (48, 12), (16, 4), (3, 1)])
def test_the_groups_follow_the_one_rule(channels, groups):
    assert EvoNorm(channels).num_groups == groups
    assert EvoNormS0()(channels).num_groups == groups


def test_the_specs_hand_their_arguments_on():
    assert repr(FRN(eps=1e-3, tlu=False)(8)) == "FilterResponseNorm(8, eps=0.001, tlu=False)"
    assert repr(EvoNormS0(groups=4, eps=1e-3)(8)) == "EvoNorm(8, num_groups=4, eps=0.001)"
    with pytest.raises(ValueError, match="eps must be finite and at least 0, got nan"):
        FRN(eps=float("nan"))
    with pytest.raises(ValueError, match="groups must be at least 1, got 0"):
        EvoNormS0(groups=0)
    with pytest.raises(ValueError, match="eps must be finite and at least 0"):
        EvoNormS0(eps=-1.0)


def test_groups_that_do_not_divide_the_channels_are_refused():
    with pytest.raises(ValueError, match="10 channels and 4 groups; try num_groups=2"):
        EvoNorm(10, 4)
