"""Flows that the sweep over timm and torchvision found missing or wrong; each law by the smallest model."""

import pytest
import torch
from torch import Tensor, nn

from micronorm.flow import Flow, trace_flow
from micronorm.flow.kinds import one_element_per_channel


def flow_of(model: nn.Module, **options) -> Flow:
    def is_leaf(module: nn.Module) -> bool:
        return isinstance(module, nn.Conv2d | nn.BatchNorm2d)

    return trace_flow(model, is_leaf, pairs=lambda *_: False, **options)


class Chain(nn.Module):
    """Layers one after the other, then what `between` does, then a norm."""

    def __init__(self, layers: list[nn.Module], channels: int = 4) -> None:
        super().__init__()
        self.layers, self.norm = nn.Sequential(*layers), nn.BatchNorm2d(channels)
        self.gamma = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.between(self.layers(x)))

    def between(self, x: Tensor) -> Tensor:
        return x * self.gamma


@pytest.mark.parametrize("first, pooled", [(nn.AdaptiveAvgPool2d(1), True), (nn.Identity(), False)])
def test_a_network_may_be_deeper_than_the_stack(first, pooled):
    model = Chain([first, *(nn.Conv2d(4, 4, 1) for _ in range(1500))])
    [source] = flow_of(model).calls[model.norm][0].inputs
    assert one_element_per_channel(source, flat=False) is pooled
