"""A residual 3-D U-Net with deep supervision, similar to nnU-Net's residual encoder."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.convert import norm_act, register_block

SLOPE = 0.01
"""Slope of the LeakyReLUs for negative values, as in nnU-Net."""


def _conv(inputs: int, outputs: int, kernel: int, *, stride: int = 1) -> nn.Conv3d:
    # no bias, because the norm after it has one
    return nn.Conv3d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


def _conv_norm_act(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(_conv(inputs, outputs, 3), nn.BatchNorm3d(outputs), nn.LeakyReLU(SLOPE, inplace=True))


class ResidualBlock3d(nn.Module):
    """act(norm(conv(act(norm(conv(x))))) + shortcut(x)); the first convolution and the shortcut take the stride.

    If the shape changes, the shortcut is a 1×1×1 convolution with a norm.
    """

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, 3, stride=stride)
        self.norm1 = nn.BatchNorm3d(outputs)
        self.conv2 = _conv(outputs, outputs, 3)
        self.norm2 = nn.BatchNorm3d(outputs)
        self.act = nn.LeakyReLU(SLOPE, inplace=True)
        self.shortcut = (
            nn.Identity()
            if inputs == outputs and stride == 1
            else nn.Sequential(_conv(inputs, outputs, 1, stride=stride), nn.BatchNorm3d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        """N×inputs×D×H×W to N×outputs×D/stride×H/stride×W/stride."""
        y = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(y)) + self.shortcut(x))


def _fused_block(self: ResidualBlock3d, x: Tensor) -> Tensor:
    y = norm_act(self.norm1, self.conv1(x), self.act)
    return norm_act(self.norm2, self.conv2(y), self.act, residual=self.shortcut(x))


register_block(ResidualBlock3d, _fused_block, fuses={"norm1": "act", "norm2": "add act"})


class ResidualUNet3d(nn.Module):
    """A U-Net of residual blocks. Every level but the first halves depth, height and width.

    On the way up, a transposed convolution doubles the size, the features of the way down are concatenated, and one
    convolution with a norm follows. Each level of the way up has a classifier.

    Args:
        widths: channels of each level, finest first.
        blocks: residual blocks of each level on the way down.
        classes: outputs per voxel.
        inputs: channels of the volumes.

    Returns:
        In training mode the logits of all levels, a list, finest first (deep supervision); in eval mode the finest:
        N×classes×D×H×W.

    Example:
        >>> network = ResidualUNet3d(widths=(8, 16, 32), blocks=(1, 1, 1), classes=3)
        >>> [tuple(logits.shape[2:]) for logits in network(torch.randn(1, 1, 8, 16, 8))]
        [(8, 16, 8), (4, 8, 4)]
        >>> network.eval()(torch.randn(1, 1, 8, 16, 8)).shape
        torch.Size([1, 3, 8, 16, 8])
    """

    def __init__(self, *, widths: Sequence[int], blocks: Sequence[int], classes: int, inputs: int = 1) -> None:
        super().__init__()
        self.stem = _conv_norm_act(inputs, widths[0])
        self.down = nn.ModuleList()
        before = widths[0]
        for level, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            first = ResidualBlock3d(before, width, stride=2 if level else 1)
            self.down.append(nn.Sequential(first, *(ResidualBlock3d(width, width) for _ in range(count - 1))))
            before = width
        levels = list(zip(widths[1:], widths[:-1], strict=True))[::-1]  # coarsest first
        self.enlarge = nn.ModuleList(nn.ConvTranspose3d(coarse, fine, 2, stride=2) for coarse, fine in levels)
        self.up = nn.ModuleList(_conv_norm_act(2 * fine, fine) for _, fine in levels)
        self.classifiers = nn.ModuleList(nn.Conv3d(fine, classes, 1) for _, fine in levels)
        for module in self.modules():
            if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
                nn.init.kaiming_normal_(module.weight, a=SLOPE)

    def forward(self, x: Tensor) -> Any:
        """N×inputs×D×H×W, each size a multiple of 2 to the number of levels below the first."""
        y = self.stem(x)
        features = []
        for level in self.down:
            y = level(y)
            features.append(y)
        logits = []
        steps = zip(self.enlarge, self.up, self.classifiers, features[-2::-1], strict=True)
        for enlarge, up, classifier, skipped in steps:
            y = up(torch.cat([enlarge(y), skipped], 1))
            logits.append(classifier(y))
        return logits[::-1] if self.training else logits[-1]
