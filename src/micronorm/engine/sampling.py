"""Choose the samples of each step and rank, from the seed, the epoch and the step's number alone."""

import math
from collections import deque
from collections.abc import Iterator

import torch

from micronorm.engine.parallel import OneRank
from micronorm.engine.settings import Settings
from micronorm.engine.step import StepInputs
from micronorm.engine.task import Samples, Share
from micronorm.ops.keyed import permutation, sample_keys


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
            indices = chosen[self.parallel.share(len(chosen), unit=settings.unit)]
            # A rank without samples loads one that does not count, so that no loader or collective forward gets none.
            share = epoch, indices if len(indices) else chosen[:1]
            loading.append((len(chosen), len(indices), share))
            yield share
