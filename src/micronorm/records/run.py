"""Writing a run directory: facts first, then rows, and the outcome at the end."""

import errno
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from micronorm.records.atomic import named_error, write_atomically
from micronorm.records.encoding import Row, encode_document, encode_line, parse
from micronorm.records.record import (
    ALL,
    DIAGNOSTICS,
    EPOCHS,
    FACTS,
    FORMAT,
    OUTCOME,
    PREDICTIONS,
    ROWS,
    STEPS,
    check_facts,
    check_row,
    read_facts,
    read_lines,
)


class Run:
    """A run directory open for writing, by one process at a time.

    Rows are handed to the operating system before a call returns. A killed process loses none of them, and leaves at
    most one incomplete line, which readers drop. Rows before a call of `sync` survive a power failure.

    Example:
        >>> import tempfile
        >>> from micronorm.records import read
        >>> folder = tempfile.TemporaryDirectory()
        >>> facts = {"recipe": "digits", "settings": {"epochs": 1}, "execution": {}, "data": {"name": "digits"}}
        >>> facts |= {"environment": {}, "revision": None, "command": "micronorm train digits", "date": "2025-01-01"}
        >>> run = Run.create(Path(folder.name) / "first", facts)
        >>> run.append_steps([{"step": 1, "loss": 2.5}, {"step": 2, "loss": float("nan")}])
        >>> run.rewind(1)  # a checkpoint of step 1 was resumed
        >>> run.append_steps([{"step": 2, "loss": 2.25}])
        >>> run.finish({"steps": 2})
        >>> read(run.path).steps
        [{'step': 1, 'loss': 2.5}, {'step': 2, 'loss': 2.25}]
        >>> folder.cleanup()
    """

    def __init__(self, path: Path, facts: Row) -> None:
        self.path = path
        self.facts = facts

    @classmethod
    def create(cls, path: str | os.PathLike[str], facts: Mapping[str, Any]) -> "Run":
        """Create the directory and write its facts; `format` is added.

        Args:
            path: the directory; it may exist, and hold other files.
            facts: the keys listed at the top of `micronorm.records`, and any others.

        Raises:
            FileExistsError: the directory holds a run.
            ValueError: a fact is missing or of the wrong type.
        """
        folder = Path(path)
        complete = {"format": FORMAT, **facts}
        check_facts(complete, folder / FACTS)
        text = encode_document(complete)
        present = [name for name in ALL if (folder / name).exists()]
        if present:
            raise FileExistsError(
                f"{folder} already holds a run ({', '.join(present)}): resume it or name another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / FACTS, text)
        return cls(folder, parse(text, str(folder / FACTS)))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Run":
        """Open an existing run. Call `rewind` before the first append: a killed writer may have left half a line.

        Raises:
            FileNotFoundError: the directory holds no run.
            ValueError: its facts are damaged, or of a newer format; or a file is a link.
        """
        folder = Path(path)
        linked = [name for name in ALL if (folder / name).is_symlink()]
        if linked:  # rows would be appended to a file elsewhere
            raise ValueError(f"{folder / linked[0]} is a link: a run writes into its own folder only; copy the file")
        return cls(folder, read_facts(folder))

    def add_facts(self, **facts: Any) -> None:
        """Add facts, replacing those of the same names."""
        complete = {**self.facts, **facts}
        check_facts(complete, self.path / FACTS)
        text = encode_document(complete)
        write_atomically(self.path / FACTS, text)
        self.facts = parse(text, str(self.path / FACTS))

    def append_steps(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the rows of steps, in one write. Readers require that `step` increases."""
        self._append(STEPS, list(rows))

    def append_epoch(self, row: Mapping[str, Any]) -> None:
        """Append the row of an evaluation."""
        self._append(EPOCHS, [row])

    def append_diagnostics(self, row: Mapping[str, Any]) -> None:
        """Append a measurement of the layers."""
        self._append(DIAGNOSTICS, [row])

    def rewind(self, step: int) -> None:
        """Drop rows of later steps than `step`, incomplete lines, outcome and predictions, to continue from there."""
        for name in (OUTCOME, PREDICTIONS):
            (self.path / name).unlink(missing_ok=True)
        for name in ROWS:
            file = self.path / name
            if file.exists():
                kept = b"".join(line for line, row in read_lines(file) if row["step"] <= step)
                if len(kept) != file.stat().st_size:
                    write_atomically(file, kept)

    def finish(self, outcome: Mapping[str, Any]) -> None:
        """Write the outcome."""
        write_atomically(self.path / OUTCOME, encode_document(outcome))

    def sync(self) -> None:
        """Wait until all rows are on the disk; before a checkpoint that relies on them."""
        for name in ROWS:
            with suppress(FileNotFoundError), open(self.path / name, "rb") as file:
                os.fsync(file.fileno())

    def _append(self, name: str, rows: list[Mapping[str, Any]]) -> None:
        data = b"".join(map(encode_line, rows))
        for row in rows:
            check_row(row, f"a row of {name}")
        file = self.path / name
        with open(file, "ab", buffering=0) as out:
            before = out.tell()
            try:
                if out.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                out.truncate(before)  # the next row must not follow half a line
                raise named_error(error, file, len(data)) from error
