"""Image folders in ImageNet's layout, root/train/CLASS/*.jpg and root/val/CLASS/*.jpg, decoded by worker processes."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from micronorm.data.files import SUFFIXES, decode, find_root, require_torchvision
from micronorm.data.loading import FileSamples, Order
from micronorm.data.samples import CROP, FLIP, IMAGENET, DataSet, Standardizer
from micronorm.ops.keyed import uniforms

SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
"""Range of the area, as a share of the image, and of width/height of a random crop."""
TINY = "tiny_imagenet20"
"""Twenty classes of Tiny ImageNet, in ImageNet's layout."""

_TRIES = 10
_IMAGENET_NAMES = ("imagenet", "ImageNet", "ilsvrc2012", "ILSVRC2012")
_LAYOUT = "a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG, the layout of torchvision's ImageFolder."
_DOWNLOAD = (
    " Download ILSVRC2012 from https://image-net.org/download after registration; torchvision.datasets.ImageNet "
    "unpacks the archives into this layout."
)


class Box(NamedTuple):
    """A rectangle of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def find_folders(folder: Path | str | None, *, name: str = "imagenet") -> Path:
    """Return the first folder with class folders in train and in val.

    Searches `folder` and its child `name`; for "imagenet" also ImageNet, ilsvrc2012 and ILSVRC2012. If `folder` is
    None, searches such children of ./data and ~/data alone, because ./data/train and ./data/val may be any data set.

    Raises:
        FileNotFoundError: no folder contains class folders; lists the searched ones.
    """

    def holds(place: Path) -> bool:
        return all(_subfolders(place / part) for part in ("train", "val"))

    title, names, layout = name, (name,), _LAYOUT
    if name == "imagenet":
        title, names, layout = "ImageNet", _IMAGENET_NAMES, _LAYOUT + _DOWNLOAD
    return find_root(folder, names, holds, title=title, layout=layout, itself=folder is not None)


def open_folders(folder: Path | str | None, *, name: str = "imagenet", size: int = 224, workers: int = 0) -> DataSet:
    """Open the images in `folder`/train and `folder`/val, a folder per class; labels follow the sorted class names.

    Training images are random resized crops, mirrored half the time; test images are central crops.

    Args:
        folder: the root, or a folder that contains it; see `find_folders`.
        name: the usual name of the root, such as "imagenet" or "tiny_imagenet20".
        size: height and width of the inputs.
        workers: processes that decode; 0 decodes in this one.

    Example:
        >>> open_folders("no/such/folder")
        Traceback (most recent call last):
            ...
        FileNotFoundError: cannot find ImageNet in ...
    """
    root = find_folders(folder, name=name)
    classes = _subfolders(root / "train")
    strangers = sorted(set(classes) ^ set(_subfolders(root / "val")))
    if strangers:
        shown = ", ".join(strangers[:5]) + (f" and {len(strangers) - 5} more" if len(strangers) > 5 else "")
        raise ValueError(f"train and val of {root} must have the same class folders; only one of them has {shown}")
    train, test = (FolderDecoder(root / part, classes, size=size, augment=part == "train") for part in ("train", "val"))
    return DataSet(FileSamples(train, workers=workers), FileSamples(test, workers=workers), classes)


class FolderDecoder:
    """Images in one folder per class. Batches are float32 N×3×size×size, standardized, and int64 labels.

    Greyscale images become RGB. With `augment`, crop and mirroring have the distribution of torchvision's
    RandomResizedCrop and RandomHorizontalFlip, and are functions of (seed, epoch, index) alone. Without, the shorter
    side is resized to size·256/224 and the centre is cut out.

    Args:
        root: the folder of class folders.
        classes: their names, in the order of the labels.
        size: height and width of the inputs.
        augment: crop and mirror at random.
    """

    def __init__(self, root: Path, classes: Sequence[str], *, size: int, augment: bool) -> None:
        if size < 1:
            raise ValueError(f"size must be positive, got {size}")
        require_torchvision()
        self._root, self._size, self._augment = root, size, augment
        self._standardize = Standardizer(IMAGENET)
        names, labels = [], []
        for label, name in enumerate(classes):
            files = _images(root / name)
            if not files:
                raise ValueError(f"{root / name} holds no image ({', '.join(SUFFIXES)}): fill it or remove it")
            names += [os.fsencode(os.path.join(name, file)) for file in files]
            labels += [label] * len(files)
        self._names = np.array(names)  # an array is copied into a worker faster than a million strings
        self.labels = torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, order: Order) -> tuple[Tensor, Tensor]:
        keys = order.keys
        boxes = uniforms(keys, 4 * _TRIES, stream=CROP).tolist()
        mirrored = (uniforms(keys, 1, stream=FLIP).squeeze(1) < 0.5).tolist()
        batch = torch.empty(len(keys), 3, self._size, self._size, dtype=torch.uint8)
        for n, index in enumerate(order.indices):
            batch[n] = self._image(Path(os.fsdecode(self._names[index])), boxes[n], mirror=mirrored[n])
        return batch, self.labels[order.indices]

    def finish(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return standardized images and their labels."""
        images, labels = batch
        return self._standardize(images), labels

    def _image(self, name: Path, draws: Sequence[float], *, mirror: bool) -> Tensor:
        from torchvision.transforms.v2 import functional as transforms

        image = decode(self._root / name)
        size = [self._size, self._size]
        if self._augment:
            box = crop_box(draws, height=image.height, width=image.width)
            image = transforms.resized_crop(image, *box, size=size)
            image = transforms.horizontal_flip(image) if mirror else image
        else:
            image = crop_centre(image, self._size)
        return transforms.pil_to_tensor(image)


def crop_box(draws: Sequence[float], *, height: int, width: int) -> Box:
    """Return the crop of an image by the rule of RandomResizedCrop, from 40 random numbers in [0, 1).

    Up to ten times, draw a share of the area and a log ratio. The first box that fits gets a random position. If none
    fits, take the largest central box whose ratio is allowed.

    Example:
        >>> crop_box([0.5] * 40, height=150, width=200)
        Box(top=12, left=37, height=127, width=127)
    """
    for area, ratio, down, right in zip(*(iter(draws),) * 4, strict=True):
        pixels = height * width * (SCALE[0] + (SCALE[1] - SCALE[0]) * area)
        aspect = math.exp(math.log(RATIO[0]) + (math.log(RATIO[1]) - math.log(RATIO[0])) * ratio)
        w, h = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
        if 0 < w <= width and 0 < h <= height:
            return Box(int(down * (height - h + 1)), int(right * (width - w + 1)), h, w)
    w, h = width, height
    if width / height < RATIO[0]:
        h = round(width / RATIO[0])
    elif width / height > RATIO[1]:
        w = round(height * RATIO[1])
    return Box((height - h) // 2, (width - w) // 2, h, w)


def crop_centre(image: Any, size: int) -> Any:
    """Return the centre of a PIL image whose shorter side is first resized to size·256/224."""
    from torchvision.transforms.v2 import functional as transforms

    return transforms.center_crop(transforms.resize(image, [round(size * 256 / 224)]), [size, size])


def _subfolders(folder: Path) -> tuple[str, ...]:
    """Return the names of the class folders, sorted, without hidden ones."""
    if not folder.is_dir():
        return ()
    with os.scandir(folder) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")))


def _images(folder: Path) -> list[str]:
    """Return the paths of the images in a class folder and below, relative to it, sorted.

    Links to folders are followed, but each folder is read once: a link may lead back to a folder that contains it.
    """
    found = []
    seen = {folder.resolve(), *folder.resolve().parents}
    for place, below, files in os.walk(folder, followlinks=True):
        real = {name: Path(place, name).resolve() for name in sorted(below)}
        below[:] = [name for name in real if real[name] not in seen]
        seen.update(real.values())
        inside = os.path.relpath(place, folder)
        found += [
            os.path.normpath(os.path.join(inside, file))
            for file in files
            if file.lower().endswith(SUFFIXES) and not file.startswith(".")
        ]
    return sorted(found)
