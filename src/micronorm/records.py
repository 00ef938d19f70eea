"""A run directory: what a run was, what each step and epoch gave, and what it came to. Standard library only.

| file | holds | written |
|---|---|---|
| `run.json` | the facts of the run, keys below | whole, atomically |
| `steps.jsonl` | a JSON object per optimizer step | appended, a line each |
| `epochs.jsonl` | a JSON object per evaluation | appended, a line each |
| `diagnostics.jsonl` | a JSON object per look into the network, where one was asked for | appended, a line each |
| `outcome.json` | what the run came to; absent until it ends | whole, atomically |
| `predictions.json` | what the network says of a few test samples, where its task can tell | whole, atomically |

Facts: `format` (1), `recipe` (str), `settings`, `execution`, `data`, `environment` (objects), `revision` (str or null),
`command` (str), `date` (ISO 8601), and whatever else the writer knows, such as `resumptions`. Of a recipe `paper` holds
the paper's figures by the names of the run's own, or null where the paper has none, and `title` its row for people.

A row of steps: `step` (completed steps, from 1), `epoch` (from 0), `loss`, `lr`, `samples`, `seconds`, `micro_batch`,
`memory` (bytes or null), and any counts. A row of epochs: `epoch` (from 0), `step`, `seconds`, and the figures `train`
and `test`.

A row of diagnostics: `step`, `epoch`, and `layers`, by the name of each layer that was looked at an object with its
`kind` and figures. Kind "norm": `norm` (the class), `channels`, `groups`, `stat_diff` and `stat_diff_worst` (the mean
and the largest over groups), `sigma_mean` and `sigma_std` (the spread of the normalized channels' means and
deviations), `active` (the share of positive outputs), `dead` and `rare` (counts of channels that are never, or hardly
ever, active). Kind "weight": `weight` (the reparameterization, "none" for a plain one), `along`, `mean`, `rest` and
`residual` (the shares of the squared gradient), `use` (the least over the mean of the input channels' weights), `norm`
and `grad` (of W). A figure that was not measured is absent.

Predictions: `samples`, a list of objects with `height`, `width` and `channels` (1 or 3) of a small picture, `pixels`
(base64 of so many bytes, row by row, the channels of a pixel together), `label` and `prediction` (str), and
`probability` (what the network gives its own answer).

JSON has no NaN and no infinity: they are written as {"float": "nan"}, {"float": "inf"} and {"float": "-inf"}, and read
back as the numbers they were. Other floats are written with the digits that give the same float again.
"""

import base64
import binascii
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

FORMAT = 1
FACTS = "run.json"
STEPS = "steps.jsonl"
EPOCHS = "epochs.jsonl"
DIAGNOSTICS = "diagnostics.jsonl"
OUTCOME = "outcome.json"
PREDICTIONS = "predictions.json"
PARTIAL = ".partial"
"""How the name of a file ends that `write_atomically` has not finished."""

_ROWS = (STEPS, EPOCHS, DIAGNOSTICS)
_ALL = (FACTS, *_ROWS, OUTCOME, PREDICTIONS)

Row = dict[str, Any]

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


class Run:
    """A run directory open for writing, by one process at a time.

    Rows reach the operating system before a call returns: a killed process loses none of them, and leaves at most one
    torn line, which readers drop. A machine that loses power keeps what `sync` was called after.

    Example:
        >>> import tempfile
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
        self._last: dict[str, int] = {}  # the last step in each file, once known

    @classmethod
    def create(cls, path: str | os.PathLike[str], facts: Mapping[str, Any], *, replace: bool = False) -> "Run":
        """Make the directory and write its facts; `format` is added.

        Args:
            path: the directory; it may exist, and hold other files.
            facts: the keys of this module's table, and any others.
            replace: remove the records of a run that is there. Files of other names, such as checkpoints, stay.

        Raises:
            FileExistsError: there is a run, and `replace` is False.
            ValueError: a fact is missing or of the wrong kind.
        """
        folder = Path(path)
        complete = {"format": FORMAT, **facts}
        _check_facts(complete, folder / FACTS)
        text = _document(complete)  # before anything is removed
        present = [name for name in _ALL if (folder / name).exists()]
        if present and not replace:
            raise FileExistsError(
                f"{folder} already holds a run ({', '.join(present)}): resume it or name another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for name in present:  # the facts first: the rest is no run without them
            (folder / name).unlink()
        write_atomically(folder / FACTS, text)
        return cls(folder, json.loads(text, object_hook=_decode))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Run":
        """Go on with a run; call `rewind` before the first append.

        Raises:
            FileNotFoundError: there is no run.
            ValueError: its facts are damaged or of a newer format.
        """
        return cls(Path(path), _read_facts(Path(path)))

    def add_facts(self, **facts: Any) -> None:
        """Set facts, in place of those of the same names."""
        complete = {**self.facts, **facts}
        _check_facts(complete, self.path / FACTS)
        text = _document(complete)
        write_atomically(self.path / FACTS, text)
        self.facts = json.loads(text, object_hook=_decode)

    def append_steps(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows, each with a `step` above that of the row before it, in one write."""
        self._append(STEPS, list(rows), apart=1)

    def append_epoch(self, row: Mapping[str, Any]) -> None:
        """Append the row of an evaluation, with a `step` not below that of the row before it."""
        self._append(EPOCHS, [row], apart=0)

    def append_diagnostics(self, row: Mapping[str, Any]) -> None:
        """Append a look into the network, with a `step` not below that of the row before it."""
        self._append(DIAGNOSTICS, [row], apart=0)

    def rewind(self, step: int) -> None:
        """Drop rows of steps above `step`, torn lines, and what was written at the end: the run goes on from there."""
        for name in (OUTCOME, PREDICTIONS):
            (self.path / name).unlink(missing_ok=True)
        self._last.clear()
        for name in _ROWS:
            file = self.path / name
            if file.exists():
                kept = b"".join(line for line, row in _read_lines(file) if row["step"] <= step)
                if len(kept) != file.stat().st_size:
                    write_atomically(file, kept)

    def finish(self, outcome: Mapping[str, Any]) -> None:
        """Write what the run came to."""
        write_atomically(self.path / OUTCOME, _document(outcome))

    def sync(self) -> None:
        """Return when all rows are on the disk: before a checkpoint that relies on them."""
        for name in _ROWS:
            with suppress(FileNotFoundError), open(self.path / name, "rb") as file:
                os.fsync(file.fileno())

    def _append(self, name: str, rows: list[Mapping[str, Any]], *, apart: int) -> None:
        file = self.path / name
        if name not in self._last:
            self._last[name] = _mend(file)
        last = self._last[name]
        for row in rows:
            step = row.get("step")
            if not _is_count(step):
                raise ValueError(f"a row of {name} needs its step, an int not below 0, got {step!r}")
            if step < last + apart:
                raise ValueError(f"step {step} follows step {last} in {file}; after a resume, rewind first")
            if name == DIAGNOSTICS:
                _check_layers(dict(row), f"a row of {name}")
            last = step
        data = b"".join(_line(row) for row in rows)
        with open(file, "ab", buffering=0) as out:
            before = out.tell()
            try:
                written = out.write(data)
                if written != len(data):
                    raise OSError(f"{file}: {written} of {len(data)} bytes written; is the disk full?")
            except BaseException:
                out.truncate(before)  # what follows must not be glued to half a line
                raise
        self._last[name] = last


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
    facts = _read_facts(folder)
    files = [folder / name for name in _ROWS]
    steps, epochs, diagnostics = (
        [row for _, row in _read_lines(file)] if rows and file.exists() else [] for file in files
    )
    outcome = folder / OUTCOME
    return Record(
        folder,
        facts,
        steps,
        epochs,
        _parse(outcome.read_bytes(), str(outcome)) if outcome.exists() else None,
        diagnostics,
        _read_predictions(folder / PREDICTIONS) if rows else [],
    )


def write_predictions(path: str | os.PathLike[str], samples: Iterable[Mapping[str, Any]]) -> None:
    """Write what the trained network says of some samples into a run directory, in place of what was there.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: a sample lacks something, or its pixels are not as many as its size says.
    """
    file = Path(path) / PREDICTIONS
    kept = [dict(sample) for sample in samples]
    _check_predictions(kept, file)
    _read_facts(Path(path))
    write_atomically(file, _document({"samples": kept}))


def _read_predictions(file: Path) -> list[Row]:
    if not file.exists():
        return []
    samples: Any = _parse(file.read_bytes(), str(file)).get("samples")
    _check_predictions(samples, file)
    return samples


def _check_predictions(samples: Any, file: Path) -> None:
    if not isinstance(samples, list):
        raise ValueError(f"{file}: a list of samples was expected, got {type(samples).__name__}")
    for number, sample in enumerate(samples):
        where = f"{file}, sample {number}"
        sides: list[Any] = [sample.get(name) for name in ("height", "width")] if isinstance(sample, dict) else []
        if not sides or not all(_is_count(side) and side for side in sides) or sample.get("channels") not in (1, 3):
            raise ValueError(f"{where}: height and width from 1 on and 1 or 3 channels were expected")
        for name in ("pixels", "label", "prediction"):
            if not isinstance(sample.get(name), str):
                raise ValueError(f"{where}: {name} must be str, got {type(sample.get(name)).__name__}")
        try:
            found = len(base64.b64decode(sample["pixels"], validate=True))
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"{where}: its pixels are no base64 ({error})") from None
        wanted = math.prod(sides) * sample["channels"]
        if found != wanted:
            raise ValueError(f"{where}: {found} bytes of pixels where its size gives {wanted}")


def find_runs(folder: str | os.PathLike[str]) -> list[Path]:
    """The run directories in `folder`, itself included and at any depth, sorted.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    return sorted(file.parent for file in Path(folder).rglob(FACTS))


def write_atomically(path: str | os.PathLike[str], content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write a file so that at every moment, power failures included, it is either the old one or the new one, whole.

    An exception leaves the old file and nothing else. A killed process may leave a hidden file beside it whose name
    ends in `.partial`; `remove_partials` removes such files.

    Args:
        path: the file; its folder must exist.
        content: the bytes, or a function that writes them into the open file it is given.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with open(partial, "xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def remove_partials(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove what killed writers left in `folder`, when no writer is at work there, and say what it was."""
    found = sorted(Path(folder).glob(f".*{PARTIAL}"))
    for file in found:
        file.unlink(missing_ok=True)
    return found


def sync_folder(folder: Path) -> None:
    """Return when the names in `folder` are on the disk, as after a rename."""
    with suppress(PermissionError):  # Windows opens no folders; elsewhere one may be writable without being readable
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _mend(file: Path) -> int:
    """Cut a torn last line off; return the step of the last whole one, 0 where there is none."""
    if not file.exists():
        return 0
    with open(file, "r+b") as out:
        data = out.read()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            out.truncate(whole)
    return max((row["step"] for _, row in _read_lines(file)), default=0)


def _read_facts(folder: Path) -> Row:
    file = folder / FACTS
    if not file.exists():
        raise FileNotFoundError(f"{folder} holds no run: there is no {FACTS}")
    facts = _parse(file.read_bytes(), str(file))
    _check_facts(facts, file)
    return facts


def _check_facts(facts: Row, file: Path) -> None:
    if facts.get("format") != FORMAT:
        raise ValueError(
            f"{file}: format {facts.get('format')!r}; this version of micronorm knows format {FORMAT} only"
        )
    for name, kinds in _KINDS.items():
        if not isinstance(facts.get(name, ...), kinds):
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            got = type(facts[name]).__name__ if name in facts else "nothing"
            raise ValueError(f"{file}: the fact {name!r} must be {wanted}, got {got}")


def _read_lines(file: Path) -> list[tuple[bytes, Row]]:
    """The whole lines and the rows they hold; what follows the last newline is torn, or nothing."""
    *lines, _ = file.read_bytes().split(b"\n")
    found: list[tuple[bytes, Row]] = []
    apart = 1 if file.name == STEPS else 0
    last = 0
    for number, line in enumerate(lines, start=1):
        row = _parse(line, f"{file}, line {number}")
        step = row.get("step")
        if not _is_count(step) or step < last + apart:
            raise ValueError(f"{file}, line {number}: step {step!r} after step {last}")
        last = step
        if file.name == DIAGNOSTICS:
            _check_layers(row, f"{file}, line {number}")
        found.append((line + b"\n", row))
    return found


def _check_layers(row: Row, where: str) -> None:
    """Refuse a look whose layers are no objects: readers would pass over it, and show less than was recorded."""
    layers: Any = row.get("layers", {})
    if not isinstance(layers, dict):
        raise ValueError(f"{where}: layers must be an object, got {type(layers).__name__}")
    for name, layer in layers.items():
        if not isinstance(layer, dict):
            raise ValueError(f"{where}: the layer {name!r} must be an object, got {type(layer).__name__}")


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(_encode(row, "row"), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _document(value: Mapping[str, Any]) -> bytes:
    return json.dumps(_encode(value, "value"), indent=2, allow_nan=False).encode() + b"\n"


def _encode(value: Any, where: str) -> Any:
    """The value as JSON can hold it; json itself would turn keys into text and write bare NaN."""
    if isinstance(value, Mapping):
        if _stands_for_float(value):
            raise ValueError(f"{where}: {dict(value)} would be read back as a float")
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where}: keys must be str, got {key!r}")
        return {key: _encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise TypeError(f"{where}: a {type(value).__name__} is no JSON value; take .item() of a tensor, str() of a path")


def _stands_for_float(value: Mapping[Any, Any]) -> bool:
    return value.keys() == {"float"} and value["float"] in ("nan", "inf", "-inf")


def _decode(row: Row) -> Any:
    return float(row["float"]) if _stands_for_float(row) else row


def _parse(data: bytes, where: str) -> Row:
    try:
        value = json.loads(data, object_hook=_decode, parse_constant=_refuse)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a JSON object was expected, got {type(value).__name__}")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
