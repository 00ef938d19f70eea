"""Labelled volumes of the Medical Segmentation Decathlon: imagesTr, labelsTr and dataset.json, in NIfTI files.

All volumes are read when the set is opened, and kept in memory. The 260 volumes of the hippocampus are 80 MB.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from micronorm.data.files import find_listed, find_root, import_optional, naming_broken_file, read_json, split_by_fold
from micronorm.data.samples import CROP, FLIP, DataSet, IndexedSamples
from micronorm.ops.keyed import sample_keys, uniforms

SCALE, SHIFT, NOISE = 0.25, 0.25, 0.1
"""Largest change of a training volume's contrast (a factor 1 ± 0.25), brightness and noise, in standard deviations."""

_INTENSITY, _NOISE = (int.from_bytes(name, "big") for name in (b"tone", b"nois"))

_MOST_CLASSES = 256  # labels are kept as bytes

Size = tuple[int, int, int]


class Volume(NamedTuple):
    """A normalized float32 volume and its uint8 labels, both D×H×W."""

    image: Tensor
    labels: Tensor


def open_decathlon(
    folder: Path | str | None, *, name: str, fold: int, patch: Size, device: torch.device | str = "cpu"
) -> DataSet:
    """Open a data set of the Medical Segmentation Decathlon with one input channel, and check all its files.

    Args:
        folder: the folder of dataset.json, or one with a child `name`; None for ./data and ~/data.
        name: the folder's usual name, such as "hippocampus".
        fold: the fold for testing, from 0 to 4; see `files.fold_of`.
        patch: depth, height and width of the training patches.
        device: where the volumes are kept.

    Raises:
        FileNotFoundError: no such folder, or a file of dataset.json is missing.
        ValueError: a file cannot be read, its label does not fit, or it has another orientation or spacing than the
            first one; the message has the file's name. Or no training volume has a label but the background.
    """
    layout = "a folder with dataset.json, imagesTr and labelsTr, as the Medical Segmentation Decathlon has it"
    root = find_root(folder, (name,), lambda place: (place / "dataset.json").is_file(), title=name, layout=layout)
    names, pairs = _read_index(root / "dataset.json")
    for path in (path for pair in pairs for path in pair):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is listed in {root / 'dataset.json'}, but is missing")
    _check_grids([image for image, _ in pairs])
    parts = split_by_fold(pairs, lambda pair: pair[0].name, fold=fold, where=root)
    train, test = ([read_volume(*pair, classes=len(names)) for pair in part] for part in parts)
    if not any(volume.labels.any() for volume in train):
        raise ValueError(
            f"no training volume of {root} has a voxel of {', '.join(names[1:])}: all labels are 0, the background; "
            "check the files in labelsTr, or choose another fold"
        )
    return DataSet(VolumePatches(train, patch=patch, device=device), WholeVolumes(test), names)


def _read_index(path: Path) -> tuple[tuple[str, ...], list[tuple[Path, Path]]]:
    """Return the names of the classes, and the image and label file of each training volume."""
    content = read_json(path)
    try:
        names = tuple(str(content["labels"][str(k)]) for k in range(len(content["labels"])))
        files = [(entry["image"], entry["label"]) for entry in content["training"]]
        pairs = [
            (find_listed(path.parent, image, path), find_listed(path.parent, label, path)) for image, label in files
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path} must have labels, numbered from 0, and training, a list of image and label files; "
            f"{type(error).__name__}: {error}"
        ) from error
    if not 2 <= len(names) <= _MOST_CLASSES:
        raise ValueError(f"{path} must name a background and 1 to {_MOST_CLASSES - 1} classes, got {len(names)} names")
    if len({name.lower() for name in names}) < len(names):  # figures are by name, in lower case
        raise ValueError(f"{path} must give each label a name of its own, got {', '.join(names)}")
    return names, pairs


def read_volume(image: Path, labels: Path, *, classes: int) -> Volume:
    """Read a volume and its labels. Subtract the volume's mean, and divide by its standard deviation.

    Raises:
        ValueError: a file cannot be read, the two differ in shape or in where their voxels lie, a label is not a class,
            or the volume is constant.
    """
    (values, affine), (truth, own_affine) = _read_nifti(image), _read_nifti(labels)
    if values.ndim != 3 or values.shape != truth.shape:
        shapes = ["×".join(map(str, array.shape)) for array in (values, truth)]
        raise ValueError(f"{labels} must label a volume of three axes: it has {shapes[1]} voxels, {image} {shapes[0]}")
    apart = _voxels_apart(affine, own_affine, values.shape)
    if not apart <= 0.5:  # NaN is wrong, too
        raise ValueError(
            f"{labels} lies elsewhere than {image}: corners are up to {apart:.3g} voxels apart, because orientation, "
            "spacing or origin differ. Resample the labels to the image; if their voxels do correspond, copy its affine"
        )
    found = np.unique(truth)
    if not np.isin(found, np.arange(classes)).all():
        wrong = found[~np.isin(found, np.arange(classes))][0]
        raise ValueError(f"{labels} has the label {wrong:g}; labels must be whole numbers from 0 to {classes - 1}")
    mean, std = values.mean(), values.std()
    if not (np.isfinite(std) and std > 0):
        raise ValueError(f"{image} is constant or has values that are not finite (standard deviation {std:g})")
    normalized = ((values - mean) / std).astype(np.float32)
    return Volume(torch.from_numpy(normalized), torch.from_numpy(truth.astype(np.uint8)))


def _check_grids(images: Sequence[Path]) -> None:
    """Refuse a volume whose orientation, or whose spacing by more than 5 %, is not that of the first one."""
    nibabel = import_optional("nibabel", "NIfTI files", "nibabel")
    first = None
    for path in images:
        with naming_broken_file(path, "NIfTI file"):
            affine = nibabel.load(path).affine
            axes = "".join(map(str, nibabel.aff2axcodes(affine)))
            spacing = nibabel.affines.voxel_sizes(affine)
        first = first or (axes, spacing)
        if axes != first[0]:
            raise ValueError(
                f"all volumes must have one orientation: {path} has {axes}, {images[0]} {first[0]}; turn it and its "
                "labels, for example by nibabel.as_closest_canonical on all files"
            )
        if not np.allclose(spacing, first[1], rtol=0.05, atol=0):
            shown = ["×".join(f"{size:.3g}" for size in sizes) for sizes in (spacing, first[1])]
            raise ValueError(
                f"all volumes must have one spacing: the voxels of {path} are {shown[0]}, those of {images[0]} "
                f"{shown[1]}; resample it and its labels"
            )


def _voxels_apart(affine: np.ndarray, other: np.ndarray, shape: tuple[int, ...]) -> float:
    """Return how far the corners of a volume lie apart under two 4×4 affines, in voxels of the first.

    Files that were written by different programs differ by rounding.
    """
    corners = np.array([(*corner, 1) for corner in itertools.product(*((0, size - 1) for size in shape))])
    distance = np.linalg.norm((corners @ (other - affine).T)[:, :3], axis=1).max()
    return float(distance / np.linalg.norm(affine[:3, :3], axis=0).min()) if distance else 0.0


def _read_nifti(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of a file in float64, its intensity scale applied, and its 4×4 map from voxels to space."""
    nibabel = import_optional("nibabel", "NIfTI files", "nibabel")
    with naming_broken_file(path, "NIfTI file"):
        opened = nibabel.load(path)
        if opened.get_data_dtype().kind not in "iuf":
            raise TypeError(f"voxels must be real numbers, got {opened.get_data_dtype()}")
        return np.asarray(opened.dataobj, dtype=np.float64), np.asarray(opened.affine, dtype=np.float64)


class WholeVolumes(IndexedSamples):
    """Volumes for testing. Batches are lists of 1×D×H×W float32 and of D×H×W int64.

    Args:
        volumes: the samples.
    """

    def __init__(self, volumes: Sequence[Volume]) -> None:
        self._volumes = list(volumes)

    def __len__(self) -> int:
        return len(self._volumes)

    def _batch(self, indices: Tensor, *, seed: int, epoch: int) -> tuple[list[Tensor], list[Tensor]]:
        chosen = [self._volumes[index] for index in indices.tolist()]
        return [volume.image[None] for volume in chosen], [volume.labels.long() for volume in chosen]


class VolumePatches(IndexedSamples):
    """Random patches of volumes. Batches are float32 N×1×D×H×W and int64 N×D×H×W, on the device of the volumes.

    A patch has a random place, is mirrored along each axis at random, and changes in contrast, brightness and noise.
    All of it is a function of (seed, epoch, index) alone. A smaller volume lies in the middle of its patch; around it
    the input is 0, the mean, and the label is background.

    Args:
        volumes: the samples.
        patch: depth, height and width of a patch.
        device: where the volumes are kept.

    Example:
        >>> volume = Volume(torch.randn(5, 9, 7), torch.zeros(5, 9, 7, dtype=torch.uint8))
        >>> images, labels = next(VolumePatches([volume], patch=(8, 8, 4)).load([(0, torch.tensor([0]))], seed=0))
        >>> images.shape, labels.shape
        (torch.Size([1, 1, 8, 8, 4]), torch.Size([1, 8, 8, 4]))
    """

    def __init__(self, volumes: Sequence[Volume], *, patch: Size, device: torch.device | str = "cpu") -> None:
        if len(patch) != 3 or min(patch) < 1:
            raise ValueError(f"patch must be three positive sizes, got {patch}")
        self.patch, self._device = patch, torch.device(device)
        # The voxels of all volumes are in one row, so that one indexing makes a batch of volumes of any shapes.
        self._values = torch.cat([volume.image.flatten() for volume in volumes]).to(device)
        self._labels = torch.cat([volume.labels.flatten() for volume in volumes]).to(device)
        self._shapes = torch.tensor([volume.image.shape for volume in volumes], device=device)
        voxels = self._shapes.prod(1)
        self._offsets = voxels.cumsum(0) - voxels

    def __len__(self) -> int:
        return len(self._offsets)

    def _batch(self, indices: Tensor, *, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        here = indices.to(self._device)
        keys = sample_keys(here, seed=seed, epoch=epoch)
        place, inside = self._places(here, keys)
        images = torch.where(inside, _change_tone(self._values[place], keys), 0.0)
        return images[:, None], torch.where(inside, self._labels[place], 0).long()

    def _places(self, indices: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return where each voxel of the patches lies among all voxels, and whether it lies inside of its volume."""
        shapes, draws = self._shapes[indices], uniforms(keys, 3, stream=CROP).double()
        mirrored = uniforms(keys, 3, stream=FLIP) < 0.5
        place = self._offsets[indices][:, None, None, None]
        inside = torch.ones_like(place, dtype=torch.bool)
        stride = torch.ones_like(place)
        for axis in (2, 1, 0):
            length, size = self.patch[axis], shapes[:, axis]
            room = size - length
            start = torch.where(room >= 0, (draws[:, axis] * (room + 1)).long(), room // 2)
            along = torch.arange(length, device=self._device)
            along = torch.where(mirrored[:, axis, None], along.flip(0), along) + start[:, None]
            at = along.reshape(-1, *(length if k == axis else 1 for k in range(3)))
            size = size[:, None, None, None]
            inside = inside & (at >= 0) & (at < size)
            place, stride = place + stride * at, stride * size
        return torch.where(inside, place, 0), inside


def _change_tone(images: Tensor, keys: Tensor) -> Tensor:
    """Change contrast, brightness and noise of N×D×H×W images by random amounts; see `SCALE`."""
    draws = 2 * uniforms(keys, 3, stream=_INTENSITY)[:, :, None, None, None] - 1
    noise = 2 * uniforms(keys, images[0].numel(), stream=_NOISE).reshape(images.shape) - 1
    width = 3**0.5 * NOISE * draws[:, 2].abs()  # uniform noise within ± √3·σ has the standard deviation σ
    return images * (1 + SCALE * draws[:, 0]) + SHIFT * draws[:, 1] + width * noise
