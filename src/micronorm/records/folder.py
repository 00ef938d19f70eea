"""The files of a run directory by name, and where such directories are."""

import os
from pathlib import Path

FACTS = "run.json"
STEPS = "steps.jsonl"
EPOCHS = "epochs.jsonl"
DIAGNOSTICS = "diagnostics.jsonl"
OUTCOME = "outcome.json"
PREDICTIONS = "predictions.json"

ROWS = (STEPS, EPOCHS, DIAGNOSTICS)
ALL = (FACTS, *ROWS, OUTCOME, PREDICTIONS)


def find_runs(folder: str | os.PathLike[str]) -> list[Path]:
    """The run directories in `folder`, itself included and at any depth, sorted.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    return sorted(file.parent for file in Path(folder).rglob(FACTS))
