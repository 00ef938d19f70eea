"""Object detection and instance segmentation with torchvision's R-CNN models: their losses and the COCO figures.

`detection_losses` takes the place of `model(images, targets)` in any training loop. It makes what an image contributes
a function of that image alone. In torchvision it is not, for four reasons:

- images are padded to the largest of their batch;
- losses are means over the batch, so that the weight of an image depends on the others in its batch;
- anchors and regions are sampled by torch's global generator;
- so is the size of an image, if the model has several.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.data.coco import open_coco
from micronorm.data.detection import load_mask_library
from micronorm.data.folders import decode
from micronorm.data.nuclei import STRIDE, open_nuclei
from micronorm.data.search import open_first
from micronorm.nn.per_step.keyed_dropout import dropout_keys
from micronorm.ops.keyed import integers, words
from micronorm.tasks.coco_score import CocoScore
from micronorm.tasks.pictures import LARGEST_SCENE, draw_detections, encode_scene, even_indices, in_eval_mode
from micronorm.tasks.prediction import Prediction
from micronorm.tasks.scores import SumLoss

# Streams of random words, one for each use of an image's key.
_ANCHORS, _REGIONS, _SIZE = (int.from_bytes(name, "big") for name in (b"anchor", b"region", b"size"))

_PARTS = ("transform", "backbone", "rpn", "roi_heads")
SURE = 0.5
"""Objects with a smaller score are not drawn in examples."""

_PREDICTORS = ("box_predictor", "mask_predictor", "keypoint_predictor")


def detection_losses(
    model: nn.Module, images: Sequence[Tensor], targets: Sequence[Mapping[str, Any]], keys: Tensor
) -> dict[str, Tensor]:
    """Return torchvision's losses, each the sum over images of what it is for that image alone.

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
        TypeError: the model is another kind of detector.
        ValueError: it is in eval mode, the arguments differ in length, or a box has no area.

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
    with _replaced(detector, "forward", partial(_sum_over_images, detector)), _boxes_in_float32(detector):
        return model(images, targets, keys.to(images[0].device))


def detect(model: nn.Module, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Return torchvision's detections of each image, computed alone; the model is in eval mode.

    Example:
        >>> from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn as build
        >>> model = build(weights=None, weights_backbone=None, num_classes=2, min_size=64).eval()
        >>> sorted(detect(model, [torch.rand(3, 64, 64)])[0])
        ['boxes', 'labels', 'scores']
    """
    with _boxes_in_float32(_detector_of(model)):
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
            with dropout_keys(keys[i : i + 1]):  # what a head sees are regions of this image
                found = _losses_of_image(detector, *prepared[i], dict(zip(levels, own, strict=True)), keys[i : i + 1])
            for name, value in found.items():
                losses[name] = losses[name] + value if name in losses else value
    return losses


def _prepare(transform: Any, image: Tensor, target: Mapping[str, Any], key: Tensor) -> tuple[Any, dict[str, Any]]:
    """Standardize, resize and pad one image: to a multiple of 32, whatever the others need."""

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
def _boxes_in_float32(detector: Any) -> Iterator[None]:
    """Turn half-precision features and predictions into float32 within this block.

    torchvision computes anchors and boxes in the dtype of features and predictions. bfloat16 has 8 bits: a box near
    the right edge of a large image would move in steps of 8 pixels.
    """
    heads = [getattr(detector.roi_heads, name, None) for name in _PREDICTORS]
    modules = [detector.backbone, detector.rpn.head, *(head for head in heads if head is not None)]
    hooks = [module.register_forward_hook(_widen) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _widen(module: nn.Module, inputs: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    if isinstance(output, Mapping):
        return {name: _widen(module, inputs, value) for name, value in output.items()}
    return type(output)(_widen(module, inputs, value) for value in output)


def _detector_of(model: nn.Module) -> Any:
    """Return the torchvision model, without DistributedDataParallel."""
    detector = getattr(model, "module", model)
    if not all(isinstance(getattr(detector, part, None), nn.Module) for part in _PARTS):
        raise TypeError(
            f"the model must be a Faster, Mask or Keypoint R-CNN of torchvision, got {type(detector).__name__}; other "
            "detectors of torchvision draw nothing at random if they have one `min_size`: call them with one image at "
            "a time and add the losses"
        )
    return detector


def _check_arguments(
    detector: nn.Module, images: Sequence[Tensor], targets: Sequence[Mapping[str, Any]], keys: Tensor
) -> None:
    if not detector.training:
        raise ValueError("the model is in eval mode and has no losses; call model.train() first")
    if not len(images) == len(targets) == len(keys) > 0:
        raise ValueError(
            f"there must be one target and one key for each of at least one image, got {len(images)} images, "
            f"{len(targets)} targets and {len(keys)} keys"
        )
    for k, target in enumerate(targets):
        boxes = target["boxes"]
        if boxes.ndim != 2 or boxes.shape[1] != 4:
            raise ValueError(f"boxes must have shape K×4, those of target {k} have {tuple(boxes.shape)}")
        wrong = ~(boxes[:, 2:] > boxes[:, :2]).all(1)  # NaN is wrong, too
        if wrong.any():
            box = boxes[wrong][0].tolist()
            raise ValueError(f"boxes must have x1 < x2 and y1 < y2, target {k} has {box}; leave such boxes out")
        labels = target["labels"]
        if len(labels) != len(boxes) or (labels < 1).any():
            raise ValueError(
                f"labels must be one per box, from 1 on (0 is the background); target {k} has {labels.tolist()} for "
                f"{len(boxes)} boxes"
            )


class Detection:
    """Find objects: their boxes and, with `masks`, their pixels.

    A batch is (images, targets, keys): lists of 3×H×W images in [0, 1] and of targets as `detection_losses` takes them,
    with "image", the index of the image in its set; and the keys of the samples. The model is an R-CNN of torchvision.

    Args:
        train: the training samples.
        test: the test samples, with `annotations`, a COCO dictionary.
        names: the names of the classes by label; the first is "background".
        masks: whether masks are learned and scored.
        stride: pad images to predict with black to a multiple of it, as the data set does for its test images.
    """

    sample = "image"
    evaluation_batch = 8

    def __init__(self, train: Any, test: Any, *, names: tuple[str, ...], masks: bool, stride: int = 1) -> None:
        self.train, self.test = train, test
        self.names, self.masks, self.stride = names, masks, stride

    def loss(self, model: nn.Module, batch: tuple[Any, ...]) -> SumLoss:
        """Return the sum over images of all losses; the terms are in `counts`."""
        images, targets, keys = batch
        losses = detection_losses(model, images, targets, keys)
        terms = {name.removeprefix("loss_"): value.detach() for name, value in losses.items()}
        return SumLoss(torch.stack(list(losses.values())).sum(), len(images), terms)

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss per image, and the mean of each term."""
        count = max(sums["count"], 1)
        return {name: value / count for name, value in sums.items() if name != "count"}

    def new_score(self) -> CocoScore:
        """Return the score of no samples."""
        return CocoScore(self.test.annotations, masks=self.masks)

    def score(self, model: nn.Module, batch: tuple[Any, ...]) -> CocoScore:
        """Return the COCO score of the images of a batch."""
        images, targets, _ = batch
        score = self.new_score()
        for target, found in zip(targets, detect(model, images), strict=True):
            score.add(target["image"], found)
        return score

    @torch.no_grad()
    def examples(self, model: nn.Module, *, count: int = 8) -> list[dict[str, Any]]:
        """Return `count` test images, each beside its true objects and those found with a score above 0.5."""
        found = []
        shares = ((0, index[None]) for index in even_indices(len(self.test), count))  # one image fits any memory
        with in_eval_mode(model) as parameter:
            for (image,), (target,), _ in self.test.load(shares, seed=0):
                (answer,) = detect(model, [image.to(parameter.device, parameter.dtype)])
                sure = answer["scores"] > SURE
                answer = {name: value[sure] for name, value in answer.items()}
                truth = {name: target[name] for name in ("boxes", "labels", "masks") if name in target}
                nothing = {name: value[:0] for name, value in truth.items()}
                scores = answer["scores"]
                found.append(
                    {
                        "image": self._draw(image, nothing),
                        "truth": self._draw(image, truth),
                        "answer": self._draw(image, answer),
                        "label": self._describe(truth["labels"]),
                        "prediction": self._describe(answer["labels"]),
                        "probability": scores.mean().item() if len(scores) else 0.0,
                        "note": f"{len(scores)} found with a score above {SURE}, {len(truth['labels'])} are there",
                    }
                )
        return found

    @torch.no_grad()
    def predict(self, model: nn.Module, path: Path) -> Prediction:
        """Return the objects with a score above 0.5, and a picture of them."""
        from PIL import Image

        parameter = next(model.parameters())
        image = torch.from_numpy(np.array(decode(path))).permute(2, 0, 1).to(parameter.device, parameter.dtype) / 255
        height, width = image.shape[1:]
        (found,) = detect(model, [F.pad(image, (0, -width % self.stride, 0, -height % self.stride))])
        boxes = found["boxes"]
        kept = (found["scores"] > SURE) & (boxes[:, 0] < width) & (boxes[:, 1] < height)
        found = {name: value[kept].cpu() for name, value in found.items()}
        found["boxes"] = found["boxes"].minimum(found["boxes"].new_tensor([width, height, width, height]))
        if "masks" in found:
            found["masks"] = found["masks"][..., :height, :width]
        picture = draw_detections(image, found, self.names).permute(1, 2, 0).contiguous().numpy()
        return Prediction(
            self._describe(found["labels"]), {"objects": self._results(found)}, {"-objects": Image.fromarray(picture)}
        )

    def _results(self, found: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Return objects with x, y, width and height of the box, and the mask as COCO's run-length encoding."""
        corners = found["boxes"].double()
        boxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist()
        results: list[dict[str, Any]] = [
            {"label": label, "category": self.names[label], "bbox": box, "score": score}
            for label, box, score in zip(found["labels"].tolist(), boxes, found["scores"].tolist(), strict=True)
        ]
        if "masks" in found:
            for result, mask in zip(results, found["masks"][:, 0] > 0.5, strict=True):
                code = load_mask_library().encode(np.asfortranarray(mask.numpy().astype(np.uint8)))
                result["segmentation"] = {"size": list(mask.shape), "counts": code["counts"].decode()}
        return results

    def _draw(self, image: Tensor, objects: Mapping[str, Tensor]) -> str:
        return encode_scene(draw_detections(image, objects, self.names, largest=LARGEST_SCENE))

    def _describe(self, labels: Tensor) -> str:
        """Return how many objects of each class there are: "2 dog, 1 person"."""
        counts = labels.bincount().tolist()
        return ", ".join(f"{n} {self.names[k]}" for k, n in enumerate(counts) if n) or "nothing"


_FILES: Mapping[str, Callable[..., Any]] = {
    "coco": open_coco,
    "coco128": partial(open_coco, child="coco128", test="train"),
    "coco128-val": partial(open_coco, child="coco128"),
    "nuclei": open_nuclei,
}
NAMES = tuple(_FILES)
"""The data sets that `open_detection` can open."""


def open_predictor(data: str, *, names: tuple[str, ...], size: int) -> Detection:
    """Return the task without its data, for images of any size."""
    return Detection((), (), names=names, masks=True, stride=STRIDE if data == "nuclei" else 1)


def open_detection(
    name: str,
    folder: Path | str | None = None,
    *,
    masks: bool = False,
    device: torch.device | str = "cpu",
    workers: int = 0,
    download: bool = False,
    verify: bool = True,
    size: int | None = None,
    classes: int | None = None,
) -> Detection:
    """Open the detection task of a data set.

    Args:
        name: "coco", "coco128" (any small set in COCO's format, tested on its own training images), "coco128-val"
            (the same, tested on its validation images) or "nuclei".
        folder: where the data are; None searches ./data, then ~/data.
        masks: learn and score masks, too.
        device: not used: images of files stay on the CPU.
        workers: processes that decode files.
        download: refused; the data sets cannot be downloaded.
        verify: not used: there are no published checksums.
        size: refused; the model resizes its images.
        classes: outputs of the model, background included; None for those of the data set.
    """
    if name not in NAMES:
        raise ValueError(f"no data set is known as {name!r}; there are {', '.join(NAMES)}")
    if download or size is not None:
        raise ValueError(f"{name} cannot be downloaded and has no size to choose: leave --download and --size out")
    train, test = open_first(_FILES[name], folder, masks=masks, workers=workers)
    if classes not in (None, len(train.names)):
        raise ValueError(f"{name} has {len(train.names)} classes with the background, the model {classes} outputs")
    return Detection(train, test, names=train.names, masks=masks)


open_instances = partial(open_detection, masks=True)
