"""Training tasks, one module each, behind the protocol `micronorm.engine.Task`: data, loss, score and example pictures.

`open_task` finds a task by the name that a recipe uses. Data formats are in `micronorm.data`, networks in
`micronorm.recipes`.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from micronorm.tasks.scores import Predictor

TASKS = {
    "classification": "classification.DATA_SETS",
    "segmentation": "segmentation.DATA_SETS",
    "detection": "detection.DATA_SETS",
    "instances": "detection.DATA_SETS_WITH_MASKS",
    "video": "video.DATA_SETS",
    "volumes": "volumes.DATA_SETS",
}
"""The module of each task, and its dictionary of data sets.

The dictionary maps the name of a data set to the function that opens the task on it. The parameters of the function are
those options of `open_task` that the data set has.
"""

_OPTIONS = {
    "folder": "--data",
    "workers": "--workers",
    "download": "--download",
    "size": "--size",
    "verify": "--unverified",
}


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
        device: where the run computes. Data sets that are kept in memory are kept there; images in files stay on the
            CPU.
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
    module, dictionary = _find_module(task)
    data_sets = getattr(module, dictionary)
    if data not in data_sets:
        raise ValueError(f"no data set is known as {data!r}; there are {', '.join(data_sets)}")
    open_data = data_sets[data]
    takes = inspect.signature(open_data).parameters
    values = {"folder": folder, "workers": workers, "download": download, "size": size, "verify": verify}
    defaults = inspect.signature(open_task).parameters
    given = {name: value for name, value in values.items() if value != defaults[name].default}
    foreign = [_OPTIONS[name] for name in given if name not in takes]
    if foreign:
        own = ", ".join(option for name, option in _OPTIONS.items() if name in takes)
        raise ValueError(
            f"{data} has no option {' and '.join(foreign)}: leave it out; the options of {data} are {own or 'none'}"
        )
    opened = open_data(**given, **_select(open_data, device=device, classes=classes))
    if "classes" not in takes and classes not in (None, len(opened.names)):
        shown = ", ".join(opened.names[:2])
        raise ValueError(f"{data} has {len(opened.names)} classes ({shown}, …), the model {classes} outputs")
    return opened


def open_predictor(task: str, data: str, *, names: Sequence[str], size: int) -> Predictor:
    """Return a task without its data set, for `predict` alone.

    Args:
        task: a key of `TASKS`.
        data: the data set that the model was trained on; it determines how an image is prepared.
        names: of the classes, by label.
        size: height and width of the inputs, for data sets that are resized.

    Raises:
        ValueError: the samples of the task are not images.

    Example:
        >>> type(open_predictor("segmentation", "camvid", names=("sky", "road"), size=180)).__name__
        'Segmentation'
    """
    build = getattr(_find_module(task)[0], "open_predictor", None)
    if build is None:
        raise ValueError(
            f"micronorm predict reads images, which are not the samples of {data}: in Python, call the network of "
            f"mn.load(RUN); see docs/{task}.md"
        )
    return build(**_select(build, data=data, names=tuple(names), size=size))


def _find_module(task: str) -> tuple[Any, str]:
    """Return the module of a task, and the name of its dictionary of data sets."""
    if task not in TASKS:
        raise ValueError(f"no task {task!r}; there are {', '.join(TASKS)}")
    module, _, dictionary = TASKS[task].partition(".")
    return importlib.import_module(f"micronorm.tasks.{module}"), dictionary


def _select(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return those options that a function takes."""
    takes = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in takes}
