"""Layers that the sweep over timm and torchvision found left, lost or misplaced; each law by the smallest model."""

import pytest
import timm
import torch
from timm.layers import GroupNorm1, LayerNorm2d
from torch import Tensor, nn

import micronorm as mn


@pytest.mark.parametrize("device, dtype", [("meta", torch.float32), ("cpu", torch.float64)])
def test_a_norm_without_tensors_is_converted_where_its_input_is_computed(device, dtype):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8)).to(device=device, dtype=dtype)
    norm = mn.convert(model)[1]
    tensors = [*norm.parameters(), *norm.buffers()]
    assert {(t.device.type, t.dtype) for t in tensors} == {(device, dtype)}


def test_a_norm_without_tensors_and_without_a_convolution_follows_the_model():
    model = nn.Sequential(nn.InstanceNorm2d(3), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(device="meta")
    assert all(parameter.is_meta for parameter in mn.convert(model).parameters())


class WithAuxiliary(nn.Module):
    """A second head that only training reaches, as GoogLeNet has."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.auxiliary = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.main(x)
        return (x, self.auxiliary(x)) if self.training else x


def test_a_branch_that_eval_mode_does_not_reach_is_paired_by_registration():
    plan = mn.plan(WithAuxiliary().eval())
    reasons = {d.name: d.reason for d in plan.decisions}
    becomes = {d.name: d.becomes for d in plan.decisions}
    assert plan.pairing == "fx"
    assert becomes["auxiliary.0"] == "WSConv2d"
    assert reasons["auxiliary.0"] == "not reached by the data flow, but registered before BatchNorm2d 'auxiliary.1'"
    assert (becomes["auxiliary.3"], reasons["auxiliary.3"]) == (None, "not reached by the data flow")


def test_both_modes_of_a_model_give_the_same_conversion():
    layers = [[type(m).__name__ for m in mn.convert(WithAuxiliary().train(mode)).modules()] for mode in (True, False)]
    assert layers[0] == layers[1]


class Renamed(GroupNorm1):
    """As timm's GroupNorm1NoBias: another constructor, the same computation."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.bias = None


class Shifted(GroupNorm1):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class RenamedLayerNorm(LayerNorm2d):
    pass


def test_a_subclass_that_leaves_the_computation_alone_is_what_it_descends_from():
    model = mn.convert(nn.Sequential(nn.Conv2d(3, 8, 1), Renamed(8)))
    assert [type(layer).__name__ for layer in model] == ["WSConv2d", "BatchChannelNorm"]
    with pytest.raises(ValueError, match="the forward of Shifted is not known"):
        mn.plan(nn.Sequential(nn.Conv2d(3, 8, 1), Shifted(8)))


def test_a_subclass_of_a_channels_first_layer_norm_is_channels_first():
    model = mn.convert(nn.Sequential(nn.Conv2d(3, 8, 1), RenamedLayerNorm(8)), layer_norm=True)
    assert isinstance(model[1], mn.nn.BatchChannelNorm)
    assert model(torch.randn(1, 3, 5, 7)).shape == (1, 8, 5, 7)


@pytest.mark.parametrize("name", ["mobileone_s0", "poolformerv2_s12", "mobilevit_xxs"])
def test_an_architecture_that_was_refused_or_half_converted_is_converted(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    plan = mn.plan(model)
    reasons = [d.reason for d in plan.decisions if d.becomes is None]
    assert plan.totals["norms converted"] > 0
    assert not any("not reached" in reason for reason in reasons)
