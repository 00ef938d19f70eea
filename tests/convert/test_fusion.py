"""Norms that compute what follows them: which do, and that nothing else changes."""

import re
from collections import OrderedDict
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import micronorm as mn
from tests.convert.fused import assert_same_bits, calls, converted, unfused

RELU, ADD, ADD_RELU = "with the ReLU after it", "with the add after it", "with the add and the ReLU after it"
IMAGE = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(2))


class Block(nn.Module):
    """Two convolutions with norms, and a shared rectifier; a subclass says what it does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.flag = False


class Residual(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class Functions(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.bn1(self.conv1(x)), 0.3)
        return torch.relu(torch.add(x, self.bn2(self.conv2(y)))) + F.silu(self.bn1(x)) + self.bn2(x).relu_()


class AddAlone(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.bn1(self.conv1(x)).add_(x)) + F.silu(self.bn2(x) + x)


class TwoNorms(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn1(self.conv1(x)) + self.bn2(self.conv2(x)))


class Identities(Block):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.drop(self.bn1(self.conv1(x)))) + self.relu(self.drop(self.bn2(self.conv2(x)) + x))


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)) + x)
        return x


FUSED: dict[str, tuple[Any, dict[str, str]]] = {
    "a shared rectifier and a sum in place": (Residual, {"bn1": RELU, "bn2": ADD_RELU}),
    "functions": (Functions, {"bn1": "with the LeakyReLU after it", "bn2": ADD_RELU}),
    "a sum alone": (AddAlone, {"bn1": ADD, "bn2": ADD}),
    "a sum of two norms": (TwoNorms, {"bn1": "it is followed by an add that another norm takes", "bn2": ADD_RELU}),
    "identities between": (Identities, {"bn1": RELU, "bn2": ADD_RELU}),
    "norms in a list": (Listed, {"norms.0": ADD_RELU, "norms.1": ADD_RELU}),
    "a row": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.SiLU()), {"1": "with the SiLU after it"}),
}


@pytest.mark.parametrize("name", FUSED)
def test_fusing_changes_no_bit(name):
    build, expected = FUSED[name]
    model, said = converted(build)
    assert said == expected
    assert "forward" in vars(model)
    assert any(calls(model, IMAGE))
    assert not any(calls(unfused(model), IMAGE))
    assert_same_bits(model, IMAGE)


# --- what must not be fused ------------------------------------------------------------------------------------------


class UsedTwice(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x))
        return self.relu(y) * self.relu(self.bn2(self.conv2(x)) - y)


class Alpha(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(torch.add(self.bn1(self.conv1(x)), x, alpha=2)) + self.relu(self.bn2(x) + 1.5)


class OtherWrittenTo(Block):
    def forward(self, x: Tensor) -> Tensor:
        skip = self.conv1(x)
        same = skip
        skip += self.bn1(x)
        return self.relu(self.bn2(same) + skip)


class InputWrittenTo(Block):
    """The norm may not be called later than it is: what it is given changes in between."""

    def forward(self, x: Tensor) -> Tensor:
        c = self.conv1(x)
        y = self.bn1(c)
        z = F.relu_(c)
        return self.relu(y + z) + self.bn2(z)


class OwnParameter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn1(self.conv1(x)) + self.shift) + self.bn2(x)


class AsksForTensors(Block):
    def forward(self, x: Tensor | list[Tensor]) -> Tensor:
        x = x if isinstance(x, Tensor) else torch.cat(x)
        return self.relu(self.bn1(self.conv1(x))) + self.bn2(x)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


class AsksElsewhere(Block):
    def forward(self, x: Any) -> Tensor:
        return self.relu(self.bn1(self.conv1(x))) + self.bn2(x) if _is_tensor(x) else x[0]


class TrainsOtherwise(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x))) + self.bn2(x)
        return y * 2 if self.training else y


class Counts(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = 1
        return self.relu(self.bn1(self.conv1(x))) + self.bn2(x)


class Collects(Block):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.append(1)
        return self.relu(self.bn1(self.conv1(x))) + self.bn2(x)


class WithoutGradients(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.relu(self.bn1(self.conv1(x)))
        return x + self.bn2(x)


class Checkpointed(Block):
    def body(self, x: Tensor) -> Tensor:
        return self.relu(self.bn1(self.conv1(x))) + self.bn2(x)

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)  # type: ignore[return-value]


class Draws(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x))) + self.bn2(x)
        return y if torch.rand(()).item() < 2 else x


class Branches(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x))) + self.bn2(x)
        return y if x.shape[0] > 1 else y * 2


class ReturnsItsOwn(Block):
    def forward(self, x: Tensor) -> Any:
        return OrderedDict(y=self.relu(self.bn1(self.conv1(x))) + self.bn2(x))


def with_rectifier_watched() -> nn.Module:
    model = Residual()
    model.relu.register_forward_hook(lambda module, args, output: output * 2)
    return model


def with_norms_watched() -> nn.Module:
    model = Residual()
    for norm in (model.bn1, model.bn2):
        norm.register_forward_hook(lambda module, args, output: output + 1)
    return model


UNFUSED: dict[str, tuple[Any, str]] = {
    "used twice": (UsedTwice, "its output is used more than once"),
    "alpha": (Alpha, "it is followed by add"),
    "its right-hand side": (OtherWrittenTo, "it is followed by iadd"),
    "a parameter is added": (OwnParameter, "it is followed by add"),
    "isinstance": (AsksForTensors, "AsksForTensors looks at the type of its input"),
    "isinstance out of sight": (AsksElsewhere, "AsksElsewhere looks at the type of its input"),
    "training": (TrainsOtherwise, "does one thing in training and another in eval mode"),
    "a write": (Counts, "Counts writes to self.seen"),
    "a list": (Collects, "Collects changes self.shapes"),
    "no_grad": (WithoutGradients, "turns gradients on or off|has a with statement"),
    "checkpointing": (Checkpointed, r"^Checkpointed "),
    "random numbers": (Draws, "draws random numbers outside its layers"),
    "a branch on a size": (Branches, "cannot be traced"),
    "a class of its own": (ReturnsItsOwn, "passes on a OrderedDict"),
    "hooks on the rectifier": (with_rectifier_watched, "hooks look at the ReLU after it"),
    "hooks on the norms": (with_norms_watched, "hooks look at its output"),
}


@pytest.mark.parametrize("name", UNFUSED)
def test_what_cannot_be_fused_says_why_and_computes_what_it_did(name):
    build, why = UNFUSED[name]
    model, said = converted(build)
    assert re.search(why, said["bn1"])
    assert_same_bits(model, IMAGE)


def test_a_norm_is_not_called_later_where_its_input_changes_in_between():
    model, said = converted(InputWrittenTo)
    assert said["bn1"] == "relu_ runs between it and the add"
    with torch.no_grad():
        assert torch.equal(model(IMAGE), unfused(model)(IMAGE))


def test_a_forward_that_somebody_put_on_the_module_stays():
    model = Residual()
    model.forward = lambda x: x + 1  # type: ignore[method-assign]
    model, said = converted(lambda: model, example_inputs=IMAGE)
    assert said["bn1"] == "Residual has a forward of its own on the instance"
    assert torch.equal(model(IMAGE), IMAGE + 1)


def test_tracing_leaves_the_model_as_it_was():
    model = Collects()
    model.bn1.register_buffer("mine", torch.zeros(1))
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    mn.plan(model)
    assert model.shapes == []
    assert before == {name: set(vars(module)) for name, module in model.named_modules()}
    assert all(module.training for module in model.modules())
    assert "__getattribute__" not in vars(nn.Module)


# --- networks --------------------------------------------------------------------------------------------------------

NETWORKS: dict[str, tuple[Any, tuple[int, int]]] = {  # norms that are fused, of how many
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=4), (17, 20)),
    "bottlenecks": (lambda: torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [1, 1, 1, 1]), (13, 17)),
    "mobilenet_v3": (lambda: torchvision.models.mobilenet_v3_small(num_classes=4), (5, 34)),
    "densenet": (lambda: torchvision.models.DenseNet(8, (2, 2), 8, num_classes=4), (2, 11)),
    "timm resnet26d": (lambda: timm.create_model("resnet26d", num_classes=4), (27, 31)),
}


@pytest.mark.filterwarnings("ignore:.*normalizes over groups of:UserWarning")
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_computes_the_same_bits(name):
    build, (fused, total) = NETWORKS[name]
    model, said = converted(build)
    assert (sum(text.startswith("with ") for text in said.values()), len(said)) == (fused, total)
    assert_same_bits(model, torch.randn(1, 3, 32, 32))


# --- group, layer and instance normalization -------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [mn.GN(groups=2, min_channels_per_group=1), mn.LN(), mn.IN()], ids=repr)
@pytest.mark.parametrize("build", [Residual, Functions, TwoNorms], ids=lambda kind: kind.__name__)
def test_group_norms_take_what_follows_them_as_bcn_does(spec, build):
    model, said = converted(build, norm=spec)
    _, of_bcn = converted(build)
    assert said == of_bcn
    assert any(text.startswith("with") for text in said.values())
    assert_same_bits(model, IMAGE)


def test_a_fused_group_norm_is_called_with_the_activation_and_the_residual(monkeypatch):
    model, _ = converted(Residual, norm=mn.GN())
    seen = []
    forward = mn.nn.GroupNorm.forward
    monkeypatch.setattr(
        mn.nn.GroupNorm, "forward", lambda self, x, **options: seen.append(options) or forward(self, x, **options)
    )
    model(IMAGE)
    assert [options["activation"] for options in seen] == ["relu", "relu"]
    assert torch.equal(seen[1]["residual"], IMAGE)
