"""The data file of a figure: its numbers, and where they come from.

A JSON object: `figure`, `title`, `paper` (what the paper shows), `ours` (what we chose where the paper is silent),
`settings` (everything that decides the numbers), `seed`, `dataset`, `command`, `environment`, `date`, `seconds`,
`complete` and `numbers`. A number that is not finite is null. During a long measurement the numbers so far are in a
file beside it.
"""

import json
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from micronorm.engine.environment import environment
from micronorm.records import write_atomically

_NUMBERS = re.compile(r"\[\s+((?:(?:-?[\d.]+(?:e[-+]?\d+)?|null),?\s+)+)\]")  # a list with one number per line

PARTIAL = ".partial.json"
"""Suffix of the file with the numbers of an unfinished measurement."""


class FigureData:
    """A data file that is being written.

    Args:
        path: the data file. An unfinished measurement with the same settings continues; any other is replaced.
        facts: `figure`, `settings` and more entries for the file.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = Path(folder.name) / "dist.json"
        >>> data = FigureData(path, {"figure": "fig:dist", "settings": {"epochs": 2}})
        >>> data.numbers["error"] = [12.5]
        >>> data.save_progress()
        >>> again = FigureData(path, {"figure": "fig:dist", "settings": {"epochs": 2}})
        >>> again.numbers
        {'error': [12.5]}
        >>> again.finish()["complete"]
        True
        >>> folder.cleanup()
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path, self.settings = path, facts["settings"]
        self._partial = path.with_name(path.stem + PARTIAL)
        self._facts = json.loads(_to_json(facts))
        self._began = time.monotonic()
        found = json.loads(self._partial.read_text("utf-8")) if self._partial.exists() else {}
        same = found.get("settings") == self._facts["settings"]
        self.numbers: dict[str, Any] = found["numbers"] if same else {}
        self._seconds_before: float = found["seconds"] if same else 0.0

    @property
    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._began

    def save_progress(self) -> None:
        """Write the numbers so far."""
        self._write(self._partial, {**self._facts, "seconds": self._seconds, "numbers": self.numbers})

    def finish(self) -> dict[str, Any]:
        """Write the data file, remove the unfinished one, and return the content."""
        ran_on = environment()
        facts = {**self._facts, "environment": ran_on, "date": ran_on["date"], "seconds": round(self._seconds, 1)}
        text = self._write(self.path, {**facts, "complete": True, "numbers": self.numbers})
        self._partial.unlink(missing_ok=True)
        return json.loads(text)

    @staticmethod
    def _write(path: Path, content: Mapping[str, Any]) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = _to_json(content)
        write_atomically(path, text.encode() + b"\n")
        return text


def read(path: Path, settings: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the content of a finished data file, or None if the file does not exist or is unfinished.

    Args:
        path: the data file.
        settings: return None for a file with other settings, too.

    Raises:
        ValueError: the file is not a data file.
    """
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict) or not {"figure", "settings", "numbers"} <= found.keys():
        raise ValueError(f"{path} is not the data file of a figure: it lacks figure, settings or numbers")
    wanted = found["settings"] if settings is None else json.loads(_to_json(settings))
    return found if found.get("complete") and found["settings"] == wanted else None


def _to_json(value: Any) -> str:
    """Return JSON text. A number that is not finite becomes null; floats keep six digits, more than a chart shows."""
    text = json.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False)
    return _NUMBERS.sub(lambda found: "[" + ", ".join(found[1].replace(",", " ").split()) + "]", text)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
