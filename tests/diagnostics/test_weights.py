"""The measure by weights: min over mean of the input channels' |ω_c|₁."""

import pytest
import torch
from torch import nn

import micronorm as mn
from micronorm.diagnostics.lipschitz import input_uses


def by_loops(weight: torch.Tensor, groups: int) -> float:
    """The definition, one input channel after another."""
    outputs, per_group = weight.shape[0] // groups, weight.shape[1]
    uses = [
        weight[g * outputs : (g + 1) * outputs, c].abs().sum().item() for g in range(groups) for c in range(per_group)
    ]
    return min(uses) / (sum(uses) / len(uses))


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_it_is_the_definition_for_grouped_convolutions_too(groups):
    layer = nn.Conv2d(6, 12, 3, groups=groups, dtype=torch.float64)
    assert input_uses(layer)[""] == pytest.approx(by_loops(layer.weight.detach(), groups), rel=1e-13)


@pytest.mark.parametrize("fill, use", [(1.0, 1), (0.0, 0)], ids=["alike", "one unused"])
def test_an_input_that_no_output_takes_gives_0_and_inputs_taken_alike_give_1(fill, use):
    layer = nn.Conv2d(3, 4, 3)
    with torch.no_grad():
        layer.weight.fill_(1.0)[:, 1] = fill
    assert input_uses(layer)[""] == use


def test_transposed_convolutions_keep_their_inputs_in_the_first_axis():
    layer = nn.ConvTranspose2d(6, 4, 3, groups=2)
    with torch.no_grad():
        layer.weight[4] = 0
    assert input_uses(layer) == {"": 0.0}


def test_a_standardized_layer_is_measured_by_the_weight_it_computes_with():
    layer = mn.nn.WSConv2d(3, 8, 3)
    with torch.no_grad():
        layer.weight[:, 1] = 5.0  # a constant that standardization takes apart
    assert input_uses(layer)[""] == pytest.approx(by_loops(layer.effective_weight().detach(), 1))
    assert input_uses(layer)[""] != pytest.approx(by_loops(layer.weight.detach(), 1))


def test_the_layers_of_a_network_are_named_and_lazy_ones_left_out():
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.LazyLinear(3))
    uses = input_uses(model)
    assert list(uses) == ["0", "3"]
    assert all(0 < use < 1 for use in uses.values())
