"""CIFAR-10 and CIFAR-100 as their authors publish them: the binary and the Python releases.

Learning Multiple Layers of Features from Tiny Images, A. Krizhevsky, 2009. https://www.cs.toronto.edu/~kriz/cifar.html
"""

import _codecs
import hashlib
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
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

_PIXELS = 3 * 32 * 32


class _Release(NamedTuple):
    """One of the official archives: its folder, and the digest of each file (SHA-1 of binary ones, else MD5)."""

    folder: str
    kind: Literal["binary", "python"]
    train: Mapping[str, str]
    test: Mapping[str, str]


# The checksums of the Python files are those that torchvision checks.
_RELEASES: Mapping[int, tuple[_Release, ...]] = {
    10: (
        _Release(
            "cifar-10-batches-bin",
            "binary",
            train={
                "data_batch_1.bin": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
                "data_batch_2.bin": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
                "data_batch_3.bin": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
                "data_batch_4.bin": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
                "data_batch_5.bin": "26e2849e66a845b7f1e4614ae70f4889ae604628",
            },
            test={"test_batch.bin": "67eb016db431130d61cd03c7ad570b013799c88c"},
        ),
        _Release(
            "cifar-10-batches-py",
            "python",
            train={
                "data_batch_1": "c99cafc152244af753f735de768cd75f",
                "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "634d18415352ddfa80567beed471001a",
                "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            },
            test={"test_batch": "40351d587109b95175f43aff81a1287e"},
        ),
    ),
    100: (
        _Release(
            "cifar-100-binary",
            "binary",
            train={"train.bin": "e207cd2e05b73b1393c74c7f5e7bea451d63e08e"},
            test={"test.bin": "8fb6623e830365ff53cf14adec797474f5478006"},
        ),
        _Release(
            "cifar-100-python",
            "python",
            train={"train": "16019d7e3df5f24257cddd939b257f8d"},
            test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        ),
    ),
}


def find_cifar(folder: Path | str | None, *, classes: Literal[10, 100]) -> Path:
    """Return the folder of a complete release in or below `folder`.

    If `folder` is None, search ./data and ~/data. The release may be in `folder` itself, in its child cifar10,
    CIFAR10, cifar-10 or CIFAR-10 (for 100 the same), or in a folder with the release's own name in one of these. The
    binary release is preferred to the Python one.

    Raises:
        FileNotFoundError: no place has a complete release. The message lists the places and how to get one.
    """
    return _find(folder, classes)[0]


def _find(folder: Path | str | None, classes: int) -> tuple[Path, _Release]:
    def release_in(place: Path) -> tuple[Path, _Release] | None:
        for release in _RELEASES[classes]:
            for root in (place / release.folder, place):
                if all((root / name).is_file() for name in (*release.train, *release.test)):
                    return root, release
        return None

    releases = " or ".join(release.folder for release in _RELEASES[classes])
    layout = (
        f"{releases}, with all its files. Unpack an archive from {PAGE} there, or let torchvision fetch it: "
        "`micronorm train … --download`, or download=True in Python"
    )
    names = (f"cifar{classes}", f"CIFAR{classes}", f"cifar-{classes}", f"CIFAR-{classes}")
    found = release_in(find_root(folder, names, release_in, title=f"CIFAR-{classes}", layout=layout))
    assert found is not None
    return found


def read_cifar(
    folder: Path | str | None, *, classes: Literal[10, 100], verify: bool = True, download: bool = False
) -> Split[Labelled]:
    """Read CIFAR-10 or CIFAR-100 from the official files in or below `folder` (see `find_cifar`).

    Images are N×3×32×32 uint8, labels int64, in the official order; of CIFAR-100 the fine labels. Nothing in a pickle
    is executed.

    Args:
        folder: where to look; None for ./data and ~/data.
        classes: 10 or 100.
        verify: require the official files, by their published checksums. Otherwise the files may be a miniature: the
            same files with any number of whole records.
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
    try:
        place, release = _find(folder, classes)
    except FileNotFoundError:
        if not download:
            raise
        first = search_folders(folder)[0]
        _download(first, classes)
        place, release = _find(first, classes)
    parts = []
    for files in (release.train, release.test):
        read = [
            _read(place / name, digest if verify else None, release.kind, classes) for name, digest in files.items()
        ]
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


def _read(path: Path, digest: str | None, kind: str, classes: int) -> Labelled:
    data = path.read_bytes()
    try:
        if digest is not None:
            _verify(data, digest, "sha1" if kind == "binary" else "md5")
        return (_parse_binary if kind == "binary" else _parse_python)(data, classes)
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged or not the official file: {error}. Delete it and unpack the archive again from {PAGE} "
            "(or use --download, download=True in Python); a miniature in the official format is read with "
            "--unverified, verify=False in Python"
        ) from error


def _verify(data: bytes, published: str, algorithm: str) -> None:
    found = hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()
    if found != published:
        raise ValueError(
            f"the {algorithm.upper()} of its {len(data):,} bytes is {found}, the published one {published}"
        )


def _parse_binary(data: bytes, classes: int) -> Labelled:
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


class _ArrayReader(pickle.Unpickler):
    """Reads arrays, numbers, strings, lists and dictionaries. A pickle is a program: other names in it do not run."""

    _ADMITTED: Mapping[tuple[str, str], Any] = {
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _codecs.encode,  # Python 3 writes bytes in the protocols of Python 2 as encoded text
    }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return the object that the name in a pickle refers to, or raise ValueError."""
        try:
            return self._ADMITTED[module_name, global_name]
        except KeyError:
            raise ValueError(
                f"it names {module_name}.{global_name}, which an array does not need; nothing was executed"
            ) from None


def _parse_python(data: bytes, classes: int) -> Labelled:
    try:
        entries = _ArrayReader(io.BytesIO(data), encoding="latin1").load()  # strings of Python 2
    except ValueError:
        raise
    except Exception as error:  # a damaged pickle can raise any error
        raise ValueError(f"it is not a readable pickle ({type(error).__name__}: {error})") from error
    key = "labels" if classes == 10 else "fine_labels"
    pixels, labels = (entries.get(name) if isinstance(entries, dict) else None for name in ("data", key))
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.shape[1:] != (_PIXELS,)
        or not len(pixels)
    ):
        raise ValueError(f"it lacks an N×{_PIXELS} array of bytes under 'data'")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ValueError(f"it lacks a list of whole numbers under '{key}'")
    if len(labels) != len(pixels):
        raise ValueError(f"it has {len(pixels)} images and {len(labels)} labels")
    _check_labels(torch.tensor(labels), classes)
    return Labelled(torch.tensor(pixels).reshape(-1, 3, 32, 32), torch.tensor(labels))


def _check_labels(labels: Tensor, classes: int) -> None:
    for label in (int(labels.min()), int(labels.max())):
        if not 0 <= label < classes:
            raise ValueError(f"its label {label} does not lie between 0 and {classes - 1}")


def _download(folder: Path, classes: int) -> None:
    """Download and unpack the Python release; torchvision checks the archive's published MD5."""
    datasets = import_optional("torchvision.datasets", f"downloads (or else an archive from {PAGE})", "torchvision")
    source = datasets.CIFAR10 if classes == 10 else datasets.CIFAR100
    fetch = datasets.utils.download_and_extract_archive
    try:
        fetch(source.url, str(folder), filename=source.filename, md5=source.tgz_md5)
    except (OSError, RuntimeError) as error:  # torchvision raises RuntimeError for a wrong checksum
        raise OSError(
            f"fetching {source.url} into {folder.absolute()} failed ({error}); try again, or unpack an archive from "
            f"{PAGE} there"
        ) from error
