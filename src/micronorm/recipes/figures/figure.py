"""A figure of the paper: its settings, how its numbers are measured and drawn, and the data file of its numbers.

The data file is a JSON object: `figure`, `title`, `paper` (what the paper shows), `ours` (what we chose where the paper
is silent), `settings` (everything that decides the numbers), `seed`, `dataset`, `command`, `environment`, `date`,
`seconds`, `complete` and `numbers`. A number that is not finite is null. During a long measurement the numbers so far
are in a file beside it.
"""

import json
import math
import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from micronorm.engine import Listener
from micronorm.engine.environment import environment
from micronorm.records import write_atomically
from micronorm.report.plots import QUIET, TEXT, save_figure

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


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options for measuring a figure. None means the figure's default.

    Args:
        dataset: data set to train on: the paper's, or a smaller one.
        epochs: length of the training.
        data: folder of the data set.
        runs: folder of run directories, for figures that are drawn from them.
        device: where to compute.
    """

    dataset: str | None = None
    epochs: int | None = None
    data: Path | None = None
    runs: Path = Path("runs")
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


Measure = Callable[[Request, FigureData, Listener], None]
"""Fills `data.numbers` by `data.settings` and the request."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the paper.

    Args:
        name: the paper's label, with `fig:`.
        title: one line.
        paper: what the paper shows there, and what its text says about it.
        ours: what we chose because the paper does not say, or because the data are smaller; a sentence each.
        settings: returns everything that decides the numbers, in JSON's types.
        measure: fills the numbers of a data file; None for a drawing, which has no numbers.
        draw: returns a matplotlib figure of the content of the data file.
        datasets: data sets it can be measured on, the default first.
        from_records: whether it is drawn from recorded runs; such a figure is measured again each time.
    """

    name: str
    title: str
    paper: str
    ours: tuple[str, ...] = ()
    settings: Callable[[Request], dict[str, Any]] = lambda request: {}
    measure: Measure | None = None
    draw: Callable[[Mapping[str, Any]], Any]
    datasets: tuple[str, ...] = ()
    from_records: bool = False

    def check(self, request: Request) -> None:
        """Raise ValueError if the figure does not accept an option of the request."""
        if request.dataset is not None and request.dataset not in self.datasets:
            known = f"it has {', '.join(self.datasets)}" if self.datasets else "leave out --dataset"
            raise ValueError(f"{self.name} has no data set {request.dataset!r}; {known}")
        if request.epochs is not None and (self.from_records or not self.datasets):
            raise ValueError(f"{self.name} trains nothing; leave out --epochs")

    def stem(self, request: Request) -> str:
        """Return the name of its files: the label, the data set, and the epochs if they were given.

        Example:
            >>> from micronorm.recipes import figures
            >>> figures.find("fig:dist").stem(Request(epochs=2))
            'dist-digits-epochs-2'
        """
        dataset = request.dataset or (self.datasets[0] if self.datasets else None)
        epochs = None if request.epochs is None else f"epochs-{request.epochs}"
        return "-".join(filter(None, [self.name.removeprefix("fig:"), dataset, epochs]))

    def run(self, request: Request, path: Path, *, command: str, listener: Listener | None = None) -> dict[str, Any]:
        """Measure the numbers into the data file `path` and return its content. Continue an interrupted measurement.

        Raises:
            ValueError: the figure is a drawing, or does not accept the request.
        """
        if self.measure is None:
            raise ValueError(f"{self.name} is a drawing: there is nothing to measure")
        self.check(request)
        settings = self.settings(request)
        facts = {
            "figure": self.name,
            "title": self.title,
            "paper": self.paper,
            "ours": self.ours,
            "dataset": request.dataset or (self.datasets[0] if self.datasets else None),
            "seed": settings.get("seed"),
            "settings": settings,
            "command": command,
        }
        data = FigureData(path, facts)
        self.measure(request, data, listener or Listener())
        return data.finish()

    def save(self, data: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
        """Draw the content of the data file as SVG and PNG into `folder`, and return both files."""
        folder.mkdir(parents=True, exist_ok=True)
        return save_figure(self.draw(data), folder / stem)


def add_caption(figure: Any, title: str, lines: Sequence[str], *, width: int = 96) -> Any:
    """Add a title above and a caption below a matplotlib figure, wrapped at `width` characters; return the figure."""
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.09)
    figure.suptitle(title, fontsize=11.5, color=TEXT, x=0.02, ha="left", fontweight="bold")
    text = "\n".join("\n".join(textwrap.wrap(line[:1].upper() + line[1:], width)) for line in lines)
    figure.supxlabel(text, fontsize=8, color=QUIET, x=0.02, ha="left", linespacing=1.45)
    return figure


def add_title(axes: Any, title: str) -> None:
    """Set the title of one of several axes."""
    axes.set_title(title, loc="left", fontsize=10, color=TEXT)
