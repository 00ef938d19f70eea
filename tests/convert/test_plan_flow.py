"""What a plan sees in a model's data flow and layers, and what it must not do to the model."""

import types
from abc import abstractmethod

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.layers import GroupNorm1, LayerNorm2d
from torch import Tensor, nn

import micronorm as mn
from tests.tolerances import assert_close_to_max


class Pair(nn.Module):
    """A standardized convolution and its norm; subclasses wire them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = mn.nn.WSConv2d(3, 8, 3, padding=1), mn.nn.BatchChannelNorm(8, 2)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)


class Optional_(Pair):
    def forward(self, x: Tensor, extra: Tensor | None = None) -> tuple[Tensor, ...] | Tensor:
        h = self.conv(x)
        return self.norm(h) if extra is not None else (self.norm(h), h)


class Branching(Pair):
    """Not for torch.fx. Subclasses say how the two layers are wired."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.sum() < 1e9
        return self.wire(x)

    @abstractmethod
    def wire(self, x: Tensor) -> Tensor: ...


class Unseen(Branching):
    def wire(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        return self.norm(h) + torch.vmap(torch.sin)(h)


class Holder:
    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors


class Held(Branching):
    def wire(self, x: Tensor) -> Holder:  # type: ignore[override]
        h = self.conv(x)
        return Holder(self.norm(h), h)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", [Optional_, Unseen, Held])
def test_folding_does_not_change_what_else_uses_a_convolution(kind, given):
    model, x = kind().eval(), torch.randn(2, 3, 8, 8)
    folded = mn.fold(model, example_inputs=x if given else None)
    with torch.no_grad():
        expected, actual = model(x), folded(x)
    outputs = [o.tensors if isinstance(o, Holder) else o if isinstance(o, tuple) else (o,) for o in (expected, actual)]
    for right, other in zip(*outputs, strict=True):
        assert_close_to_max(other, right, tol=1e-5)


def test_a_raw_weight_read_in_a_run_is_refused():
    class Reading(Branching):
        def wire(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)) + F.conv2d(x, self.conv.weight, padding=1)

    with pytest.raises(ValueError, match="also reads its weight or bias directly"):
        mn.fold(Reading())


def test_a_layer_with_a_forward_put_on_it_is_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    for layer in (model[0], model[3]):
        layer.forward = types.MethodType(type(layer).forward, layer)
    becomes = {d.name: d.becomes for d in mn.plan(model).decisions}
    assert becomes == {"0": None, "1": "BatchChannelNorm(8/2)", "2": None, "3": None}


def test_a_plan_leaves_caches_and_counters_of_the_model_as_they_were():
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
            self.cache: dict[str, Tensor] = {}
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if "scale" not in self.cache:
                self.cache["scale"] = x.new_ones(1, 8, 1, 1)
            return self.norm(self.conv(x)) * self.cache["scale"]

    model = Caching()
    mn.convert(model)
    assert model.cache == {}
    assert model.calls == 0
    model(torch.randn(1, 3, 8, 8))


def test_a_convolution_that_is_an_output_of_the_model_stays_plain():
    class Supervised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.predict, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            p = self.predict(x)
            return p, self.last(self.norm(p))

    decisions = {d.name: d for d in mn.plan(Supervised()).decisions}
    assert decisions["predict"].becomes is None
    assert "an output of the model too" in decisions["predict"].reason


class Reshaping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spread, self.norm = nn.Linear(16, 1024), nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.spread(x).view(-1, 64, 16))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 3), nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x).flatten(2).mean(-1))


def test_one_element_per_channel_is_judged_by_what_the_norm_is_given():
    assert [d.becomes for d in mn.plan(Reshaping()).decisions] == ["BatchChannelNorm(64/32)"]
    assert [d.becomes for d in mn.plan(Pooled()).decisions][1] == "BatchChannelNorm(64/4)"
    small = torchvision.models.resnet18()
    last = [d for d in mn.plan(small, example_inputs=torch.randn(1, 3, 32, 32)).decisions if d.name == "layer4.1.bn2"]
    assert "one element per channel" in last[0].reason  # of a 32×32 image nothing more is left there


def test_a_warm_start_at_another_eps_is_refused():
    with pytest.raises(ValueError, match="keeps the eps of the pretrained network"):
        mn.convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), mn.BCN(eps=1e-2), warm_steps=3)


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
