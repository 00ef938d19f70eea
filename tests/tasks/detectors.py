"""A small Mask R-CNN of torchvision's modules, and images with objects for it."""

from typing import Any

import torch
from torch import Tensor, nn

import micronorm as mn
from micronorm.ops.keyed import sample_keys
from micronorm.recipes.rcnn import build_rcnn
from micronorm.recipes.recipe import parts_to_convert

CLASSES = 3
OPTIONS: dict[str, Any] = {
    "channels": 16,
    "hidden": 32,
    "min_size": 48,
    "max_size": 80,
    "box_batch_size_per_image": 16,
    "rpn_batch_size_per_image": 32,
    "rpn_pre_nms_top_n_train": 60,
    "rpn_post_nms_top_n_train": 30,
    "rpn_pre_nms_top_n_test": 60,
    "rpn_post_nms_top_n_test": 30,
    "box_detections_per_img": 10,
}
SIZES = ((48, 48), (50, 70), (48, 64), (96, 96))
"""Height and width of the images; the model resizes the last to the size of the first."""
OBJECTS = (2, 1, 0, 3)


def small_detector(norm: Any = None, weight: Any = None, *, masks: bool = True, seed: int = 0) -> Any:
    """Build a detector, in training mode. No parameter is special: a zero would hide what lies before it."""
    torch.manual_seed(seed)
    network = build_rcnn((1, 1, 1, 1), classes=CLASSES, masks=masks, **OPTIONS)
    if norm is not None:
        for part, spec in parts_to_convert(network, norm):
            mn.convert(part, spec, weight)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) if parameter.ndim == 1 else 0)
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d) or hasattr(module, "group_weight"):
                module.weight.uniform_(0.5, 1.5)
            if hasattr(module, "group_weight"):
                module.group_weight.uniform_(0.5, 1.5)
    return network.train()


def scenes(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> tuple[list[Tensor], list[dict[str, Any]], Tensor]:
    """Return a batch of four images of noise with rectangles; the third has none."""
    random = torch.Generator().manual_seed(seed)
    images, targets = [], []
    for k, ((height, width), count) in enumerate(zip(SIZES, OBJECTS, strict=True)):
        size = torch.tensor([width, height])
        corner = (torch.rand(count, 2, generator=random) * size * 0.5).floor()
        boxes = torch.cat([corner, corner + 6 + (torch.rand(count, 2, generator=random) * size * 0.3).floor()], 1)
        masks = torch.zeros(count, height, width, dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.long().tolist(), strict=True):
            mask[y1:y2, x1:x2] = 1
        labels = torch.randint(1, CLASSES, (count,), generator=random)
        images.append(torch.rand(3, height, width, generator=random).to(dtype))
        targets.append({"boxes": boxes.to(dtype), "labels": labels, "masks": masks, "image": k})
    return images, targets, sample_keys(torch.arange(4), seed=seed, epoch=0)


def cut(batch: tuple[Any, ...], part: slice) -> tuple[Any, ...]:
    """Return some samples of a batch."""
    return tuple(column[part] for column in batch)
