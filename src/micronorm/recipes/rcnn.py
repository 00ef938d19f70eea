"""Faster and Mask R-CNN with FPN, as the paper's tables `mask` and `fast` have them, made of torchvision's classes."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from micronorm.recipes.resnet import build_resnet, import_torchvision
from micronorm.tasks.rcnn_losses import set_levels

ANCHORS = (32, 64, 128, 256, 512)
"""Sizes of the anchors on the five levels of the pyramid."""
LEVELS = (2, 3, 4, 5)
"""How often the features were halved on the levels from which regions are taken."""


def build_rcnn(
    blocks: Sequence[int],
    *,
    classes: int,
    masks: bool,
    anchors: Sequence[int] = ANCHORS,
    keep_size: bool = False,
    pyramid_norm: bool = True,
    frozen: bool = False,
    channels: int = 256,
    hidden: int = 1024,
    **options: Any,
) -> nn.Module:
    """Build torchvision's FasterRCNN or MaskRCNN on a bottleneck ResNet with a feature pyramid (FPN).

    The box head has four convolutions and one fully connected layer (4conv1fc). BatchNorm follows every convolution of
    backbone, pyramid, box head and mask head. The one convolution of the RPN head and the predictors have none. The
    last norm of each residual block starts at zero. So does the mask predictor of a single class, nearly.

    Args:
        blocks: bottleneck blocks of each stage.
        classes: outputs of the classifier, background included.
        masks: build a Mask R-CNN.
        anchors: size of the anchors on each level; each has the ratios 1:2, 1:1 and 2:1.
        keep_size: compute images at their own size instead of resizing them.
        pyramid_norm: whether the pyramid has norms.
        frozen: FrozenBatchNorm in the backbone and no norm elsewhere: the usual baseline from pretrained weights.
        channels: of pyramid, box head and mask head.
        hidden: width of the box head's fully connected layer.
        options: further arguments of torchvision's FasterRCNN.

    Example:
        >>> network = build_rcnn((1, 1, 1, 1), classes=3, masks=True, channels=32, hidden=64)
        >>> type(network).__name__, network.roi_heads.box_head[0][1]
        ('MaskRCNN', BatchNorm2d(32, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True))
    """
    models, ops = import_torchvision("models.detection"), import_torchvision("ops")
    norm = None if frozen else nn.BatchNorm2d
    norm_layer = ops.FrozenBatchNorm2d if frozen else nn.BatchNorm2d
    body = build_resnet(blocks, zero_init_residual=not frozen, norm_layer=norm_layer)
    backbone = models.backbone_utils.BackboneWithFPN(
        body,
        {f"layer{k + 1}": str(k) for k in range(4)},
        [256, 512, 1024, 2048],
        channels,
        norm_layer=norm if pyramid_norm else None,
    )
    parts: dict[str, Any] = {
        "rpn_anchor_generator": models.rpn.AnchorGenerator(
            tuple((size,) for size in anchors), ((0.5, 1.0, 2.0),) * len(anchors)
        ),
        "box_head": models.faster_rcnn.FastRCNNConvFCHead((channels, 7, 7), [channels] * 4, [hidden], norm_layer=norm),
        "box_predictor": models.faster_rcnn.FastRCNNPredictor(hidden, classes),
    }
    if masks:
        parts["mask_head"] = models.mask_rcnn.MaskRCNNHeads(channels, [channels] * 4, 1, norm_layer=norm)
        parts["mask_predictor"] = models.mask_rcnn.MaskRCNNPredictor(channels, channels, classes)
        if classes <= 2:
            # torchvision's initial weights are larger for fewer classes: with two classes the loss begins at 5. With
            # many classes keep its weights, because small ones would slow the training of each class.
            nn.init.normal_(parts["mask_predictor"].mask_fcn_logits.weight, std=0.001)
    network = (models.MaskRCNN if masks else models.FasterRCNN)(backbone, **parts, **options)
    for pool in (network.roi_heads.box_roi_pool, network.roi_heads.mask_roi_pool):
        if pool is not None:  # otherwise torchvision infers them from the first image, without its padding
            set_levels(pool, LEVELS)
    if keep_size:
        network.transform.resize = _keep_size
    return network


def _keep_size(image: Tensor, target: Any = None) -> tuple[Tensor, Any]:
    """Take the place of the method that resizes an image and its target."""
    return image, target
