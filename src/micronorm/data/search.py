"""Search for data sets in the usual folders."""

from pathlib import Path

from micronorm.data import cifar, folders

DEFAULT_FOLDERS = (Path("data"), Path("~/data"))
"""Searched in this order if no folder is given."""


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
    found = find_data(folder).get(name)
    if found is not None:
        return found
    places = search_folders(folder)
    if name == "imagenet":
        raise FileNotFoundError(folders.explain_missing(*places))
    raise FileNotFoundError(cifar.explain_missing(*places, classes=10 if name == "cifar10" else 100))
