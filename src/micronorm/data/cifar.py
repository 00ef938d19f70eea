"""CIFAR-10 and CIFAR-100 as their authors publish them: the binary release, and the Python release by torchvision.

Learning Multiple Layers of Features from Tiny Images, A. Krizhevsky, 2009. https://www.cs.toronto.edu/~kriz/cifar.html
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from micronorm.data.files import find_root, import_optional, search_folders
from micronorm.data.samples import Labelled, MemorySamples, PadCropFlip, Split, Standardization, keep_in_memory

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
USUAL = PadCropFlip(pad=4, flip=True)
"""The usual augmentation, also the paper's: a crop of the image padded by 4, mirrored half the time."""

# Of the 50,000 training images, with the biased deviation, rounded. They are constants, so that an image gives
# the same input in the whole data set, in a part of it and in a miniature.
STANDARDIZATION: Mapping[int, Standardization] = {
    10: Standardization(mean=(125.30692, 122.95039, 113.86538), std=(62.99322, 62.08871, 66.70490)),
    100: Standardization(mean=(129.30417, 124.06996, 112.43405), std=(68.17024, 65.39181, 70.41837)),
}

_FINE = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree
wolf woman worm
"""
CLASSES: Mapping[int, tuple[str, ...]] = {
    10: ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    100: tuple(_FINE.split()),
}
"""The names of the classes by label; of CIFAR-100 the fine ones."""

_PIXELS = 3 * 32 * 32


class _Release(NamedTuple):
    """The binary release: its folder, and the published SHA-1 of each file. And the folder of the Python release."""

    folder: str
    train: Mapping[str, str]
    test: Mapping[str, str]
    python: str


_RELEASES: Mapping[int, _Release] = {
    10: _Release(
        "cifar-10-batches-bin",
        train={
            "data_batch_1.bin": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
            "data_batch_2.bin": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
            "data_batch_3.bin": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
            "data_batch_4.bin": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
            "data_batch_5.bin": "26e2849e66a845b7f1e4614ae70f4889ae604628",
        },
        test={"test_batch.bin": "67eb016db431130d61cd03c7ad570b013799c88c"},
        python="cifar-10-batches-py",
    ),
    100: _Release(
        "cifar-100-binary",
        train={"train.bin": "e207cd2e05b73b1393c74c7f5e7bea451d63e08e"},
        test={"test.bin": "8fb6623e830365ff53cf14adec797474f5478006"},
        python="cifar-100-python",
    ),
}


def find_cifar(folder: Path | str | None, *, classes: Literal[10, 100]) -> Path:
    """Return the folder of a release in or below `folder`.

    If `folder` is None, search ./data and ~/data. The release may be in `folder` itself, in its child cifar10,
    CIFAR10, cifar-10 or CIFAR-10 (for 100 the same), or in a folder with the release's own name in one of these. A
    complete binary release is preferred to the Python one, which needs its own name.

    Raises:
        FileNotFoundError: no place has a release. The message lists the places and how to get one.
    """
    release = _RELEASES[classes]

    def release_in(place: Path) -> Path | None:
        for root in (place / release.folder, place):
            if all((root / name).is_file() for name in (*release.train, *release.test)):
                return root
        return next((p for p in (place / release.python, place) if p.name == release.python and p.is_dir()), None)

    layout = (
        f"{release.folder} or {release.python}, with all its files. Unpack an archive from {PAGE} there, or let "
        "torchvision fetch it: `micronorm train … --download`, or download=True in Python"
    )
    names = (f"cifar{classes}", f"CIFAR{classes}", f"cifar-{classes}", f"CIFAR-{classes}")
    found = release_in(find_root(folder, names, release_in, title=f"CIFAR-{classes}", layout=layout))
    assert found is not None
    return found


def read_cifar(
    folder: Path | str | None, *, classes: Literal[10, 100], verify: bool = True, download: bool = False
) -> Split[Labelled]:
    """Read CIFAR-10 or CIFAR-100 from the official files in or below `folder` (see `find_cifar`).

    Images are N×3×32×32 uint8, labels int64, in the official order; of CIFAR-100 the fine labels.

    Args:
        folder: where to look; None for ./data and ~/data.
        classes: 10 or 100.
        verify: require the official files, by their published checksums. Otherwise the binary files may be a miniature:
            the same files with any number of whole records. The Python release is always verified: its files are
            pickles, which are programs.
        download: if no release is found, let torchvision download the Python release into the first searched folder.

    Raises:
        FileNotFoundError: no release is found; lists the searched places and how to get one.
        ValueError: a file is damaged; names it and says what was expected.

    Example:
        >>> read_cifar("no/such/folder", classes=100)
        Traceback (most recent call last):
            ...
        FileNotFoundError: cannot find CIFAR-100 in ...
    """
    release = _RELEASES[classes]
    try:
        place = find_cifar(folder, classes=classes)
    except FileNotFoundError:
        if not download:
            raise
        return _read_python(search_folders(folder)[0], classes, download=True)
    if place.name == release.python:
        return _read_python(place.parent, classes, download=download)
    parts = []
    for files in (release.train, release.test):
        read = [_read(place / name, digest if verify else None, classes) for name, digest in files.items()]
        parts.append(Labelled(torch.cat([part.images for part in read]), torch.cat([part.labels for part in read])))
    return Split(*parts)


def open_cifar(
    folder: Path | str | None,
    *,
    classes: Literal[10, 100],
    device: torch.device | str = "cpu",
    verify: bool = True,
    download: bool = False,
) -> Split[MemorySamples]:
    """Keep the images of `read_cifar` on a device; training images get the usual augmentation."""
    parts = read_cifar(folder, classes=classes, verify=verify, download=download)
    return keep_in_memory(parts, STANDARDIZATION[classes], USUAL, device=device)


def _read_python(folder: Path, classes: int, *, download: bool = False) -> Split[Labelled]:
    """Read the Python release in `folder`, or download it. torchvision compares the published MD5 of each file."""
    datasets = import_optional(
        "torchvision.datasets", f"Python files of CIFAR (the binary ones of {PAGE})", "torchvision"
    )
    source = datasets.CIFAR10 if classes == 10 else datasets.CIFAR100
    place = (folder / source.base_folder).absolute()
    try:
        parts = [source(folder, train=train, download=download) for train in (True, False)]
    except (OSError, RuntimeError) as error:  # torchvision raises RuntimeError for a wrong checksum
        if download:
            raise OSError(
                f"fetching {source.url} into {place.parent} failed ({error}); try again, or unpack an archive from "
                f"{PAGE} there"
            ) from error
        raise ValueError(
            f"{place} is damaged or not the official Python release ({error}). Delete it and unpack the archive again "
            f"from {PAGE} (or use --download, download=True in Python)"
        ) from error
    train, test = (
        Labelled(torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets))
        for part in parts
    )
    return Split(train, test)


def _read(path: Path, digest: str | None, classes: int) -> Labelled:
    data = path.read_bytes()
    try:
        found = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        if digest not in (None, found):
            raise ValueError(f"the SHA1 of its {len(data):,} bytes is {found}, the published one {digest}")
        return _parse(data, classes)
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged or not the official file: {error}. Delete it and unpack the archive again from {PAGE} "
            "(or use --download, download=True in Python); a miniature in the official format is read with "
            "--unverified, verify=False in Python"
        ) from error


def _parse(data: bytes, classes: int) -> Labelled:
    heads = 1 if classes == 10 else 2  # bytes before the pixels: the label, or the coarse and the fine label
    record = heads + _PIXELS
    if not data or len(data) % record:
        raise ValueError(f"its {len(data):,} bytes are not a whole number of records of {record:,} bytes")
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(-1, record)
    if heads == 2:
        _check_labels(rows[:, 0], 20)
    labels = rows[:, heads - 1].to(torch.int64)
    _check_labels(labels, classes)
    return Labelled(rows[:, heads:].reshape(-1, 3, 32, 32), labels)


def _check_labels(labels: Tensor, classes: int) -> None:
    for label in (int(labels.min()), int(labels.max())):
        if not 0 <= label < classes:
            raise ValueError(f"its label {label} does not lie between 0 and {classes - 1}")
