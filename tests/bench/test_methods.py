"""The methods that are compared."""

import pytest
import torch
from torch import nn

from micronorm.bench.cases import BN, BN_GN, GN, METHODS, ON_CPU, ON_GPU, OURS, choose_methods
from micronorm.nn.bcn import STATISTICS


def test_keys_and_labels_name_one_method_each():
    assert len({method.key for method in METHODS}) == len(METHODS)
    assert len({method.label for method in METHODS}) == len(METHODS)


def test_ours_is_there_in_every_mode():
    assert {method.mode for method in OURS} == {*STATISTICS, "eval"}
    assert set(OURS) <= set(ON_CPU) & set(ON_GPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", [m for m in METHODS if not m.is_compiled], ids=lambda m: m.key)
def test_every_method_rectifies_and_gives_gradients_in_the_dtype(method, dtype):
    layer = method.build(8, dtype)
    x = torch.randn(3, 8, 4, 4).to(dtype).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.dtype == x.dtype
    assert y.min() == 0 < y.max()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_what_is_called_batch_norm_is_torch_s():
    x = torch.randn(3, 8, 4, 4)
    theirs = nn.BatchNorm2d(8)
    ours = BN.build(8, torch.float32)
    assert torch.equal(ours(x), theirs(x).relu())
    assert torch.equal(ours[0].running_var, theirs.running_var)
    composed = BN_GN.build(8, torch.float32)
    assert torch.equal(composed(x), composed[1](nn.BatchNorm2d(8)(x)).relu())


def test_what_computed_it_is_named():
    by = {method.key: method.computed_by(torch.device("cpu")) for method in METHODS}
    assert by["bn"] == by["bn-gn"] == by["gn"] == "torch"
    assert by["bn-compiled"] == "inductor"
    assert by["bcn-step"] == "one-pass"


def test_methods_are_chosen_by_key_or_by_device():
    assert choose_methods([], on_gpu=True) == list(ON_GPU)
    assert choose_methods([], on_gpu=False) == list(ON_CPU)
    assert not any(m.is_compiled for m in choose_methods([], on_gpu=True, compiled=False))
    assert choose_methods(["gn", "bn", "gn"], on_gpu=False) == [GN, BN]
    with pytest.raises(ValueError, match="no method 'bnn'; there are bcn-step"):
        choose_methods(["bnn"], on_gpu=False)
    with pytest.raises(ValueError, match="leaves none of the methods"):
        choose_methods(["bn-compiled"], on_gpu=True, compiled=False)
