"""Signals that ask a run to stop, kept until the step in progress is done."""

import os
import signal
import threading
from typing import Any, Self


class Signals:
    """SIGTERM and Ctrl-C, remembered until the step is done. A second one ends the process as it would have.

    Args:
        say: tell standard error that the signal was heard: a step may be long, and the second signal loses it.
    """

    def __init__(self, *, say: bool = False) -> None:
        self.received: int | None = None
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._remember)
        return self

    def _remember(self, number: int, frame: Any) -> None:
        self.received = number
        self._restore()
        if self._say:  # not by way of Python's files, which the signal may have found in mid-write
            os.write(2, b"\nfinishing the step, then saving; the same again ends at once\n")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *exception: object) -> None:
        self._restore()
