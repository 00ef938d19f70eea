"""Cell nuclei of the 2018 Data Science Bowl: images/ID.jpg, and labels/ID.png with the number of a nucleus per pixel.

All images are read when the set is opened, and kept in memory as bytes: 664 images are half a gigabyte.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from micronorm.data.coco import DetectionDecoder, DetectionSamples, Target, encode_masks
from micronorm.data.files import decode, decode_labels, find_root, require_torchvision, split_by_fold
from micronorm.data.masks import MaskedImage, check_pair, pair_files
from micronorm.data.samples import DataSet

NAMES = ("background", "nucleus")

LEAST_PIXELS = 10
"""A nucleus with fewer pixels in a training crop is not a target."""

STRIDE = 32
"""Detectors pad images to a multiple of this number, and so does this reader."""


def open_nuclei(folder: Path | str | None, *, masks: bool, workers: int = 0, crop: int = 256) -> DataSet:
    """Open the nuclei. A hash of its ID decides whether an image is for testing; about one in five is.

    Training images are cropped at random, and mirrored left to right and top to bottom. Test images are whole, with
    black added at the bottom and on the right up to a multiple of 32. A detector would add the mean colour of ImageNet
    instead, which is far brighter than most of these images and which training crops do not contain.

    Args:
        folder: the folder of `images` and `labels`, or one with a child `dsb2018`; None for ./data and ~/data.
        masks: whether targets have the mask of each nucleus.
        workers: processes that prepare batches; 0 prepares them in this one.
        crop: height and width of the training crops. Smaller images are padded with black.

    Raises:
        FileNotFoundError: no such folder, or an image without labels.
        ValueError: a broken file, with its name.
    """
    if crop < 1:
        raise ValueError(f"crop must be positive, got {crop}")
    require_torchvision()
    layout = "a folder with images/ID.jpg and labels/ID.png, which has the number of a nucleus per pixel"
    root = find_root(folder, ("dsb2018",), lambda place: (place / "labels").is_dir(), title="the nuclei", layout=layout)
    files = pair_files(root / "images", root / "labels")
    parts = split_by_fold(files, lambda pair: pair.image.stem, fold=0, where=root)
    train, test = (
        DetectionSamples(_NucleiDecoder(part, masks=masks, crop=size), workers=workers)
        for part, size in zip(parts, (crop, None), strict=True)
    )
    return DataSet(train, test, NAMES)


class _Picture(NamedTuple):
    """An image (H×W×3 bytes) and the number of a nucleus per pixel (H×W uint16, 0 is background)."""

    name: str
    image: np.ndarray
    nuclei: np.ndarray


class _NucleiDecoder(DetectionDecoder):
    """Images in memory; cropped and mirrored if `crop` is given."""

    def __init__(self, files: list[MaskedImage], *, masks: bool, crop: int | None) -> None:
        super().__init__(masks=masks, train=crop is not None, axes=(-1, -2))
        self._pictures = [_read(pair) for pair in files]
        if crop is None:
            self._pictures = [_pad_to_stride(picture) for picture in self._pictures]
        if not any(picture.nuclei.any() for picture in self._pictures):
            raise ValueError(f"none of the {len(files)} label maps ({files[0].mask} and others) has a nucleus")
        self._crop = crop

    def __len__(self) -> int:
        return len(self._pictures)

    def read(self, index: int, place: list[float]) -> tuple[Tensor, Target]:
        """Return a crop, or a whole image, and its target."""
        _, pixels, nuclei = self._pictures[index]
        if self._crop is not None:
            pixels, nuclei = (_cut(part, place, size=self._crop) for part in (pixels, nuclei))
        target = self._target(nuclei, least=1 if self._crop is None else LEAST_PIXELS)
        return torch.from_numpy(pixels).permute(2, 0, 1), target

    def _target(self, nuclei: np.ndarray, *, least: int) -> Target:
        found = _locate(nuclei, least=least)
        labels = torch.ones(len(found.numbers), dtype=torch.int64)
        target = {"boxes": torch.tensor(found.boxes, dtype=torch.float32), "labels": labels}
        if not self._masks:
            return target
        masks = np.zeros((len(labels), *nuclei.shape), dtype=np.uint8)
        for k, (number, box) in enumerate(zip(found.numbers, found.boxes, strict=True)):
            _fill(masks[k], nuclei, number, box)
        return {**target, "masks": torch.from_numpy(masks)}

    @cached_property
    def annotations(self) -> dict[str, Any]:
        """Return the nuclei as a COCO dictionary."""
        images, entries = [], []
        for number, picture in enumerate(self._pictures, 1):
            height, width = picture.nuclei.shape
            images.append({"id": number, "file_name": picture.name, "height": height, "width": width})
            entries += [{**entry, "image_id": number} for entry in _annotate(picture.nuclei, masks=self._masks)]
        categories = [{"id": k, "name": name} for k, name in enumerate(NAMES) if k]
        entries = [{**entry, "id": k} for k, entry in enumerate(entries, 1)]
        return {"images": images, "annotations": entries, "categories": categories}


def _read(pair: MaskedImage) -> _Picture:
    """Read an image and its labels, completely. Raise an error with the name of a broken file."""
    check_pair(pair)
    image, nuclei = np.array(decode(pair.image)), decode_labels(pair.mask, modes=("L", "I;16", "I"))
    if nuclei.min() < 0 or nuclei.max() > np.iinfo(np.uint16).max:
        raise ValueError(f"labels must lie between 0 and 65535, {pair.mask} has {nuclei.min()} to {nuclei.max()}")
    return _Picture(pair.image.name, image, nuclei.astype(np.uint16))


def _cut(pixels: np.ndarray, place: list[float], *, size: int) -> np.ndarray:
    """Cut size×size out of H×W or H×W×3 pixels, from two random numbers in [0, 1). Pad what is too small with zeros."""
    top, left = (int(draw * (max(0, side - size) + 1)) for draw, side in zip(place, pixels.shape[:2], strict=True))
    pixels = pixels[top : top + size, left : left + size]
    return _pad(pixels, *(size - side for side in pixels.shape[:2]))


def _pad_to_stride(picture: _Picture) -> _Picture:
    down, right = (-side % STRIDE for side in picture.nuclei.shape)
    return picture._replace(image=_pad(picture.image, down, right), nuclei=_pad(picture.nuclei, down, right))


def _pad(pixels: np.ndarray, down: int, right: int) -> np.ndarray:
    """Add zeros at the bottom and on the right of H×W or H×W×3 pixels."""
    return np.pad(pixels, ((0, down), (0, right), *[(0, 0)] * (pixels.ndim - 2)))


class _Located(NamedTuple):
    """Nuclei of an image: numbers (K), boxes (K×4, the outer edges x1 y1 x2 y2 of their pixels), and pixels (K)."""

    numbers: np.ndarray
    boxes: np.ndarray
    pixels: np.ndarray


def _locate(nuclei: np.ndarray, *, least: int) -> _Located:
    """Return the nuclei of at least `least` pixels, in the order of their numbers."""
    rows, columns = np.nonzero(nuclei)
    order = np.argsort(nuclei[rows, columns], kind="stable")
    rows, columns = rows[order], columns[order]
    numbers, starts, pixels = np.unique(nuclei[rows, columns], return_index=True, return_counts=True)
    low = [np.minimum.reduceat(side, starts) for side in (columns, rows)]
    high = [np.maximum.reduceat(side, starts) + 1 for side in (columns, rows)]
    kept = pixels >= least
    return _Located(numbers[kept], np.stack([*low, *high], 1)[kept], pixels[kept])


def _annotate(nuclei: np.ndarray, *, masks: bool) -> Iterator[dict[str, Any]]:
    """Yield the nuclei of an image as COCO's annotations, without their ids."""
    for number, box, pixels in zip(*_locate(nuclei, least=1), strict=True):
        x1, y1, x2, y2 = box.tolist()
        entry: dict[str, Any] = {
            "category_id": 1,
            "iscrowd": 0,
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "area": int(pixels),
        }
        if masks:
            mask = _fill(np.zeros(nuclei.shape, dtype=np.uint8), nuclei, number, box)
            (counts,) = encode_masks(torch.from_numpy(mask)[None])
            entry["segmentation"] = {"size": list(nuclei.shape), "counts": counts}
        yield entry


def _fill(mask: np.ndarray, nuclei: np.ndarray, number: int, box: np.ndarray) -> np.ndarray:
    """Set the pixels of one nucleus in an empty mask, and return the mask."""
    x1, y1, x2, y2 = box
    mask[y1:y2, x1:x2] = nuclei[y1:y2, x1:x2] == number
    return mask
