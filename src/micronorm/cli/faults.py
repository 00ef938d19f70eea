"""The one place where errors of a command become one line and an exit code.

Wrong input and failing disks end in a line. Everything else is a bug of ours and shows Python's traceback, which users
can paste into a report.
"""

import io
import sys
from typing import Any

import typer
from safetensors import SafetensorError
from typer.core import TyperGroup

from micronorm.engine.loop import Diverged
from micronorm.engine.sampling import is_out_of_memory

FAILED = 1
"""The exit code if the answer is no, or something failed: a file cannot be written, memory runs out."""

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
