"""The progress of a training run: one live line on a terminal, otherwise a plain line per epoch or half minute."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from micronorm.cli.printing import say
from micronorm.engine.task import Listener
from micronorm.report.runs import title_of

QUIET_SECONDS = 30.0
"""The shortest time between two plain lines within an epoch."""

_RECENT_STEPS = 50  # images per second are averaged over these
_BAR_WIDTH, _WIDTH_FOR_BAR = 16, 110  # a narrower terminal has no room for the bar


class TrainingProgress(Listener):
    """Show epoch, step, loss, the first test figure, time left, images per second, memory and learning rate of a run.

    The methods take the rows of the run's record. A figure that a row lacks is left out.

    Args:
        console: Where to show it; standard output if None.
        name: Shown instead of the name of the run's recipe.
        clock: A function that returns seconds.

    Example:
        >>> progress = TrainingProgress(Console(width=120))
        >>> progress.on_start(total_steps=4, start_step=0, description="digits")
        >>> progress.on_step({"step": 1, "epoch": 0, "loss": 2.25, "samples": 32, "seconds": 0.5})
        >>> progress.on_message("out of memory at micro-batch 64, step repeated with 32")
        out of memory at micro-batch 64, step repeated with 32
        >>> progress.on_end()
    """

    def __init__(
        self, console: Console | None = None, *, name: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._name = console or Console(highlight=False), name
        self._clock = clock
        self._live: Progress | None = None
        self._bar = TaskID(0)
        self._reset(None, 0, "")

    def on_start(self, total_steps: int | None, start_step: int, description: str) -> None:
        """Start a run of `total_steps`, of which `start_step` are done."""
        self.on_end()
        self._reset(total_steps, start_step, self._name or description)
        if self._console.is_interactive:  # a "dumb" terminal cannot redraw a line
            figures = Column(no_wrap=True, overflow="ellipsis", ratio=1)
            bar = [BarColumn(_BAR_WIDTH)] if self._console.width >= _WIDTH_FOR_BAR else []
            columns = (
                TextColumn("{task.description}", markup=False),
                *bar,
                TextColumn("{task.fields[figures]}", markup=False, table_column=figures),
            )
            self._live = Progress(*columns, console=self._console, expand=True)
            self._bar = self._live.add_task(self._description, total=total_steps, completed=start_step, figures="")
            self._live.start()

    def on_step(self, row: Mapping[str, Any]) -> None:
        """Show the figures of a finished step."""
        self._row = row
        if row.get("samples") and row.get("seconds"):
            self._recent.append((row["samples"], row["seconds"]))
        if self._live is not None or self._clock() - self._printed_at >= QUIET_SECONDS:
            self._show()

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        """Show the figures of the test samples at the end of an epoch."""
        self._row = {**self._row, **{key: row[key] for key in ("epoch", "step") if key in row}}
        test = row.get("test") or {}
        name = next((key for key in test if key != "loss"), "loss" if test else None)
        self._test = f"test {title_of(name)} {test[name]:.4g}" if name is not None else ""
        self._show()

    def on_message(self, text: str) -> None:
        """Print a message that stays on the screen."""
        say(self._console, text)

    def on_end(self) -> None:
        """End the run and leave the live line as it is. Do nothing if there is no run."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _reset(self, total: int | None, start: int, description: str) -> None:
        self._total, self._start, self._description = total, start, description
        self._row: Mapping[str, Any] = {"step": start}
        self._test = ""
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT_STEPS)
        self._began_at = self._printed_at = self._clock()

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(self._bar, completed=self._row["step"], figures=self._figures())
        else:
            self._printed_at = self._clock()
            self.on_message(": ".join(filter(None, (self._description, self._figures()))))

    def _figures(self) -> str:
        # The most important figures come first: a narrow terminal cuts off the end.
        row = self._row
        parts = [
            f"epoch {row['epoch'] + 1}" if "epoch" in row else "",  # records count from 0
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
        # Elapsed time rather than the steps' seconds, because evaluation and checkpoints take time too.
        seconds = round((self._clock() - self._began_at) / done * (self._total - self._row["step"]))
        hours, minutes = seconds // 3600, seconds // 60 % 60
        clock = f"{hours}:{minutes:02}" if hours else f"{minutes}"
        return f"{clock}:{seconds % 60:02} left"

    def _images_per_second(self) -> str:
        if not self._recent:
            return ""
        samples, seconds = map(sum, zip(*self._recent, strict=True))
        return f"{samples / seconds:,.{0 if samples >= 10 * seconds else 1}f} img/s"
