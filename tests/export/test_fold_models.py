"""Folding whole networks: each is converted, given statistics and affines, and trained for a step.

tests/convert/test_models.py folds many more.
"""

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import micronorm as mn
from tests.export.networks import assert_folds, kinds, randomized, trained
from tests.tolerances import assert_close_to_max, tolerance


class UNet(nn.Module):
    """Two levels, transposed convolutions upwards, skip connections by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self.level(3, 8), self.level(8, 16, stride=2)
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 8, 2, stride=2), nn.BatchNorm2d(8), nn.ReLU())
        self.merge, self.head = self.level(16, 8), nn.Conv2d(8, 2, 1)

    @staticmethod
    def level(i: int, o: int, stride: int = 1) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(i, o, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        return self.head(self.merge(torch.cat([fine, self.up(self.down2(fine))], 1)))


# name -> how to build it, its input, how many BatchNorms and GroupNorms the folded model has
MODELS = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=10), (1, 3, 64, 64), (0, 20)),
    "densenet121": (lambda: torchvision.models.densenet121(num_classes=10), (1, 3, 64, 64), (62, 121)),
    "efficientnet_b0": (lambda: timm.create_model("efficientnet_b0", num_classes=10), (1, 3, 64, 64), (0, 49)),
    "tf_efficientnet_b0": (lambda: timm.create_model("tf_efficientnet_b0", num_classes=10), (1, 3, 64, 64), (0, 49)),
    "mobilenetv3": (lambda: torchvision.models.mobilenet_v3_small(num_classes=10), (1, 3, 64, 64), (0, 34)),
    "repvgg": (lambda: timm.create_model("repvgg_a0", num_classes=10), (1, 3, 64, 64), (17, 61)),
    "pre-activation": (lambda: timm.create_model("resnetv2_50", num_classes=10), (1, 3, 64, 64), (17, 49)),
    "levit": (lambda: timm.create_model("levit_128s", num_classes=10), (1, 3, 224, 224), (48, 52)),
    "r3d_18": (lambda: torchvision.models.video.r3d_18(num_classes=10), (1, 3, 4, 32, 32), (0, 20)),
    "unet": (UNet, (2, 3, 16, 16), (0, 4)),
}


SLOW = ("r3d_18",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in MODELS])
def test_folding_a_network_does_not_change_its_function(name):
    build, shape, (batch_norms, group_norms) = MODELS[name]
    x = torch.randn(shape)
    model = trained(randomized(mn.convert(build())), x)
    folded = assert_folds(model, x)
    found = kinds(folded, "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
    assert (sum(found), *kinds(folded, "GroupNorm")) == (batch_norms, group_norms)


def test_a_detector_that_only_runs_folds():
    build = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn
    model = randomized(mn.convert(build(weights=None, weights_backbone=None, num_classes=3))).eval()
    folded = mn.fold(model)
    assert kinds(folded, "GroupNorm") == kinds(model, "BatchChannelNorm")
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():  # detections are cut off at a score, which a rounding may cross; features are not
        features = zip(folded.backbone(x).values(), model.backbone(x).values(), strict=True)
        for actual, expected in features:
            assert_close_to_max(actual, expected, tol=tolerance("folded", torch.float32))
        assert folded([torch.rand(3, 64, 64)])[0].keys() == {"boxes", "labels", "scores"}


def test_a_network_converted_to_start_as_it_was_folds_back_to_convolutions_alone():
    model = torchvision.models.resnet18(num_classes=10).eval()
    x = torch.randn(1, 3, 64, 64)
    mn.convert(model, warm_steps=10)
    assert kinds(assert_folds(model, x), "GroupNorm", "BatchNorm2d") == [0, 0]
