"""The data file of a figure: its numbers, and all that says where they come from.

A JSON object: `figure`, `title`, `paper` (what the paper shows and reports), `ours` (what was chosen here, the paper
being silent), `settings` (all that decides the numbers), `seed`, `dataset`, `command`, `environment`, `date`,
`seconds`, `complete` and `numbers`. A number that is not finite is null. While a long measurement lasts,
the state to go on from lies in a file beside it.
"""

import json
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from micronorm.engine.environment import environment
from micronorm.records import write_atomically

_NUMBERS = re.compile(r"\[\s+((?:(?:-?[\d.]+(?:e[-+]?\d+)?|null),?\s+)+)\]")  # a list of numbers, a line each

STATE = ".state.pt"
"""How the name of the file ends that holds the state of an unfinished measurement."""


class Sheet:
    """A data file while it is being made.

    Args:
        path: of the data file; an unfinished one with the same settings is gone on with, any other is replaced.
        facts: `figure`, `settings` and whatever else the file is to say.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = Path(folder.name) / "dist.json"
        >>> sheet = Sheet(path, {"figure": "fig:dist", "settings": {"epochs": 2}})
        >>> sheet.numbers["error"] = [12.5]
        >>> sheet.keep({"epoch": 1})
        >>> again = Sheet(path, {"figure": "fig:dist", "settings": {"epochs": 2}})
        >>> again.numbers, again.state
        ({'error': [12.5]}, {'epoch': 1})
        >>> again.finish()["complete"]
        True
        >>> folder.cleanup()
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self._state_path = path.with_name(path.stem + STATE)
        self._facts = json.loads(_text(facts))
        self._began = time.monotonic()
        found = self._read_state()
        self.numbers: dict[str, Any] = json.loads(found["numbers"]) if found else {}
        self.state: Any = found["state"] if found else None
        self._seconds = float(found["seconds"]) if found else 0.0

    def keep(self, state: Any) -> None:
        """Write the numbers so far, and the `state` from which to go on: tensors, numbers, text, lists and dicts."""
        self._settle_clock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.state = state
        kept = {"settings": self._key(), "numbers": _text(self.numbers), "seconds": self._seconds, "state": state}
        write_atomically(self._state_path, lambda file: torch.save(kept, file))

    def finish(self) -> dict[str, Any]:
        """Write the data file whole, remove the state, and return what the file holds."""
        self._settle_clock()
        made = environment()
        facts = {**self._facts, "environment": made, "date": made["date"], "seconds": round(self._seconds, 1)}
        content = _text({**facts, "complete": True, "numbers": self.numbers})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, content.encode() + b"\n")
        self._state_path.unlink(missing_ok=True)
        return json.loads(content)

    def _settle_clock(self) -> None:
        now = time.monotonic()
        self._seconds += now - self._began
        self._began = now

    def _key(self) -> str:
        return json.dumps(self._facts["settings"], sort_keys=True)

    def _read_state(self) -> dict[str, Any] | None:
        if not self._state_path.exists():
            return None
        found = torch.load(self._state_path, map_location="cpu", weights_only=True)
        return found if found["settings"] == self._key() else None


def read(path: Path) -> dict[str, Any] | None:
    """What a finished data file holds; None where there is none.

    Raises:
        ValueError: the file is no data file.
    """
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict) or not {"figure", "settings", "numbers"} <= found.keys():
        raise ValueError(f"{path} is not the data file of a figure: it lacks figure, settings or numbers")
    return found if found.get("complete") else None


def _text(value: Any) -> str:
    """JSON; what is not finite becomes null, and floats keep six digits, more than a chart can show."""
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
