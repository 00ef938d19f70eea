"""Images with objects: the batches that detection and instance segmentation train on, and the mask library.

A batch is (images, targets, keys):

- images: a list of 3×H×W float32 tensors in [0, 1], each of its own size.
- targets: a list of dictionaries: "boxes" (K×4 float32, x1 y1 x2 y2 in pixels), "labels" (K int64, from 1), "masks"
  (K×H×W uint8, if the set was opened with masks) and "image" (the sample's index). K may be 0.
- keys: one random key per sample (int64 N), a function of (seed, epoch, index).
"""

from typing import Any

import torch
from torch import Tensor

from micronorm.data.loading import FileSamples, Order
from micronorm.data.samples import CROP, FLIP
from micronorm.ops.keyed import uniforms

Target = dict[str, Any]
DecodedBatch = tuple[list[Tensor], list[Target], Tensor]


class DetectionDecoder:
    """Images with objects. The batches are described at the top of this module.

    A subclass has a length and `annotations`: the objects of all images as a COCO dictionary, in the order of the
    samples.

    Args:
        masks: whether the targets have masks.
        train: mirror samples at random.
        axes: along which to mirror: -1 is left to right, -2 top to bottom.
    """

    annotations: Any

    def __init__(self, *, masks: bool, train: bool, axes: tuple[int, ...] = (-1,)) -> None:
        self._masks, self._train, self._axes = masks, train, axes

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int, place: list[float]) -> tuple[Tensor, Target]:
        """Return the 3×H×W bytes and the target of a sample. Two random numbers in [0, 1) determine its crop."""
        raise NotImplementedError

    def __getitem__(self, order: Order) -> DecodedBatch:
        keys = order.keys
        places = uniforms(keys, 2, stream=CROP).tolist()
        flips = (uniforms(keys, len(self._axes), stream=FLIP) < 0.5).tolist()
        images, targets = [], []
        for index, place, mirrored in zip(order.indices, places, flips, strict=True):
            image, target = self.read(index, place)
            for mirror, axis in zip(mirrored, self._axes, strict=True):
                if mirror and self._train:
                    image, target = flip_sample(image, target, axis=axis)
            images.append(image)
            targets.append({**target, "image": index})
        return images, targets, keys

    def finish(self, batch: DecodedBatch) -> DecodedBatch:
        """Return the batch with images in [0, 1]."""
        images, targets, keys = batch
        return [image.to(torch.float32) / 255 for image in images], targets, keys


class DetectionSamples(FileSamples):
    """Images with objects that a `DetectionDecoder` reads."""

    _decoder: DetectionDecoder

    @property
    def annotations(self) -> dict[str, Any]:
        """The objects of all images as a COCO dictionary, for scoring. Its images are in the order of the samples."""
        return self._decoder.annotations


def flip_sample(image: Tensor, target: Target, *, axis: int) -> tuple[Tensor, Target]:
    """Mirror an image with its boxes and masks.

    Args:
        image: C×H×W.
        target: with "boxes", and "masks" if there are any.
        axis: -1 for left to right, -2 for top to bottom.

    Example:
        >>> target = {"boxes": torch.tensor([[0.0, 1.0, 2.0, 3.0]])}
        >>> flip_sample(torch.zeros(3, 6, 8), target, axis=-1)[1]["boxes"].tolist()
        [[6.0, 1.0, 8.0, 3.0]]
    """
    boxes = target["boxes"].clone()
    low = 0 if axis == -1 else 1
    boxes[:, [low, low + 2]] = image.shape[axis] - boxes[:, [low + 2, low]]
    masks = {"masks": target["masks"].flip(axis)} if "masks" in target else {}
    return image.flip(axis), {**target, "boxes": boxes, **masks}


def encode_masks(masks: Tensor) -> list[str]:
    """Return K×H×W masks of 0 and 1 as K compressed run-length encodings.

    Example:
        >>> encode_masks(torch.ones(1, 2, 3))
        ['06']
    """
    # The library takes H×W×K in Fortran's order.
    columns = masks.to(torch.uint8).transpose(1, 2).contiguous().cpu().numpy().transpose(2, 1, 0)
    return [code["counts"].decode() for code in load_mask_library().encode(columns)] if len(masks) else []


def to_coco_boxes(boxes: Tensor) -> list[list[float]]:
    """Return K×4 boxes of x1, y1, x2, y2 as lists of x, y, width and height."""
    corners = boxes.double()
    return torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist()


def load_mask_library() -> Any:
    """Return `faster_coco_eval.mask`. Raise ImportError with the fix if it is not installed."""
    try:
        from faster_coco_eval import mask
    except ImportError as error:
        raise ImportError("COCO's masks and scores need faster-coco-eval (pip install faster-coco-eval)") from error
    return mask
