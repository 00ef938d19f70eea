"""What the engine asks of a task. Nothing else about the task is known here: classification, detection, video.

A *batch* is a tuple of tensors or lists, each indexed by sample along its first axis. A *share* is (epoch, indices):
the samples that one rank takes of one optimizer step.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

Batch = tuple[Any, ...]
Share = tuple[int, Tensor]


class Loss(Protocol):
    """The loss of some samples, on whichever device they lie: any value with these three, such as a dataclass."""

    @property
    def sum(self) -> Tensor:
        """Over the samples, to be divided once by the whole step's count."""
        ...

    @property
    def count(self) -> Tensor | int:
        """What this part adds to the count that the step's sum is divided by."""
        ...

    @property
    def counts(self) -> Mapping[str, Tensor]:
        """More sums for the record, such as the number of wrong answers."""
        ...


class Samples(Protocol):
    """A set of samples that can be asked for by index."""

    def __len__(self) -> int: ...

    def load(self, shares: Iterable[Share], *, seed: int) -> Iterator[Batch]:
        """One batch per share, in order, its samples in the order of the share's indices.

        A sample's augmentation is a function of (seed, epoch, index) alone, never of its rank, worker or companions.
        `shares` may be long: it is read as it is needed, a few shares ahead at most.
        """
        ...


class Task(Protocol):
    """Data, loss and score of one training problem."""

    @property
    def train(self) -> Samples:
        """The samples to learn from."""
        ...

    @property
    def test(self) -> Samples:
        """The samples to evaluate on; nothing is augmented."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """The training loss of a batch, by the model as it stands."""
        ...

    def score(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Sums over a batch of the test samples, each a tensor without axes; they are added over batches and ranks."""
        ...

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The figures to report, from sums: those of `score`, or those of `Loss.counts` with "loss" and "count"."""
        ...
