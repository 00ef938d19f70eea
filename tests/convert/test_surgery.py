"""Replacing modules in a model."""

import torch
from torch import nn

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
