"""A run directory: the names of its files, what each must contain, reading it, and writing it."""

import base64
import binascii
import errno
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from micronorm.records.files import (
    Row,
    encode_document,
    encode_line,
    is_count,
    is_number,
    named_error,
    parse,
    read_file,
    write_atomically,
)

FORMAT = 1

FACTS = "run.json"
STEPS = "steps.jsonl"
EPOCHS = "epochs.jsonl"
DIAGNOSTICS = "diagnostics.jsonl"
OUTCOME = "outcome.json"
PREDICTIONS = "predictions.json"

SCENE = ("image", "truth", "answer")
"""The pictures of a prediction that cannot be said in a word: label maps, boxes, masks."""

ROWS = (STEPS, EPOCHS, DIAGNOSTICS)
ALL = (FACTS, *ROWS, OUTCOME, PREDICTIONS)

_KINDS: Mapping[str, tuple[type, ...]] = {
    "format": (int,),
    "recipe": (str,),
    "settings": (dict,),
    "execution": (dict,),
    "data": (dict,),
    "environment": (dict,),
    "revision": (str, type(None)),
    "command": (str,),
    "date": (str,),
}


_COUNT = ("an int from 0 on", is_count)
_NUMBER = ("a number", is_number)
_OBJECT = ("an object", lambda value: isinstance(value, dict))
_ROW_VALUES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "epoch": _COUNT,
    "samples": _COUNT,
    "micro_batch": _COUNT,
    "memory": _COUNT,
    "seconds": ("a finite number from 0 on", lambda value: is_number(value) and 0 <= value < math.inf),
    "loss": _NUMBER,
    "lr": _NUMBER,
    "train": _OBJECT,
    "test": _OBJECT,
    "layers": _OBJECT,
}


@dataclass(frozen=True)
class Record:
    """The contents of a run directory."""

    path: Path
    facts: Row
    steps: list[Row]
    epochs: list[Row]
    outcome: Row | None
    """None while the run is in progress, and after it was killed."""
    diagnostics: list[Row] = field(default_factory=list)
    predictions: list[Row] = field(default_factory=list)


def find_runs(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the run directories in `folder`, itself included and at any depth, sorted: `bn-8` before `bn-16`.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    found = (file.parent for file in Path(folder).rglob(FACTS))
    return sorted(found, key=lambda run: [int(w) if w.isdecimal() else w for w in re.split(r"(\d+)", str(run))])


def read(path: str | os.PathLike[str], *, rows: bool = True) -> Record:
    """Read a run directory, also while the run is in progress. Drop the incomplete last line of a killed writer.

    Args:
        path: the directory.
        rows: False leaves the lists of rows and predictions empty: a long run has hundreds of thousands of rows.

    Raises:
        FileNotFoundError: the directory holds no run.
        ValueError: a file is damaged; names the file and the line.
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
        parse(read_file(outcome), str(outcome)) if outcome.exists() else None,
        diagnostics,
        _read_predictions(folder / PREDICTIONS) if rows else [],
    )


def read_facts(folder: Path) -> Row:
    """Return the facts of the run in `folder`.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: the facts are damaged, or of a newer format.
    """
    file = folder / FACTS
    if not file.exists():
        fix = "; give the directory of the run, not a file" if folder.is_file() else ""
        raise FileNotFoundError(f"{folder} holds no run: there is no {FACTS}{fix}")
    facts = parse(read_file(file), str(file))
    check_facts(facts, file)
    return facts


def check_facts(facts: Row, file: Path) -> None:
    """Raise ValueError if a fact is missing or of the wrong type, or if the format is another."""
    if facts.get("format") != FORMAT:
        raise ValueError(f"{file}: format {facts.get('format')!r}; this micronorm reads format {FORMAT} only")
    for name, kinds in _KINDS.items():
        if not isinstance(facts.get(name, ...), kinds):
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            got = type(facts[name]).__name__ if name in facts else "nothing"
            raise ValueError(f"{file}: the fact {name!r} must be {wanted}, got {got}")


def read_lines(file: Path) -> list[tuple[bytes, Row]]:
    """Return the complete lines of a `.jsonl` file and their rows, whose steps must increase."""
    *lines, _ = read_file(file).split(b"\n")  # what follows the last newline is incomplete
    found: list[tuple[bytes, Row]] = []
    apart = 1 if file.name == STEPS else 0
    last = 0
    for number, line in enumerate(lines, start=1):
        row = parse(line, f"{file}, line {number}")
        step = row.get("step")
        if not is_count(step) or step < last + apart:
            raise ValueError(f"{file}, line {number}: step {step!r} after step {last}")
        last = step
        check_row(row, f"{file}, line {number}")
        found.append((line + b"\n", row))
    return found


def check_row(row: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if a value of a row that the format names has another type."""
    for name, (kind, holds) in _ROW_VALUES.items():
        value = row.get(name)
        if value is not None and not holds(value):
            raise ValueError(f"{where}: {name} must be {kind}, got {type(value).__name__} {str(value)[:40]}")
    for name, layer in (row.get("layers") or {}).items():
        if not isinstance(layer, dict):
            raise ValueError(f"{where}: the layer {name!r} must be an object, got {type(layer).__name__}")


def write_predictions(path: str | os.PathLike[str], samples: Iterable[Mapping[str, Any]]) -> None:
    """Write predictions for some test samples into a run directory, replacing earlier ones.

    Raises:
        FileNotFoundError: the directory holds no run.
        ValueError: a sample lacks a key, or its pixels do not match its size.
    """
    file = Path(path) / PREDICTIONS
    kept = [dict(sample) for sample in samples]
    _check_predictions(kept, file)
    read_facts(Path(path))
    write_atomically(file, encode_document({"samples": kept}))


def _read_predictions(file: Path) -> list[Row]:
    """Return the predictions stored in `file`, or an empty list if it does not exist."""
    if not file.exists():
        return []
    samples: Any = parse(read_file(file), str(file)).get("samples")
    _check_predictions(samples, file)
    return samples


def _check_predictions(samples: Any, file: Path) -> None:
    if not isinstance(samples, list):
        raise ValueError(f"{file}: a list of samples was expected, got {type(samples).__name__}")
    for number, sample in enumerate(samples):
        where = f"{file}, sample {number}"
        if not isinstance(sample, dict):
            raise ValueError(f"{where}: an object was expected, got {type(sample).__name__}")
        scene = "image" in sample
        if scene != ("image" in samples[0]):
            raise ValueError(f"{where}: either all samples or none have an image, a truth and an answer")
        for name in (*(SCENE if scene else ("pixels",)), "label", "prediction"):
            if not isinstance(sample.get(name), str):
                raise ValueError(f"{where}: {name} must be str, got {type(sample.get(name)).__name__}")
        _check_scene(sample, where) if scene else _check_pixels(sample, where)


def _check_pixels(sample: Row, where: str) -> None:
    sides: list[Any] = [sample.get(name) for name in ("height", "width")]
    if not all(is_count(side) and side for side in sides) or sample.get("channels") not in (1, 3):
        raise ValueError(f"{where}: height and width from 1 on and 1 or 3 channels were expected")
    found, wanted = len(_decode(sample, "pixels", where)), math.prod(sides) * sample["channels"]
    if found != wanted:
        raise ValueError(f"{where}: {found} bytes of pixels where its size gives {wanted}")


def _check_scene(sample: Row, where: str) -> None:
    for name in SCENE:
        if not _decode(sample, name, where).startswith((b"\x89PNG\r\n", b"\xff\xd8\xff")):
            raise ValueError(f"{where}: {name} must be base64 of a PNG or JPEG file")
    if not isinstance(sample.get("note", ""), str):
        raise ValueError(f"{where}: note must be str, got {type(sample['note']).__name__}")
    colours: Any = sample.get("colours", {})
    if not isinstance(colours, dict) or not all(re.fullmatch("#[0-9a-f]{6}", str(c)) for c in colours.values()):
        raise ValueError(f"{where}: colours must be an object of classes and colours such as #80ff00")


def _decode(sample: Row, name: str, where: str) -> bytes:
    try:
        return base64.b64decode(sample[name], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{where}: {name} is no base64 ({error})") from None


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
