"""Whoever looks into the network while it trains, as far as the engine is concerned.

The engine says when a step begins, and hands out a place to write to. What is looked at is not its business: whoever
starts a run brings the observer, as `mn.observe`, so no arrow leads from here to the diagnostics.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn


class Watch(Protocol):
    """An observer at work, from `__enter__` to `__exit__`. It counts the optimizer's steps itself."""

    epoch: int
    """That of the present step, for the rows."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: object) -> None: ...

    def discard(self) -> None:
        """Forget what was seen of the present step: it begins now, perhaps once more."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Forwards within this block count for nothing."""
        ...


class Observer(Protocol):
    """Makes a `Watch`."""

    def __call__(
        self, model: nn.Module, *, every: int, writer: Any, sink: Callable[[dict[str, Any]], object], start: int
    ) -> Watch:
        """See `mn.observe`."""
        ...
