"""Losses, scores and predictions that several tasks return. `micronorm.engine.Loss` and `Score` are the protocols."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SumLoss:
    """The summed loss of some samples, what they add to the step's count, and more sums for the record."""

    sum: Tensor
    count: Tensor | int
    counts: Mapping[str, Tensor]


def compute_logits(model: nn.Module, images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the model's logits, in float32 at least.

    Args:
        model: maps images to logits.
        images: N×C×H×W.
        shape: the shape that the logits of one image must have, classes first.

    Raises:
        TypeError: the model does not return a tensor.
        ValueError: the logits have another shape.
    """
    logits = model(images)
    wanted = "×".join(map(str, ("N", *shape)))
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"the model gives a {type(logits).__name__}, not a tensor of {wanted} logits: switch off its auxiliary "
            "heads, or wrap it in a module that returns the logits alone"
        )
    if logits.shape != (len(images), *shape):
        raise ValueError(
            f"the model gives shape {tuple(logits.shape)} for {len(images)} images of {shape[0]} classes; build it "
            f"with {shape[0]} outputs, so that the logits are {wanted}"
        )
    return widen(logits)


def widen(values: Tensor) -> Tensor:
    """Return half-precision values in float32, others as they are."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


class SumScore:
    """Named sums over samples, and a function from the sums to figures.

    Args:
        to_figures: the figures of given sums; usually the task's `figures`.
        sums: tensors without axes. They are added in float64, and stay on their device until `figures`.

    Example:
        >>> score = SumScore(lambda sums: {"error": 100 * sums["wrong"] / sums["count"]})
        >>> for wrong in (1, 2):
        ...     score.merge(SumScore(score.to_figures, {"wrong": torch.tensor(wrong), "count": torch.tensor(8)}))
        >>> score.figures()
        {'error': 18.75}
    """

    def __init__(
        self, to_figures: Callable[[Mapping[str, float]], dict[str, float]], sums: Mapping[str, Tensor] | None = None
    ) -> None:
        for name, value in (sums or {}).items():
            if not isinstance(value, Tensor) or value.ndim:
                shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise TypeError(f"a sum must be a tensor without axes, {name!r} is {shown}; use .sum()")
        self.to_figures = to_figures
        self.sums = {name: value.detach().to(torch.float64) for name, value in (sums or {}).items()}

    def merge(self, other: "SumScore") -> None:
        """Add the sums of other samples."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def figures(self) -> dict[str, float]:
        """Return the figures of the sums."""
        return self.to_figures({name: value.item() for name, value in self.sums.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        return dict(self.sums)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.sums = dict(state)


class ConfusionMatrix:
    """Counts of (true class, predicted class), for pixels, voxels or images.

    Args:
        classes: the number of classes.

    Example:
        >>> matrix = ConfusionMatrix(2)
        >>> matrix.add(torch.tensor([0, 0, 1, 255]), torch.tensor([0, 1, 1, 1]), void=255)
        >>> matrix.counts.tolist(), matrix.figures()
        ([[1, 1], [0, 1]], {'miou': 50.0, 'accuracy': 66.66666666666667})
    """

    def __init__(self, classes: int) -> None:
        self.counts = torch.zeros(classes, classes, dtype=torch.int64)

    def add(self, truth: Tensor, prediction: Tensor, *, void: int | None = None) -> None:
        """Count these pixels, except those whose true class is `void`."""
        truth, prediction = truth.flatten(), prediction.flatten()
        if void is not None:
            truth, prediction = truth[truth != void], prediction[truth != void]
        classes = len(self.counts)
        found = torch.bincount(truth * classes + prediction, minlength=classes**2).reshape(classes, classes)
        self.counts = self.counts.to(found.device) + found

    def merge(self, other: "ConfusionMatrix") -> None:
        """Add the counts of other samples."""
        self.counts = self.counts.to(other.counts.device) + other.counts

    def figures(self) -> dict[str, float]:
        """Return mean intersection over union of the classes that occur, and pixel accuracy, in per cent."""
        counts = self.counts.double().cpu()
        right, union = counts.diag(), counts.sum(0) + counts.sum(1) - counts.diag()
        if not union.sum():
            raise ValueError("there are no labelled pixels to score")
        occurs = union > 0
        return {
            "miou": (100 * (right[occurs] / union[occurs]).mean()).item(),
            "accuracy": (100 * right.sum() / counts.sum()).item(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.counts = state["counts"]


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image.

    Args:
        words: one line for a table.
        answer: the prediction as an entry of the JSON file.
        pictures: PIL images to write, by the end of their file names: {"-overlay": image}.
    """

    words: str
    answer: Mapping[str, Any]
    pictures: Mapping[str, Any] = field(default_factory=dict)


class Predictor(Protocol):
    """The part of a task that `micronorm predict` uses. It needs no data set."""

    def predict(self, model: nn.Module, path: Path) -> Prediction:
        """Return the prediction for the image in a file. The model is in eval mode.

        Raises:
            ValueError: the file cannot be read; the message has its name.
        """
        ...


def list_shares(shares: Mapping[str, float], *, most: int = 5) -> str:
    """Return the largest shares in words.

    Example:
        >>> list_shares({"road": 0.25, "sky": 0.7, "car": 0.05}, most=2)
        'sky 70.0 %, road 25.0 %'
    """
    largest = sorted(shares.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{name} {100 * share:.1f} %" for name, share in largest)
