"""Scikit-learn's handwritten digits: 1,797 images of 8×8 pixels that come with the library."""

from typing import NamedTuple

import torch
from torch import Tensor

TEST_IMAGES = 500


class Labelled(NamedTuple):
    """N×1×8×8 float32 images with values in [−1, 1], and their N labels, int64 from 0 to 9."""

    images: Tensor
    labels: Tensor


class Digits(NamedTuple):
    """The two parts of the data set."""

    train: Labelled
    test: Labelled


def read_digits() -> Digits:
    """1,297 training and 500 test images, each digit in the same share in both; the same split at every call.

    Images of the same writers lie in both parts, so the test error says nothing of a writer never seen.

    Example:
        >>> digits = read_digits()
        >>> digits.train.images.shape, digits.test.images.shape
        (torch.Size([1297, 1, 8, 8]), torch.Size([500, 1, 8, 8]))
    """
    from sklearn.datasets import load_digits  # here: it costs a second, and few who import this room read digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels, labels, test_size=TEST_IMAGES, stratify=labels, random_state=0)
    train_pixels, test_pixels, train_labels, test_labels = map(torch.as_tensor, parts)
    return Digits(_labelled(train_pixels, train_labels), _labelled(test_pixels, test_labels))


def _labelled(pixels: Tensor, labels: Tensor) -> Labelled:
    images = pixels.to(torch.float32).reshape(-1, 1, 8, 8) / 8 - 1  # pixels are integers from 0 to 16
    return Labelled(images, labels.to(torch.int64))
