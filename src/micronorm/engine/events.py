"""The figures of a run as TensorBoard events, if the tensorboard package is installed."""

import os
from collections.abc import Mapping
from typing import Any


class Events:
    """Writes scalars for TensorBoard. Without the tensorboard package it does nothing, and `available` is False.

    Args:
        path: the folder of the event files.
        resumed_at: the completed steps of the resumed checkpoint. TensorBoard then hides events of later steps that an
            earlier process wrote, because those steps are repeated.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> events = Events(folder.name)
        >>> events.scalars(1, {"train/loss": 2.5, "memory": None})
        >>> events.close()
        >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str], *, resumed_at: int | None = None) -> None:
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter  # optional, and slow to import
        except ImportError:
            return
        self._writer = SummaryWriter(os.fspath(path), purge_step=None if resumed_at is None else resumed_at + 1)

    @property
    def available(self) -> bool:
        """Whether the tensorboard package is installed."""
        return self._writer is not None

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write the values of a step under their names, except those that are None."""
        if self._writer is not None:
            for name, value in values.items():
                if value is not None:
                    self.add_scalar(name, value, step)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Write one scalar, as SummaryWriter does."""
        if self._writer is not None:
            self._writer.add_scalar(tag, scalar_value, global_step)

    def add_histogram(self, tag: str, values: Any, global_step: int, bins: Any = "tensorflow") -> None:
        """Write one histogram, as SummaryWriter does."""
        if self._writer is not None:
            self._writer.add_histogram(tag, values, global_step, bins=bins)

    def flush(self) -> None:
        """Hand all events to the operating system; before a checkpoint, because steps before it are not repeated."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        if self._writer is not None:
            self._writer.close()
