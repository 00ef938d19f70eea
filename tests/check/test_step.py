"""The steps run on private copies: nothing of the user's is touched."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import micronorm as mn
from tests.check.parts import Net, images, summed
from tests.networks import SmallResNet


def test_the_users_model_batch_and_random_states_stay_as_they_are():
    model = SmallResNet(mn.BCN(groups=4), mn.WS())
    model.extra = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.1))
    model.extra[0].eval()
    seen = []
    model.head.register_forward_hook(lambda module, args, output: seen.append(1))
    loss_before = summed(model, images())[0]
    loss_before.backward()
    window = model.norm._window.sums.clone()
    state, grads = copy.deepcopy(model.state_dict()), {n: copy.deepcopy(p.grad) for n, p in model.named_parameters()}
    flags = {n: m.training for n, m in model.named_modules()}
    hooks = {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()}
    batch = images()
    batch_before = copy.deepcopy(batch)
    rng = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    def loss(model, part):
        part[0].mul_(2)  # writes into its part
        return summed(model, (model.extra(part[0]), part[1]))

    assert not mn.check_cuts(model, batch, loss)
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype
        for a, b in zip(model.state_dict().values(), state.values(), strict=True)
    )
    for name, p in model.named_parameters():
        assert (p.grad is None) == (grads[name] is None)
        assert p.grad is None or torch.equal(p.grad, grads[name])
    assert torch.equal(model.norm._window.sums, window)
    assert {n: m.training for n, m in model.named_modules()} == flags
    assert {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()} == hooks
    assert all(map(torch.equal, batch, batch_before))
    assert torch.equal(torch.get_rng_state(), rng[0])
    assert random.getstate() == rng[1]
    assert np.random.get_state()[1].tolist() == rng[2]
    assert torch.get_default_dtype() == torch.float32
    assert len(seen) > 1  # hooks of the user's do run: spectral and weight normalization are hooks


def test_the_check_holds_under_no_grad_and_inside_autocast():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert mn.check_cuts(SmallResNet(), images(), summed)
        assert not torch.is_grad_enabled()


@pytest.mark.gpu
def test_a_model_on_cuda_is_checked_there():
    devices = set()

    def loss(model, part):
        devices.add(model.stem.weight.device.type)
        return summed(model, part)

    batch = tuple(t.cuda() for t in images())
    state = torch.cuda.get_rng_state()
    assert mn.check_cuts(SmallResNet().cuda(), batch, loss)
    found = mn.check_cuts(SmallResNet(mn.BN()).cuda(), batch, loss).findings[0]
    assert (found.where, found.cause) == ("norm", "batch_statistics")
    found = mn.check_cuts(Net(nn.Dropout(0.5)).cuda(), batch, loss).findings[0]
    assert (found.where, found.cause) == ("middle", "randomness")
    assert devices == {"cuda"}
    assert torch.equal(torch.cuda.get_rng_state(), state)
