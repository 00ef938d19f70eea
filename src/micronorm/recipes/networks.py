"""The networks of the recipes, made of convolutions and BatchNorm, which conversion then replaces.

The networks for small images and for volumes are defined here. Those for ImageNet are torchvision's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.convert import norm_act, register_block
from micronorm.recipes.rcnn import build_rcnn
from micronorm.recipes.resnet import RN50, RN101, DeepLabV3, build_resnet
from micronorm.recipes.temporal_shift import ClipNetwork, temporal_shift

SLOPE = 0.01
"""Slope of the LeakyReLUs for negative values, as in nnU-Net."""


def _conv(inputs: int, outputs: int, kernel: int, *, stride: int = 1, dims: int = 2) -> nn.Module:
    # no bias, because the norm after it has one
    conv = {2: nn.Conv2d, 3: nn.Conv3d}[dims]
    return conv(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


def _norm(channels: int, *, dims: int = 2) -> nn.Module:
    return {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](channels)


class ResidualBlock(nn.Module):
    """act(norm(conv(act(norm(conv(x))))) + shortcut(x)); the first convolution and the shortcut take the stride.

    If the shape changes, the shortcut is a 1×1 convolution with a norm (option B of He et al.), as in the authors'
    CIFAR code. He et al.'s CIFAR networks used option A, without parameters.

    Args:
        inputs: channels of the input.
        outputs: channels of the output.
        stride: divides the size.
        dims: 2 for images, with ReLU; 3 for volumes, with nnU-Net's LeakyReLU.
    """

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1, dims: int = 2) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, 3, stride=stride, dims=dims)
        self.norm1 = _norm(outputs, dims=dims)
        self.conv2 = _conv(outputs, outputs, 3, dims=dims)
        self.norm2 = _norm(outputs, dims=dims)
        self.act = nn.ReLU() if dims == 2 else nn.LeakyReLU(SLOPE, inplace=True)
        self.shortcut = (
            nn.Identity()
            if inputs == outputs and stride == 1
            else nn.Sequential(_conv(inputs, outputs, 1, stride=stride, dims=dims), _norm(outputs, dims=dims))
        )

    def forward(self, x: Tensor) -> Tensor:
        """N×inputs×H×W to N×outputs×H/stride×W/stride, or the same for volumes."""
        y = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(y)) + self.shortcut(x))


def _fused_block(self: ResidualBlock, x: Tensor) -> Tensor:
    y = norm_act(self.norm1, self.conv1(x), self.act)
    return norm_act(self.norm2, self.conv2(y), self.act, residual=self.shortcut(x))


register_block(ResidualBlock, _fused_block, fuses={"norm1": "act", "norm2": "add act"})


class SmallImageResNet(nn.Module):
    """A residual network for small images: a 3×3 stem without pooling, stages of basic blocks, one classifier.

    Every stage but the first halves height and width. Convolutions start from Kaiming's normal distribution over the
    fan-out, norms from weight 1 and bias 0.

    Args:
        widths: channels of each stage; the stem has those of the first.
        blocks: blocks of each stage.
        classes: outputs of the classifier.
        inputs: channels of the images.

    Example:
        >>> SmallImageResNet(widths=(16, 32, 64), blocks=(3, 3, 3), classes=10)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, *, widths: Sequence[int], blocks: Sequence[int], classes: int, inputs: int = 3) -> None:
        super().__init__()
        self.conv = _conv(inputs, widths[0], 3)
        self.norm = nn.BatchNorm2d(widths[0])
        stages = []
        before = widths[0]
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            first = ResidualBlock(before, width, stride=2 if stage else 1)
            stages.append(nn.Sequential(first, *(ResidualBlock(width, width) for _ in range(count - 1))))
            before = width
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(before, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """N×inputs×H×W images to N×classes."""
        y = self.stages(F.relu(self.norm(self.conv(x))))
        return self.classifier(y.mean((2, 3)))


def _fused_network(self: SmallImageResNet, x: Tensor) -> Tensor:
    y = self.stages(norm_act(self.norm, self.conv(x), F.relu))
    return self.classifier(y.mean((2, 3)))


register_block(SmallImageResNet, _fused_network, fuses={"norm": "relu"})


class SmallSegmenter(nn.Module):
    """A small fully convolutional network, with a classifier after each block.

    Every block but the first halves height and width. Coarser logits are enlarged and added to the finer ones, as in
    Long et al.'s FCN.

    Args:
        widths: channels of each block.
        classes: outputs per pixel.
        inputs: channels of the images.
    """

    def __init__(self, *, widths: Sequence[int], classes: int, inputs: int = 3) -> None:
        super().__init__()
        sizes = zip((inputs, *widths), widths, strict=False)
        self.blocks = nn.ModuleList(ResidualBlock(i, o, stride=1 if k == 0 else 2) for k, (i, o) in enumerate(sizes))
        self.classifiers = nn.ModuleList(nn.Conv2d(width, classes, 1) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        """N×inputs×H×W images to N×classes×H×W."""
        features = []
        for block in self.blocks:
            x = block(x)
            features.append(x)
        logits = self.classifiers[-1](features[-1])
        for y, classifier in zip(features[-2::-1], list(self.classifiers)[-2::-1], strict=True):
            logits = F.interpolate(logits, y.shape[2:], mode="bilinear") + classifier(y)
        return logits


def _conv_norm_act(inputs: int, outputs: int) -> nn.Sequential:
    conv, norm = _conv(inputs, outputs, 3, dims=3), _norm(outputs, dims=3)
    return nn.Sequential(conv, norm, nn.LeakyReLU(SLOPE, inplace=True))


class ResidualUNet3d(nn.Module):
    """A U-Net of residual blocks with deep supervision, similar to nnU-Net's residual encoder.

    Every level but the first halves depth, height and width.

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
        if len(blocks) != len(widths):
            raise ValueError(f"each level has a width and a number of blocks, got {len(widths)} and {len(blocks)}")
        self.stem = _conv_norm_act(inputs, widths[0])
        self.down = nn.ModuleList()
        before = widths[0]
        for level, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            first = ResidualBlock(before, width, stride=2 if level else 1, dims=3)
            self.down.append(nn.Sequential(first, *(ResidualBlock(width, width, dims=3) for _ in range(count - 1))))
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


def _clips(*, shift: bool, classes: int, inputs: int, widths: Sequence[int]) -> nn.Module:
    """Build a network of one block per stage for N×8×inputs×H×W clips."""
    network = SmallImageResNet(widths=widths, blocks=(1,) * len(widths), classes=classes, inputs=inputs)
    return temporal_shift(network) if shift else ClipNetwork(network)


def _tsm_resnet50(*, classes: int) -> nn.Module:
    return temporal_shift(build_resnet(RN50, classes=classes))


_RESNEXT = {"groups": 32, "width_per_group": 4}
# Nuclei are small, many, and computed at their own size. Half of the usual regions are enough for a crop of 256 pixels.
_NUCLEI: dict[str, Any] = {
    "masks": True,
    "anchors": (8, 16, 32, 64, 128),
    "keep_size": True,
    "box_detections_per_img": 200,
    "box_batch_size_per_image": 256,
    "rpn_pre_nms_top_n_train": 1000,
    "rpn_post_nms_top_n_train": 1000,
}
# Pad all images to 512×512, so that those of a micro-batch share one forward of the backbone instead of about seven.
_SMALL_COCO: dict[str, Any] = {
    "masks": True,
    "anchors": (16, 32, 64, 128, 256),
    "min_size": 320,
    "max_size": 512,
    "size_divisible": 512,
}

_NETWORKS: dict[str, tuple[str, Callable[..., nn.Module]]] = {
    "digits": ("small ResNet", partial(SmallImageResNet, widths=(16, 32, 64), blocks=(1, 1, 1), inputs=1)),
    "shapes": ("small FCN", partial(SmallSegmenter, widths=(16, 32, 64, 64))),
    # He et al.'s networks for CIFAR, of 6n + 2 layers
    "cifar-resnet20": ("ResNet-20", partial(SmallImageResNet, widths=(16, 32, 64), blocks=(3,) * 3)),
    "cifar-resnet56": ("ResNet-56", partial(SmallImageResNet, widths=(16, 32, 64), blocks=(9,) * 3)),
    "cifar-resnet110": ("ResNet-110", partial(SmallImageResNet, widths=(16, 32, 64), blocks=(18,) * 3)),
    # the usual ResNet-18 for CIFAR: ImageNet's widths and depths after a 3×3 stem
    "cifar-resnet18": ("ResNet-18", partial(SmallImageResNet, widths=(64, 128, 256, 512), blocks=(2,) * 4)),
    "resnet50": ("ResNet-50", partial(build_resnet, RN50)),
    "resnet101": ("ResNet-101", partial(build_resnet, RN101)),
    "resnext50-32x4d": ("ResNeXt-50 32×4d", partial(build_resnet, RN50, **_RESNEXT)),
    "resnext101-32x4d": ("ResNeXt-101 32×4d", partial(build_resnet, RN101, **_RESNEXT)),
    "deeplabv3-resnet50": ("DeepLabV3, ResNet-50", partial(DeepLabV3, RN50)),
    "deeplabv3-resnet101": ("DeepLabV3, ResNet-101", partial(DeepLabV3, RN101)),
    "fasterrcnn-resnet50": ("Faster R-CNN, ResNet-50", partial(build_rcnn, RN50, masks=False)),
    "fasterrcnn-resnet101": ("Faster R-CNN, ResNet-101", partial(build_rcnn, RN101, masks=False)),
    "maskrcnn-resnet50": ("Mask R-CNN, ResNet-50", partial(build_rcnn, RN50, masks=True)),
    "maskrcnn-resnet101": ("Mask R-CNN, ResNet-101", partial(build_rcnn, RN101, masks=True)),
    "maskrcnn-resnet50-plain-fpn": (
        "Mask R-CNN, ResNet-50, FPN without norms",
        partial(build_rcnn, RN50, masks=True, pyramid_norm=False),
    ),
    "maskrcnn-resnet50-frozen": ("Mask R-CNN, ResNet-50", partial(build_rcnn, RN50, masks=True, frozen=True)),
    "maskrcnn-resnet50-nuclei": ("Mask R-CNN, ResNet-50", partial(build_rcnn, RN50, **_NUCLEI)),
    "maskrcnn-resnet50-nuclei-frozen": ("Mask R-CNN, ResNet-50", partial(build_rcnn, RN50, **_NUCLEI, frozen=True)),
    "maskrcnn-resnet50-512": ("Mask R-CNN, ResNet-50", partial(build_rcnn, RN50, **_SMALL_COCO)),
    "tsm-resnet50": ("TSM, ResNet-50", _tsm_resnet50),
    "motion": ("small TSM", partial(_clips, shift=True, inputs=1, widths=(8, 16, 32, 64))),
    "motion-no-shift": ("small ResNet by frame", partial(_clips, shift=False, inputs=1, widths=(8, 16, 32, 64))),
    "clips": ("small TSM", partial(_clips, shift=True, inputs=3, widths=(16, 32, 64, 128))),
    "clips-no-shift": ("small ResNet by frame", partial(_clips, shift=False, inputs=3, widths=(16, 32, 64, 128))),
    "unet3d": ("residual 3-D U-Net", partial(ResidualUNet3d, widths=(32, 64, 128, 256), blocks=(1, 2, 2, 2))),
}
TITLES = {name: title for name, (title, _) in _NETWORKS.items()}
NETWORKS = {name: build for name, (_, build) in _NETWORKS.items()}
"""By the name that a recipe uses; each function takes classes=. Add a network of your own before its recipe."""


def build_network(name: str, *, classes: int) -> nn.Module:
    """Build the plain network of that name, with weights from torch's global generator.

    Example:
        >>> sum(p.numel() for p in build_network("cifar-resnet20", classes=10).parameters())
        272474
    """
    if name not in NETWORKS:
        raise ValueError(f"no network {name!r}; there are {', '.join(NETWORKS)}")
    return NETWORKS[name](classes=classes)
