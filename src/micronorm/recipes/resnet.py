"""torchvision's ResNets, the classifiers and backbones of the recipes. torchvision is imported when one is built."""

import importlib
from collections.abc import Sequence
from typing import Any

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
