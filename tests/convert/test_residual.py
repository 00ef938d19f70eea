"""The zero start of residual branches, which `zero_init_residual=True` finds in the data flow."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import micronorm as mn
from micronorm.recipes.networks import build_network

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")


def zeroed(model: nn.Module) -> list[str]:
    """Return the names of the norms whose weight is zero; of a BatchChannelNorm, whose group weight is."""
    names = []
    for name, module in model.named_modules():
        weight = getattr(module, "group_weight", getattr(module, "weight", None))
        if isinstance(weight, nn.Parameter) and weight.ndim == 1 and not weight.any():
            names.append(name)
    return names


def branch_ends(model: nn.Module) -> list[str]:
    return [d.name for d in mn.plan(model, zero_init_residual=True).decisions if d.zero]


NETWORKS = {
    "torchvision resnet18": (lambda: torchvision.models.resnet18(), ".bn2", 8),
    "torchvision resnet50": (lambda: torchvision.models.resnet50(), ".bn3", 16),
    "timm resnet50d": (lambda: timm.create_model("resnet50d", zero_init_last=False), ".bn3", 16),
    "timm seresnet50 with stochastic depth": (
        lambda: timm.create_model("seresnet50", zero_init_last=False, drop_path_rate=0.1),
        ".bn3",
        16,
    ),
    "mobilenet_v2": (lambda: torchvision.models.mobilenet_v2(), ".conv.3", 10),
    "ours": (lambda: build_network("cifar-resnet110", classes=10), ".norm2", 54),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_branches_of_known_networks_end_in_their_last_norms(name):
    make, suffix, count = NETWORKS[name]
    ends = branch_ends(make())
    assert len(ends) == count
    assert all(end.endswith(suffix) for end in ends)


def test_a_network_that_torch_fx_cannot_trace_has_the_same_branches():
    class Untraceable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torchvision.models.resnet18(num_classes=4)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) if x.sum() >= 0 else self.net(-x)

    plan = mn.plan(Untraceable(), zero_init_residual=True, example_inputs=torch.ones(1, 3, 32, 32))
    assert plan.pairing == "execution"
    assert [d.name.removeprefix("net.") for d in plan.decisions if d.zero] == branch_ends(torchvision.models.resnet18())


@pytest.mark.parametrize(
    "norm, weight",
    [(mn.BCN(), mn.WS()), (mn.GN(), mn.WS()), (mn.BN(), None), (mn.FRN(), None), (None, mn.WS())],
    ids=str,
)
def test_each_block_starts_as_its_shortcut(norm, weight):
    model = torchvision.models.resnet18(num_classes=4)
    plan = mn.plan(model, norm, weight, zero_init_residual=True)
    ends = [d.name for d in plan.decisions if d.zero]
    assert plan.totals["residual branches that start at zero"] == len(ends) == 8
    assert "8 residual branches that start at zero" in plan.summary()
    model = plan.apply().eval()
    assert zeroed(model) == ends
    x = torch.randn(2, 64, 8, 8, generator=torch.Generator().manual_seed(0)).relu()
    assert torch.equal(model.layer1(x), x)  # type: ignore[operator]
    F.cross_entropy(model.train()(torch.randn(2, 3, 64, 64)), torch.tensor([0, 1])).backward()
    for name in ends:  # the branch can leave zero
        layer = model.get_submodule(name)
        assert getattr(layer, "group_weight", layer.weight).grad.any(), name


def test_without_the_option_no_branch_starts_at_zero():
    assert zeroed(mn.convert(torchvision.models.resnet18())) == []


class Block(nn.Module):
    """A residual block whose forward the tests choose."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def branch(self, x: Tensor) -> Tensor:
        return self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))


class ActivatedBranch(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.branch(x))


class SumOfTwo(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm1(self.conv1(x)) + self.norm2(self.conv2(x))


class BranchUsedTwice(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.branch(x)
        return x + y, y


class NoAddition(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.branch(x)], 1)


@pytest.mark.parametrize("kind", [ActivatedBranch, SumOfTwo, BranchUsedTwice, NoAddition])
def test_a_network_without_a_branch_that_may_start_at_zero_raises(kind):
    with pytest.raises(ValueError, match="no residual branch that ends in a trainable norm"):
        mn.convert(kind(), zero_init_residual=True)


@pytest.mark.filterwarnings("ignore:.*BatchNorm stays:UserWarning")
def test_frozen_and_filtered_norms_keep_their_weights():
    model = torchvision.models.resnet18()
    model.layer1.requires_grad_(False)
    model.layer2[0].bn2.weight.requires_grad_(False)
    mn.convert(model, filter=lambda module, name: not name.startswith("layer4"), zero_init_residual=True)
    assert zeroed(model) == ["layer2.1.bn2", "layer3.0.bn2", "layer3.1.bn2"]


def test_a_converted_network_can_be_given_the_zero_start():
    model = mn.convert(torchvision.models.resnet18())
    assert len(zeroed(mn.convert(model, zero_init_residual=True))) == 8


def test_a_warm_start_and_a_zero_start_contradict_each_other():
    with pytest.raises(ValueError, match="use only one"):
        mn.plan(torchvision.models.resnet18(), warm_steps=10, zero_init_residual=True)


def test_a_norm_without_a_weight_is_refused_before_anything_changes():
    class Bare(mn.nn.NormSpec):
        def __call__(self, num_channels: int, *, dims: int = 2) -> nn.Module:
            return nn.InstanceNorm2d(num_channels)

    model = torchvision.models.resnet18()
    with pytest.raises(ValueError, match="needs a norm with a weight, but InstanceNorm2d has none"):
        mn.convert(model, Bare(), None, zero_init_residual=True)
    assert isinstance(model.bn1, nn.BatchNorm2d)
