"""Search for data sets in the usual folders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from micronorm.data import cifar, folders

DEFAULT_FOLDERS = (Path("data"), Path("~/data"))
"""Searched in this order if no folder is given."""

TINY = "tiny_imagenet20"
"""Twenty classes of Tiny ImageNet, in ImageNet's layout."""


def search_folders(folder: Path | str | None = None) -> tuple[Path, ...]:
    """Return the given folder, or the default ones."""
    return tuple(Path(place).expanduser() for place in (DEFAULT_FOLDERS if folder is None else (folder,)))


def find_data(folder: Path | str | None = None) -> dict[str, Path]:
    """Return the paths of "cifar10", "cifar100" and "imagenet" below `folder`, or below ./data and ~/data.

    Files are not read. In a default folder ImageNet must be a child of that name, because ./data/train and ./data/val
    may be any data set.

    Example:
        >>> find_data("no/such/folder")
        {}
    """
    found: dict[str, Path | None] = {"cifar10": None, "cifar100": None, "imagenet": None}
    for place in search_folders(folder):
        found["cifar10"] = found["cifar10"] or cifar.find_cifar(place, classes=10)
        found["cifar100"] = found["cifar100"] or cifar.find_cifar(place, classes=100)
        found["imagenet"] = found["imagenet"] or folders.find_folders(place, itself=folder is not None)
    return {name: path for name, path in found.items() if path is not None}


def locate(name: str, folder: Path | str | None = None) -> Path:
    """Return the path of a data set. Raise FileNotFoundError with all searched folders if it is not found."""
    places = search_folders(folder)
    if name == TINY:
        roots = (folders.find_folders(place, itself=folder is not None, names=(TINY,)) for place in places)
        found = next(filter(None, roots), None)
    else:
        found = find_data(folder).get(name)
    if found is not None:
        return found
    if name == TINY:
        shown = " and ".join(str(place.absolute()) for place in places)
        raise FileNotFoundError(f"{TINY} was looked for in {shown}, and below: folders train/CLASS/* and val/CLASS/*")
    if name == "imagenet":
        raise FileNotFoundError(folders.explain_missing(*places))
    raise FileNotFoundError(cifar.explain_missing(*places, classes=10 if name == "cifar10" else 100))


def open_first(open_files: Callable[..., Any], folder: Path | str | None, **options: Any) -> Any:
    """Open a data set in the first search folder that contains it. Raise FileNotFoundError with what each one lacks."""
    errors = []
    for place in search_folders(folder):
        try:
            return open_files(place, **options)
        except FileNotFoundError as error:
            errors.append(str(error))
    raise FileNotFoundError("; ".join(errors))
