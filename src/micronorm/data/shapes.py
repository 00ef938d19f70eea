"""Generated pictures of discs, squares and triangles on noise, with the class of each pixel."""

import math

import torch
from torch import Tensor

from micronorm.data.samples import FLIP, IndexedSamples
from micronorm.ops.keyed import integers, sample_keys, uniforms

CLASSES = ("background", "disc", "square", "triangle")
VOID = 255
"""The label of pixels on the edge of a shape, which are not scored."""

_SHAPES = 2  # per picture; a later one covers an earlier one
_GEOMETRY = int.from_bytes(b"form", "big")
_NOISE = int.from_bytes(b"nois", "big")


class ShapeSamples(IndexedSamples):
    """N×3×size×size float32 pictures and N×size×size int64 labels, kept on a device.

    Picture i is a function of (seed, i). With `augment` it is mirrored in half of the epochs, at random.

    Args:
        count: the number of pictures.
        seed: another seed gives other pictures.
        size: height and width.
        augment: mirror pictures at random.
        device: where the pictures are kept.

    Example:
        >>> images, labels = next(ShapeSamples(8, seed=0).load([(0, torch.arange(2))], seed=0))
        >>> images.shape, labels.shape
        (torch.Size([2, 3, 32, 32]), torch.Size([2, 32, 32]))
    """

    def __init__(
        self, count: int, *, seed: int, size: int = 32, augment: bool = False, device: torch.device | str = "cpu"
    ) -> None:
        images, labels = draw_shapes(torch.arange(count), seed=seed, size=size)
        self._images, self._labels = images.to(device), labels.to(device)
        self._augment = augment

    def __len__(self) -> int:
        return len(self._labels)

    def _batch(self, indices: Tensor, *, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        here = indices.to(self._images.device)
        images, labels = self._images[here], self._labels[here]
        if self._augment:
            keys = sample_keys(indices, seed=seed, epoch=epoch)
            mirrored = integers(keys, 1, bound=2, stream=FLIP).bool().to(here.device)[:, :, None]
            labels = torch.where(mirrored, labels.flip(-1), labels)
            images = torch.where(mirrored[..., None], images.flip(-1), images)
        return images, labels


def draw_shapes(indices: Tensor, *, seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the pictures and labels of these indices; a function of (seed, index) alone."""
    keys = sample_keys(indices, seed=seed, epoch=0)
    noise = uniforms(keys, 3 * size * size, stream=_NOISE).float().reshape(-1, 3, size, size)
    images = noise - 0.5
    labels = torch.zeros(len(indices), size, size, dtype=torch.int64)
    draws = uniforms(keys, 7 * _SHAPES, stream=_GEOMETRY).float().reshape(-1, _SHAPES, 7, 1, 1)
    rows = torch.arange(size, dtype=torch.float32)[:, None]
    columns = torch.arange(size, dtype=torch.float32)[None, :]
    for k in range(_SHAPES):
        kind, top, left, radius, *colour = draws[:, k].unbind(1)
        kind = (3 * kind).long()
        down, right = rows - size * (0.15 + 0.7 * top), columns - size * (0.15 + 0.7 * left)
        outside = _distance(kind, down, right, size * (0.16 + 0.14 * radius))
        inside = outside < 0
        paint = (torch.stack(colour, 1) - 0.5) * 3
        images = torch.where(inside[:, None], paint + images, images)
        labels = torch.where(inside, kind + 1, labels)
        labels = torch.where(outside.abs() < 0.5, VOID, labels)
    return images, labels


def _distance(kind: Tensor, down: Tensor, right: Tensor, radius: Tensor) -> Tensor:
    """Return roughly how far each pixel is outside of the shape, negative inside."""
    disc = torch.hypot(down, right) - radius
    square = torch.maximum(down.abs(), right.abs()) - radius / math.sqrt(2)
    triangle = torch.maximum(down, math.sqrt(0.75) * right.abs() - down / 2) - radius / 2
    return torch.where(kind == 0, disc, torch.where(kind == 1, square, triangle))
