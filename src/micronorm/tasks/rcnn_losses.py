"""Losses and detections of torchvision's R-CNN models, for any training loop.

`detection_losses` takes the place of `model(images, targets)` in any training loop. It makes what an image contributes
a function of that image alone. In torchvision it is not, for five reasons:

- images are padded to the largest of their batch;
- the scales of the feature maps are inferred from the first image that the model sees, without its padding;
- losses are means over the batch, so that the weight of an image depends on the others in its batch;
- anchors and regions are sampled by torch's global generator;
- so is the size of an image, if the model has several.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.nn.per_step.keyed_dropout import dropout_keys
from micronorm.ops.keyed import integers, words
from micronorm.tasks.scores import widen

# Streams of random words, one for each use of an image's key.
_ANCHORS, _REGIONS, _SIZE = (int.from_bytes(name, "big") for name in (b"anchor", b"region", b"size"))

_PARTS = ("transform", "backbone", "rpn", "roi_heads")
_PREDICTORS = ("box_predictor", "mask_predictor", "keypoint_predictor")
_POOLS = ("box_roi_pool", "mask_roi_pool", "keypoint_roi_pool")


def detection_losses(
    model: nn.Module, images: Sequence[Tensor], targets: Sequence[Mapping[str, Any]], keys: Tensor
) -> dict[str, Tensor]:
    """Return torchvision's losses. Compute each loss image by image, and add it over the images.

    Divide their sum by the number of images in the optimizer step, over all micro-batches and ranks. With one image
    per step these are the losses of `model([image], [target])`. Images of equal padded size share one forward of the
    backbone; region proposals and heads run image by image. Boxes are computed in float32 at least, also under
    autocast.

    Args:
        model: a Faster, Mask or Keypoint R-CNN of torchvision in training mode; it may be wrapped in
            DistributedDataParallel.
        images: 3×H×W each, in [0, 1].
        targets: "boxes" (K×4, x1 y1 x2 y2 in pixels), "labels" (K, from 1 on), "masks" (K×H×W) for a Mask R-CNN, and
            "keypoints" (K×P×3, x y and visibility) for a Keypoint R-CNN. K may be 0.
        keys: int64 N, from `micronorm.ops.keyed.sample_keys`: they determine which anchors and regions are sampled.

    Raises:
        TypeError: the model is another kind of detector, or keys or part of a target are no tensor or no int64.
        ValueError: it is in eval mode, the arguments differ in length, or a target lacks a part or has a wrong one.

    Example:
        >>> from micronorm.ops.keyed import sample_keys
        >>> from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn as build
        >>> model = build(weights=None, weights_backbone=None, num_classes=2, min_size=64).train()
        >>> target = {"boxes": torch.tensor([[8.0, 8.0, 40.0, 48.0]]), "labels": torch.tensor([1])}
        >>> keys = sample_keys(torch.tensor([7]), seed=0, epoch=0)
        >>> sorted(detection_losses(model, [torch.rand(3, 64, 64)], [target], keys))
        ['loss_box_reg', 'loss_classifier', 'loss_objectness', 'loss_rpn_box_reg']
    """
    detector = _detector_of(model)
    _check_arguments(detector, images, targets, keys)
    # The model itself is called, with another forward, so that its hooks run: DDP and FSDP need them.
    with _replaced(detector, "forward", partial(_sum_over_images, detector)), _image_by_image(detector):
        return model(images, targets, keys.to(images[0].device))


def detect(model: nn.Module, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Return torchvision's detections of each image, computed alone; the model is in eval mode.

    Example:
        >>> from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn as build
        >>> model = build(weights=None, weights_backbone=None, num_classes=2, min_size=64).eval()
        >>> sorted(detect(model, [torch.rand(3, 64, 64)])[0])
        ['boxes', 'labels', 'scores']
    """
    with _image_by_image(_detector_of(model)):
        return [model([image])[0] for image in images]


class KeyedSampler:
    """Sample anchors or regions of one image like torchvision's sampler, but from the image's key.

    Each candidate gets a random word; those with the smallest words are taken. The words are the same on every device.

    Args:
        like: torchvision's sampler, with its `batch_size_per_image` and `positive_fraction`.
        key: the key of the image, int64 1.
        stream: the stream of random words.

    Example:
        >>> from types import SimpleNamespace
        >>> sampler = KeyedSampler(SimpleNamespace(batch_size_per_image=4, positive_fraction=0.5), torch.tensor([1]), 0)
        >>> positive, negative = sampler([torch.tensor([1, 1, 1, 0, 0, 0, 0, -1])])
        >>> positive[0].sum().item(), negative[0].sum().item()
        (2, 2)
    """

    def __init__(self, like: Any, key: Tensor, stream: int) -> None:
        self.size, self.key, self.stream = like.batch_size_per_image, key, stream
        self.most_positive = int(like.batch_size_per_image * like.positive_fraction)

    def __call__(self, labels: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return masks of the chosen positive (label ≥ 1) and negative (0) candidates of the one image."""
        (own,) = labels
        drawn = words(self.key, len(own), stream=self.stream)[0]
        positive, count = _take_smallest(drawn, own >= 1, self.most_positive)
        negative, _ = _take_smallest(drawn, own == 0, self.size - count)
        return [positive], [negative]


def _take_smallest(drawn: Tensor, among: Tensor, count: int) -> tuple[Tensor, int]:
    """Return a mask of the `count` candidates in `among` with the smallest words, and how many there are."""
    candidates = among.nonzero().squeeze(1)
    taken = candidates[drawn[candidates].argsort()[:count]]
    return torch.zeros_like(among).index_fill(0, taken, True), len(taken)


def _sum_over_images(
    detector: Any, images: Sequence[Tensor], targets: Sequence[Mapping[str, Any]], keys: Tensor
) -> dict[str, Tensor]:
    """Take the place of GeneralizedRCNN.forward in training."""
    prepared = [_prepare(detector.transform, *one) for one in zip(images, targets, keys.split(1), strict=True)]
    losses: dict[str, Tensor] = {}
    # Only neighbours share a forward: statistics that move image by image depend on the order of the images.
    for _, alike in itertools.groupby(range(len(prepared)), key=lambda i: prepared[i][0].tensors.shape):
        members = list(alike)
        with dropout_keys(keys[members]):
            features = detector.backbone(torch.cat([prepared[i][0].tensors for i in members]))
        levels = {"0": features} if isinstance(features, Tensor) else features
        per_image = zip(*(level.split(1) for level in levels.values()), strict=True)
        for i, own in zip(members, per_image, strict=True):
            with dropout_keys(keys[i : i + 1]):  # the heads get regions of this image only
                found = _losses_of_image(detector, *prepared[i], dict(zip(levels, own, strict=True)), keys[i : i + 1])
            for name, value in found.items():
                losses[name] = losses[name] + value if name in losses else value
    return losses


def _prepare(transform: Any, image: Tensor, target: Mapping[str, Any], key: Tensor) -> tuple[Any, dict[str, Any]]:
    """Standardize, resize and pad one image to a multiple of 32. Other images do not change the result."""

    def choose(sizes: Sequence[int]) -> int:
        return sizes[int(integers(key, 1, bound=len(sizes), stream=_SIZE))]

    with _replaced(transform, "torch_choice", choose):
        padded, (resized,) = transform([image], [dict(target)])
    if "keypoints" in resized:
        resized["keypoints"] = resized["keypoints"].float()  # torchvision refuses others, also in a float64 model
    return padded, resized


def _losses_of_image(
    detector: Any, image: Any, target: dict[str, Any], features: dict[str, Tensor], key: Tensor
) -> dict[str, Tensor]:
    rpn, roi_heads = detector.rpn, detector.roi_heads
    anchors = KeyedSampler(rpn.fg_bg_sampler, key, _ANCHORS)
    regions = KeyedSampler(roi_heads.fg_bg_sampler, key, _REGIONS)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(rpn, "fg_bg_sampler", anchors))
        stack.enter_context(_replaced(rpn, "assign_targets_to_anchors", partial(_assign_targets, rpn)))
        stack.enter_context(_replaced(roi_heads, "fg_bg_sampler", regions))
        proposals, of_proposals = rpn(image, features, [target])
        _, of_regions = roi_heads(features, proposals, image.image_sizes, [target])
    return {**of_proposals, **of_regions}


def _assign_targets(rpn: Any, anchors: list[Tensor], targets: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return labels in the dtype of the anchors. torchvision's are float32, which makes the loss float32 as well."""
    labels, boxes = type(rpn).assign_targets_to_anchors(rpn, anchors, targets)
    return [label.to(anchors[0].dtype) for label in labels], boxes


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object another attribute within this block."""
    own = vars(owner)
    before = own.get(name, _replaced)
    own[name] = value
    try:
        yield
    finally:
        if before is _replaced:
            del own[name]
        else:
            own[name] = before


@contextlib.contextmanager
def _image_by_image(detector: Any) -> Iterator[None]:
    """Set the scales of the feature maps, and turn half-precision features and predictions into float32.

    torchvision computes anchors and boxes in the dtype of features and predictions. In bfloat16, which has 8 bits, a
    box near the right edge of a large image moves in steps of 8 pixels.
    """
    from torchvision.ops import MultiScaleRoIAlign

    heads = _present(detector.roi_heads, _PREDICTORS)
    pools = [pool for pool in _present(detector.roi_heads, _POOLS) if isinstance(pool, MultiScaleRoIAlign)]
    hooks = [module.register_forward_hook(_widen) for module in (detector.backbone, detector.rpn.head, *heads)]
    hooks.append(detector.backbone.register_forward_hook(partial(_set_scales, pools)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _present(owner: Any, names: Sequence[str]) -> list[Any]:
    return [part for name in names if (part := getattr(owner, name, None)) is not None]


def _set_scales(pools: Sequence[Any], backbone: nn.Module, inputs: tuple[Tensor], features: Any) -> None:
    """Set the scales of the feature maps, powers of two, from the padded size of the images.

    torchvision compares the features with the first image that the model sees, without its padding, and keeps the
    result. If the padding is 41 % of the image's height, all regions are taken from a wrong place.
    """
    size = max(inputs[0].shape[2:])
    levels = {"0": features} if isinstance(features, Tensor) else features
    for pool in pools:
        pooled = [level for name, level in levels.items() if name in pool.featmap_names]
        set_levels(pool, [round(math.log2(size / max(level.shape[2:]))) for level in pooled])


def set_levels(pool: Any, levels: Sequence[int]) -> None:
    """Tell torchvision's MultiScaleRoIAlign how often each of its feature maps was halved: [2, 3, 4, 5]."""
    from torchvision.ops.poolers import LevelMapper

    pool.scales = [2.0**-level for level in levels]
    pool.map_levels = LevelMapper(levels[0], levels[-1], pool.canonical_scale, pool.canonical_level)


def _widen(module: nn.Module, inputs: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return widen(output)
    if isinstance(output, Mapping):
        return {name: _widen(module, inputs, value) for name, value in output.items()}
    return type(output)(_widen(module, inputs, value) for value in output)


def _detector_of(model: nn.Module) -> Any:
    """Return the torchvision model, without DistributedDataParallel."""
    detector = getattr(model, "module", model)
    if not all(isinstance(getattr(detector, part, None), nn.Module) for part in _PARTS):
        raise TypeError(
            f"the model must be a Faster, Mask or Keypoint R-CNN of torchvision, got {type(detector).__name__}. "
            "RetinaNet, FCOS and SSD need no keys: give them one number as `min_size`, call them with one image at a "
            "time, and add the losses"
        )
    return detector


def _check_arguments(
    detector: Any, images: Sequence[Tensor], targets: Sequence[Mapping[str, Any]], keys: Tensor
) -> None:
    if not detector.training:
        raise ValueError("the model is in eval mode and has no losses; call model.train() first")
    if not isinstance(keys, Tensor) or keys.dtype != torch.int64:
        raise TypeError(
            "keys must be the tensor that sample_keys(image_ids, seed=..., epoch=...) returns, got "
            f"{keys.dtype if isinstance(keys, Tensor) else type(keys).__name__}"
        )
    if not len(images) == len(targets) == len(keys) > 0:
        raise ValueError(
            f"there must be one target and one key for each of at least one image, got {len(images)} images, "
            f"{len(targets)} targets and {len(keys)} keys"
        )
    for k, (image, target) in enumerate(zip(images, targets, strict=True)):
        _check_target(detector.roi_heads, k, image, target)


def _check_target(roi_heads: Any, k: int, image: Tensor, target: Mapping[str, Any]) -> None:
    optional = {"masks": "mask_predictor", "keypoints": "keypoint_predictor"}
    needed = ["boxes", "labels", *(name for name, part in optional.items() if _present(roi_heads, [part]))]
    if not set(needed) <= set(target):
        raise ValueError(f"a target of this model needs {', '.join(needed)}; target {k} has only {sorted(target)}")
    for name in needed:
        if not isinstance(target[name], Tensor):
            raise TypeError(
                f"{name} must be a tensor, target {k} has a {type(target[name]).__name__}; use torch.as_tensor(...)"
            )
    boxes, labels = target["boxes"], target["labels"]
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise ValueError(f"boxes must have shape K×4, those of target {k} have {tuple(boxes.shape)}")
    wrong = ~(boxes[:, 2:] > boxes[:, :2]).all(1)  # NaN is wrong, too
    if wrong.any():
        box = boxes[wrong][0].tolist()
        raise ValueError(f"boxes must have x1 < x2 and y1 < y2, target {k} has {box}; leave such boxes out")
    if labels.dtype != torch.int64:
        raise TypeError(f"labels must be int64, those of target {k} are {labels.dtype}; use labels.long()")
    classes = getattr(getattr(roi_heads.box_predictor, "cls_score", None), "out_features", math.inf)
    if labels.shape != boxes.shape[:1] or ((labels < 1) | (labels >= classes)).any():
        raise ValueError(
            "labels must be one per box, at least 1 (0 is the background) and less than the model's number of classes, "
            f"{classes}; target {k} has {labels.tolist()} for {len(boxes)} boxes"
        )
    if "masks" in needed and target["masks"].shape != (len(boxes), *image.shape[-2:]):
        raise ValueError(
            f"masks must be one per box and as large as the image, {(len(boxes), *image.shape[-2:])}; those of target "
            f"{k} have shape {tuple(target['masks'].shape)}"
        )
    if "masks" in needed and len(boxes) and target["masks"].max() > 1:
        raise ValueError(f"masks must be 0 or 1, those of target {k} reach {target['masks'].max()}; use masks > 0")
    if "keypoints" in needed:
        points, shape = target["keypoints"], (len(boxes), roi_heads.keypoint_predictor.out_channels, 3)
        if points.shape != shape or not points.is_floating_point():
            raise ValueError(
                f"keypoints must be floats (x, y, visibility) of shape {shape}; those of target {k} are {points.dtype} "
                f"of shape {tuple(points.shape)}"
            )
