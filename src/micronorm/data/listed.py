"""Read the lists, annotations and pictures of a data set. Nothing in them is trusted.

A name in a list must not lead out of its folder. A picture is opened by PIL's readers of pixels only: for a PostScript
file, whatever its name, PIL would start Ghostscript, which runs the program in the file.
"""

import json
from pathlib import Path, PurePath
from typing import Any

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM")
"""The formats of pictures that are read, in PIL's names. A file may have the suffix of another one."""


def read_list(path: Path) -> list[str]:
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
        raise ValueError(f"{path} must be text in UTF-8 ({error}); save it so") from error
    if not lines:
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


def open_picture(path: Path) -> Any:
    """Return an open PIL image, whose pixels are not decoded yet.

    Raises:
        OSError: the file is no picture in one of `FORMATS`, or is a pipe or a folder. PIL may raise other errors.
    """
    from PIL import Image

    if not path.is_file():  # a pipe could be read forever
        raise OSError("it is not a regular file")
    return Image.open(path, formats=FORMATS)
