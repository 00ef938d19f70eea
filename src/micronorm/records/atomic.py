"""Write files atomically."""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"
"""How the name of a file ends while `write_atomically` writes it."""


def write_atomically(path: str | os.PathLike[str], content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write a file so that, even after a power failure, it is complete: either the old one or the new one.

    After an exception only the old file remains. A killed process may leave a hidden file whose name ends in
    `.partial`; `remove_partials` deletes such files.

    Args:
        path: the file; its folder must exist.
        content: the bytes, or a function that writes them into an open file.
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
    """Delete the unfinished files of killed writers in `folder`, and return their paths."""
    found = sorted(Path(folder).glob(f".*{PARTIAL}"))
    for file in found:
        file.unlink(missing_ok=True)
    return found


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk, as after a rename."""
    with suppress(PermissionError):  # Windows cannot open folders, and a folder may be writable but not readable
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
