"""Training tasks, one module each, behind the protocol `micronorm.engine.Task`: data, loss, score and example pictures.

`open_task` finds a task by the name that a recipe uses. Data formats are in `micronorm.data`, networks in
`micronorm.recipes`.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from micronorm.tasks.prediction import Predictor

TASKS = {
    "classification": "classification.open_classification",
    "segmentation": "segmentation.open_segmentation",
    "detection": "detection.open_detection",
    "instances": "detection.open_instances",
    "video": "video.open_video",
    "volumes": "volumes.open_volumes",
}
"""The module and function that open a task. "instances" is detection with masks."""


def open_predictor(task: str, data: str, *, names: Sequence[str], size: int) -> Predictor:
    """Return a task without its data set, for `predict` alone.

    Args:
        task: a key of `TASKS`.
        data: the data set that the model was trained on; it determines how an image is prepared.
        names: of the classes, by label.
        size: height and width of the inputs, for data sets that are resized.

    Example:
        >>> type(open_predictor("segmentation", "camvid", names=("sky", "road"), size=180)).__name__
        'Segmentation'
    """
    module = importlib.import_module(f"micronorm.tasks.{_place(task)[0]}")
    return module.open_predictor(data, names=tuple(names), size=size)


def open_task(
    task: str,
    data: str,
    folder: Path | str | None = None,
    *,
    classes: int | None = None,
    device: torch.device | str = "cpu",
    workers: int = 0,
    download: bool = False,
    verify: bool = True,
    size: int | None = None,
) -> Any:
    """Open a task by name.

    Args:
        task: a key of `TASKS`.
        data: the data set, by the name that the task uses.
        folder: where the data are; None searches ./data and ~/data.
        classes: outputs of the model; None for the number of classes of the data set.
        device: where the run computes. Data sets that are kept in memory are kept there.
        workers: processes that decode files.
        download: download the data set if it is not found.
        verify: compare files with their published checksums.
        size: height and width of the inputs, for data sets that are resized.

    Raises:
        ValueError: no such task or data set, or an option that this data set does not have.

    Example:
        >>> len(open_task("classification", "digits").train)
        1297
    """
    module, function = _place(task)
    options = {"classes": classes, "device": device, "workers": workers}
    opened = getattr(importlib.import_module(f"micronorm.tasks.{module}"), function)
    return opened(data, folder, **options, download=download, verify=verify, size=size)


def _place(task: str) -> tuple[str, str]:
    """Return the module and the function that open a task."""
    if task not in TASKS:
        raise ValueError(f"no task {task!r}; there are {', '.join(TASKS)}")
    module, _, function = TASKS[task].partition(".")
    return module, function
