"""A run directory, read back."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from micronorm.records.encoding import Row, parse
from micronorm.records.facts import read_facts
from micronorm.records.folder import OUTCOME, PREDICTIONS, ROWS
from micronorm.records.predictions import read_predictions
from micronorm.records.rows import read_lines


@dataclass(frozen=True)
class Record:
    """What a run directory holds."""

    path: Path
    facts: Row
    steps: list[Row]
    epochs: list[Row]
    outcome: Row | None
    """None while the run goes on, and where it was killed."""
    diagnostics: list[Row] = field(default_factory=list)
    predictions: list[Row] = field(default_factory=list)


def read(path: str | os.PathLike[str], *, rows: bool = True) -> Record:
    """Read a run directory, of a run that goes on too. The torn last line of a killed writer is dropped.

    Args:
        path: the directory.
        rows: False leaves rows and predictions unread, and their lists empty: a long run has hundreds of thousands.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: anything else is wrong, with the file and the line.
    """
    folder = Path(path)
    facts = read_facts(folder)
    files = [folder / name for name in ROWS]
    steps, epochs, diagnostics = (
        [row for _, row in read_lines(file)] if rows and file.exists() else [] for file in files
    )
    outcome = folder / OUTCOME
    return Record(
        folder,
        facts,
        steps,
        epochs,
        parse(outcome.read_bytes(), str(outcome)) if outcome.exists() else None,
        diagnostics,
        read_predictions(folder / PREDICTIONS) if rows else [],
    )
