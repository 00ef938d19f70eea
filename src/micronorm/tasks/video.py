"""Video classification: a sample is a clip, whose frames stay together; loss and score are those of images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from micronorm.data.frame_folders import PREFIXES, open_frame_folders
from micronorm.data.motion import CLASSES, open_motion
from micronorm.data.search import open_first
from micronorm.data.videos import FOLDS, open_videos
from micronorm.tasks.classification import Classification
from micronorm.tasks.pictures import LARGEST_PICTURE, even_indices, shrink, stretch

_CLIPS = tuple(f"clips-{fold}" for fold in range(FOLDS))
NAMES = ("motion", *PREFIXES, *_CLIPS)
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
        super().__init__(train, test, classes=len(names), names=names)

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
    """Open the video task of a data set.

    Args:
        name: "motion" (3,000 training and 1,000 test clips, generated), "something" (Something-Something V1), "jester",
            or "clips-0" to "clips-4": video files in one folder per class, tested on this fold.
        folder: where the data are; None searches ./data, then ~/data.
        device: where clips in memory are kept. Clips of frame folders stay on the CPU.
        workers: processes that decode the frames of "something" and "jester".
        download: refused; none of the data sets can be downloaded.
        verify: not used: there are no published checksums.
        size: height and width of the inputs; None for 224 (something, jester) and 64 (clips).
        classes: outputs of the model; None for the number of classes of the data set.
    """
    if name not in NAMES:
        raise ValueError(f"no data set is known as {name!r}; there are {', '.join(NAMES)}")
    if download:
        raise ValueError(f"{name} cannot be downloaded by this command: leave --download out")
    if workers and name not in PREFIXES:
        raise ValueError(f"workers decode frame folders, {name} is held in memory: leave --workers out")
    given = {} if size is None else {"size": size}
    if name == "motion":
        if folder is not None or given:
            raise ValueError("motion is generated: leave --data and --size out")
        (train, test), names = open_motion(device=device), CLASSES
    elif name in _CLIPS:
        train, test, names = open_first(open_videos, folder, fold=_CLIPS.index(name), device=device, **given)
    else:
        train, test, names = open_first(open_frame_folders, folder, name=name, workers=workers, **given)
    if classes not in (None, len(names)):
        raise ValueError(f"{name} has {len(names)} classes here, the model {classes} outputs")
    return Video(train, test, names=names)


def open_predictor(data: str, *, names: Sequence[str], size: int) -> NoReturn:
    """Raise ValueError: `micronorm predict` reads images."""
    raise ValueError(f"a network of {data} reads clips, not images: call mn.load(RUN) on clips of N×8×C×H×W instead")
