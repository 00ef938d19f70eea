import pytest
import torch

from micronorm.nn.evonorm import EvoNorm, EvoNormS0
from micronorm.ops.evonorm import evonorm_s0


def test_the_layer_is_the_function_of_its_parameters():
    norm = EvoNorm(8, 4, eps=1e-3)
    with torch.no_grad():
        for p in norm.parameters():
            p.normal_()
    x = torch.randn(2, 8, 3, 3)
    assert torch.equal(norm(x), evonorm_s0(x, norm.weight, norm.bias, norm.v, groups=4, eps=1e-3))


def test_training_and_evaluation_agree_and_no_sample_sees_another():
    norm = EvoNorm(8)
    x = torch.randn(4, 8, 2, 2)
    y = norm(x)
    assert torch.equal(norm.eval()(x), y)
    assert torch.equal(norm(x[:1]), y[:1])


@pytest.mark.parametrize("channels, groups", [(64, 32), (48, 12), (16, 4), (3, 1)])
def test_the_groups_follow_the_one_rule(channels, groups):
    assert EvoNorm(channels).num_groups == groups
    assert EvoNormS0()(channels).num_groups == groups


def test_the_spec_hands_its_arguments_on():
    assert repr(EvoNormS0(groups=4, eps=1e-3)(8)) == "EvoNorm(8, num_groups=4, eps=0.001)"
    with pytest.raises(ValueError, match="groups must be at least 1, got 0"):
        EvoNormS0(groups=0)
    with pytest.raises(ValueError, match="eps must be finite and at least 0"):
        EvoNormS0(eps=-1.0)


def test_groups_that_do_not_divide_the_channels_are_refused():
    with pytest.raises(ValueError, match="10 channels and 4 groups; try num_groups=2"):
        EvoNorm(10, 4)
