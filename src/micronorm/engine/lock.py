"""One writer per run directory: a killed run's lock goes with its process, so there is none to remove by hand."""

import errno
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

NAME = ".lock"


class Lock:
    """Holds a folder until it is released or the process ends, however it ends. Children do not inherit it.

    Where the system or the file system has no such locks, it holds nothing.

    Args:
        folder: must exist.

    Raises:
        FileExistsError: another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = (folder / NAME).open("ab")
        try:
            if fcntl is not None:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                self._file.close()
                raise FileExistsError(
                    f"another process is writing to {folder}, such as a rank whose launcher was killed; wait for it, "
                    "or end it"
                ) from None

    def release(self) -> None:
        """Let others write; calling it again does nothing."""
        self._file.close()
