"""Labelled images kept on a device as bytes, and cropped and mirrored there, without Python code per sample."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from micronorm.data.pixels import Standardization, Standardizer
from micronorm.data.samples import CROP, FLIP, IndexedSamples, Split, copy_indices
from micronorm.ops.keyed import integers, sample_keys


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
