"""A table of several training runs: live on a terminal; elsewhere a line per finished run, then the table."""

from collections.abc import Sequence
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from typing_extensions import override

from micronorm.engine.listener import Listener

_BAR_WIDTH, _NARROW_BAR_WIDTH, _WIDTH_FOR_BAR = 14, 6, 100
_REFRESH_PER_SECOND = 4


class BoardRow(Listener):
    """The row of one run; pass it to the run as its listener."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.total_steps: int | None = None
        self.steps = self.epochs = 0
        self.loss: float | None = None
        self.error: float | None = None
        self.seconds = 0.0

    @property
    def is_running(self) -> bool:
        """Whether the run has started and not finished."""
        return 0 < self.steps != self.total_steps

    @override
    def on_start(self, total_steps: int, start_step: int, description: str) -> None:
        self.total_steps = total_steps

    @override
    def on_step(self, row: dict[str, Any]) -> None:
        self.steps = row["step"]
        self.seconds += row["seconds"]
        if not self.epochs:  # later the column shows the mean loss of an epoch, which varies less
            self.loss = row["loss"]

    @override
    def on_epoch(self, row: dict[str, Any]) -> None:
        self.epochs = row["epoch"] + 1
        self.loss, self.error = row["train"]["loss"], row["test"]["top1"]


class Board:
    """Show the table of some runs while the context is open.

    Args:
        console: Where to show it.
        rows: The runs, from top to bottom.
    """

    def __init__(self, console: Console, rows: Sequence[BoardRow]) -> None:
        self.console, self.rows = console, rows
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_interactive:  # a "dumb" terminal cannot redraw the table
            self._live = Live(get_renderable=self.table, console=self.console, refresh_per_second=_REFRESH_PER_SECOND)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif any(row.steps for row in self.rows):
            self.console.print(self.table())

    def print_finished(self, row: BoardRow) -> None:
        """Print the result of a run, unless the live table shows it."""
        if self._live is None:
            self.console.print(f"{row.name}: {row.error:.2f} % test error, {row.seconds:.1f} s")

    def table(self) -> Table:
        """Return the table as it is now."""
        table = Table(box=SIMPLE_HEAD, padding=(0, 1))
        table.add_column("method", no_wrap=True)
        bar_width = _BAR_WIDTH if self.console.width >= _WIDTH_FOR_BAR else _NARROW_BAR_WIDTH
        if self._live is not None:
            table.add_column("", width=bar_width)
        for heading in ("epoch", "training loss", "test error %", "seconds"):
            table.add_column(heading, justify="right")
        for row in self.rows:
            bar = [] if self._live is None else [ProgressBar(row.total_steps or 1, row.steps, width=bar_width)]
            cells = ["", "", "", ""]
            if row.steps:
                error = "" if row.error is None else f"{row.error:.2f}"
                cells = [str(row.epochs), f"{row.loss:.4f}", error, f"{row.seconds:.1f}"]
            table.add_row(row.name, *bar, *cells, style="bold" if row.is_running else None)
        return table
