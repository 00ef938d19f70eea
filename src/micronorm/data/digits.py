"""Scikit-learn's handwritten digits: 1,797 images of 8×8 pixels, part of the library."""

import torch

from micronorm.data.samples import Labelled, MemorySamples, PadCropFlip, Split, Standardization, keep_in_memory

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
    return Split(*(Labelled(part.images.to(torch.float32) / 8 - 1, part.labels) for part in _read()))


def open_digits(*, device: torch.device | str = "cpu") -> Split[MemorySamples]:
    """Keep the images of `read_digits` on a device; training images are shifted at random.

    Example:
        >>> train, test = open_digits()
        >>> len(train), len(test)
        (1297, 500)
    """
    return keep_in_memory(_read(), SCALE, SHIFT, device=device)


def _read() -> Split[Labelled]:
    """Return the training and the test part: N×1×8×8 uint8 images and N int64 labels."""
    from sklearn.datasets import load_digits  # here, because importing scikit-learn takes a second
    from sklearn.model_selection import train_test_split

    digits, targets = load_digits(return_X_y=True)
    images = torch.as_tensor(digits).to(torch.uint8).reshape(-1, 1, 8, 8)
    labels = torch.as_tensor(targets).to(torch.int64)
    parts = train_test_split(torch.arange(len(labels)).numpy(), test_size=TEST_IMAGES, stratify=targets, random_state=0)
    return Split(*(Labelled(images[part], labels[part]) for part in parts))
