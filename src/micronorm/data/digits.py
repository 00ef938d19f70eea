"""Scikit-learn's handwritten digits: 1,797 images of 8×8 pixels that come with the library."""

from typing import NamedTuple

import torch
from torch import Tensor

from micronorm.data.memory import MemorySamples, PadCropFlip
from micronorm.data.pixels import Standardization

TEST_IMAGES = 500
SHIFT = PadCropFlip(pad=1)
"""By one pixel at most, and never mirrored: a digit that is turned round is another sign."""
_SCALE = Standardization(mean=(8.0,), std=(8.0,))  # pixels are integers from 0 to 16


class Labelled(NamedTuple):
    """N×1×8×8 float32 images with values in [−1, 1], and their N labels, int64 from 0 to 9."""

    images: Tensor
    labels: Tensor


class Digits(NamedTuple):
    """The two parts of the data set."""

    train: Labelled
    test: Labelled


class DigitSamples(NamedTuple):
    """The two parts of the data set, as samples to be asked for by index."""

    train: MemorySamples
    test: MemorySamples


def read_digits() -> Digits:
    """1,297 training and 500 test images, each digit in the same share in both; the same split at every call.

    Images of the same writers lie in both parts, so the test error says nothing of a writer never seen.

    Example:
        >>> digits = read_digits()
        >>> digits.train.images.shape, digits.test.images.shape
        (torch.Size([1297, 1, 8, 8]), torch.Size([500, 1, 8, 8]))
    """
    return Digits(*(Labelled(pixels.to(torch.float32) / 8 - 1, labels) for pixels, labels in _read()))


def open_digits(*, augmentation: PadCropFlip = SHIFT, device: torch.device | str = "cpu") -> DigitSamples:
    """The images of `read_digits` held on a device; `augmentation` is done to the training part.

    Example:
        >>> train, test = open_digits()
        >>> len(train), len(test)
        (1297, 500)
    """
    train, test = _read()
    return DigitSamples(
        MemorySamples(*train, standardization=_SCALE, augmentation=augmentation, device=device),
        MemorySamples(*test, standardization=_SCALE, device=device),
    )


def _read() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(pixels, labels) of the training part and of the test part: N×1×8×8 uint8 and N int64."""
    from sklearn.datasets import load_digits  # here: it costs a second, and few who import this room read digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels, labels, test_size=TEST_IMAGES, stratify=labels, random_state=0)
    train_pixels, test_pixels, train_labels, test_labels = map(torch.as_tensor, parts)

    def part(pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return pixels.to(torch.uint8).reshape(-1, 1, 8, 8), labels.to(torch.int64)

    return part(train_pixels, train_labels), part(test_pixels, test_labels)
