"""The temporal shift: what moves where, which layers read it, and what conversion and folding make of it."""

import copy

import pytest
import torch
from torch import nn

import micronorm as mn
from micronorm.recipes.networks import build_network
from micronorm.recipes.temporal_shift import ClipNetwork, TemporalShift, temporal_shift
from tests.tolerances import assert_close_to_max, tolerance

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")


def small(frames=4, **options):
    torch.manual_seed(0)
    return temporal_shift(build_network("cifar-resnet20", classes=5), frames=frames, **options)


def shifted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if module._forward_pre_hooks]


def test_an_eighth_of_the_channels_comes_from_each_neighbour():
    x = torch.randn(2, 5, 16, 3, 3)
    y = TemporalShift(frames=5)(x.flatten(0, 1)).unflatten(0, (2, 5))
    for t in range(5):
        after = x[:, t + 1] if t < 4 else torch.zeros_like(x[:, 0])
        before = x[:, t - 1] if t else torch.zeros_like(x[:, 0])
        assert torch.equal(y[:, t, :2], after[:, :2])
        assert torch.equal(y[:, t, 2:4], before[:, 2:4])
        assert torch.equal(y[:, t, 4:], x[:, t, 4:])


def test_channels_last_stays_channels_last():
    x = torch.randn(4, 16, 3, 3).to(memory_format=torch.channels_last)
    assert TemporalShift(frames=2)(x).is_contiguous(memory_format=torch.channels_last)


NETWORKS = {
    "torchvision resnet18": (lambda: torchvision.models.resnet18(), ".conv1", 8),
    "torchvision resnet50": (lambda: torchvision.models.resnet50(), ".conv1", 16),
    "timm resnet26d": (lambda: timm.create_model("resnet26d"), ".conv1", 8),
    "timm seresnet50": (lambda: timm.create_model("seresnet50"), ".conv1", 16),
    "mobilenet_v2": (lambda: torchvision.models.mobilenet_v2(), ".conv.0.0", 10),
    "converted": (lambda: mn.convert(torchvision.models.resnet18()), ".conv1", 8),
    "ours": (lambda: build_network("cifar-resnet20", classes=10), ".conv1", 9),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_first_convolution_of_each_residual_branch_reads_shifted_frames(name):
    make, suffix, count = NETWORKS[name]
    network = make()
    keys = list(network.state_dict())
    found = shifted(temporal_shift(network))
    assert len(found) == count
    assert all(layer.endswith(suffix) for layer in found)
    assert list(network.state_dict()) == keys


def test_the_order_of_the_frames_counts_only_with_the_shift():
    clips = torch.randn(2, 4, 3, 16, 16)
    blind = ClipNetwork(build_network("cifar-resnet20", classes=5), frames=4).eval()
    assert_close_to_max(blind(clips.flip(1)), blind(clips), tol=tolerance("output", torch.float32))
    model = small().eval()
    assert (model(clips.flip(1)) - model(clips)).abs().max() > 1e-3 * model(clips).abs().max()


def test_conversion_before_and_after_the_shift_gives_the_same_network():
    before = temporal_shift(mn.convert(build_network("cifar-resnet20", classes=5)), frames=4)
    after = mn.convert(small())
    assert shifted(before) == shifted(after)
    after.load_state_dict(before.state_dict())
    clips = torch.randn(2, 4, 3, 16, 16)
    assert torch.equal(after(clips), before(clips))
    assert torch.equal(copy.deepcopy(after)(clips), before(clips))


def test_a_folded_network_still_shifts_and_every_norm_goes_into_its_convolution():
    model = mn.convert(small()).double().eval()
    clips = torch.randn(2, 4, 3, 16, 16, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, mn.nn.BatchChannelNorm):
            module.running_mean.normal_()
    folded = mn.fold(model)
    assert shifted(folded) == shifted(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert_close_to_max(folded(clips), model(clips), tol=tolerance("folded", torch.float64))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"Sequential has no residual branch that begins with a Conv2d, .* by fx"):
        temporal_shift(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()))
    network = build_network("cifar-resnet20", classes=5)
    temporal_shift(network)
    with pytest.raises(ValueError, match="shifts its frames already; call temporal_shift once"):
        temporal_shift(network)
    with pytest.raises(ValueError, match="1/32 of 16 channels is less than one channel; give a smaller share"):
        small(share=32)
    with pytest.raises(ValueError, match=r"clips of shape N×4×C×H×W, got \(2, 8, 3, 16, 16\)"):
        small()(torch.randn(2, 8, 3, 16, 16))
    with pytest.raises(ValueError, match="frames must be at least 1 and share at least 2, got 0 and 8"):
        TemporalShift(0)
