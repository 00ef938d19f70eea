"""Images with objects: the batches that detection and instance segmentation train on, and the mask library.

A batch is (images, targets, keys):

- images: a list of 3×H×W float32 tensors in [0, 1], each of its own size.
- targets: a list of dictionaries: "boxes" (K×4 float32, x1 y1 x2 y2 in pixels), "labels" (K int64, from 1), "masks"
  (K×H×W uint8, if the set was opened with masks) and "image" (the sample's index). K may be 0.
- keys: one random key per sample (int64 N), a function of (seed, epoch, index).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from micronorm.data.loading import FileSamples

Target = dict[str, Any]


class DetectionSet(NamedTuple):
    """The training and test samples."""

    train: "DetectionSamples"
    test: "DetectionSamples"


class DetectionSamples(FileSamples):
    """Images with objects. The batches are described at the top of this module.

    Args:
        decoder: turns an `Order` into lists of 3×H×W bytes and targets, and keys. It has `annotations`.
        names: the names of the classes by label; names[0] is "background".
        workers: processes that decode; 0 decodes in this one.
    """

    def __init__(self, decoder: Any, *, names: tuple[str, ...], workers: int = 0) -> None:
        super().__init__(decoder, workers=workers)
        self.names = names

    @property
    def annotations(self) -> dict[str, Any]:
        """The objects of all images as a COCO dictionary, for scoring. Its images are in the order of the samples."""
        return self._decoder.annotations

    def finish(self, batch: tuple[list[Tensor], list[Target], Tensor]) -> tuple[list[Tensor], list[Target], Tensor]:
        """Return the batch with images in [0, 1]."""
        images, targets, keys = batch
        return [image.to(torch.float32) / 255 for image in images], targets, keys


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


def load_mask_library() -> Any:
    """Return `faster_coco_eval.mask`. Raise ImportError with the fix if it is not installed."""
    try:
        from faster_coco_eval import mask
    except ImportError as error:
        raise ImportError("COCO's masks and scores need faster-coco-eval (pip install faster-coco-eval)") from error
    return mask
