"""Bytes to network inputs: per-channel standardization."""

from typing import NamedTuple

import torch
from torch import Tensor


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
