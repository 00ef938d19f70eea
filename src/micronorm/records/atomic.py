"""Files that are written whole or not at all."""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"
"""How the name of a file ends that `write_atomically` has not finished."""


def write_atomically(path: str | os.PathLike[str], content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write a file so that at every moment, power failures included, it is either the old one or the new one, whole.

    An exception leaves the old file and nothing else. A killed process may leave a hidden file beside it whose name
    ends in `.partial`; `remove_partials` removes such files.

    Args:
        path: the file; its folder must exist.
        content: the bytes, or a function that writes them into the open file it is given.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with open(partial, "xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def remove_partials(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove what killed writers left in `folder`, when no writer is at work there, and say what it was."""
    found = sorted(Path(folder).glob(f".*{PARTIAL}"))
    for file in found:
        file.unlink(missing_ok=True)
    return found


def sync_folder(folder: Path) -> None:
    """Return when the names in `folder` are on the disk, as after a rename."""
    with suppress(PermissionError):  # Windows opens no folders; elsewhere one may be writable without being readable
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
