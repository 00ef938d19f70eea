"""Turns the results of steps into rows of the record. Reading a result waits for the GPU, so reads are bundled."""

import time
from typing import Any

import torch

from micronorm.engine.step import StepResult
from micronorm.engine.task import Task

AT_MOST = 50  # steps between two reads
SECONDS = 1.0  # after which a read is due


class Meter:
    """Collects the results of steps. `epoch_sums` are their sums over the epoch so far."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, self.device = task, device
        self._pending: list[tuple[dict[str, Any], StepResult]] = []
        self.epoch_sums: dict[str, float] = {}
        self._flushed = time.perf_counter()

    def add(self, row: dict[str, Any], result: StepResult) -> list[dict[str, Any]]:
        """Add the result of one step. Return the rows of all pending steps if a read is due, else an empty list."""
        self._pending.append((row, result))
        late = time.perf_counter() - self._flushed > SECONDS
        cheap = self.device.type == "cpu"
        return self.flush() if cheap or late or len(self._pending) >= AT_MOST else []

    def flush(self) -> list[dict[str, Any]]:
        """Return the rows of all pending steps."""
        if not self._pending:
            return []
        sums = torch.stack([result.sums for _, result in self._pending]).tolist()
        now = time.perf_counter()
        seconds = (now - self._flushed) / len(self._pending)
        rows = []
        for (row, result), values in zip(self._pending, sums, strict=True):
            named = dict(zip(result.names, values, strict=True))
            for name, value in named.items():
                self.epoch_sums[name] = self.epoch_sums.get(name, 0.0) + value
            row |= {"seconds": seconds, "micro_batch": result.micro_batch, "memory": self._memory()}
            rows.append(row | self.task.figures(named))
        self._pending.clear()
        self._flushed = now
        return rows

    def restart(self) -> None:
        """Restart the clock, after time that was not spent on steps."""
        self._flushed = time.perf_counter()

    def epoch_figures(self) -> dict[str, float]:
        """Return the training figures over all samples of the epoch so far."""
        return self.task.figures(self.epoch_sums) if self.epoch_sums else {}

    def _memory(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
