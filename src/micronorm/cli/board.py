"""Runs side by side: a table that lives while they train on a terminal, a line per finished run elsewhere."""

from collections.abc import Callable, Sequence
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from typing_extensions import override

from micronorm.engine.listener import Listener

_BAR_WIDTH, _NARROW_BAR_WIDTH, _WIDTH_FOR_BAR = 14, 6, 100
_FIGURE_WIDTH = 7  # "1.5e-06", and the longest word of a heading
_REFRESH_PER_SECOND = 4


class Row(Listener):
    """One run's row; it listens to the run.

    Args:
        name: what stands in the first column.
        after_step: is called after each step, with its number. What it gives stands in the last column; None leaves
            what stands there.
    """

    def __init__(self, name: str, after_step: Callable[[int], float | None] | None = None) -> None:
        self.name, self.after_step = name, after_step
        self.total_steps: int | None = None
        self.steps = self.epochs = 0
        self.loss: float | None = None
        self.error: float | None = None
        self.last: float | None = None
        self.seconds = 0.0
        self.ended = False

    @override
    def on_start(self, total_steps: int, start_step: int, description: str) -> None:
        self.total_steps = total_steps

    @override
    def on_step(self, row: dict[str, Any]) -> None:
        self.steps = row["step"]
        self.seconds += row["seconds"]
        if self.after_step is not None and (measured := self.after_step(self.steps)) is not None:
            self.last = measured
        if not self.epochs:  # from then on the loss is that of an epoch, which does not jump about
            self.loss = row["loss"]

    @override
    def on_epoch(self, row: dict[str, Any]) -> None:
        self.epochs = row["epoch"] + 1
        self.loss, self.error = row["train"]["loss"], row["test"]["top1"]

    @override
    def on_end(self) -> None:
        self.ended = self.steps == self.total_steps


class Board:
    """The table of some runs, to be used as a context: on a terminal it lives meanwhile and then stays.

    Elsewhere it is printed in the end, whatever ended it, unless no run had begun.

    Args:
        console: where it is shown.
        rows: from top to bottom.
        first: the heading of the rows' names.
        last: the heading of what `Row.after_step` gives; None without that column.
    """

    def __init__(self, console: Console, rows: Sequence[Row], *, first: str, last: str | None = None) -> None:
        self.console, self.rows, self.first, self.last = console, rows, first, last
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_interactive:  # not on a "dumb" terminal: nothing can live there
            self._live = Live(get_renderable=self.table, console=self.console, refresh_per_second=_REFRESH_PER_SECOND)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif any(row.steps for row in self.rows):
            self.console.print(self.table())

    def tell(self, row: Row) -> None:
        """Say what a run came to, where no table shows it."""
        if self._live is None:
            name, last = row.name, ""
            if self.last is not None:
                name, last = f"{self.first}, {name}", f", {row.last:.1e} {self.last}"
            self.console.print(f"{name}: {row.error:.2f} % test error, {row.seconds:.1f} s{last}")

    def table(self) -> Table:
        """As it stands now."""
        table = Table(box=SIMPLE_HEAD, padding=(0, 1))
        table.add_column(self.first, no_wrap=True)
        bar_width = _BAR_WIDTH if self.console.width >= _WIDTH_FOR_BAR else _NARROW_BAR_WIDTH
        if self._live is not None:
            table.add_column("", width=bar_width)
        for heading in ("epoch", "training loss", "test error %", "seconds", *([self.last] if self.last else [])):
            table.add_column(heading, justify="right", min_width=5 if heading == "epoch" else _FIGURE_WIDTH)
        for row in self.rows:
            bar = [] if self._live is None else [ProgressBar(row.total_steps or 1, row.steps, width=bar_width)]
            table.add_row(row.name, *bar, *self._cells(row), style=None if row.ended or not row.steps else "bold")
        return table

    def _cells(self, row: Row) -> list[str]:
        cells = [
            str(row.epochs) if row.steps else "",
            _shown(row.loss, ".4f"),
            _shown(row.error, ".2f"),
            f"{row.seconds:.1f}" if row.steps else "",
        ]
        return [*cells, _shown(row.last, ".1e")] if self.last else cells


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
