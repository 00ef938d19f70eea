"""What all sets of samples share: parts, streams of a sample's key, batches by index, and standardization.

Labelled images are kept on a device as bytes, and cropped and mirrored there, without Python code per sample.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from micronorm.ops.keyed import integers, sample_keys

T = TypeVar("T")

# Streams of a sample's key: numbers made of ASCII names, so that no two users of a key draw the same numbers.
CROP = int.from_bytes(b"crop", "big")
FLIP = int.from_bytes(b"flip", "big")


class Split(NamedTuple, Generic[T]):
    """The training and the test part of a data set."""

    train: T
    test: T


class DataSet(NamedTuple):
    """The training and test samples, and the names of the classes by label."""

    train: Any
    test: Any
    names: tuple[str, ...]


class IndexedSamples:
    """Samples in memory. A subclass has a length, and computes a batch from indices."""

    def __len__(self) -> int:
        raise NotImplementedError

    def load(self, shares: Iterable[tuple[int, Tensor]], *, seed: int) -> Iterator[tuple[Any, ...]]:
        """Yield one batch for each share (epoch, indices), in order."""
        for epoch, indices in shares:
            check_indices(indices, len(self))
            yield self._batch(indices, seed=seed, epoch=epoch)

    def _batch(self, indices: Tensor, *, seed: int, epoch: int) -> tuple[Any, ...]:
        raise NotImplementedError


def check_indices(indices: Tensor, samples: int) -> None:
    """Raise IndexError for an index outside of the samples. On a GPU the indexing itself fails, without a message."""
    if indices.device.type == "cpu" and indices.numel():
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= samples:
            raise IndexError(f"indices from {low} to {high} do not lie within the {samples} samples of the set")


def copy_indices(indices: Tensor, device: torch.device) -> Tensor:
    """Copy to a device without waiting for it, which a copy from pageable memory would do."""
    if device.type == "cuda" and indices.device.type == "cpu":
        indices = indices.pin_memory()
    return indices.to(device, non_blocking=True)


class Standardization(NamedTuple):
    """Mean and standard deviation of each channel, in the units of the stored bytes (0 to 255)."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


IMAGENET = Standardization(
    mean=(255 * 0.485, 255 * 0.456, 255 * 0.406),
    std=(255 * 0.229, 255 * 0.224, 255 * 0.225),
)
"""The usual values for ImageNet, which are published for pixels between 0 and 1."""


class Standardizer:
    """Compute (x − mean)/std of N×C×H×W bytes in float32, with mean and std on a device.

    Example:
        >>> Standardizer(Standardization((8.0,), (8.0,)))(torch.zeros(1, 1, 1, 1).byte()).item()
        -1.0
    """

    def __init__(self, standardization: Standardization, device: torch.device | str = "cpu") -> None:
        columns = [torch.tensor(column, dtype=torch.float32) for column in standardization]
        if columns[0].shape != columns[1].shape or not (columns[1] > 0).all():
            raise ValueError(f"standardization needs one mean and one positive std per channel, got {standardization}")
        self.channels = columns[0].numel()
        self._mean, self._std = (column.reshape(-1, 1, 1).to(device) for column in columns)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the standardized images, float32."""
        return (images - self._mean).div_(self._std)


class Labelled(NamedTuple):
    """N×C×H×W images and their N labels."""

    images: Tensor
    labels: Tensor


class PadCropFlip(NamedTuple):
    """The usual augmentation of small images.

    Attributes:
        pad: zero bytes on each side of the image, from which a window of the image's size is cut. The border is black,
            as with torchvision's RandomCrop(padding=pad) before Normalize.
        flip: mirror half of the images, left to right.
    """

    pad: int = 0
    flip: bool = False


class MemorySamples(IndexedSamples):
    """N images of C×H×W bytes and their labels. Batches are float32 N×C×H×W, standardized, and int64 labels.

    Window and mirroring are functions of (seed, epoch, index) alone. They are drawn on the device of the indices,
    usually the CPU, and copied to the images' device together with the indices, in one asynchronous copy.

    Args:
        images: N×C×H×W uint8.
        labels: N whole numbers.
        standardization: mean and standard deviation per channel.
        augmentation: random changes of an image; none by default.
        device: where the images are kept.

    Example:
        >>> images = torch.arange(48, dtype=torch.uint8).reshape(3, 1, 4, 4)
        >>> samples = MemorySamples(
        ...     images,
        ...     torch.tensor([0, 1, 0]),
        ...     standardization=Standardization((24.0,), (10.0,)),
        ...     augmentation=PadCropFlip(pad=1, flip=True),
        ... )
        >>> batch, labels = next(samples.load([(0, torch.tensor([2, 1]))], seed=0))
        >>> batch.shape, labels
        (torch.Size([2, 1, 4, 4]), tensor([0, 1]))
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        standardization: Standardization,
        augmentation: PadCropFlip = PadCropFlip(),  # noqa: B008  a named tuple is immutable
        device: torch.device | str = "cpu",
    ) -> None:
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise ValueError(f"images must be N×C×H×W uint8, got {images.dtype} {tuple(images.shape)}")
        if labels.shape != images.shape[:1] or labels.is_floating_point():
            raise ValueError(
                f"labels must be one whole number for each of {len(images)} images, got {labels.dtype} "
                f"{tuple(labels.shape)}"
            )
        if augmentation.pad < 0:
            raise ValueError(f"pad must not be negative, got {augmentation.pad}")
        self._device = torch.device(device)
        self._standardize = Standardizer(standardization, self._device)
        if self._standardize.channels != images.shape[1]:
            raise ValueError(
                f"standardization is for {self._standardize.channels} channels, the images have {images.shape[1]}"
            )
        self._augmentation = augmentation
        self._height, self._width = images.shape[2:]
        # Padded once, so that a window is only an offset.
        self._images = F.pad(images.to(self._device), (augmentation.pad,) * 4)
        self._labels = labels.to(self._device, torch.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def _batch(self, indices: Tensor, *, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        pad, flip = self._augmentation
        columns = [indices.to(torch.int64)]
        keys = sample_keys(indices, seed=seed, epoch=epoch)
        if pad:
            columns += integers(keys, 2, bound=2 * pad + 1, stream=CROP).unbind(1)
        if flip:
            columns += integers(keys, 1, bound=2, stream=FLIP).unbind(1)
        index, *chance = copy_indices(torch.stack(columns), self._device)
        images = self._images
        if pad:
            top, left = chance[:2]
            # N×C×(2·pad + 1)²×H×W: every window of every image, as a view.
            images = images.unfold(2, self._height, 1).unfold(3, self._width, 1)[index, :, top, left]
        else:
            images = images.index_select(0, index)
        if flip:
            images = torch.where(chance[-1].bool()[:, None, None, None], images.flip(-1), images)
        return self._standardize(images), self._labels.index_select(0, index)


def keep_in_memory(
    parts: Split[Labelled],
    standardization: Standardization,
    augmentation: PadCropFlip,
    *,
    device: torch.device | str = "cpu",
) -> Split[MemorySamples]:
    """Keep both parts of a data set on a device. The augmentation applies to the training part."""
    return Split(
        MemorySamples(*parts.train, standardization=standardization, augmentation=augmentation, device=device),
        MemorySamples(*parts.test, standardization=standardization, device=device),
    )
