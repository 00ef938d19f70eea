"""The network of fig:dist: the equation, and what the cells of the grid share."""

import pytest
import torch

from micronorm.recipes.figures.dist import PresetNorm, build
from tests.tolerances import assert_close_to_max, tolerance


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


@pytest.mark.parametrize("spreads", [(2.0, 0.3), (1.0, 0.6)])
def test_cells_of_one_seed_differ_in_their_spreads_alone(spreads):
    one, other = (build(*cell, seed=3, inputs=1, classes=10) for cell in ((1.0, 0.3), spreads))
    convs = [[m.weight for m in network if isinstance(m, torch.nn.Conv2d)] for network in (one, other)]
    assert len(convs[0]) == 4
    assert all(torch.equal(a, b) for a, b in zip(*convs, strict=True))
    norm, changed = one[1], other[1]
    assert torch.allclose(norm.preset_mean * spreads[0], changed.preset_mean)
    assert torch.allclose(norm.preset_std.log() * (spreads[1] / 0.3), changed.preset_std.log(), atol=1e-6)
