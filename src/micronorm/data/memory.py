"""Labelled images held whole on a device as bytes, cropped and flipped there: no Python per sample."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from micronorm.data.pixels import Standardization, Standardizer
from micronorm.ops.keyed import integers, sample_keys

# Streams of a sample's key. Their names in ASCII: what another room draws from the same key has another number.
CROP = int.from_bytes(b"crop", "big")
FLIP = int.from_bytes(b"flip", "big")


class PadCropFlip(NamedTuple):
    """The usual augmentation of small images.

    Attributes:
        pad: rows and columns of zero bytes around the image, of which a window of the image's own size is cut. The
            zeros come before standardization: the border is black, as with torchvision's RandomCrop(padding=pad) ahead
            of Normalize, not the mean colour.
        flip: mirror every second image, left to right.
    """

    pad: int = 0
    flip: bool = False


class MemorySamples:
    """N images of C×H×W bytes and their labels. Batches are float32 N×C×H×W, standardized, and int64 labels.

    Window and mirroring are functions of (seed, epoch, index) alone. They are drawn where the indices lie, usually on
    the CPU, and travel to the device with the indices in one copy that nothing waits for.

    Args:
        images: N×C×H×W uint8.
        labels: N whole numbers.
        standardization: per channel; see `channel_statistics`.
        augmentation: what chance does to an image; the default does nothing.
        device: where the images are kept and batches appear.

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
        augmentation: PadCropFlip = PadCropFlip(),  # noqa: B008  a named tuple: nobody can change it
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
        # Padded once and for all: a window is then nothing but an offset.
        self._images = F.pad(images.to(self._device), (augmentation.pad,) * 4)
        self._labels = labels.to(self._device, torch.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def load(self, shares: Iterable[tuple[int, Tensor]], *, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(images, labels) for each share (epoch, indices), in order."""
        for epoch, indices in shares:
            yield self._batch(indices, seed=seed, epoch=epoch)

    def _batch(self, indices: Tensor, *, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        check_indices(indices, len(self))
        pad, flip = self._augmentation
        columns = [indices.to(torch.int64)]
        keys = sample_keys(indices, seed=seed, epoch=epoch)
        if pad:
            columns += integers(keys, 2, bound=2 * pad + 1, stream=CROP).unbind(1)
        if flip:
            columns += integers(keys, 1, bound=2, stream=FLIP).unbind(1)
        index, *chance = self._here(torch.stack(columns))
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

    def _here(self, columns: Tensor) -> Tensor:
        if self._device.type == "cuda" and columns.device.type == "cpu":
            columns = columns.pin_memory()  # a copy from ordinary memory would wait for the device
        return columns.to(self._device, non_blocking=True)


def check_indices(indices: Tensor, samples: int) -> None:
    """Raise IndexError where an index is not one of `samples`; on a GPU the reading itself does, without a message."""
    if indices.device.type == "cpu" and indices.numel():
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= samples:
            raise IndexError(f"indices from {low} to {high} do not lie within the {samples} samples of the set")
