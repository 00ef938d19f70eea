"""Choose the samples of each step and rank, from the seed, the epoch and the step's number alone."""

import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from micronorm.engine.parallel import OneRank
from micronorm.engine.settings import Settings
from micronorm.engine.task import Share
from micronorm.ops.keyed import permutation


class StepSamples(NamedTuple):
    """The samples of one step."""

    epoch: int
    step_samples: int
    """Over all ranks."""
    indices: torch.Tensor
    """Of this rank."""
    own_samples: int
    """How many of the indices count."""


class Sampler:
    """Chooses the samples of steps, and remembers them until their batches have been loaded."""

    def __init__(self, settings: Settings, parallel: OneRank, samples: int) -> None:
        self.settings, self.parallel, self.samples = settings, parallel, samples
        self.steps_per_epoch = math.ceil(samples / settings.step_batch)
        self._loading: deque[StepSamples] = deque()  # a loader may read some shares ahead

    def shares(self, first: int, last: int) -> Iterator[Share]:
        """Yield this rank's share of the steps from `first` on, up to but without `last`."""
        settings, order, order_epoch = self.settings, torch.empty(0), -1
        for k in range(first, last):
            epoch, within = divmod(k, self.steps_per_epoch)
            if epoch != order_epoch:
                order, order_epoch = permutation(self.samples, seed=settings.seed, epoch=epoch), epoch
            chosen = order[within * settings.step_batch : (within + 1) * settings.step_batch]
            indices = chosen[self.parallel.share(len(chosen), unit=settings.unit)]
            own = len(indices)
            # A rank without samples loads one that does not count, so that no loader or collective forward gets none.
            taken = StepSamples(epoch, len(chosen), indices if own else chosen[:1], own)
            self._loading.append(taken)
            yield epoch, taken.indices

    def next_loaded(self) -> StepSamples:
        """Return the samples of the batch that was loaded next. Raise ValueError if no share is left for it."""
        if not self._loading:
            raise ValueError("task.train.load yielded more batches than shares; yield one batch per share")
        return self._loading.popleft()
