"""Video classification: a sample is a clip, whose frames stay together; loss and score are those of images."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from micronorm.data import motion
from micronorm.tasks.classification import Classification
from micronorm.tasks.pictures import LARGEST_PICTURE, even_indices, shrink, stretch

NAMES = ("motion",)
"""The data sets that `open_video` can open."""

_SHOWN = 4  # frames of a clip


class Video(Classification):
    """Predict the class of a clip.

    The loss is a sum over clips, and counts are of clips, whatever the number of frames.

    Args:
        train: the training samples. A batch is (clips, labels), N×T×C×H×W floating and N int64.
        test: the test samples.
        names: the names of the classes, in the order of their labels.

    Example:
        >>> task = open_video("motion")
        >>> clips, labels = next(task.test.load([(0, torch.arange(2))], seed=0))
        >>> task.sample, clips.shape
        ('clip', torch.Size([2, 8, 1, 24, 24]))
    """

    sample = "clip"
    evaluation_batch = 32

    def __init__(self, train: Any, test: Any, *, names: tuple[str, ...]) -> None:
        super().__init__(train, test, classes=len(names))
        self.names = names

    def _name(self, label: int) -> str:
        return self.names[label]

    def _picture(self, image: Tensor) -> Tensor:
        """Return four frames of a T×C×H×W clip side by side."""
        frames = image[even_indices(len(image), _SHOWN)].detach().float().cpu()
        return stretch(torch.cat([shrink(frame, LARGEST_PICTURE) for frame in frames], 2))


def open_video(
    name: str,
    folder: Path | str | None = None,
    *,
    device: torch.device | str = "cpu",
    workers: int = 0,
    download: bool = False,
    verify: bool = True,
    size: int | None = None,
    classes: int | None = None,
) -> Video:
    """Open the video task of a data set."""
    train, test = motion.open_motion(device=device)
    return Video(train, test, names=motion.CLASSES)
