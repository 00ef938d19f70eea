"""The answer of a trained model for one image file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn


@dataclass(frozen=True)
class Prediction:
    """The answer for one image.

    Args:
        words: one line for a table.
        answer: the entry of the JSON file.
        pictures: PIL images to write, by the end of their file names: {"-overlay": image}.
    """

    words: str
    answer: Mapping[str, Any]
    pictures: Mapping[str, Any] = field(default_factory=dict)


class Predictor(Protocol):
    """The part of a task that `micronorm predict` uses. It needs no data set."""

    def predict(self, model: nn.Module, path: Path) -> Prediction:
        """Return the answer for the image in a file. The model is in eval mode.

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
