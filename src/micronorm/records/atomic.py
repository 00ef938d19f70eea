"""Write files atomically."""

import errno
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

PARTIAL = ".partial"
"""The ending of a file's name while `write_atomically` writes it."""


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file so that, even after a power failure, it is complete: either the old one or the new one.

    After an exception only the old file remains. A killed process may leave a hidden file whose name ends in
    `.partial`; `remove_partials` deletes such files.

    Args:
        path: the file; its folder must exist.
        content: the bytes.

    Raises:
        OSError: the file cannot be written. Names `path` and, if the disk is full, the bytes that it needs.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with open(partial, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(partial)):
            raise named_error(error, target, len(content)) from error
        raise
    sync_folder(target.parent)


def named_error(error: OSError, file: Path, needed: int) -> OSError:
    """Return the error of a write with the file's name and, if the disk is full, the bytes that were needed."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(file.parent).free
        reason += f" ({needed:,} bytes needed, {free:,} free); free some space or choose another disk"
    return OSError(error.errno, reason, str(file))


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
