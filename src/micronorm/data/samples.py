"""What all sets of samples share: their parts, the streams of a sample's key, and batches by index."""

from collections.abc import Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

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
