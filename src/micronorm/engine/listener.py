"""Whoever watches a run: a progress bar, a live table."""

from typing import Any, Protocol

from typing_extensions import override


class Listener(Protocol):
    """Whoever watches a run, such as a progress bar. Called on rank 0."""

    def on_start(self, total_steps: int, start_step: int, description: str) -> None:
        """Before the first step."""
        ...

    def on_step(self, row: dict[str, Any]) -> None:
        """A row of the record; rows come in bundles where the device must not be asked after every step."""
        ...

    def on_epoch(self, row: dict[str, Any]) -> None:
        """After an epoch's evaluation."""
        ...

    def on_message(self, text: str) -> None:
        """Something a user should know."""
        ...

    def on_end(self) -> None:
        """After the last step, or an error."""
        ...


class Silent(Listener):
    """Hears everything and says nothing."""

    @override
    def on_start(self, total_steps: int, start_step: int, description: str) -> None: ...
    @override
    def on_step(self, row: dict[str, Any]) -> None: ...
    @override
    def on_epoch(self, row: dict[str, Any]) -> None: ...
    @override
    def on_message(self, text: str) -> None: ...
    @override
    def on_end(self) -> None: ...
