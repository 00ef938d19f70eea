"""Which conversions keep the function a network computes, and which do not: the table of docs/conversion.md."""

import copy

import pytest
import torch
from torch import Tensor, nn

import micronorm as mn
from tests.tolerances import assert_close_to_max, tolerance

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")

BATCH, SYNC, FROZEN, GROUP, INSTANCE = "BN", "SyncBN", "FrozenBN", "GN", "IN"
NORMS = {
    BATCH: nn.BatchNorm2d,
    FROZEN: torchvision.ops.FrozenBatchNorm2d,
    GROUP: lambda c: nn.GroupNorm(32, c),
    INSTANCE: lambda c: nn.InstanceNorm2d(c, affine=True),
}


def trained_like(model: nn.Module) -> nn.Module:
    """Affines and statistics as training leaves them: neither zero nor the identity."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if not hasattr(module, "eps"):  # which every norm has
            continue
        for name, tensor in module.state_dict().items():
            if name in ("running_var", "weight"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
            elif name in ("running_mean", "bias"):
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model.double().eval()


def resnet(norm: str) -> nn.Module:
    torch.manual_seed(0)
    block, norm_layer = torchvision.models.resnet.BasicBlock, NORMS.get(norm, nn.BatchNorm2d)
    model = trained_like(torchvision.models.ResNet(block, [1, 1, 1, 1], num_classes=10, norm_layer=norm_layer))
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if norm == SYNC else model


def outputs(model: nn.Module) -> Tensor:
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        return model(x)


ROUNDING = tolerance("one_step", torch.float64)  # two equal computations, through a whole network
CHANGED = 0.01  # of the largest output, at least


@pytest.mark.parametrize(
    "norm, arguments, options",
    [
        (BATCH, (mn.BCN(),), {"warm_steps": 10}),
        (BATCH, (mn.BCN(), None), {"warm_steps": 10}),
        (BATCH, (mn.BCN(), mn.WN()), {"warm_steps": 10}),
        (SYNC, (mn.BCN(),), {"warm_steps": 10}),
        (FROZEN, (mn.BCN(),), {"warm_steps": 10}),
        (BATCH, (None, mn.WS()), {"absorb": True}),
        (BATCH, (None, mn.WN()), {}),
        (BATCH, (mn.BN(micro_batch=1), None), {}),
        (INSTANCE, (mn.IN(), None), {}),
    ],
    ids=str,
)
def test_these_conversions_keep_the_function(norm, arguments, options):
    model = resnet(norm)
    expected = outputs(model)
    assert_close_to_max(outputs(mn.convert(model, *arguments, **options)), expected, tol=ROUNDING)


@pytest.mark.parametrize(
    "norm, arguments, options",
    [
        (BATCH, (mn.BCN(),), {}),
        (BATCH, (mn.BCN(), None), {}),
        (BATCH, (mn.BCN(),), {"absorb": True}),
        (BATCH, (mn.BCN(statistics="batch"), None), {}),
        (FROZEN, (mn.BCN(), None), {}),
        (BATCH, (mn.GN(), None), {}),
        (GROUP, (mn.BCN(), None), {}),
        (GROUP, (mn.BCN(), None), {"warm_steps": 10}),
        (GROUP, (mn.GN(groups=16), None), {}),
        (INSTANCE, (mn.BCN(), None), {}),
        (BATCH, (None, mn.WS()), {}),
        (BATCH, (None, mn.CWN()), {}),
    ],
    ids=str,
)
def test_these_conversions_change_the_function(norm, arguments, options):
    model = resnet(norm)
    expected = outputs(model)
    actual = outputs(mn.convert(model, *arguments, **options))
    assert (actual - expected).abs().max() > CHANGED * expected.abs().max()


@pytest.mark.parametrize("name, options", [("resnetv2_50x1_bit", {}), ("vit_small_r26_s32_224", {"img_size": 64})])
def test_timms_standardized_convolutions_go_on_as_ours(name, options):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, **options).double().eval()
    theirs = sum(type(m).__name__ in ("StdConv2d", "StdConv2dSame") for m in model.modules())
    expected = outputs(model)
    model = mn.convert(model, norm=None)
    ours = [m for m in model.modules() if isinstance(m, mn.nn.WSConv2d | mn.nn.WSConv2dSame)]
    assert len(ours) == theirs > 0
    assert {layer.eps for layer in ours} <= {1e-8, 1e-6}
    assert_close_to_max(outputs(model), expected, tol=ROUNDING)


@pytest.mark.parametrize("name", ["efficientnet_b0", "tf_efficientnet_b0", "regnety_002", "densenet121"])
def test_a_warm_conversion_of_timms_networks_starts_as_they_are(name):
    torch.manual_seed(0)
    model = trained_like(timm.create_model(name, num_classes=10))
    expected = outputs(model)
    assert_close_to_max(outputs(mn.convert(model, warm_steps=10)), expected, tol=ROUNDING)


def test_in_float32_a_warm_start_is_the_network_to_a_hundred_thousandth():
    model = resnet(BATCH).float()
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(x)
        actual = mn.convert(copy.deepcopy(model), warm_steps=10)(x)
    assert_close_to_max(actual, expected, tol=tolerance("one_step", torch.float32))


def test_a_warm_start_ends_as_the_abrupt_conversion_with_absorbed_kernels_begins():
    warm, abrupt = (mn.convert(resnet(BATCH), absorb=True, warm_steps=steps) for steps in (10, 0))
    for layer in warm.modules():
        if isinstance(layer, mn.nn.BatchChannelNorm):
            layer.blend.fill_(1)  # as ten commits leave it
    assert torch.equal(outputs(warm), outputs(abrupt))
