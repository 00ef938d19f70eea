"""Callbacks of a run: a listener receives steps, epochs and messages; an observer measures the network's layers."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn


class Listener:
    """Receive the events of a run, on rank 0. These methods do nothing: override those you need."""

    def on_start(self, total_steps: int, start_step: int, description: str) -> None:
        """Called before the first step."""

    def on_step(self, row: dict[str, Any]) -> None:
        """Called with each row of `steps.jsonl`. On a GPU the rows of several steps come together."""

    def on_epoch(self, row: dict[str, Any]) -> None:
        """Called with each row of `epochs.jsonl`, after the evaluation."""

    def on_message(self, text: str) -> None:
        """Called with a message for the user."""

    def on_end(self) -> None:
        """Called after the last step, or after an error."""


class Observation(Protocol):
    """An observer that is attached to a model, from `__enter__` to `__exit__`. It counts the optimizer's steps."""

    epoch: int
    """The epoch of the present step, for the rows."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: object) -> None: ...

    def discard(self) -> None:
        """Forget what was measured since the last optimizer step, because the step begins again."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Ignore forward passes within this block."""
        ...


class Observer(Protocol):
    """A function such as `mn.observe`. The caller passes it in, so that the engine does not import the diagnostics."""

    def __call__(
        self, model: nn.Module, *, every: int, writer: Any, sink: Callable[[dict[str, Any]], object], start: int
    ) -> Observation:
        """See `mn.observe`."""
        ...
