"""Random hostile input for the command line: options, run directories, checkpoints, data sets and names on pages.

    python -m tests.fuzz --seconds 60 --seed 0

Every case calls a command in this process. A command may succeed, or end with an exit code and one line of explanation.
An exception that reaches Python, a command that hangs, and a report page that no parser accepts are failures. They are
grouped by the place that raised them, with one command to repeat the first of each group. Case number k of a seed is
the same on every machine, and does not depend on the other cases.
"""

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner

from micronorm.cli import app
from tests.fuzz.inputs import FACTORIES, KINDS

PATIENCE = 120.0
"""Seconds after which a command counts as hanging."""


@dataclass(frozen=True)
class Failure:
    """What went wrong, by the line that raised it."""

    kind: str
    number: int
    arguments: list[str]
    what: str


class _Hangs(BaseException):
    """Raised by the alarm; no command may catch it."""


def fuzz(
    seed: int, *, seconds: float = float("inf"), count: int | None = None, kinds: tuple[str, ...] = ()
) -> tuple[int, list[Failure]]:
    """Run cases of all kinds in turn until the seconds are over or each kind has had `count`; return the failures."""
    deadline = time.monotonic() + seconds
    failures, done, number = [], 0, 0
    while time.monotonic() < deadline and (count is None or number < count):
        for kind in kinds or KINDS:
            if time.monotonic() >= deadline:
                break
            failure = run_case(kind, seed, number)
            failures += [] if failure is None else [failure]
            done += 1
        number += 1
    return done, failures


def run_case(kind: str, seed: int, number: int) -> Failure | None:
    """Make and run case `number` of a kind in a folder of its own."""
    chance = random.Random(f"{seed} {kind} {number}")
    with tempfile.TemporaryDirectory(prefix="micronorm-fuzz-") as place, _inside(Path(place)), _quick_work():
        case = KINDS[kind](chance, Path(place))
        try:
            with _alarm(PATIENCE), case.around(Path(place)):
                result = CliRunner().invoke(app, case.arguments)
                what = _fault(result, Path(place))
                if what is None and result.exit_code == 0:
                    case.check(Path(place))
        except _Hangs:
            what = "hangs"
        except Exception as error:  # the check of what was written
            what = _describe(error)
    return None if what is None else Failure(kind, number, case.arguments, what)


def _fault(result: Any, place: Path) -> str | None:
    """Return what is wrong with the end of a command, or None."""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        last = traceback.extract_tb(result.exception.__traceback__)[-1]
        by_user = Path(last.filename).is_relative_to(place)  # the traceback of a user's layer shows the user's line
        return None if by_user else _describe(result.exception)
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    if any(line.startswith("Usage:") for line in lines):
        return None  # typer's own message
    if result.exit_code == 2 and not lines:
        return "exit code 2 without a line"
    strange = [line for line in lines if not line.startswith("micronorm ") or line.endswith(": ")]
    return f"printed {strange[0]!r}" if strange else None


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/micronorm/" in frame.filename or "/tests/" in frame.filename]
    place = f"{'/'.join(Path(own[-1].filename).parts[-2:])}:{own[-1].lineno}" if own else "?"
    return f"{type(error).__name__} at {place}: {' '.join(str(error).split())[:120]}"


@contextlib.contextmanager
def _inside(place: Path) -> Iterator[None]:
    """Work in a folder. Leave Python's path and its modules as they were."""
    before, path, modules = os.getcwd(), [*sys.path], {*sys.modules}
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        for name in {*sys.modules} - modules:
            if name in FACTORIES:
                del sys.modules[name]


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise _Hangs

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _quick_work() -> Iterator[None]:
    """Leave out what takes long: the trainings of demo and reproduce, timing, self-tests."""
    no_data = FileNotFoundError("left out by the test")
    with (
        mock.patch("micronorm.cli.demo.run", side_effect=KeyboardInterrupt(signal.SIGINT)),
        mock.patch("micronorm.cli.row_queue.run_recipe", side_effect=no_data),
        mock.patch("micronorm.recipes.figures.figure.Figure.run", side_effect=no_data),
        mock.patch("micronorm.cli.bench.measure", return_value=[]),
        mock.patch("micronorm.cli.bench._print_table"),
        mock.patch("micronorm.cli.doctor.check_step", return_value=""),
        mock.patch("webbrowser.open"),
        warnings.catch_warnings(action="ignore"),
    ):
        yield
