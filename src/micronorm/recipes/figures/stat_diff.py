"""Figure `fig:stat_diff`: statistical differences between channels that are normalized together, by epoch."""

import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.diagnostics.norms import stat_diff
from micronorm.nn import LN, WS
from micronorm.recipes.figures.figure import add_caption, add_title
from micronorm.recipes.figures.methods import (
    GROUPS,
    EpochRecorder,
    Specs,
    describe_training,
    mean_over_seeds,
    methods_figure,
)
from micronorm.report.plots import COLOURS, apply_style, subplots

METHODS: dict[str, Specs] = {
    "GN": (GROUPS, None),
    "GN+WS": (GROUPS, WS()),
    "LN": (LN(), None),
    "LN+WS": (LN(), WS()),
}
MOMENTUM = 0.1


class ChannelStatistics(EpochRecorder):
    """Running mean and variance of the channels that enter each norm, that is of each convolution's output.

    They start as the moments of the first batch and move by `MOMENTUM`, over batch and space, as in BatchNorm. They are
    buffers of the norms, so that checkpoints contain them and captured steps update them.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4))
        >>> recorder = ChannelStatistics(model)
        >>> _ = model(torch.randn(8, 1, 6, 6))
        >>> sorted(recorder.after_epoch()), len(recorder.after_epoch()["layers"])
        (['layers', 'mean', 'std'], 1)
    """

    def __init__(self, model: nn.Module, *others: Any) -> None:
        super().__init__(model, *others)
        self.norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
        for norm in self.norms:
            like = norm.weight.detach()
            norm.register_buffer("channel_mean", torch.zeros_like(like))
            norm.register_buffer("channel_var", torch.zeros_like(like))
            norm.register_buffer("channel_batches", like.new_zeros(()))
            norm.register_forward_pre_hook(_update)

    def after_epoch(self) -> dict[str, Any]:
        """Return StatDiff of each layer (the mean over its groups), and its mean and deviation over layers."""
        layers = [
            stat_diff(norm.get_buffer("channel_mean"), norm.get_buffer("channel_var"), norm.num_groups).mean().item()
            for norm in self.norms
        ]
        return {"mean": statistics.fmean(layers), "std": statistics.pstdev(layers), "layers": layers}


@torch.no_grad()
def _update(norm: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Move the running statistics of a norm in training."""
    if not norm.training:
        return
    batches: Tensor = norm.get_buffer("channel_batches")
    step = torch.where(batches == 0, torch.ones_like(batches), MOMENTUM)  # no `if`: a captured step must compute it
    batches.add_(1)
    var, mean = torch.var_mean(inputs[0].to(batches.dtype), (0, 2, 3), correction=0)
    norm.get_buffer("channel_mean").lerp_(mean, step)
    norm.get_buffer("channel_var").lerp_(var, step)


def draw(data: Mapping[str, Any]) -> Any:
    """Draw the mean over layers as a line in a band of one standard deviation; GN on the left, LN on the right."""
    methods = data["numbers"]["methods"]
    figure, both = subplots(1, 2, figsize=(8.6, 4.3), layout="constrained", sharey=True)
    for axes, norm in zip(both, ("GN", "LN"), strict=True):
        for name, colour in ((norm, COLOURS[1]), (f"{norm}+WS", COLOURS[0])):
            epochs, mean, std = (mean_over_seeds(methods[name], key) for key in ("epoch", "mean", "std"))
            low = [max(m - s, 0) for m, s in zip(mean, std, strict=True)]
            high = [m + s for m, s in zip(mean, std, strict=True)]
            axes.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0, zorder=2)
            axes.plot(epochs, mean, color=colour, linewidth=2, label=name, zorder=3)
            error = mean_over_seeds(methods[name], "test_error")[-1]
            axes.annotate(
                f"{name}: {mean[-1]:.2f}, error {error:.1f} %",
                (epochs[-1], mean[-1]),
                xytext=(0, 7),
                textcoords="offset points",
                ha="right",
                fontsize=8.5,
                color=colour,
                zorder=4,
            )
        add_title(axes, "group normalization" if norm == "GN" else "layer normalization")
        axes.set_xlabel("epoch")
        apply_style(axes, grid="y")
    both[0].set_ylabel("StatDiff")
    both[0].set_ylim(0, 1.04 * max(axes.dataLim.y1 for axes in both))
    chosen = data["settings"]
    count = len(methods["GN"][0][-1]["layers"])
    lines = (
        f"{describe_training(chosen)}: mean (line) and standard deviation (band) of StatDiff over {count} layers after "
        f"each epoch, averaged over {chosen['seeds']} seeds. The labels give StatDiff and test error at the end.",
        f"We chose the schedule ({chosen['training']['epochs']} epochs) and the momentum {MOMENTUM} of the running "
        "statistics.",
    )
    return add_caption(figure, "Statistical differences between channels", lines, width=132)


FIGURE = methods_figure(
    METHODS,
    ChannelStatistics,
    networks={"digits": "digits", "cifar10": "cifar-resnet110"},
    epochs={"digits": 15, "cifar10": 164},
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
        "on CIFAR-10: the schedule of the authors' code, scaled if --epochs gives another length",
    ),
    draw=draw,
)
