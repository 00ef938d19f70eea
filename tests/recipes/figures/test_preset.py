"""The networks of fig:dist: the equation, and that a stack is its networks one by one."""

import pytest
import torch
import torch.nn.functional as F

from micronorm.recipes.figures.dist import build
from micronorm.recipes.figures.preset import PresetNorm, StackedNetworks
from tests.tolerances import assert_close_to_max, tolerance

CELLS = [(0.0, 0.0), (1.0, 0.3), (2.0, 0.9)]


def networks():
    return [build(m, s, seed=0, inputs=1, classes=10).double() for m, s in CELLS]


def train(model, *, steps: int):
    """SGD with momentum on random images, the losses of a stack's networks summed."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    for _ in range(steps):
        images = torch.randn(16, 1, 16, 16, generator=generator, dtype=torch.float64)
        labels = torch.randint(10, (16,), generator=generator)
        logits = model(images).reshape(16, -1, 10)
        optimizer.zero_grad()
        sum(F.cross_entropy(logits[:, k], labels) for k in range(logits.shape[1])).backward()
        optimizer.step()
    return model


def test_channels_get_the_preset_mean_and_deviation_before_the_affine():
    mean, std = torch.randn(2, 8, dtype=torch.float64)
    norm = PresetNorm(mean, std.exp()).double()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.normal_()
    x = 3 + 2 * torch.randn(16, 8, 5, 5, dtype=torch.float64)
    var, mu = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
    shaped = [v.reshape(1, -1, 1, 1) for v in (mean, std.exp(), norm.weight, norm.bias)]
    expected = shaped[2] * (shaped[1] * (x - mu) / (var + norm.eps).sqrt() + shaped[0]) + shaped[3]
    assert_close_to_max(norm(x), expected, tol=tolerance("output", torch.float64, condition=2.0))


def test_bn_is_the_origin_of_the_grid():
    norm, bn = PresetNorm(torch.zeros(8), torch.ones(8)), torch.nn.BatchNorm2d(8)
    x = torch.randn(4, 8, 3, 3)
    for _ in range(3):
        assert torch.equal(norm(x), bn(x))
    norm.eval()
    bn.eval()
    assert torch.equal(norm(x), bn(x))


def test_a_stack_trains_its_networks_as_they_train_alone():
    stack = train(StackedNetworks(networks()), steps=8)
    for index in (0, 2):
        alone = train(networks()[index], steps=8)
        for joined, conv, first in zip(stack.convs, alone.convs, networks()[index].convs, strict=True):
            weight = joined.weight.chunk(len(CELLS))[index]
            assert_close_to_max(weight, conv.weight, tol=tolerance("fifty_steps", torch.float64))
            assert not torch.allclose(conv.weight, first.weight)  # or equality would say nothing
        images = torch.randn(4, 1, 16, 16, dtype=torch.float64)
        found, expected = stack.eval()(images)[:, index], alone.eval()(images)
        assert_close_to_max(found, expected, tol=tolerance("fifty_steps", torch.float64))


def test_a_network_that_breaks_leaves_the_others_alone():
    broken = networks()
    with torch.no_grad():
        broken[1].convs[0].weight.fill_(torch.inf)
    stack, whole = (train(StackedNetworks(made), steps=3) for made in (broken, networks()))
    images = torch.randn(4, 1, 16, 16, dtype=torch.float64)
    found, expected = stack.eval()(images), whole.eval()(images)
    assert found[:, 1].isnan().all()
    assert torch.equal(found[:, ::2], expected[:, ::2])


@pytest.mark.parametrize("spreads", [(2.0, 0.3), (1.0, 0.6)])
def test_cells_of_one_seed_differ_in_their_spreads_alone(spreads):
    one, other = (build(*cell, seed=3, inputs=1, classes=10) for cell in ((1.0, 0.3), spreads))
    assert torch.equal(one.convs[2].weight, other.convs[2].weight)
    assert torch.allclose(one.norms[1].preset_mean * spreads[0], other.norms[1].preset_mean)
    ratio = spreads[1] / 0.3
    assert torch.allclose(one.norms[1].preset_std.log() * ratio, other.norms[1].preset_std.log(), atol=1e-6)
