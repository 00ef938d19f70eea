"""Video classification: a sample is a clip, whose frames stay together; loss and score are those of images."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from micronorm.data.files import FOLDS
from micronorm.data.frame_folders import PREFIXES, open_frame_folders
from micronorm.data.motion import open_motion
from micronorm.data.samples import DataSet
from micronorm.data.videos import open_videos
from micronorm.tasks.classification import Classification
from micronorm.tasks.pictures import LARGEST_PICTURE, even_indices, shrink, stretch

_SHOWN = 4  # frames of a clip


class Video(Classification):
    """Predict the class of a clip.

    The loss is a sum over clips, and the count is the number of clips, not of frames.

    Args:
        train: the training samples. A batch is (clips, labels), N×T×C×H×W floating and N int64.
        test: the test samples.
        names: the names of the classes, in the order of their labels.

    Example:
        >>> task = DATA_SETS["motion"]()
        >>> clips, labels = next(task.test.load([(0, torch.arange(2))], seed=0))
        >>> task.sample, clips.shape
        ('clip', torch.Size([2, 8, 1, 24, 24]))
    """

    sample = "clip"
    evaluation_batch = 32

    def __init__(self, train: Any, test: Any, *, names: tuple[str, ...]) -> None:
        super().__init__(train, test, classes=len(names), names=names)

    def _picture(self, image: Tensor) -> Tensor:
        """Return four frames of a T×C×H×W clip side by side."""
        frames = image[even_indices(len(image), _SHOWN)].detach().float().cpu()
        return stretch(torch.cat([shrink(frame, LARGEST_PICTURE) for frame in frames], 2))


def _video(opened: DataSet) -> Video:
    return Video(opened.train, opened.test, names=opened.names)


def _open_motion(*, device: torch.device | str = "cpu") -> Video:
    return _video(open_motion(device=device))


def _open_frames(name: str, folder: Path | str | None = None, *, workers: int = 0, size: int = 224) -> Video:
    return _video(open_frame_folders(folder, name=name, size=size, workers=workers))


def _open_clips(
    fold: int, folder: Path | str | None = None, *, device: torch.device | str = "cpu", size: int = 64
) -> Video:
    return _video(open_videos(folder, fold=fold, size=size, device=device))


DATA_SETS = {
    "motion": _open_motion,
    **{name: partial(_open_frames, name) for name in PREFIXES},
    **{f"clips-{fold}": partial(_open_clips, fold) for fold in range(FOLDS)},
}
