"""The samples of each step and rank, and the micro-batches in which a step is computed.

Seed, epoch and the step's number alone determine the samples. The size of a micro-batch is a performance knob that
depends on the memory: a step of n samples is computed in pieces of at most `size` samples. If a network's statistics
bind samples together (a BatchNorm over 64 images), pieces are whole multiples of that unit; otherwise the unit is one.
"""

import gc
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from micronorm.engine.parallel import OneRank
from micronorm.engine.settings import Settings
from micronorm.engine.task import Batch, Samples, Share
from micronorm.ops.keyed import permutation, sample_keys

_ALLOCATION_FAILURES = (
    "out of memory",
    "can't allocate memory",  # torch's CPU allocator
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this error means that memory ran out, on any device and in any library."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _ALLOCATION_FAILURES)


def release_memory() -> None:
    """Free the memory of a failed attempt. Call it outside the `except` block, whose traceback keeps tensors alive."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class MicroBatch:
    """The present size of a micro-batch.

    Args:
        size: the size to start with; rounded down to a multiple of `unit`.
        unit: samples that must stay together.
        largest: the most samples that a micro-batch may hold.

    Example:
        >>> micro_batch = MicroBatch(8)
        >>> micro_batch.pieces(20)
        [slice(0, 8, None), slice(8, 16, None), slice(16, 20, None)]
        >>> micro_batch.halve()
        4
    """

    def __init__(self, size: int, *, unit: int = 1, largest: int | None = None) -> None:
        if size < unit:
            raise ValueError(
                f"micro_batch must be at least {unit}, got {size}: this network's statistics are over {unit} samples, "
                "and a smaller micro-batch would change them"
            )
        if largest is not None:
            size = min(size, largest)
        self.unit = unit
        self.size = size // unit * unit

    def pieces(self, samples: int) -> list[slice]:
        """Return the slices in which `samples` samples are computed; the last one may be shorter."""
        return [slice(start, min(start + self.size, samples)) for start in range(0, samples, self.size)]

    def halve(self) -> int:
        """Halve the size and return it; raise MemoryError if it is one unit already."""
        if self.size == self.unit:
            together = "" if self.unit == 1 else f" (this network's statistics are over {self.unit} samples)"
            raise MemoryError(
                f"out of memory with {self.unit} sample{'s' * (self.unit > 1)} per micro-batch, the least "
                f"possible{together}; use smaller inputs, --dtype bfloat16 or activation checkpointing"
            )
        self.size = max(self.unit, self.size // 2 // self.unit * self.unit)
        return self.size


@dataclass(frozen=True)
class StepInputs:
    """This rank's share of one step."""

    batch: Batch
    keys: Tensor
    """The random key of each sample of the batch."""
    step_samples: int
    """Samples of the whole step, over all ranks."""
    own_samples: int
    """Samples of this rank's batch that count: 0 if its one sample only keeps collective forwards in step."""


class Sampler:
    """Loads this rank's samples of each step.

    Args:
        samples: the training samples.
        settings: the samples of a step, and the seed of their order.
        parallel: the ranks that share a step.
    """

    def __init__(self, samples: Samples, settings: Settings, parallel: OneRank) -> None:
        self.samples, self.settings, self.parallel = samples, settings, parallel
        self.steps_per_epoch = math.ceil(len(samples) / settings.step_batch)
        self._aspect_ratios: Tensor | None = getattr(samples, "aspect_ratios", None)

    def load(self, first: int, last: int) -> Iterator[tuple[int, StepInputs]]:
        """Yield the epoch and the inputs of the steps from `first` on, up to but without `last`.

        Raises:
            ValueError: `samples.load` does not yield one batch per share.
        """
        seed, done = self.settings.seed, first
        loading: deque[tuple[int, int, Share]] = deque()  # a loader may read some shares ahead
        for batch in self.samples.load(self._shares(first, last, loading), seed=seed):
            if not loading:
                raise ValueError("task.train.load yielded more batches than shares; yield one batch per share")
            step_samples, own_samples, (epoch, indices) = loading.popleft()
            keys = sample_keys(indices, seed=seed, epoch=epoch).to(self.parallel.device)
            done += 1
            yield epoch, StepInputs(batch, keys, step_samples, own_samples)
        if done < last:
            raise ValueError(f"task.train.load ended after {done} of {last} steps; yield one batch per share")

    def _shares(self, first: int, last: int, loading: deque[tuple[int, int, Share]]) -> Iterator[Share]:
        """Yield this rank's shares. For each, `loading` gets the samples of the step, the own ones, and the share."""
        settings, order, order_epoch = self.settings, torch.empty(0), -1
        for k in range(first, last):
            epoch, within = divmod(k, self.steps_per_epoch)
            if epoch != order_epoch:
                order, order_epoch = permutation(len(self.samples), seed=settings.seed, epoch=epoch), epoch
            chosen = order[within * settings.step_batch : (within + 1) * settings.step_batch]
            if self._aspect_ratios is not None:  # which samples a step has does not change
                chosen = chosen[self._aspect_ratios[chosen].argsort(stable=True)]
            indices = chosen[self.parallel.share(len(chosen), unit=settings.unit)]
            # A rank without samples loads one that does not count, so that no loader or collective forward gets none.
            share = epoch, indices if len(indices) else chosen[:1]
            loading.append((len(chosen), len(indices), share))
            yield share
