"""What a trace must not do to a model, and what it must see: findings of a review, each once wrong."""

import types
from abc import abstractmethod

import pytest
import torch
import torch.nn.functional as F
import torchvision
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
    with pytest.raises(ValueError, match="at its own eps"):
        mn.convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), mn.BCN(eps=1e-2), warm_steps=3)


def test_calibration_drops_what_was_gathered_around_the_old_statistics():
    norm = mn.nn.BatchChannelNorm(4, 2, rate=1.0)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    norm(torch.randn(2, 4, 8, 8) + 10)
    mn.calibrate(norm, [torch.randn(2, 4, 8, 8) + 100])
    calibrated = norm.running_mean.clone()
    optimizer.step()
    assert torch.equal(norm.running_mean, calibrated)


def test_norms_that_evaluation_does_not_reach_keep_their_statistics_with_a_warning():
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.extra = mn.nn.BatchChannelNorm(4), mn.nn.BatchChannelNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x=self.extra(x) if self.training else x)

    model = Auxiliary()
    with pytest.warns(UserWarning, match="1 norms had no input in eval mode and keep their statistics: extra"):
        mn.calibrate(model, [torch.ones(1, 4, 2, 2)])
    assert model.norm.running_mean.eq(1).all()


def test_statistics_that_the_buffers_cannot_hold_are_refused():
    norm = nn.BatchNorm2d(4).half()
    with pytest.raises(ValueError, match="no finite statistics in its dtype"):
        mn.calibrate(norm, [torch.randn(2, 4, 8, 8).half() * 400])
    assert norm.running_var is not None
    assert norm.running_var.eq(1).all()


def test_calibrate_says_what_it_was_given_in_the_wrong_place():
    norm = mn.nn.BatchChannelNorm(4)
    with pytest.raises(TypeError, match="the model comes first, got list"):
        mn.calibrate([torch.ones(1, 4, 2, 2)], norm)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"one tensor of \(1, 4, 2, 2\)"):
        mn.calibrate(norm, torch.ones(1, 4, 2, 2))
