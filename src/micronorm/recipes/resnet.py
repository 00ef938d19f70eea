"""torchvision's ResNets, the classifiers and backbones of the recipes, and DeepLabV3 on a dilated one (table `voc`).

torchvision is imported when a network is built.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.data.files import import_optional

RN50, RN101 = (3, 4, 6, 3), (3, 4, 23, 3)
"""Bottleneck blocks of each stage."""


def import_torchvision(module: str) -> Any:
    """Return a module of torchvision. Raise ImportError with the command that installs it if it is missing."""
    return import_optional(f"torchvision.{module}", "networks made of torchvision's", "torchvision")


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


class DeepLabV3(nn.Module):
    """A ResNet of output stride 16, atrous spatial pyramid pooling, and a plain 1×1 convolution.

    Logits are enlarged to the image. Backbone and pyramid are torchvision's. In the last stage of the backbone all
    three blocks have dilation 2 (multi-grid 1, 1, 1), where torchvision leaves the first at 1. The last norm of each
    residual block starts at zero.

    Args:
        blocks: bottleneck blocks of each stage.
        classes: outputs per pixel.

    Example:
        >>> import torch
        >>> DeepLabV3((1, 1, 1, 1), classes=21).eval()(torch.randn(1, 3, 33, 49)).shape
        torch.Size([1, 21, 33, 49])
    """

    def __init__(self, blocks: Sequence[int], *, classes: int) -> None:
        super().__init__()
        self.backbone = _dilated_resnet(blocks)
        self.pyramid = import_torchvision("models.segmentation.deeplabv3").ASPP(2048, RATES, 256)
        self.pyramid.project[3].p = 0.0  # the paper names no dropout
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
    names = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
    return nn.Sequential(OrderedDict((name, getattr(whole, name)) for name in names))
