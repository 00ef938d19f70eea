import pytest
import torch

from micronorm.nn.frn import FRN, FilterResponseNorm
from micronorm.ops.frn import filter_response_norm


@pytest.mark.parametrize("tlu", [True, False])
def test_the_layer_is_the_function_of_its_parameters(tlu):
    norm = FilterResponseNorm(3, tlu=tlu)
    with torch.no_grad():
        for p in norm.parameters():
            p.normal_()
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(norm(x), filter_response_norm(x, norm.weight, norm.bias, norm.tau, eps=1e-6))
    assert list(norm.state_dict()) == ["weight", "bias"] + ["tau"] * tlu


def test_at_the_start_the_threshold_is_a_rectifier():
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(FilterResponseNorm(3)(x), FilterResponseNorm(3, tlu=False)(x).relu())


def test_training_and_evaluation_agree_and_no_sample_sees_another():
    norm = FilterResponseNorm(3)
    x = torch.randn(4, 3, 2, 2)
    y = norm(x)
    assert torch.equal(norm.eval()(x), y)
    assert torch.equal(norm(x[:1]), y[:1])


def test_the_spec_hands_its_arguments_on():
    assert repr(FRN(eps=1e-3, tlu=False)(8)) == "FilterResponseNorm(8, eps=0.001, tlu=False)"
    with pytest.raises(ValueError, match="eps must be finite and at least 0, got nan"):
        FRN(eps=float("nan"))
