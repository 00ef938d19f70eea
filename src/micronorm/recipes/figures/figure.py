"""A figure of the paper as a recipe: what decides its numbers, how they are measured, and how they are drawn."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from micronorm.engine.listener import Listener
from micronorm.recipes.figures.sheet import Sheet

OPTIONS = ("dataset", "network", "epochs", "seed")
"""What a request may change of a figure's settings, where the figure has it."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for. None leaves the figure's own choice.

    Args:
        dataset: what to train on; the paper's, or a smaller one.
        network: what to train, by its name in `recipes.networks`.
        epochs: how long.
        seed: of weights, order and augmentation.
        data: where the data set lies.
        runs: the folder of run directories, for figures that are drawn from them.
        device: where to compute.
    """

    dataset: str | None = None
    network: str | None = None
    epochs: int | None = None
    seed: int | None = None
    data: Path | None = None
    runs: Path = Path("runs")
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class Work:
    """A measurement at work: what to measure, with what, and where the numbers go."""

    settings: Mapping[str, Any]
    request: Request
    sheet: Sheet
    listener: Listener = field(default_factory=Listener)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the paper.

    Args:
        name: the paper's label, with `fig:`.
        title: one line.
        paper: what the paper shows there, and what its text reports of it.
        ours: what was chosen here because the paper does not say, or cannot be done at a small size; a sentence each.
        settings: from a request to all that decides the numbers, in JSON's types.
        measure: fills `work.sheet.numbers`; None for a drawing, which has none.
        draw: from matplotlib's pyplot and the content of the data file to a matplotlib figure.
        options: those of `OPTIONS` that the figure has.
        datasets: what it can be measured on, the default first.
        from_records: whether it is drawn from what was recorded, and so looked up anew each time.
    """

    name: str
    title: str
    paper: str
    ours: tuple[str, ...] = ()
    settings: Callable[[Request], dict[str, Any]] = lambda request: {}
    measure: Callable[[Work], None] | None = None
    draw: Callable[[Any, Mapping[str, Any]], Any]
    options: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    from_records: bool = False

    def check(self, request: Request) -> None:
        """Refuse what the figure does not have. ValueError, with what it has."""
        for name in OPTIONS:
            if getattr(request, name) is not None and name not in self.options:
                has = f"it has --{', --'.join(self.options)}" if self.options else "it has no options"
                raise ValueError(f"{self.name} has no --{name}; {has}")
        if request.dataset is not None and request.dataset not in self.datasets:
            raise ValueError(f"{self.name} has no data set {request.dataset!r}; it has {', '.join(self.datasets)}")

    def stem(self, request: Request) -> str:
        """The name of its files: the label, the data set, and every option that was asked for.

        Example:
            >>> from micronorm.recipes import figures
            >>> figures.find("fig:dist").stem(Request(epochs=2))
            'dist-digits-epochs-2'
        """
        dataset = request.dataset or (self.datasets[0] if self.datasets else None)
        changed = [f"{name}-{value}" for name in OPTIONS[1:] if (value := getattr(request, name)) is not None]
        return "-".join(filter(None, [self.name.removeprefix("fig:"), dataset, *changed]))

    def run(self, request: Request, path: Path, *, command: str, listener: Listener | None = None) -> dict[str, Any]:
        """Measure, into the data file `path`; returns its content. An interrupted measurement is gone on with.

        ValueError for a drawing, and for a request that `check` refuses.
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
        sheet = Sheet(path, facts)
        self.measure(Work(settings=settings, request=request, sheet=sheet, listener=listener or Listener()))
        return sheet.finish()
