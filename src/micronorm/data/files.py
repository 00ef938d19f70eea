"""Files of data sets: find a set's folder, read lists, decode and check images, and split files into folds.

Nothing in a data set is trusted. A name in a list must not lead out of its folder. A picture is opened by PIL's readers
of pixels only: for a PostScript file, whatever its name, PIL would start Ghostscript, which runs the program in it.
"""

import contextlib
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")

DEFAULT_FOLDERS = (Path("data"), Path("~/data"))
"""Searched in this order if no folder is given."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
"""Suffixes of image files, in upper or lower case."""
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM")
"""Formats of pictures that are read, in PIL's names. A file may have the suffix of another one."""
FOLDS = 5

_TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip
"""PIL's name of what turns a picture upright, by EXIF orientation. From 5 on, width and height change places."""
_TAIL = 1024  # bytes at the end of a file that contain its end marker
_JPEG_END = b"\xff\xd9"
_END_MARKERS = {".jpg": _JPEG_END, ".jpeg": _JPEG_END, ".png": b"IEND"}


def search_folders(folder: Path | str | None = None) -> tuple[Path, ...]:
    """Return the given folder, or the default ones."""
    return tuple(Path(place).expanduser() for place in (DEFAULT_FOLDERS if folder is None else (folder,)))


def find_root(
    folder: Path | str | None,
    children: Sequence[str],
    holds: Callable[[Path], Any],
    *,
    title: str,
    layout: str,
    itself: bool = True,
) -> Path:
    """Return the first folder that contains a data set.

    Args:
        folder: where to search; None for the default folders.
        children: the set's usual names, searched for in `folder`.
        holds: whether a folder contains the set.
        title: the name of the set, for the error.
        layout: what its folder contains, and where to get it, for the error.
        itself: search `folder` itself before its children.

    Raises:
        FileNotFoundError: no folder contains the set; lists the searched folders.
    """
    places = search_folders(folder)
    names = ("", *children) if itself else children
    found = next((root for place in places for name in names if holds(root := place / name)), None)
    if found is None:
        searched = " and ".join(str(place.absolute()) for place in places)
        raise FileNotFoundError(
            f"cannot find {title} in {searched}, or in a subfolder named {' or '.join(children)}; expected {layout}"
        )
    return found


def fold_of(name: str) -> int:
    """Return the fold of a file: SHA-256 of its name, modulo 5.

    Example:
        >>> [fold_of(f"{k}.mp4") for k in range(8)]
        [2, 3, 1, 1, 4, 2, 4, 4]
    """
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % FOLDS


def split_by_fold(
    items: Sequence[T], name_of: Callable[[T], str], *, fold: int, where: Path
) -> tuple[list[T], list[T]]:
    """Return the items for training, and those of one fold for testing.

    Args:
        items: what to split.
        name_of: returns the name that decides about the fold of an item.
        fold: from 0 to 4.
        where: the folder of the items, for the error.

    Raises:
        ValueError: there is no such fold, or a part is empty.
    """
    if not 0 <= fold < FOLDS:
        raise ValueError(f"fold must lie between 0 and {FOLDS - 1}, got {fold}")
    parts: tuple[list[T], list[T]] = ([], [])
    for item in items:
        parts[fold_of(name_of(item)) == fold].append(item)
    if not all(parts):
        raise ValueError(
            f"fold {fold} of {where} has {len(parts[0])} samples for training and {len(parts[1])} for testing: add more"
        )
    return parts


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is empty or not UTF-8.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no list {path}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8 ({error}); save it as UTF-8") from error
    if not "".join(lines).strip():
        raise ValueError(f"{path} is empty")
    return lines


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raise an error with its name if it is missing or is no JSON."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON file ({error}); replace it") from error


def find_listed(folder: Path, name: str, source: Path) -> Path:
    """Return the path of a file that `source` names, below `folder`. Raise ValueError if the name leads out of it.

    Example:
        >>> find_listed(Path("voc/images"), "../../.ssh/key.png", Path("voc/train.txt"))
        Traceback (most recent call last):
        ...
        ValueError: voc/train.txt names '../../.ssh/key.png', which is not below voc/images; ...
    """
    parts = PurePath(name)
    if parts.anchor or ".." in parts.parts or not parts.parts:
        raise ValueError(
            f"{source} names {name!r}, which is not below {folder}; files of a data set must have relative names "
            "without '..'"
        )
    return folder / parts


@contextlib.contextmanager
def naming_broken_file(path: Path, kind: str) -> Iterator[None]:
    """Raise ValueError with the path and the kind of the file if it cannot be read within this block."""
    try:
        yield
    except Exception as error:  # decoders raise many kinds of errors
        why = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} is not a readable {kind} ({type(error).__name__}: {why}); replace it or delete it"
        ) from error


def open_picture(path: Path) -> Any:
    """Return an open PIL image, whose pixels are not decoded yet.

    Raises:
        OSError: the file is no picture in one of `FORMATS`, or is a pipe or a folder. PIL may raise other errors.
    """
    from PIL import Image

    if not path.is_file():  # a pipe could be read forever
        raise OSError("it is not a regular file")
    return Image.open(path, formats=FORMATS)


def _read_orientation(image: Any) -> int:
    """Return the EXIF orientation of an open picture, from its header; 1 if it has none that can be read.

    PIL turns TIFF files itself.
    """
    from PIL import ExifTags, Image

    exif = Image.Exif()
    with contextlib.suppress(Exception):  # other readers show pictures with broken EXIF data, too
        exif.load(image.info.get("exif"))
        orientation = exif.get(ExifTags.Base.Orientation)
        return orientation if orientation in _TURNS else 1
    return 1


def _turn_upright(image: Any) -> Any:
    """Return a picture as its EXIF orientation says."""
    from PIL import Image

    turn = _TURNS.get(_read_orientation(image))
    return image.transpose(Image.Transpose[turn]) if turn else image


def _check_depth(path: Path, mode: str) -> None:
    """Raise ValueError for a grey image of more than 8 bits, which PIL would clip when it converts it to RGB."""
    if mode.startswith(("I", "F")):
        raise ValueError(f"an image must have 8 bits per channel, {path} has PIL's mode {mode}; convert it to 8 bits")


def decode(path: Path) -> Any:
    """Return the image as a PIL image, in RGB, turned as its EXIF orientation says.

    Raises:
        ValueError: the file cannot be read, or has grey values of more than 8 bits.
    """
    with naming_broken_file(path, "image"), open_picture(path) as image:
        mode, upright = image.mode, _turn_upright(image).convert("RGB")
    _check_depth(path, mode)
    return upright


def decode_pixels(path: Path) -> Tensor:
    """Return the image as 3×H×W uint8."""
    return to_pixels(decode(path))


def to_pixels(image: Any) -> Tensor:
    """Return an RGB image of PIL as 3×H×W uint8."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def decode_labels(path: Path, *, modes: Sequence[str]) -> np.ndarray:
    """Return the values of an image with one channel, H×W, turned as its EXIF orientation says.

    Args:
        path: the file.
        modes: PIL's modes that are allowed, such as "L" for grey values of 8 bits.
    """
    with naming_broken_file(path, "label map"), open_picture(path) as image:
        mode, values = image.mode, np.array(_turn_upright(image))
    if mode not in modes:
        raise ValueError(
            f"a label map must have one number per pixel (PIL's modes {', '.join(modes)}), {path} has {mode}"
        )
    return values


def check_picture(path: Path, *, label_map: bool = False) -> tuple[int, int]:
    """Return width and height of a JPEG or PNG file, turned as its EXIF orientation says.

    Reads the header and the end of the file, so that a hundred thousand files take seconds.

    Args:
        path: the file.
        label_map: whether it has labels, which may have more than 8 bits.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is cut short or no picture, or has grey values of more than 8 bits.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no image at {path}")
    with naming_broken_file(path, "image"), open_picture(path) as image:
        mode, size = image.mode, image.size if _read_orientation(image) < 5 else image.size[::-1]
    if not label_map:
        _check_depth(path, mode)
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        tail = file.read()
    marker = _END_MARKERS.get(path.suffix.lower(), b"")
    if marker not in tail and not (marker == _JPEG_END and _has_end_of_scan(path.read_bytes())):
        raise ValueError(f"{path} ends before its image does: the file was cut short; replace it or delete it")
    return size


def _has_end_of_scan(data: bytes) -> bool:
    """Return whether the pixels of a JPEG file end with their marker. Phones append videos and other data to the file.

    The segments before the pixels are skipped: a thumbnail in them has an end marker of its own.
    """
    place = 2
    while data[place : place + 1] == b"\xff":
        if data[place + 1 : place + 2] == b"\xda":  # start of scan; within the pixels no byte follows 0xff as it is
            return _JPEG_END in data[place:]
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return False


def import_optional(module: str, users: str, package: str) -> Any:
    """Return a module. Raise ImportError that says who needs it, and how to install its package, if it is missing.

    Example:
        >>> import_optional("no_such.module", "image files", "no-such")
        Traceback (most recent call last):
        ...
        ImportError: image files need no-such: pip install no-such
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{users} need {package}: pip install {package}") from error


def require_torchvision() -> None:
    """Raise ImportError with the fix if torchvision is not installed."""
    import_optional("torchvision.transforms.v2", "image files", "torchvision")
