"""Search for data sets in the usual folders."""

import contextlib
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
    found = {"cifar10": find_cifar(folder, classes=10), "cifar100": find_cifar(folder, classes=100), "imagenet": None}
    with contextlib.suppress(FileNotFoundError):
        found["imagenet"] = find_folders(folder)
    return {name: path for name, path in found.items() if path is not None}
