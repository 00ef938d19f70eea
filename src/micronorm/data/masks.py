"""Images with one label per pixel in files: PASCAL VOC, CamVid, and any pair of folders.

A mask is a PNG of palette or grey values, as large as its image. The value is the class, or `void` for no label.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from micronorm.data.files import (
    SUFFIXES,
    check_picture,
    decode_labels,
    decode_pixels,
    find_listed,
    find_root,
    read_lines,
    require_torchvision,
)
from micronorm.data.loading import FileSamples, Order
from micronorm.data.samples import CROP, FLIP, IMAGENET, Standardizer
from micronorm.ops.keyed import uniforms

VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
CAMVID_CLASSES = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist",
)  # fmt: skip
VOC_VOID = 255
CAMVID_VOID = 11

SCALES = (0.5, 2.0)
"""Range of the random scale of a training image. Its logarithm is uniform."""

_MODES = ("P", "L")  # PIL's names for palette and grey values of 8 bits


class MaskedImage(NamedTuple):
    """The files of one sample."""

    image: Path
    mask: Path


class MaskSet(NamedTuple):
    """The training and test samples, the names of the classes by label, and the label of pixels that do not count."""

    train: FileSamples
    test: FileSamples
    names: tuple[str, ...]
    void: int


def open_voc(folder: Path | str | None, *, size: int = 513, workers: int = 0) -> MaskSet:
    """Open PASCAL VOC 2012: the folder VOC2012 of the official archive, or one that contains it.

    Training uses the list `trainaug.txt` of 10,582 images with the masks of `SegmentationClassAug`, if both exist, and
    `train.txt` otherwise. Testing uses `val.txt`, whole images.

    Args:
        folder: VOC2012, VOCdevkit, or the folder that contains it; None for ./data and ~/data.
        size: height and width of the training crops.
        workers: processes that decode; 0 decodes in this one.
    """
    lists = Path("ImageSets/Segmentation")
    root = find_root(
        folder,
        ("VOC2012", "VOCdevkit/VOC2012", "voc2012/VOCdevkit/VOC2012"),
        lambda place: (place / lists).is_dir(),
        title="PASCAL VOC 2012",
        layout=f"a folder with JPEGImages, SegmentationClass and {lists}, as in VOCtrainval_11-May-2012.tar",
    )
    augmented = (root / lists / "trainaug.txt").is_file() and (root / "SegmentationClassAug").is_dir()
    listed = {"trainaug": "SegmentationClassAug"} if augmented else {"train": "SegmentationClass"}
    train, test = (
        _voc_list(root, root / lists / f"{name}.txt", masks)
        for name, masks in (listed | {"val": "SegmentationClass"}).items()
    )
    return _open_checked(train, test, VOC_CLASSES, VOC_VOID, size=size, workers=workers)


def _voc_list(root: Path, path: Path, masks: str) -> list[MaskedImage]:
    folders = ((root / "JPEGImages", ".jpg"), (root / masks, ".png"))
    names = " ".join(read_lines(path)).split()
    return [MaskedImage(*(find_listed(folder, n + suffix, path) for folder, suffix in folders)) for n in names]


def open_camvid(folder: Path | str | None, *, size: int = 180, workers: int = 0) -> MaskSet:
    """Open CamVid in the layout of SegNet: train, trainannot, test, testannot. Eleven classes, void is 11.

    Args:
        folder: the folder of these four, or one with a child `camvid` or `CamVid`; None for ./data and ~/data.
        size: height and width of the training crops.
        workers: processes that decode; 0 decodes in this one.
    """
    root = find_root(
        folder,
        ("camvid", "CamVid"),
        lambda place: (place / "trainannot").is_dir(),
        title="CamVid",
        layout="a folder with train, trainannot, test and testannot, as in the SegNet tutorial",
    )
    train, test = (pair_files(root / part, root / f"{part}annot") for part in ("train", "test"))
    return _open_checked(train, test, CAMVID_CLASSES, CAMVID_VOID, size=size, workers=workers)


def open_label_maps(folder: Path | str | None, *, size: int | None = None, workers: int = 0) -> MaskSet:
    """Open images and masks of your own: train/images, train/masks, val/images and val/masks. All masks are read.

    A mask has the name of its image and the suffix .png. The file classes.txt names the classes, one per line, in the
    order of their labels, which start at 0. One further label may occur: void. Without classes.txt void is 255, and
    the classes are "class 0" up to the largest label.

    Args:
        folder: the folder of `train` and `val`.
        size: height and width of the training crops; None for the larger side of the first image, at most 513.
        workers: processes that decode; 0 decodes in this one.

    Raises:
        FileNotFoundError: a folder, a mask or an image is missing.
        ValueError: no folder is given, a file is broken, there are more labels than classes and void, or void occurs
            and the first or last class does not.
    """
    if folder is None:
        raise ValueError("label_maps reads your own data: give its folder with --data")
    root = Path(folder)
    train, test = (pair_files(root / part / "images", root / part / "masks") for part in ("train", "val"))
    names, void = _find_classes(root / "classes.txt", _find_labels([*train, *test]))
    size = size or min(513, max(check_picture(train[0].image)))
    return _mask_set(train, test, names, void, size=size, workers=workers)


def _find_labels(files: Sequence[MaskedImage]) -> dict[int, Path]:
    """Decode all masks. Return each label that occurs, with the first mask that has it."""
    masks = [pair.mask for pair in files]
    where: dict[int, Path] = {}
    with ThreadPoolExecutor() as pool:  # decoding releases Python's lock
        counts = pool.map(lambda path: np.bincount(decode_labels(path, modes=_MODES).ravel()), masks)
        for path, pixels in zip(masks, counts, strict=True):
            where |= {label: path for label in np.flatnonzero(pixels).tolist() if label not in where}
    return where


def _open_checked(
    train: list[MaskedImage], test: list[MaskedImage], names: tuple[str, ...], void: int, **options: int
) -> MaskSet:
    """Open files with these classes. Raise ValueError with the name of a mask that has a label beyond them."""
    opened = _mask_set(train, test, names, void, **options)
    for label, path in sorted(_find_labels([*train, *test]).items()):
        if label >= len(names) and label != void:
            raise ValueError(f"{path} has the label {label}; labels must be below {len(names)}, or {void} for no label")
    return opened


def _find_classes(listed: Path, where: Mapping[int, Path]) -> tuple[tuple[str, ...], int]:
    """Return the names of the classes and the void label, from classes.txt if it exists, and from all labels."""
    if not listed.is_file():
        return tuple(f"class {k}" for k in range(max((k for k in where if k != VOC_VOID), default=-1) + 1)), VOC_VOID
    names = tuple(line.strip() for line in read_lines(listed) if line.strip())
    beyond = sorted(label for label in where if label >= len(names))
    if len(beyond) > 1:
        raise ValueError(
            f"{listed} names {len(names)} classes, labels 0 to {len(names) - 1}, and one further label may be void; "
            f"there are {beyond[0]} ({where[beyond[0]]}) and {beyond[1]} ({where[beyond[1]]}): name all classes"
        )
    void = beyond[0] if beyond else VOC_VOID
    # A class that was saved as the void label leaves the last class empty; labels from 1 on leave the first one empty.
    empty = [k for k in (0, len(names) - 1) if k not in where]
    if beyond and empty:
        raise ValueError(
            f"no mask has the class {names[empty[0]]!r}, label {empty[0]} in {listed}, and {void} was taken as void "
            f"({where[void]}); a class saved as {void} must be saved as {len(names) - 1}, and a last class without "
            "pixels must be removed from the list"
        )
    return names, void


def _mask_set(
    train: Sequence[MaskedImage],
    test: Sequence[MaskedImage],
    names: tuple[str, ...],
    void: int,
    *,
    size: int,
    workers: int,
) -> MaskSet:
    if len(names) < 2:
        raise ValueError(
            f"segmentation needs at least 2 classes, got {len(names)}: {', '.join(names) or 'none'}; the label {void} "
            "counts as void, not as a class"
        )
    opened = (
        FileSamples(MaskDecoder(files, void=void, crop=crop), workers=workers)
        for files, crop in ((train, size), (test, None))
    )
    return MaskSet(*opened, names=names, void=void)


def pair_files(images: Path, masks: Path) -> list[MaskedImage]:
    """Return the images of a folder with the masks of the same name (and the suffix .png) in another, sorted.

    Raises:
        FileNotFoundError: a folder is missing, an image has no mask, or a mask has no image.
        ValueError: there are no images.
    """
    for folder in (images, masks):
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {folder}")
    found = sorted(path for path in images.iterdir() if path.suffix.lower() in SUFFIXES and path.name[0] != ".")
    if not found:
        raise ValueError(f"{images} holds no image ({', '.join(SUFFIXES)})")
    pairs = [MaskedImage(image, masks / f"{image.stem}.png") for image in found]
    for image, mask in pairs:
        if not mask.exists():
            raise FileNotFoundError(f"{image} has no mask {mask}; add it or delete the image")
    strangers = {path for path in masks.glob("*.png") if path.name[0] != "."} - {pair.mask for pair in pairs}
    if strangers:
        raise FileNotFoundError(f"{min(strangers)} has no image of this name in {images}; add it or delete the mask")
    return pairs


def check_pair(pair: MaskedImage) -> None:
    """Raise an error with the name of a file that is missing or cut short, or of a mask of another size."""
    size, mask_size = check_picture(pair.image), check_picture(pair.mask, label_map=True)
    if size != mask_size:
        raise ValueError(
            f"a mask must be as large as its image: {pair.image} has {size[0]}×{size[1]} pixels, {pair.mask} has "
            f"{mask_size[0]}×{mask_size[1]}; images are turned as their EXIF orientation says"
        )


class MaskDecoder:
    """Images and masks. With `crop`, batches are float32 N×3×crop×crop and int64 N×crop×crop; otherwise lists.

    With `crop`, an image is scaled by 0.5 to 2, cropped and mirrored at random; the crop may extend beyond the image,
    where the input is the mean colour and the label void. All of it is a function of (seed, epoch, index) alone.
    Without, images keep their size and come as lists.

    All files are checked at once, before a training starts: they exist, end where they should, and a mask has the size
    of its image.

    Args:
        files: of each sample.
        void: the label of pixels that do not count.
        crop: height and width of the training crops; None for whole images.
    """

    def __init__(self, files: Sequence[MaskedImage], *, void: int, crop: int | None = None) -> None:
        if crop is not None and crop < 1:
            raise ValueError(f"size must be positive, got {crop}")
        require_torchvision()
        for pair in files:
            check_pair(pair)
        self._files, self._void, self._crop = list(files), void, crop
        self._standardize = Standardizer(IMAGENET)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, order: Order) -> tuple[Any, Any]:
        keys = order.keys
        crops = uniforms(keys, 3, stream=CROP).tolist()
        mirrored = (uniforms(keys, 1, stream=FLIP).squeeze(1) < 0.5).tolist()
        images, masks = [], []
        for index, draws, mirror in zip(order.indices, crops, mirrored, strict=True):
            files = self._files[index]
            image, mask = decode_pixels(files.image), torch.from_numpy(decode_labels(files.mask, modes=_MODES))
            if self._crop is not None:
                image, mask = scale_and_crop(image, mask, draws, size=self._crop, void=self._void)
                image, mask = (image.flip(-1), mask.flip(-1)) if mirror else (image, mask)
            images.append(image)
            masks.append(mask)
        # A worker sends two tensors faster than two lists.
        return (images, masks) if self._crop is None else (torch.stack(images), torch.stack(masks))

    def finish(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return standardized images and their labels, as two tensors if they were cropped."""
        images, labels = batch
        if isinstance(images, Tensor):
            return self._standardize(images), labels.long()
        return [self._standardize(image) for image in images], [mask.long() for mask in labels]


def scale_and_crop(
    image: Tensor, mask: Tensor, draws: Sequence[float], *, size: int, void: int
) -> tuple[Tensor, Tensor]:
    """Scale 3×H×W bytes and their H×W mask, and cut out size×size, from three random numbers in [0, 1).

    Where the scaled image is smaller than the crop, the rest is the mean colour and void.

    Example:
        >>> image, mask = torch.zeros(3, 4, 6, dtype=torch.uint8), torch.zeros(4, 6, dtype=torch.uint8)
        >>> [part.shape for part in scale_and_crop(image, mask, (0.5, 0.0, 0.0), size=5, void=255)]
        [torch.Size([3, 5, 5]), torch.Size([5, 5])]
    """
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as transforms

    low, high = map(math.log, SCALES)
    scale = math.exp(low + (high - low) * draws[0])
    height, width = (max(1, round(scale * side)) for side in mask.shape)
    image = transforms.resize(image, [height, width])
    mask = transforms.resize(mask[None], [height, width], interpolation=InterpolationMode.NEAREST)[0]
    top, left = (int(draw * (max(0, side - size) + 1)) for draw, side in zip(draws[1:], (height, width), strict=True))
    image, mask = (part[..., top : top + size, left : left + size] for part in (image, mask))
    down, right = (size - side for side in mask.shape)
    if down or right:
        colours = (F.pad(c, (0, right, 0, down), value=round(m)) for c, m in zip(image, IMAGENET.mean, strict=True))
        image, mask = torch.stack(list(colours)), F.pad(mask, (0, right, 0, down), value=void)
    return image, mask
