"""Tables of figures as CSV files."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write the rows; a column that some do not have is empty there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
