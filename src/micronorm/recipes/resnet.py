"""torchvision's ResNets, the classifiers and backbones of the recipes, and DeepLabV3 on a dilated one (table `voc`).

torchvision is imported when a network is built.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RN50, RN101 = (3, 4, 6, 3), (3, 4, 23, 3)
"""Bottleneck blocks of each stage."""


def import_torchvision(module: str) -> Any:
    """Return a module of torchvision. Raise ImportError with the command that installs it if it is missing."""
    try:
        return importlib.import_module(f"torchvision.{module}")
    except ImportError as error:
        raise ImportError(
            "the network is made of torchvision's, which is not installed: pip install torchvision"
        ) from error


def build_resnet(blocks: Sequence[int], *, classes: int = 1000, **options: Any) -> Any:
    """Build torchvision's bottleneck ResNet; the last norm of each residual block starts at weight 0.

    The paper does not say how its networks start; the authors' code zeroes that norm. torchvision has no function for
    ResNeXt-101 32×4d, so this uses its class.

    Args:
        blocks: bottleneck blocks of each stage.
        classes: outputs of the classifier.
        options: further arguments of torchvision's ResNet.

    Example:
        >>> build_resnet((1, 1, 1, 1), classes=7).fc.out_features
        7
    """
    resnet = import_torchvision("models.resnet")
    options = {"zero_init_residual": True, **options}
    return resnet.ResNet(resnet.Bottleneck, list(blocks), num_classes=classes, **options)


RATES = (6, 12, 18)
"""Dilations of the 3×3 branches, for output stride 16."""


class AtrousPyramid(nn.Module):
    """Atrous spatial pyramid pooling: a 1×1 branch, one 3×3 branch per rate, and the image's mean; then a 1×1.

    Args:
        inputs: channels of the features.
        width: channels of each branch and of the output.
        rates: dilations of the 3×3 branches.
    """

    def __init__(self, inputs: int, width: int = 256, *, rates: Sequence[int] = RATES) -> None:
        super().__init__()
        self.branches = nn.ModuleList([_branch(inputs, width, 1), *(_branch(inputs, width, 3, r) for r in rates)])
        self.image = _branch(inputs, width, 1)
        self.project = _branch((len(rates) + 2) * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """N×inputs×H×W to N×width×H×W."""
        mean = self.image(x.mean((2, 3), keepdim=True)).expand(-1, -1, x.shape[2], x.shape[3])
        return self.project(torch.cat([*(branch(x) for branch in self.branches), mean], 1))


def _branch(inputs: int, outputs: int, kernel: int, rate: int = 1) -> nn.Sequential:
    padding = rate * (kernel // 2)
    conv = nn.Conv2d(inputs, outputs, kernel, padding=padding, dilation=rate, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class DeepLabV3(nn.Module):
    """A ResNet of output stride 16, the pyramid, and a plain 1×1 convolution; logits are enlarged to the image.

    The backbone is torchvision's; in its last stage all three blocks have dilation 2 (multi-grid 1, 1, 1), where
    torchvision leaves the first at 1. The last norm of each residual block starts at zero.

    Args:
        blocks: bottleneck blocks of each stage.
        classes: outputs per pixel.

    Example:
        >>> DeepLabV3((1, 1, 1, 1), classes=21).eval()(torch.randn(1, 3, 33, 49)).shape
        torch.Size([1, 21, 33, 49])
    """

    def __init__(self, blocks: Sequence[int], *, classes: int) -> None:
        super().__init__()
        self.backbone = _dilated_resnet(blocks)
        self.pyramid = AtrousPyramid(2048)
        self.classifier = nn.Conv2d(256, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """N×3×H×W images to N×classes×H×W logits."""
        logits = self.classifier(self.pyramid(self.backbone(x)))
        return F.interpolate(logits, x.shape[2:], mode="bilinear", align_corners=False)


def _dilated_resnet(blocks: Sequence[int]) -> nn.Module:
    """Return torchvision's ResNet without its classifier, as a Sequential with the names of its parts."""
    whole = build_resnet(blocks, replace_stride_with_dilation=[False, False, True])
    first = whole.layer4[0].conv2
    first.dilation = first.padding = (2, 2)
    chain = nn.Sequential()
    for name in ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4"):
        chain.add_module(name, getattr(whole, name))
    return chain
