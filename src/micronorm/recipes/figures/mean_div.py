"""Figure `fig:mean_div`: training with the two halves of WS, and what each takes from the gradient."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from micronorm.diagnostics.lipschitz import gradient_shares
from micronorm.nn import WS
from micronorm.nn.per_step.shared_weights import SharedWeights
from micronorm.recipes.figures import sweep
from micronorm.recipes.figures.figure import Figure, Work
from micronorm.recipes.figures.style import COLOURS, TEXT, caption, panel, tidy
from micronorm.recipes.figures.sweep import average, subject

METHODS: Mapping[str, sweep.Method] = {
    "GN": (sweep.GROUPS, None),
    "GN + center": (sweep.GROUPS, WS(center=True, scale=False)),
    "GN + scale": (sweep.GROUPS, WS(center=False, scale=True)),
    "GN + both": (sweep.GROUPS, WS()),
}
NETWORKS = {"digits": "digits", "cifar10": "cifar-resnet20"}
EPOCHS = {"digits": 15, "cifar10": 30}
PARTS = ("along", "mean", "rest", "residual")
PAPER_LIMIT = 0.02
"""Below which the paper's share of (1/I)⟨Ŵ, ∇Ŵ⟩² stays."""


class FirstGradients:
    """The shares of ‖∇Ŵ‖² in the first iteration of each epoch: means over the channels of a layer, then over layers.

    Channels without a gradient have no shares, and are left out as layers of such channels are.

    Example:
        >>> import torch
        >>> from micronorm.nn import WSConv2d
        >>> model = nn.Sequential(WSConv2d(3, 8, 3), nn.GroupNorm(2, 8))
        >>> eye = FirstGradients(model)
        >>> with eye.first():
        ...     model(torch.randn(4, 3, 6, 6)).square().sum().backward()
        >>> abs(sum(eye.row()["shares"].values()) - 1) < 1e-5
        True
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = SharedWeights(model)
        self._row: dict[str, Any] = {}

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around one forward and backward: the effective weights become leaves, whose gradients are read."""
        if not self._weights.layers:
            yield
            return
        found: list[list[float]] = []
        with self._weights.shared():
            yield
            for layer in self._weights.layers:
                if layer.shared_weight.grad is None:
                    continue
                options = {"center": layer.center, "scale": layer.scale, "eps": layer.eps}
                shares = gradient_shares(layer.weight.detach(), layer.shared_weight.grad, **options)
                means = shares.channel_means()
                found.append([means[part] for part in PARTS])
        if not found:
            raise RuntimeError("no layer with a standardized weight got a gradient; its shares cannot be told")
        averages = torch.tensor(found, dtype=torch.float64).nanmean(0).tolist()
        self._row = {"shares": dict(zip(PARTS, averages, strict=True))}

    def row(self) -> dict[str, Any]:
        """`shares`, by part; nothing for a network of plain weights."""
        return self._row

    def state(self) -> dict[str, Any]:
        """Nothing lasts from epoch to epoch."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


def measure(work: Work) -> None:
    """Train by the four methods."""
    sweep.sweep(work, METHODS, FirstGradients, epochs=EPOCHS)


def draw(pyplot: Any, sheet: Mapping[str, Any]) -> Any:
    """Training error, test error, and the shares on a logarithmic axis: of both halves as in the paper, and of each."""
    methods = sheet["numbers"]["methods"]
    colours = dict(zip(methods, (COLOURS[7], COLOURS[0], COLOURS[1], COLOURS[2]), strict=True))
    figure, axes = pyplot.subplots(1, 3, figsize=(11.4, 4.5), layout="constrained")
    for axis, key, title in (
        (axes[0], "train_error", "training error, %"),
        (axes[1], "test_error", "test error, %"),
    ):
        curves = {name: average(lists, key) for name, lists in methods.items()}
        for name, values in curves.items():
            axis.plot(range(1, len(values) + 1), values, color=colours[name], label=name, linewidth=1.8)
        panel(axis, title)
        axis.set_yscale("log")
        _plain_ticks(axis, [value for values in curves.values() for value in values])
        axis.set_xlabel("epoch")
        tidy(axis, grid="y")
        axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    _draw_shares(axes[2], methods, colours)
    chosen = sheet["settings"]
    lines = (
        f"{subject(chosen)} with GN, means of {chosen['seeds']} seeds. Training error is "
        "counted on samples as they are trained on. Right: shares of the squared gradient of the effective weight in "
        "the first iteration of each epoch, means over channels and layers.",
        f"Ours: network, data and schedule ({chosen['training']['epochs']} epochs); the paper has ResNet-50 on "
        "ImageNet, 90 epochs. Dotted black: the limit 0.02 that the paper reports for what scaling takes.",
    )
    return caption(figure, "The two halves of WS, and what they take from the gradient", lines, width=182)


def _draw_shares(axis: Any, methods: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    lines = (
        ("GN + both", "rest", "-", "both: reaches W"),
        ("GN + both", "mean", "--", "both: centering takes"),
        ("GN + both", "along", ":", "both: scaling takes"),
        ("GN + center", "mean", "--", "center only: centering takes"),
        ("GN + scale", "along", ":", "scale only: scaling takes"),
    )
    seen = [PAPER_LIMIT, 1.0]
    for name, part, dashes, label in lines:
        values = average(methods[name], "shares", part)
        seen += values
        axis.plot(range(1, len(values) + 1), values, color=colours[name], linestyle=dashes, linewidth=1.8, label=label)
    axis.axhline(PAPER_LIMIT, color=TEXT, linewidth=0.8, linestyle=(0, (1, 3)))
    panel(axis, "shares of the squared gradient")
    axis.set_yscale("log")
    axis.set_ylim(top=1.3)
    _plain_ticks(axis, seen)
    axis.set_xlabel("epoch")
    tidy(axis, grid="y")
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


def _plain_ticks(axis: Any, values: list[float]) -> None:
    ticks = [
        t
        for t in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
        if min(values) / 1.3 <= t <= max(values) * 1.3
    ]
    axis.set_yticks(ticks, labels=[f"{t:g}" for t in ticks])
    axis.minorticks_off()


FIGURE = Figure(
    name="fig:mean_div",
    title="Training with GN, centering (eq:9), scaling (eq:10) and both, and their shares of the gradient",
    paper=(
        "ResNet-50 on ImageNet, 90 epochs: scaling (eq:10) improves training slightly, centering (eq:9) most. The "
        "share that scaling takes from the squared gradient stays below 0.02; what centering takes and what is left "
        "are larger. Top-1 errors of the four (tab:ind_abl): 24.81, 23.96 (center), 24.60 (scale), 23.72 (both)."
    ),
    ours=(
        "network, data and schedule: the digits table's, or ResNet-20 for 30 epochs on CIFAR-10",
        "shares are averaged over the channels of a layer, then over layers; the paper says average and no more",
        "shares of center only and scale only are added beside those of both",
        "scaling alone divides by the root mean square",
    ),
    settings=partial(sweep.settings, methods=METHODS, networks=NETWORKS, epochs=EPOCHS),
    measure=measure,
    draw=draw,
    options=("dataset", "network", "epochs", "seed"),
    datasets=("digits", "cifar10"),
)
