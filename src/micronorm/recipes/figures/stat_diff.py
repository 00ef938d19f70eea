"""Figure `fig:stat_diff`: the statistical differences of channels that are normalized together, by epoch."""

import statistics
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.diagnostics.channels import stat_diff
from micronorm.nn import LN, WS
from micronorm.recipes.figures import sweep
from micronorm.recipes.figures.figure import Figure, Work
from micronorm.recipes.figures.style import COLOURS, caption, panel, tidy

METHODS: Mapping[str, sweep.Method] = {
    "GN": (sweep.GROUPS, None),
    "GN+WS": (sweep.GROUPS, WS()),
    "LN": (LN(), None),
    "LN+WS": (LN(), WS()),
}
NETWORKS = {"digits": "digits", "cifar10": "cifar-resnet110"}
EPOCHS = {"digits": 15, "cifar10": 164}
MOMENTUM = 0.1


class ChannelStatistics:
    """Running means and variances of the channels that enter each norm, which is what its convolution gives.

    They start as the first batch's moments and move by `MOMENTUM`, over the batch and space, as BatchNorm's do.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4))
        >>> eye = ChannelStatistics(model)
        >>> _ = model(torch.randn(8, 1, 6, 6))
        >>> sorted(eye.row()), len(eye.row()["layers"])
        (['layers', 'mean', 'std'], 1)
    """

    def __init__(self, model: nn.Module) -> None:
        self.groups: dict[str, int] = {}
        self._running: dict[str, tuple[Tensor, Tensor]] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.GroupNorm):
                self.groups[name] = module.num_groups
                module.register_forward_pre_hook(partial(self._see, name))

    def _see(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not module.training:
            return
        var, mean = torch.var_mean(inputs[0].detach(), (0, 2, 3), correction=0)
        if name in self._running:
            old_mean, old_var = (old.to(mean.device) for old in self._running[name])  # resumed ones lie on the CPU
            mean, var = torch.lerp(old_mean, mean, MOMENTUM), torch.lerp(old_var, var, MOMENTUM)
        self._running[name] = mean, var

    def first(self) -> AbstractContextManager[None]:
        """Nothing: every iteration is seen."""
        return nullcontext()

    def row(self) -> dict[str, Any]:
        """StatDiff of each layer (the mean over its groups), and mean and deviation over layers."""
        layers = [stat_diff(*self._running[name], groups).mean().item() for name, groups in self.groups.items()]
        return {"mean": statistics.fmean(layers), "std": statistics.pstdev(layers), "layers": layers}

    def state(self) -> dict[str, Any]:
        """The running statistics."""
        return {name: list(pair) for name, pair in self._running.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._running = {name: (mean, var) for name, (mean, var) in state.items()}


def measure(work: Work) -> None:
    """Train by the four methods."""
    sweep.sweep(work, METHODS, ChannelStatistics, epochs=EPOCHS)


def draw(pyplot: Any, sheet: Mapping[str, Any]) -> Any:
    """Mean over layers as a line, a band of one deviation around it; GN on the left, LN on the right."""
    methods = sheet["numbers"]["methods"]
    figure, axes = pyplot.subplots(1, 2, figsize=(8.6, 4.3), layout="constrained", sharey=True)
    for axis, norm in zip(axes, ("GN", "LN"), strict=True):
        for name, colour in ((norm, COLOURS[1]), (f"{norm}+WS", COLOURS[0])):
            epochs, mean, std = (sweep.average(methods[name], key) for key in ("epoch", "mean", "std"))
            low = [max(m - s, 0) for m, s in zip(mean, std, strict=True)]
            high = [m + s for m, s in zip(mean, std, strict=True)]
            axis.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0, zorder=2)
            axis.plot(epochs, mean, color=colour, linewidth=2, label=name, zorder=3)
            error = sweep.average(methods[name], "test_error")[-1]
            axis.annotate(
                f"{name}: {mean[-1]:.2f}, error {error:.1f} %",
                (epochs[-1], mean[-1]),
                xytext=(0, 7),
                textcoords="offset points",
                ha="right",
                fontsize=8.5,
                color=colour,
                zorder=4,
            )
        panel(axis, "group normalization" if norm == "GN" else "layer normalization")
        axis.set_xlabel("epoch")
        tidy(axis, grid="y")
    axes[0].set_ylabel("StatDiff")
    axes[0].set_ylim(0, 1.04 * max(axis.dataLim.y1 for axis in axes))
    chosen = sheet["settings"]
    count = len(methods["GN"][0][-1]["layers"])
    lines = (
        f"{sweep.subject(chosen)}: mean (line) and standard deviation (band) of StatDiff over "
        f"{count} layers after each epoch, means of {chosen['seeds']} seeds. At the ends: StatDiff and test error.",
        f"Schedule ({chosen['training']['epochs']} epochs) and momentum {MOMENTUM} of the running statistics are ours.",
    )
    return caption(figure, "Statistical differences between channels", lines, width=132)


FIGURE = Figure(
    name="fig:stat_diff",
    title="Statistical differences between channels that are normalized together: GN, GN+WS, LN, LN+WS",
    paper=(
        "ResNet-110 on CIFAR-10: mean and standard deviation over layers of StatDiff (eq:sd) after every epoch. It "
        '"provides explanations why GN performs better than LN", which has one group only, and "WS makes StatDiff much '
        'closer to 0". The text gives no values.'
    ),
    ours=(
        "running statistics start from the first batch and move by 0.1 as BatchNorm's do",
        "a layer's value is the mean over its groups; mean and deviation are over layers",
        "on digits: a residual network of 9 convolutions, and the schedule of our table `digits`",
        "on CIFAR-10: the schedule of the authors' code, scaled where --epochs asks for another length",
    ),
    settings=partial(sweep.settings, methods=METHODS, networks=NETWORKS, epochs=EPOCHS),
    measure=measure,
    draw=draw,
    options=("dataset", "network", "epochs", "seed"),
    datasets=("digits", "cifar10"),
)
