"""What a task gives, checked where it enters the engine: a sample lost or a sum misread would not be noticed later."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from micronorm.engine.task import Task


def check_samples(task: Task) -> None:
    """That there is something to learn from, and that it can be asked for by index.

    Raises:
        TypeError: a set of samples without `load`, such as a dataset or a loader of torch.
        ValueError: no training samples.
    """
    for name in ("train", "test"):
        samples = getattr(task, name)
        if not (hasattr(samples, "load") and hasattr(samples, "__len__")):
            raise TypeError(
                f"task.{name} must have a length and `load(shares, *, seed)`, got {type(samples).__name__}; "
                "see docs/training.md for a set of samples"
            )
    if len(task.train) == 0:
        raise ValueError("task.train is empty: there is nothing to learn from")


def check_batch(batch: Any, samples: int) -> None:
    """That a batch holds the samples of its share, no more and no fewer.

    Raises:
        TypeError: the batch is no tuple or list.
        ValueError: a column has another length.
    """
    if not isinstance(batch, (tuple, list)):
        raise TypeError(
            f"a batch must be a tuple of tensors or lists, each indexed by sample, got {type(batch).__name__}; "
            "yield (images, labels), or (images,) where there is one column"
        )
    lengths = [len(column) for column in batch if isinstance(column, (Tensor, list))]
    if any(length != samples for length in lengths):
        raise ValueError(
            f"a batch must hold the {samples} samples it was asked for in each column, got {lengths}; "
            "`load` yields one batch per share, its samples in the order of the share's indices"
        )


def check_loss(loss: Any) -> None:
    """That a loss has a sum, a count and counts of the kinds that can be added up.

    Raises:
        TypeError: one is missing, or of another kind.
        ValueError: the sum or the count cannot be one.
    """
    total, count, counts = (getattr(loss, name, None) for name in ("sum", "count", "counts"))
    if isinstance(loss, Tensor) or not isinstance(counts, Mapping):
        raise TypeError(
            "task.loss must give a value with `sum`, `count` and `counts` (a mapping, empty if nothing more is to be "
            f"counted), such as a dataclass; got {type(loss).__name__} with counts of type {type(counts).__name__}"
        )
    if not isinstance(total, Tensor):
        raise TypeError(f"the sum of a loss must be a tensor to go backward from, got {type(total).__name__}")
    if total.ndim:
        raise ValueError(f'the sum of a loss must have no axes, got shape {tuple(total.shape)}; use reduction="sum"')
    if not total.requires_grad:
        raise ValueError("the sum of a loss must depend on parameters that train, this one has no gradient")
    for name, value in {"count": count, **counts}.items():
        if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.ndim == 0):
            shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise TypeError(f"the {name} of a loss must be a number or a tensor without axes, got {shown}")
    if isinstance(count, Real) and count < 0:
        raise ValueError(f"the count of a loss must be 0 or more, got {count}: the step's sum is divided by it")
    taken = counts.keys() & {"loss", "count"}
    if taken:
        raise ValueError(
            f"the counts of a loss must have other names than {', '.join(sorted(taken))}: the engine's own"
        )


def check_scores(scores: Any) -> None:
    """That scores can be added over batches and ranks.

    Raises:
        TypeError: no mapping of names to tensors without axes.
    """
    if not isinstance(scores, Mapping):
        raise TypeError(f"task.score must give a mapping of names to sums, got {type(scores).__name__}")
    for name, value in scores.items():
        if not isinstance(value, Tensor) or value.ndim:
            shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise TypeError(
                f"task.score must give tensors without axes, {name!r} is {shown}; use torch.tensor(…) or .sum()"
            )
