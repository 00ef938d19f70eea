"""Figure `fig:mean_div`: training with the two halves of WS, and which share of the gradient each removes."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from micronorm.diagnostics.lipschitz import TERMS, effective_gradients, weight_shares
from micronorm.nn import WS
from micronorm.nn.reparameterized import Reparameterized
from micronorm.ops.keyed import permutation
from micronorm.recipes.figures.figure import add_caption, add_title
from micronorm.recipes.figures.methods import (
    GROUPS,
    EpochRecorder,
    Specs,
    describe_training,
    mean_over_seeds,
    methods_figure,
)
from micronorm.report.plots import COLOURS, TEXT, apply_style, subplots

METHODS: dict[str, Specs] = {
    "GN": (GROUPS, None),
    "GN + center": (GROUPS, WS(center=True, scale=False)),
    "GN + scale": (GROUPS, WS(center=False, scale=True)),
    "GN + both": (GROUPS, WS()),
}
PAPER_LIMIT = 0.02
"""The paper reports that the share of (1/I)⟨Ŵ, ∇Ŵ⟩² stays below this."""


class FirstGradients(EpochRecorder):
    """Shares of ‖∇Ŵ‖² in the first step of each epoch, computed on a copy of the model."""

    def before_epoch(self, epoch: int) -> dict[str, Any]:
        """Return `shares` by part, for the samples of the epoch's first step."""
        seed = self.plan.seed
        indices = permutation(len(self.task.train), seed=seed, epoch=epoch)[: self.plan.step_batch]
        batch = next(iter(self.task.train.load([(epoch, indices)], seed=seed)))
        parameter = next(self.model.parameters())
        images, labels = batch[0].to(parameter.device, parameter.dtype), batch[1].to(parameter.device)
        model = copy.deepcopy(self.model).train()
        shares = effective_gradient_shares(model, lambda: self.task.loss(model, (images, labels)).sum)
        return {"shares": shares} if shares else {}


def effective_gradient_shares(model: nn.Module, loss: Any) -> dict[str, float]:
    """Return the shares of ‖∇Ŵ‖² by part: means over the channels of a layer, then over layers.

    Channels and layers without a gradient are left out. Without standardized weights the result is empty.

    Args:
        model: it keeps the gradients of the loss.
        loss: returns the loss to differentiate.

    Example:
        >>> from micronorm.nn import WSConv2d
        >>> model = nn.Sequential(WSConv2d(3, 8, 3), nn.GroupNorm(2, 8))
        >>> shares = effective_gradient_shares(model, lambda: model(torch.randn(4, 3, 6, 6)).square().sum())
        >>> abs(sum(shares.values()) - 1) < 1e-5
        True
    """
    standardized = {name for name, module in model.named_modules() if isinstance(module, Reparameterized)}
    if not standardized:
        return {}
    with effective_gradients(model) as gradients:
        loss().backward()
    shares = weight_shares(model, gradients)
    means = [list(found.channel_means().values()) for name, found in shares.items() if name in standardized]
    return dict(zip(TERMS, torch.tensor(means, dtype=torch.float64).nanmean(0).tolist(), strict=True))


def draw(data: Mapping[str, Any]) -> Any:
    """Draw training error, test error, and the shares: of both halves together as in the paper, and of each alone."""
    methods = data["numbers"]["methods"]
    colours = dict(zip(methods, (COLOURS[7], COLOURS[0], COLOURS[1], COLOURS[2]), strict=True))
    figure, (*errors, shares) = subplots(1, 3, figsize=(11.4, 4.5), layout="constrained")
    for axes, key, title in zip(
        errors, ("train_error", "test_error"), ("training error, %", "test error, %"), strict=True
    ):
        curves = [(name, "-", name, mean_over_seeds(seeds, key)) for name, seeds in methods.items()]
        _draw_curves(axes, title, curves, colours)
    curves = [
        (name, dashes, label, mean_over_seeds(methods[name], "shares", part))
        for name, part, dashes, label in (
            ("GN + both", "rest", "-", "both: reaches W"),
            ("GN + both", "mean", "--", "both: centering removes"),
            ("GN + both", "along", ":", "both: scaling removes"),
            ("GN + center", "mean", "--", "center only: centering removes"),
            ("GN + scale", "along", ":", "scale only: scaling removes"),
        )
    ]
    shares.axhline(PAPER_LIMIT, color=TEXT, linewidth=0.8, linestyle=(0, (1, 3)))
    _draw_curves(shares, "shares of the squared gradient", curves, colours, also=(PAPER_LIMIT, 1.0))
    shares.set_ylim(top=1.3)
    chosen = data["settings"]
    lines = (
        f"{describe_training(chosen)} with GN, averaged over {chosen['seeds']} seeds. The training error is counted "
        "on samples as they are trained on. Right: shares of the squared gradient of the effective weight in the "
        "first iteration of each epoch, averaged over channels and layers.",
        f"We chose network, data and schedule ({chosen['training']['epochs']} epochs); the paper has ResNet-50 on "
        "ImageNet, 90 epochs. Dotted black: the limit 0.02 that the paper reports for what scaling removes.",
    )
    return add_caption(figure, "The two halves of WS, and what they remove from the gradient", lines, width=182)


def _draw_curves(
    axes: Any,
    title: str,
    curves: list[tuple[str, str, str, list[float]]],
    colours: Mapping[str, str],
    *,
    also: tuple[float, ...] = (),
) -> None:
    """Draw curves of (method, dashes, label, values) on a logarithmic axis that includes the values of `also`."""
    for name, dashes, label, values in curves:
        epochs = range(1, len(values) + 1)
        axes.plot(epochs, values, color=colours[name], linestyle=dashes, linewidth=1.8, label=label)
    seen = [*also, *(value for *_, values in curves for value in values)]
    ticks = [digit * 10.0**power for power in range(-3, 3) for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if min(seen) / 1.3 <= tick <= max(seen) * 1.3]
    add_title(axes, title)
    axes.set_yscale("log")
    axes.set_yticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("epoch")
    apply_style(axes, grid="y")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


FIGURE = methods_figure(
    METHODS,
    FirstGradients,
    networks={"digits": "digits", "cifar10": "cifar-resnet20"},
    epochs={"digits": 15, "cifar10": 30},
    name="fig:mean_div",
    title="Training with GN, centering (eq:9), scaling (eq:10) and both, and their shares of the gradient",
    paper=(
        "ResNet-50 on ImageNet, 90 epochs: scaling (eq:10) improves training slightly, centering (eq:9) most. The "
        "share that scaling takes from the squared gradient stays below 0.02; what centering takes and what is left "
        "are larger. Top-1 errors of the four (tab:ind_abl): 24.81, 23.96 (center), 24.60 (scale), 23.72 (both)."
    ),
    ours=(
        "network, data and schedule: the digits table's, or ResNet-20 for 30 epochs on CIFAR-10",
        "shares are averaged over the channels of a layer, then over layers; the paper only says average",
        "shares of center only and scale only are added beside those of both",
        "scaling alone divides by the root mean square",
    ),
    draw=draw,
)
