"""The rows of a run's `.jsonl` files: whole lines, in the order of their steps."""

from pathlib import Path
from typing import Any

from micronorm.records.encoding import Row, is_count, parse
from micronorm.records.folder import DIAGNOSTICS, STEPS


def read_lines(file: Path) -> list[tuple[bytes, Row]]:
    """The whole lines and the rows they hold; what follows the last newline is torn, or nothing."""
    *lines, _ = file.read_bytes().split(b"\n")
    found: list[tuple[bytes, Row]] = []
    apart = 1 if file.name == STEPS else 0
    last = 0
    for number, line in enumerate(lines, start=1):
        row = parse(line, f"{file}, line {number}")
        step = row.get("step")
        if not is_count(step) or step < last + apart:
            raise ValueError(f"{file}, line {number}: step {step!r} after step {last}")
        last = step
        if file.name == DIAGNOSTICS:
            check_layers(row, f"{file}, line {number}")
        found.append((line + b"\n", row))
    return found


def mend(file: Path) -> int:
    """Cut a torn last line off; return the step of the last whole one, 0 where there is none."""
    if not file.exists():
        return 0
    with open(file, "r+b") as out:
        data = out.read()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            out.truncate(whole)
    return max((row["step"] for _, row in read_lines(file)), default=0)


def check_layers(row: Row, where: str) -> None:
    """Refuse a look whose layers are no objects: readers would pass over it, and show less than was recorded."""
    layers: Any = row.get("layers", {})
    if not isinstance(layers, dict):
        raise ValueError(f"{where}: layers must be an object, got {type(layers).__name__}")
    for name, layer in layers.items():
        if not isinstance(layer, dict):
            raise ValueError(f"{where}: the layer {name!r} must be an object, got {type(layer).__name__}")
