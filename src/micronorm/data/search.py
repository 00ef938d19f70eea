"""Where data sets are looked for."""

from pathlib import Path

from micronorm.data import cifar, folders

DEFAULT_FOLDERS = (Path("data"), Path("~/data"))
"""Looked through in this order where no folder is given: beside the work, then at home."""


def search_folders(folder: Path | str | None = None) -> tuple[Path, ...]:
    """The folder given and no other, or the default ones."""
    return tuple(Path(place).expanduser() for place in (DEFAULT_FOLDERS if folder is None else (folder,)))


def find_data(folder: Path | str | None = None) -> dict[str, Path]:
    """Which of "cifar10", "cifar100" and "imagenet" lie under `folder`, or under ./data and ~/data, and where.

    Files are looked for, not read. The digits come with scikit-learn and are always there. In a default folder ImageNet
    must be a child of that name: ./data/train and ./data/val may be anything.

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
    """Where `find_data` finds the set, or FileNotFoundError with all the places looked at and how to get it."""
    found = find_data(folder).get(name)
    if found is not None:
        return found
    places = search_folders(folder)
    if name == "imagenet":
        raise FileNotFoundError(folders.explain_missing(*places))
    raise FileNotFoundError(cifar.explain_missing(*places, classes=10 if name == "cifar10" else 100))
