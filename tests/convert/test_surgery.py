"""Replacing modules in a model."""

from typing import Any

import torch
from torch import nn

import micronorm as mn
from micronorm.convert.surgery import adopt_hooks, names_of, replace


def shared() -> tuple[nn.Module, nn.Module]:
    norm = nn.BatchNorm2d(4)
    return nn.Sequential(norm, nn.Sequential(norm, nn.ReLU())), norm


def test_a_shared_module_is_listed_once_with_all_its_names():
    model, norm = shared()
    assert names_of(model)[norm] == ["0", "1.0"]


def test_a_shared_module_stays_shared_when_it_is_replaced():
    model, norm = shared()
    new = nn.Identity()
    assert replace(model, {norm: new}) is model
    assert model[0] is model[1][0] is new  # type: ignore[index]


def test_a_replaced_root_is_returned():
    norm, new = nn.BatchNorm2d(4), nn.Identity()
    assert replace(norm, {norm: new}) is new


def test_adopted_hooks_run_on_the_new_module_and_their_handles_remove_them():
    old, new, seen = nn.ReLU(), nn.Identity(), []
    before = old.register_forward_pre_hook(lambda *_: seen.append("before"))
    after = old.register_forward_hook(lambda *_: seen.append("after"))
    adopt_hooks(new, old)
    new(torch.ones(1))
    assert seen == ["before", "after"]
    before.remove()
    after.remove()
    new(torch.ones(1))
    assert seen == ["before", "after"]


def test_layers_that_a_forward_finds_in_attributes_are_replaced_there_too():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
            conv, first, second, third = self.layers
            self.in_a_list, self.in_a_tuple, self.in_a_dict = [conv], (first,), {"norm": second}
            self.method = third.forward

        def forward(self, x):
            for layer in (*self.in_a_list, *self.in_a_tuple, *self.in_a_dict.values(), self.method):
                x = layer(x)
            return x

    model = mn.convert(Hidden())
    x, layers = torch.randn(2, 3, 8, 8), model.layers
    assert torch.equal(model.eval()(x), layers[3](layers[2](layers[1](layers[0](x)))))
    folded: Any = mn.fold(model)
    torch.testing.assert_close(folded(x), model(x))
    assert not any(isinstance(layer, mn.nn.BatchChannelNorm) for layer in (*folded.in_a_tuple, folded.method.__self__))
