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

from micronorm.data.folders import SUFFIXES, decode, require_torchvision
from micronorm.data.loading import FileSamples, Order
from micronorm.data.memory import CROP, FLIP
from micronorm.data.pixels import IMAGENET, Standardizer
from micronorm.ops.keyed import sample_keys, uniforms

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

_TAIL = 1024  # bytes at the end of a file that hold its end marker
_JPEG_END = b"\xff\xd9"
_END_MARKERS = {".jpg": _JPEG_END, ".jpeg": _JPEG_END, ".png": b"IEND"}


class MaskedImage(NamedTuple):
    """The files of one sample."""

    image: Path
    mask: Path


class MaskSet(NamedTuple):
    """The training and test samples, the names of the classes by label, and the label of pixels that do not count."""

    train: "MaskSamples"
    test: "MaskSamples"
    names: tuple[str, ...]
    void: int


def open_voc(folder: Path | str, *, crop: int = 513, workers: int = 0) -> MaskSet:
    """Open PASCAL VOC 2012: the folder VOC2012 of the official archive, or one that contains it.

    Training uses the list `trainaug.txt` of 10,582 images with the masks of `SegmentationClassAug`, if both exist, and
    `train.txt` otherwise. Testing uses `val.txt`, whole images.

    Args:
        folder: VOC2012, VOCdevkit, or the folder that contains it.
        crop: height and width of the training crops.
        workers: processes that decode; 0 decodes in this one.
    """
    places = [Path(folder) / below for below in ("", "VOC2012", "VOCdevkit/VOC2012", "voc2012/VOCdevkit/VOC2012")]
    root = next((place for place in places if (place / "ImageSets" / "Segmentation").is_dir()), None)
    if root is None:
        raise FileNotFoundError(
            f"PASCAL VOC 2012 was looked for in {', '.join(map(str, places))}: a folder with JPEGImages, "
            "SegmentationClass and ImageSets/Segmentation, as in VOCtrainval_11-May-2012.tar"
        )
    augmented = (root / "ImageSets/Segmentation/trainaug.txt").is_file() and (root / "SegmentationClassAug").is_dir()
    train = _voc_list(root, *(("trainaug", "SegmentationClassAug") if augmented else ("train", "SegmentationClass")))
    test = _voc_list(root, "val", "SegmentationClass")
    opened = _mask_set(train, test, VOC_CLASSES, VOC_VOID, crop=crop, workers=workers)
    return _check_labels(opened, [*train, *test])


def open_camvid(folder: Path | str, *, crop: int = 180, workers: int = 0) -> MaskSet:
    """Open CamVid in the layout of SegNet: train, trainannot, test, testannot. Eleven classes, void is 11.

    Args:
        folder: the folder of these four, or one with a child `camvid` or `CamVid`.
        crop: height and width of the training crops.
        workers: processes that decode; 0 decodes in this one.
    """
    places = [Path(folder) / below for below in ("", "camvid", "CamVid")]
    root = next((place for place in places if (place / "trainannot").is_dir()), None)
    if root is None:
        raise FileNotFoundError(
            f"CamVid was looked for in {', '.join(map(str, places))}: a folder with train, trainannot, test and "
            "testannot, as in the SegNet tutorial"
        )
    train, test = (pair_files(root / part, root / f"{part}annot") for part in ("train", "test"))
    opened = _mask_set(train, test, CAMVID_CLASSES, CAMVID_VOID, crop=crop, workers=workers)
    return _check_labels(opened, [*train, *test])


def open_label_maps(folder: Path | str, *, crop: int | None = None, workers: int = 0) -> MaskSet:
    """Open images and masks of your own: train/images, train/masks, val/images and val/masks. All masks are read.

    A mask has the name of its image and the suffix .png. The file classes.txt names the classes, one per line, in the
    order of their labels from 0 on. One further label may occur, which is void. Without classes.txt void is 255, and
    the classes are "class 0" up to the largest label.

    Args:
        folder: the folder of `train` and `val`.
        crop: height and width of the training crops; None for the larger side of the first image, at most 513.
        workers: processes that decode; 0 decodes in this one.

    Raises:
        FileNotFoundError: a folder or a mask is missing.
        ValueError: a file is broken, or there are more labels than classes and void.
    """
    root = Path(folder)
    train, test = (pair_files(root / part / "images", root / part / "masks") for part in ("train", "val"))
    names, void = _find_classes(root / "classes.txt", _find_labels([*train, *test]))
    crop = crop or min(513, max(check_picture(train[0].image)))
    return _mask_set(train, test, names, void, crop=crop, workers=workers)


def _find_labels(files: Sequence[MaskedImage]) -> dict[int, Path]:
    """Decode all masks. Return each label that occurs, with the first mask that has it."""
    masks = [pair.mask for pair in files]
    where: dict[int, Path] = {}
    with ThreadPoolExecutor() as pool:  # decoding releases Python's lock
        counts = pool.map(lambda path: np.bincount(_decode_mask(path).ravel()), masks)
        for path, pixels in zip(masks, counts, strict=True):
            where |= {label: path for label in np.flatnonzero(pixels).tolist() if label not in where}
    return where


def _check_labels(opened: "MaskSet", files: Sequence[MaskedImage]) -> "MaskSet":
    """Return the set. Raise ValueError with the name of a mask that has a label beyond the classes."""
    for label, path in sorted(_find_labels(files).items()):
        if label >= len(opened.names) and label != opened.void:
            raise ValueError(_explain_label(path, label, classes=len(opened.names), void=opened.void))
    return opened


def _explain_label(path: Path, label: int, *, classes: int, void: int) -> str:
    return f"{path} has the label {label}; labels must be below {classes}, or {void} for no label"


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
    return names, beyond[0] if beyond else VOC_VOID


def _mask_set(
    train: Sequence[MaskedImage],
    test: Sequence[MaskedImage],
    names: tuple[str, ...],
    void: int,
    *,
    crop: int,
    workers: int,
) -> MaskSet:
    if len(names) < 2:
        raise ValueError(f"segmentation needs at least 2 classes, got {len(names)}: {', '.join(names) or 'none'}")
    options: dict[str, Any] = {"classes": len(names), "void": void, "workers": workers}
    return MaskSet(MaskSamples(train, crop=crop, **options), MaskSamples(test, **options), names, void)


def pair_files(images: Path, masks: Path) -> list[MaskedImage]:
    """Return the images of a folder with the masks of the same name (and the suffix .png) in another, sorted.

    Raises:
        FileNotFoundError: a folder is missing, or an image has no mask.
        ValueError: there are no images.
    """
    for folder in (images, masks):
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {folder}")
    found = sorted(path for path in images.iterdir() if path.suffix.lower() in SUFFIXES and path.name[0] != ".")
    if not found:
        raise ValueError(f"{images} holds no image ({', '.join(SUFFIXES)})")
    return [MaskedImage(image, masks / f"{image.stem}.png") for image in found]


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file. Raise an error with its name if it is missing, empty or not UTF-8."""
    if not path.is_file():
        raise FileNotFoundError(f"no list {path}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8 ({error}); replace it") from error
    if not lines:
        raise ValueError(f"{path} is empty")
    return lines


def _voc_list(root: Path, name: str, masks: str) -> list[MaskedImage]:
    path = root / "ImageSets" / "Segmentation" / f"{name}.txt"
    names = " ".join(read_lines(path)).split()
    if not names:
        raise ValueError(f"{path} lists no image")
    return [MaskedImage(root / "JPEGImages" / f"{n}.jpg", root / masks / f"{n}.png") for n in names]


class MaskSamples(FileSamples):
    """Images and masks. With `crop`, batches are float32 N×3×crop×crop and int64 N×crop×crop; otherwise lists.

    With `crop`, an image is scaled by 0.5 to 2, cropped and mirrored at random; the crop may extend beyond the image,
    where the input is the mean colour and the label void. All of it is a function of (seed, epoch, index) alone.
    Without, images keep their size and come as lists.

    All files are checked at once, before a training starts: they exist, end where they should, and a mask has the size
    of its image.

    Args:
        files: of each sample.
        classes: the number of classes.
        void: the label of pixels that do not count.
        crop: height and width of the training crops; None for whole images.
        workers: processes that decode; 0 decodes in this one.
    """

    def __init__(
        self,
        files: Sequence[MaskedImage],
        *,
        classes: int,
        void: int,
        crop: int | None = None,
        workers: int = 0,
    ) -> None:
        if crop is not None and crop < 1:
            raise ValueError(f"crop must be positive, got {crop}")
        require_torchvision()
        for image, mask in files:
            size, mask_size = check_picture(image), check_picture(mask)
            if size != mask_size:
                raise ValueError(
                    f"a mask must be as large as its image: {image} has {size[0]}×{size[1]} pixels, {mask} has "
                    f"{mask_size[0]}×{mask_size[1]}"
                )
        super().__init__(_MaskDecoder(files, classes=classes, void=void, crop=crop), workers=workers)
        self._standardize = Standardizer(IMAGENET, torch.device("cpu"))

    def finish(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return standardized images and their labels, as two tensors if they were cropped."""
        images, labels = batch
        if isinstance(images, Tensor):
            return self._standardize(images), labels.long()
        return [self._standardize(image) for image in images], [mask.long() for mask in labels]


def check_picture(path: Path) -> tuple[int, int]:
    """Return width and height of a JPEG or PNG file. Raise an error with its name if it is missing or cut short.

    Reads the header and the end of the file, so that a hundred thousand files take seconds.
    """
    from PIL import Image

    if not path.is_file():
        raise FileNotFoundError(f"no image at {path}")
    try:
        with Image.open(path) as image:
            size = image.size
    except Exception as error:  # PIL's decoders raise many kinds of errors
        raise ValueError(f"{path} is not a readable image ({error}); replace it or delete it") from error
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        tail = file.read()
    marker = _END_MARKERS.get(path.suffix.lower(), b"")
    if marker not in tail and not (marker == _JPEG_END and _has_end_of_scan(path.read_bytes())):
        raise ValueError(f"{path} ends before its image does: the file was cut short; replace it or delete it")
    return size


def _has_end_of_scan(data: bytes) -> bool:
    """Return whether the pixels of a JPEG file end with their marker. Phones append videos and other data to the file.

    The segments before the pixels are skipped: a thumbnail in them has an end marker of its own.
    """
    place = 2
    while data[place : place + 1] == b"\xff":
        if data[place + 1 : place + 2] == b"\xda":  # start of scan; within the pixels no byte follows 0xff as it is
            return _JPEG_END in data[place:]
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return False


class _MaskDecoder:
    """Turns shares into bytes: crops as two tensors, which a worker sends faster, whole images as two lists."""

    def __init__(self, files: Sequence[MaskedImage], *, classes: int, void: int, crop: int | None) -> None:
        self._files, self._classes, self._void, self._crop = list(files), classes, void, crop

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, order: Order) -> tuple[Any, Any]:
        keys = sample_keys(torch.tensor(order.indices, dtype=torch.int64), seed=order.seed, epoch=order.epoch)
        crops = uniforms(keys, 3, stream=CROP).tolist()
        mirrored = (uniforms(keys, 1, stream=FLIP).squeeze(1) < 0.5).tolist()
        images, masks = [], []
        for index, draws, mirror in zip(order.indices, crops, mirrored, strict=True):
            image, mask = self._read(self._files[index])
            if self._crop is not None:
                image, mask = scale_and_crop(image, mask, draws, size=self._crop, void=self._void)
                image, mask = (image.flip(-1), mask.flip(-1)) if mirror else (image, mask)
            images.append(image)
            masks.append(mask)
        return (images, masks) if self._crop is None else (torch.stack(images), torch.stack(masks))

    def _read(self, files: MaskedImage) -> tuple[Tensor, Tensor]:
        image = torch.from_numpy(np.array(decode(files.image))).permute(2, 0, 1)
        mask = torch.from_numpy(_decode_mask(files.mask))
        labels = mask[mask != self._void]
        if labels.numel() and int(labels.max()) >= self._classes:
            label = int(labels.max())
            raise ValueError(_explain_label(files.mask, label, classes=self._classes, void=self._void))
        return image, mask


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


def _decode_mask(path: Path) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(path) as image:
            mode, values = image.mode, np.array(image)
    except Exception as error:  # PIL's decoders raise many kinds of errors
        raise ValueError(f"{path} is not a readable mask ({error}); replace it or delete it") from error
    if mode not in ("P", "L"):
        raise ValueError(f"a mask must have one byte per pixel (palette or grey), {path} has mode {mode}")
    return values
