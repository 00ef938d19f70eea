"""The protocol of a task, the checks of what a task returns, and the listener, which receives the events of a run.

A *sample* has one index: an image, a clip, a volume. A *batch* is a tuple of columns: tensors or lists
that are indexed by sample. Images of different sizes come as a list. A *share* is (epoch, indices): the samples of
one rank in one optimizer step. The engine uses nothing else of a task.
"""

from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import Any, Protocol

from torch import Tensor, nn

Batch = tuple[Any, ...]
Share = tuple[int, Tensor]


class Loss(Protocol):
    """The loss of some samples: any object with these three attributes, such as a dataclass."""

    @property
    def sum(self) -> Tensor:
        """Return the sum over samples. The engine divides it once, by the count of the whole step."""
        ...

    @property
    def count(self) -> Tensor | int:
        """Return what these samples add to the count: samples, labelled pixels, or 0 if nothing is labelled."""
        ...

    @property
    def counts(self) -> Mapping[str, Tensor]:
        """Return more sums for the record, such as the number of wrong answers."""
        ...


class Samples(Protocol):
    """A set of samples that are requested by index. Files may be opened as late as in `load`.

    Images of different sizes may have `aspect_ratios`, width / height of each sample as a tensor. The samples of a step
    are then computed in their order, so that images of equal shape share a micro-batch.
    """

    def __len__(self) -> int: ...

    def load(self, shares: Iterable[Share], *, seed: int) -> Iterator[Batch]:
        """Yield one batch per share, in order, its samples in the order of the share's indices.

        A sample's augmentation must depend on (seed, epoch, index) alone, never on rank, worker or other samples.
        `shares` may be long: read it lazily, at most a few shares ahead.
        """
        ...


class Score(Protocol):
    """How good a model is on some test samples: sums, a confusion matrix, a list of detections.

    The engine merges the scores of batches. Across ranks it sends `state_dict()` as bytes and
    loads it into a new score of the same task.
    """

    def merge(self, other: Any) -> None:
        """Add the score of other samples to this one."""
        ...

    def figures(self) -> dict[str, float]:
        """Return the figures to report, by name."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers, strings, and lists and dictionaries of these."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        ...


class Task(Protocol):
    """Data, loss and score of one training problem."""

    @property
    def train(self) -> Samples:
        """Return the training samples."""
        ...

    @property
    def test(self) -> Samples:
        """Return the test samples, without augmentation."""
        ...

    @property
    def sample(self) -> str:
        """Return what one sample is, in the singular: "image", "clip", "volume"."""
        ...

    @property
    def evaluation_batch(self) -> int:
        """Return how many test samples to load and evaluate at once, at most. It is halved if memory runs out."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the training loss of a batch."""
        ...

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the training figures to report, from the sums of `Loss`: "loss", "count" and its `counts`."""
        ...

    def new_score(self) -> Score:
        """Return the score of no samples."""
        ...

    def score(self, model: nn.Module, batch: Batch) -> Score:
        """Return the score of a batch of test samples. The model is in eval mode."""
        ...

    def examples(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return predictions for a few test samples as pictures; see `micronorm.records` for their keys."""
        ...


def check_task(task: Task) -> None:
    """Raise TypeError for a part that is missing or of the wrong type, ValueError if there are no training samples."""
    for name in ("train", "test"):
        samples = getattr(task, name, None)
        if not (hasattr(samples, "load") and hasattr(samples, "__len__")):
            raise TypeError(
                f"task.{name} must have a length and `load(shares, *, seed)`, got {type(samples).__name__}; "
                "see docs/training.md for a set of samples"
            )
    needed = ("sample", "evaluation_batch", "loss", "figures", "new_score", "score", "examples")
    missing = [name for name in needed if not hasattr(task, name)]
    if missing:
        raise TypeError(f"the task {type(task).__name__} lacks {', '.join(missing)}; see docs/training.md")
    if len(task.train) == 0:
        raise ValueError("task.train is empty: it needs at least one sample")


def check_batch(batch: Any, samples: int) -> None:
    """Raise TypeError if a batch is not a tuple, ValueError if a column does not hold exactly `samples` samples."""
    if not isinstance(batch, (tuple, list)):
        raise TypeError(
            f"a batch must be a tuple of tensors or lists, each indexed by sample, got {type(batch).__name__}; "
            "yield (images, labels), or (images,) for a single column"
        )
    lengths = [len(column) for column in batch if isinstance(column, (Tensor, list))]
    if any(length != samples for length in lengths):
        raise ValueError(
            f"each column of a batch must hold the {samples} samples of its share, got {lengths}; "
            "`load` yields one batch per share, its samples in the order of the share's indices"
        )


def check_loss(loss: Any) -> None:
    """Raise TypeError or ValueError if a loss lacks a part, or has one that cannot be summed."""
    total, count, counts = (getattr(loss, name, None) for name in ("sum", "count", "counts"))
    if isinstance(loss, Tensor) or not isinstance(counts, Mapping):
        raise TypeError(
            "task.loss must return an object with `sum`, `count` and `counts` (a mapping, which may be empty), such as "
            f"a dataclass; got {type(loss).__name__} with counts of type {type(counts).__name__}"
        )
    if not isinstance(total, Tensor):
        raise TypeError(f"the sum of a loss must be a tensor with a gradient, got {type(total).__name__}")
    if total.ndim:
        raise ValueError(f'the sum of a loss must have no axes, got shape {tuple(total.shape)}; use reduction="sum"')
    if not total.requires_grad:
        raise ValueError("the sum of a loss must depend on trainable parameters, this one has no gradient")
    for name, value in {"count": count, **counts}.items():
        if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.ndim == 0):
            shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise TypeError(f"the {name} of a loss must be a number or a tensor without axes, got {shown}")
    if isinstance(count, Real) and count < 0:
        raise ValueError(f"the count of a loss must be 0 or more, got {count}: the step's sum is divided by it")
    reserved = sorted(counts.keys() & {"loss", "count"})
    if reserved:
        raise ValueError(f"the counts of a loss must not be named {', '.join(reserved)}: the engine uses these names")


def check_score(score: Any) -> None:
    """Raise TypeError if a score lacks a method."""
    missing = [
        name
        for name in ("merge", "figures", "state_dict", "load_state_dict")
        if not callable(getattr(score, name, None))
    ]
    if missing:
        raise TypeError(
            f"task.score must return a score with {', '.join(missing)}, got {type(score).__name__}; "
            "see micronorm.tasks.scores for one that adds up sums"
        )


class Listener:
    """Receive the events of a run, on rank 0. These methods do nothing: override those you need."""

    def on_start(self, total_steps: int, start_step: int, description: str) -> None:
        """Handle the start of a run, before its first step."""

    def on_step(self, row: dict[str, Any]) -> None:
        """Handle a row of `steps.jsonl`. On a GPU the rows of several steps come together."""

    def on_test(self, done: int, samples: int) -> None:
        """Handle the progress of an evaluation: `done` of this rank's test samples are scored."""

    def on_epoch(self, row: dict[str, Any]) -> None:
        """Handle a row of `epochs.jsonl`, after the evaluation."""

    def on_message(self, text: str) -> None:
        """Handle a message for the user."""

    def on_end(self) -> None:
        """Handle the end of a run, after its last step or an error."""
