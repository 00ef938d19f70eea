"""The progress of a training run: one live line on a terminal, a plain line now and then elsewhere."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from micronorm.engine.listener import Listener

QUIET_SECONDS = 30.0
"""Away from a terminal, the least time between two lines within an epoch."""

_RECENT_STEPS = 50  # over which images per second are counted
_BAR_WIDTH, _WIDTH_FOR_BAR = 16, 110  # on a narrower terminal the figures need the room


_LABELS = {"top1": "error %"}  # what a task's figures are called on the screen


class TrainingProgress(Listener):
    """Listens to a run and shows epoch, step, loss, error, time left, images per second, memory and learning rate.

    Rows are those of the run's record. What a row lacks is not shown.

    Args:
        console: where to show it; standard output if None.
        clock: seconds from any start.

    Example:
        >>> progress = TrainingProgress(Console(width=120))
        >>> progress.on_start(total_steps=4, start_step=0, description="digits")
        >>> progress.on_step({"step": 1, "epoch": 0, "loss": 2.25, "samples": 32, "seconds": 0.5})
        >>> progress.on_message("out of memory at micro-batch 64, step repeated with 32")
        out of memory at micro-batch 64, step repeated with 32
        >>> progress.on_end()
    """

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._live: Progress | None = None
        self._bar = TaskID(0)
        self._begin(None, 0, "")

    def on_start(self, total_steps: int | None, start_step: int, description: str) -> None:
        """A run of `total_steps` begins, or goes on after `start_step` of them."""
        self.on_end()
        self._begin(total_steps, start_step, description)
        if self._console.is_interactive:  # not on a "dumb" terminal: it has no live line
            figures = Column(no_wrap=True, overflow="ellipsis", ratio=1)
            bar = [BarColumn(_BAR_WIDTH)] if self._console.width >= _WIDTH_FOR_BAR else []
            columns = (
                TextColumn("{task.description}", markup=False),
                *bar,
                TextColumn("{task.fields[figures]}", markup=False, table_column=figures),
            )
            self._live = Progress(*columns, console=self._console, expand=True)
            self._bar = self._live.add_task(description, total=total_steps, completed=start_step, figures="")
            self._live.start()

    def on_step(self, row: Mapping[str, Any]) -> None:
        """A step has been committed."""
        self._row = row
        if _is_positive(row.get("samples")) and _is_positive(row.get("seconds")):
            self._recent.append((row["samples"], row["seconds"]))
        if self._live is not None:
            self._live.update(self._bar, completed=row["step"], figures=self._figures())
        elif self._clock() - self._printed_at >= QUIET_SECONDS:
            self._print_line()

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        """An epoch has ended and the test samples were evaluated."""
        self._row = {**self._row, **{key: row[key] for key in ("epoch", "step") if key in row}}
        test = row.get("test") or {}
        name = next((key for key in test if key != "loss"), "loss" if test else None)  # the loss is shown already
        self._test = f"test {_LABELS.get(name, name.replace('_', ' '))} {test[name]:.4g}" if name is not None else ""
        if self._live is not None:
            self._live.update(self._bar, figures=self._figures())
        else:
            self._print_line()

    def on_message(self, text: str) -> None:
        """Something the user should know; it stays on the screen."""
        # A terminal breaks lines between words; a file gets the whole line, for whoever searches in it.
        self._console.print(text, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)

    def on_end(self) -> None:
        """The run is over, in whatever way; the live line stays as it is. Without a run nothing happens."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _begin(self, total: int | None, start: int, description: str) -> None:
        self._total, self._start, self._description = total, start, description
        self._row: Mapping[str, Any] = {"step": start}
        self._test = ""
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT_STEPS)
        self._began_at = self._printed_at = self._clock()

    def _print_line(self) -> None:
        self._printed_at = self._clock()
        self.on_message(": ".join(filter(None, (self._description, self._figures()))))

    def _figures(self) -> str:
        """What matters most stands first: a narrow terminal cuts off the end."""
        row = self._row
        parts = [
            f"epoch {row['epoch'] + 1}" if "epoch" in row else "",  # records count from 0, people from 1
            f"step {row['step']}" + (f"/{self._total}" if self._total else ""),
            f"loss {row['loss']:.4g}" if row.get("loss") is not None else "",
            self._test,
            self._time_left(),
            self._images_per_second(),
            f"{row['memory'] / 2**30:.1f} GiB" if row.get("memory") else "",
            f"lr {row['lr']:.3g}" if row.get("lr") is not None else "",
        ]
        return ", ".join(filter(None, parts))

    def _time_left(self) -> str:
        done = self._row["step"] - self._start
        if not self._total or done <= 0 or self._row["step"] >= self._total:
            return ""
        # By the clock, not by the steps' own seconds: evaluation and checkpoints take their share.
        minutes, seconds = divmod(
            round((self._clock() - self._began_at) / done * (self._total - self._row["step"])), 60
        )
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"

    def _images_per_second(self) -> str:
        if not self._recent:
            return ""
        samples, seconds = map(sum, zip(*self._recent, strict=True))
        return f"{samples / seconds:,.{0 if samples >= 10 * seconds else 1}f} img/s"


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0
