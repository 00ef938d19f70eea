"""Remember SIGTERM and Ctrl-C until the step in progress is done."""

import os
import signal
import threading
from typing import Any, Self


class Signals:
    """Catch the first SIGTERM or Ctrl-C and store it in `received`. A second one ends the process as usual.

    Args:
        verbose: write a line to standard error when the first signal arrives, because a step may take long.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        self.received: int | None = None
        self._verbose = verbose
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._remember)
        return self

    def _remember(self, number: int, frame: Any) -> None:
        self.received = number
        self._restore()
        if self._verbose:  # os.write, because the signal may have interrupted a write to sys.stderr
            os.write(2, b"\nfinishing the step, then saving; the same signal again ends at once\n")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *exception: object) -> None:
        self._restore()
