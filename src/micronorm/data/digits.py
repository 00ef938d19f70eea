"""Scikit-learn's handwritten digits: 1,797 images of 8×8 pixels, part of the library."""

import torch
from torch import Tensor

from micronorm.data.memory import Labelled, MemorySamples, PadCropFlip
from micronorm.data.pixels import Standardization
from micronorm.data.samples import Split

TEST_IMAGES = 500
SHIFT = PadCropFlip(pad=1)
"""Shifts by at most one pixel. Digits are not mirrored, because a mirrored digit is another sign."""
SCALE = Standardization(mean=(8.0,), std=(8.0,))  # pixels are integers from 0 to 16


def read_digits() -> Split[Labelled]:
    """Return 1,297 training and 500 test images, each digit with the same share in both; the split is fixed.

    Images are N×1×8×8 float32 with values in [−1, 1], labels int64 from 0 to 9. Both parts contain images of the same
    writers, so the test error does not measure how well new writers are recognized.

    Example:
        >>> digits = read_digits()
        >>> digits.train.images.shape, digits.test.images.shape
        (torch.Size([1297, 1, 8, 8]), torch.Size([500, 1, 8, 8]))
    """
    return Split(*(Labelled(pixels.to(torch.float32) / 8 - 1, labels) for pixels, labels in _read()))


def open_digits(*, augmentation: PadCropFlip = SHIFT, device: torch.device | str = "cpu") -> Split[MemorySamples]:
    """Keep the images of `read_digits` on a device; `augmentation` applies to the training part.

    Example:
        >>> train, test = open_digits()
        >>> len(train), len(test)
        (1297, 500)
    """
    train, test = _read()
    return Split(
        MemorySamples(*train, standardization=SCALE, augmentation=augmentation, device=device),
        MemorySamples(*test, standardization=SCALE, device=device),
    )


def _read() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (pixels, labels) of the training and the test part: N×1×8×8 uint8 and N int64."""
    from sklearn.datasets import load_digits  # here, because importing scikit-learn takes a second
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels, labels, test_size=TEST_IMAGES, stratify=labels, random_state=0)
    train_pixels, test_pixels, train_labels, test_labels = map(torch.as_tensor, parts)

    def part(pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return pixels.to(torch.uint8).reshape(-1, 1, 8, 8), labels.to(torch.int64)

    return part(train_pixels, train_labels), part(test_pixels, test_labels)
