"""Flows that the sweep over timm and torchvision found missing or wrong; each law by the smallest model."""

import pytest
import timm
import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from micronorm.convert.flow import Flow, trace_flow
from micronorm.convert.flow.graph import one_element_per_channel


def flow_of(model: nn.Module, **options) -> Flow:
    def is_leaf(module: nn.Module) -> bool:
        return isinstance(module, nn.Conv2d | nn.BatchNorm2d)

    return trace_flow(model, is_leaf, pairs=lambda *_: False, **options)


@register_notrace_module
class Branching(nn.Module):
    """What timm asks torch.fx not to look into, because its forward depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.numel() else x


class WithBlock(nn.Module):
    """A convolution, a block that torch.fx cannot trace, and a norm; with `size`, for that input size alone."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self.stem, self.block, self.norm, self.size = nn.Conv2d(3, 4, 1), Branching(), nn.BatchNorm2d(4), size

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.size is not None:
            x = x.view(-1, 4, self.size, self.size)
        return self.norm(self.block(x))


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


def test_a_block_that_timm_wants_untraced_is_looked_into_where_it_holds_layers():
    model = WithBlock()
    flow = flow_of(model)
    assert flow.method == "execution"
    [norm] = flow.calls[model.norm]
    assert flow.sole_source(norm).module is model.block.inner


def test_a_block_is_one_call_where_the_model_neither_traces_nor_runs():
    model = WithBlock(size=17)
    flow = flow_of(model)
    assert flow.method == "fx"
    assert "example_inputs" in flow.detail
    assert model.block in flow.calls
    assert model.block.inner not in flow.calls
    given = flow_of(model, example_inputs=torch.zeros(1, 3, 17, 17))
    assert model.block.inner in given.calls


@pytest.mark.parametrize("name", ["mobilevitv2_050", "tiny_vit_5m_224"])
def test_every_convolution_of_a_network_with_untraced_blocks_is_in_the_flow(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    flow = flow_of(model)
    assert {m for m in model.modules() if isinstance(m, nn.Conv2d)} <= flow.calls.keys()


class Dropping(Chain):
    def between(self, x: Tensor) -> Tensor:
        keep = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.5)
        return x * keep + torch.zeros_like(x)


class DroppingByValue(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() == 0 else x


@pytest.mark.parametrize("kind, method", [(Dropping, "fx"), (DroppingByValue, "execution")])
def test_a_fresh_tensor_of_another_ones_shape_carries_none_of_its_signal(kind, method):
    model = kind([nn.Conv2d(3, 4, 1)])
    flow = flow_of(model)
    assert flow.method == method
    [convolution] = flow.calls[model.layers[0]]
    assert [node.name.strip("_") for node in flow.consumers[convolution]] == ["mul"]


def test_a_parameter_does_not_spread_what_was_pooled():
    model = Chain([nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1)])
    flow = flow_of(model)
    [source] = flow.calls[model.norm][0].inputs
    assert one_element_per_channel(source, flat=False)


@pytest.mark.parametrize("first, pooled", [(nn.AdaptiveAvgPool2d(1), True), (nn.Identity(), False)])
def test_a_network_may_be_deeper_than_the_stack(first, pooled):
    model = Chain([first, *(nn.Conv2d(4, 4, 1) for _ in range(1500))])
    [source] = flow_of(model).calls[model.norm][0].inputs
    assert one_element_per_channel(source, flat=False) is pooled


class Untraceable(nn.Module):
    def __init__(self, convolution: nn.Module, least: int) -> None:
        super().__init__()
        self.convolution, self.least = convolution, least

    def forward(self, x: Tensor) -> Tensor:
        if min(x.shape[-2:]) < self.least:
            raise ValueError("too small")
        return self.convolution(x)


def test_a_video_network_may_want_larger_frames():
    flow = flow_of(Untraceable(nn.Conv3d(3, 4, 3, stride=8), least=200))
    assert (flow.method, flow.detail.split(";")[0]) == ("execution", "run on a guessed input 1×3×16×224×224")


def test_a_guess_has_the_channels_of_the_first_convolution():
    model = Untraceable(nn.Conv2d(1, 4, 3), least=1)
    model.pretrained_cfg = {"input_size": (3, 32, 32)}  # type: ignore[assignment]
    flow = flow_of(model)
    assert (flow.method, flow.detail.split(";")[0]) == ("execution", "run on a guessed input 1×1×32×32")
