"""The figures of a run as TensorBoard events, where the tensorboard package is installed."""

import os
from collections.abc import Mapping
from typing import Any


class Events:
    """Writes scalars for TensorBoard. Without the tensorboard package it does nothing, and `available` is False.

    Args:
        path: the folder of the event files.
        resumed_at: the completed steps of the checkpoint that was resumed, if one was. What an earlier process wrote of
            later steps is then not shown: those steps are done again.

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
            from torch.utils.tensorboard import SummaryWriter  # here: it is optional, and takes a while
        except ImportError:
            return
        self._writer = SummaryWriter(os.fspath(path), purge_step=None if resumed_at is None else resumed_at + 1)

    @property
    def available(self) -> bool:
        """Whether the tensorboard package is installed."""
        return self._writer is not None

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write the values of a step under their names; None is left out."""
        if self._writer is not None:
            for name, value in values.items():
                if value is not None:
                    self.add_scalar(name, value, step)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """As SummaryWriter's, for those who write to one."""
        if self._writer is not None:
            self._writer.add_scalar(tag, scalar_value, global_step)

    def add_histogram(self, tag: str, values: Any, global_step: int, bins: Any = "tensorflow") -> None:
        """As SummaryWriter's."""
        if self._writer is not None:
            self._writer.add_histogram(tag, values, global_step, bins=bins)

    def flush(self) -> None:
        """Return when the operating system has everything: before a checkpoint, since steps before it do not recur."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Flush and end; calling it again does nothing."""
        if self._writer is not None:
            self._writer.close()
