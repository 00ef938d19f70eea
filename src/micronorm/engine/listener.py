"""The callback of a run, which receives steps, epochs and messages."""

from typing import Any


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
