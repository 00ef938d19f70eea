"""What commands print: sentences, tables and JSON, the progress of a run, and errors as one line with an exit code.

Wrong input and failing disks end in a line. Everything else is a bug of ours and shows Python's traceback, which users
can paste into a report.
"""

import io
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text
from safetensors import SafetensorError
from typer.core import TyperGroup

from micronorm.engine.loop import Diverged
from micronorm.engine.sampling import is_out_of_memory
from micronorm.engine.task import Listener
from micronorm.report.runs import PERCENT


def say(console: Console, text: str) -> None:
    """Print a text without markup. A terminal breaks lines between words; a file gets whole lines, easy to search."""
    console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def show_report(console: Console, text: str, *, bold: Sequence[str], red: str, green: str) -> None:
    """Print a report as `say` does. A terminal shows some words in bold, and what matches a pattern in its colour."""
    report = Text(text)
    if console.is_terminal:
        report.highlight_words(bold, "bold")
        report.highlight_regex(red, "bold red")
        report.highlight_regex(green, "green")
    console.print(report, soft_wrap=not console.is_terminal)


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Collection[str] = (),
    styles: Sequence[str | None] = (),
    title: str | None = None,
) -> None:
    """Print a table. Columns named in `right` are aligned there; `styles` has the colour of each row."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for number, row in enumerate(rows):
        table.add_row(*row, style=styles[number] if styles else None)
    console.print(table, markup=False)


def as_options(given: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line. None and False are left out, True is a flag, a list repeats its option.

    Example:
        >>> as_options({"dtype": None, "save_every": 20, "compile": True})
        ['--save-every', '20', '--compile']
    """
    words = []
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            words += [word for one in (value if isinstance(value, list) else [value]) for word in (option, str(one))]
    return words


_PRECISIONS = {"AP": "AP", "AP50": "AP.5", "AP75": "AP.75", "APl": "APl", "APm": "APm", "APs": "APs"}
FIGURE_NAMES = {"top1": "top-1 error", "top5": "top-5 error", "miou": "mIoU", "dice": "Dice", **_PRECISIONS}
FIGURE_NAMES |= {f"mask_{name}": f"mask {title}" for name, title in _PRECISIONS.items()}
"""Names of recorded figures for readers; other figures are shown under the name in the record."""


def figure_text(name: str, value: float) -> str:
    """Return a recorded figure in words.

    Example:
        >>> figure_text("top1", 2.4), figure_text("soft_dice", 81.25)
        ('top-1 error 2.4 %', 'soft dice 81.25')
    """
    return f"{FIGURE_NAMES.get(name, name.replace('_', ' '))} {value:.4g}{' %' * (name in PERCENT)}"


def print_json(value: Any) -> None:
    """Print a value as JSON, for the options named --json."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False))


# --- errors -----------------------------------------------------------------------------------------------------------

FAILED = 1
"""The exit code if a check fails, or the work does: a file cannot be written, memory runs out."""

MISUSE = 2
"""The exit code for a wrong target or option."""

DIVERGED = 3
"""The exit code if the loss or a weight is not finite."""

LONGEST = 1000
"""Characters of a message; a path of 4,000 would fill the screen."""

_WRONG_PATHS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


class TargetError(Exception):
    """A target or an option that cannot be used; the message is one line for the user. The exit code is 2."""


class CommandFailed(Exception):
    """The options are right, but the command cannot do what they say. The exit code is 1."""


class Commands(TyperGroup):
    """A group of commands whose errors are explained in one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Print the error that wrong input causes, and exit."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # names of files may hold bytes that are no text
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except Exception as fault:
            code = exit_code(fault)
            if code is None:
                raise
            typer.echo(f"micronorm {ctx.invoked_subcommand}: {one_line(fault)}", err=True)
            raise typer.Exit(code) from None


def exit_code(fault: Exception) -> int | None:
    """Return the exit code for an error of the user or the machine, or None for a bug of ours.

    ValueError, TypeError and ImportError count only if code of micronorm raised them: others were not foreseen.
    """
    if isinstance(fault, (TargetError, *_WRONG_PATHS)):
        return MISUSE
    if isinstance(fault, CommandFailed):
        return FAILED
    if isinstance(fault, Diverged):
        return DIVERGED
    if isinstance(fault, (ValueError, TypeError)):
        return MISUSE if _is_ours(fault) else None
    if isinstance(fault, ImportError):
        return FAILED if _is_ours(fault) else None
    if isinstance(fault, BrokenPipeError):
        return None  # the reader of a pipe has left, as `head` does: typer ends the command without a word
    return FAILED if isinstance(fault, (OSError, SafetensorError)) or is_out_of_memory(fault) else None


def one_line(fault: BaseException) -> str:
    """Return the message of an error without line breaks and control characters, shortened if it is very long.

    Example:
        >>> one_line(PermissionError(13, "Permission denied", "runs/demo"))
        'runs/demo: Permission denied'
    """
    text = str(fault)
    if isinstance(fault, OSError) and fault.filename is not None and fault.strerror:
        text = f"{fault.filename}: {fault.strerror}"
    text = "".join(c if c.isprintable() else " " for c in text)
    text = " ".join(text.split()) or type(fault).__name__
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


def _is_ours(fault: BaseException) -> bool:
    """Return whether a line of micronorm raised the error, or called the built-in function that did."""
    step = fault.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return step is not None and str(step.tb_frame.f_globals.get("__name__")).startswith("micronorm.")


# --- the progress of a training run -----------------------------------------------------------------------------------

QUIET_SECONDS = 30.0
"""The shortest time between two plain lines within an epoch."""

_RECENT_STEPS = 50  # samples per second are averaged over these
_BAR_WIDTH, _WIDTH_FOR_BAR = 16, 110  # a narrower terminal has no room for the bar


class TrainingProgress(Listener):
    """Show epoch, step, loss, the first test figure, time left, samples per second, memory and learning rate of a run.

    A terminal has one live line; otherwise there is a plain line at the start, and per epoch or half minute.

    The methods take the rows of the run's record. A figure that a row lacks is left out.

    Args:
        console: Where to show it.
        name: Shown instead of the name of the run's recipe.
        clock: A function that returns seconds.

    Example:
        >>> progress = TrainingProgress(Console(width=120))
        >>> progress.on_start(total_steps=4, start_step=0, description="digits")
        digits: step 0/4
        >>> progress.on_step({"step": 1, "epoch": 0, "loss": 2.25, "samples": 32, "seconds": 0.5})
        >>> progress.on_message("out of memory at micro-batch 64, step repeated with 32")
        out of memory at micro-batch 64, step repeated with 32
        >>> progress.on_end()
    """

    def __init__(self, console: Console, *, name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._name, self._clock = console, name, clock
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
        self._show()  # the first step may take long: it compiles kernels

    def on_step(self, row: Mapping[str, Any]) -> None:
        """Show the figures of a finished step."""
        self._row = row
        if row.get("samples") and row.get("seconds"):
            self._recent.append((row["samples"], row["seconds"]))
        self._show_if_due()

    def on_test(self, done: int, samples: int) -> None:
        """Show how many test samples are scored."""
        self._test = f"{100 * done / max(samples, 1):.0f} % of the test samples scored"
        self._show_if_due()

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        """Show the figures of the test samples at the end of an epoch."""
        self._row = {**self._row, **{key: row[key] for key in ("epoch", "step") if key in row}}
        test = row.get("test") or {}
        name = next((key for key in test if key != "loss"), "loss" if test else None)
        self._test = f"test {figure_text(name, test[name])}" if name is not None else ""
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

    def _show_if_due(self) -> None:
        if self._live is not None or self._clock() - self._printed_at >= QUIET_SECONDS:
            self._show()

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
            self._samples_per_second(),
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

    def _samples_per_second(self) -> str:
        if not self._recent:
            return ""
        samples, seconds = map(sum, zip(*self._recent, strict=True))
        if seconds > 10 * samples:
            return f"{seconds / samples:,.0f} s/sample"
        return f"{samples / seconds:,.{0 if samples >= 10 * seconds else 1}f} samples/s"
