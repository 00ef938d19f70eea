"""Search for data sets in the usual folders."""

import contextlib
from functools import partial
from pathlib import Path

from micronorm.data.cifar import find_cifar
from micronorm.data.folders import find_folders


def find_data(folder: Path | str | None = None) -> dict[str, Path]:
    """Return the paths of "cifar10", "cifar100" and "imagenet" below `folder`, or below ./data and ~/data.

    Files are not read.

    Example:
        >>> find_data("no/such/folder")
        {}
    """
    finders = {
        "cifar10": partial(find_cifar, classes=10),
        "cifar100": partial(find_cifar, classes=100),
        "imagenet": find_folders,
    }
    found = {}
    for name, find in finders.items():
        with contextlib.suppress(FileNotFoundError):
            found[name] = find(folder)
    return found
