"""Figure `fig:dist`: accuracy against the distance to BN, over a grid of (σ_μ, σ_σ).

The paper describes four convolutions of 32 channels, each normalized to preset means and deviations, followed by ReLU
and mean pooling by two, then the mean over space and a linear classifier. We chose kernels of 3×3 without bias, torch's
default initial weights, and BatchNorm's running statistics (momentum 0.1) for evaluation.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.engine import Diverged
from micronorm.engine.settings import describe
from micronorm.recipes.figures.figure import Figure, FigureData, Listener, Request, add_caption
from micronorm.recipes.figures.methods import train_network, training_settings
from micronorm.recipes.recipe import DATA
from micronorm.report.plots import COLOURS, QUIET, TEXT, apply_style, subplots
from micronorm.tasks.classification import open_classification

SIGMA_MEAN = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
SIGMA_STD = (0.0, 0.3, 0.6, 0.9, 1.2, 1.5, 1.8)
FAILED = 70.0
"""Accuracy in % below which the paper draws a cross."""
EPOCHS = {"digits": 10, "cifar10": 30}
SEEDS = 3
LAYERS = 4
WIDTH = 32


class PresetNorm(nn.BatchNorm2d):
    """Y = γ(σ̂ (X − μ)/σ + μ̂) + β for each channel, with fixed μ̂ and σ̂. BatchNorm has μ̂ = 0 and σ̂ = 1.

    Args:
        mean: μ̂, C numbers.
        std: σ̂, C numbers.

    Example:
        >>> y = PresetNorm(torch.tensor([3.0]), torch.tensor([0.5]))(torch.randn(64, 1, 8, 8))
        >>> round(y.mean().item(), 3), round(y.std().item(), 3)
        (3.0, 0.5)
    """

    preset_mean: Tensor
    preset_std: Tensor

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__(len(mean))
        self.register_buffer("preset_mean", mean)
        self.register_buffer("preset_std", std)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize N×C×H×W."""
        # γ(σ̂ x̂ + μ̂) + β = (γσ̂) x̂ + (γμ̂ + β): batch normalization with this affine
        weight, bias = self.weight * self.preset_std, self.weight * self.preset_mean + self.bias
        mean, var = self.running_mean, self.running_var
        return F.batch_norm(input, mean, var, weight, bias, training=self.training, momentum=0.1, eps=self.eps)


def settings(request: Request) -> dict[str, Any]:
    """Return everything that decides the numbers."""
    dataset = request.dataset or "digits"
    return {
        "dataset": dataset,
        "sigma_mean": list(SIGMA_MEAN),
        "sigma_std": list(SIGMA_STD),
        "seed": 0,
        "seeds": SEEDS,
        "layers": LAYERS,
        "width": WIDTH,
        "enlarged": 2 if dataset == "digits" else 1,
        "training": describe(training_settings(request, epochs=EPOCHS, cosine=True)),
    }


def build(
    sigma_mean: float, sigma_std: float, *, seed: int, inputs: int, classes: int, enlarged: int = 1
) -> nn.Sequential:
    """Return the network of one cell. Cells with one seed share the normal draws and the initial weights.

    Args:
        sigma_mean: spread of the channels' means.
        sigma_std: spread of the logarithms of their deviations.
        seed: seed of draws and weights.
        inputs: channels of the images.
        classes: outputs.
        enlarged: how often each pixel is repeated: four poolings by two need 16×16 pixels, and the digits have 8×8.

    Example:
        >>> build(1.0, 0.5, seed=0, inputs=3, classes=10)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    z_mean, z_std = torch.randn(2, LAYERS, WIDTH, generator=torch.Generator().manual_seed(seed))
    layers: list[nn.Module] = [nn.Upsample(scale_factor=enlarged, mode="nearest")] if enlarged > 1 else []
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        for mean, std in zip(sigma_mean * z_mean, (sigma_std * z_std).exp(), strict=True):
            layers += [nn.Conv2d(inputs, WIDTH, 3, padding=1, bias=False), PresetNorm(mean, std)]
            layers += [nn.ReLU(inplace=True), nn.AvgPool2d(2)]
            inputs = WIDTH
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, classes))


def measure(request: Request, data: FigureData, listener: Listener) -> None:
    """Train a network for every cell and seed, one after the other, and record its accuracy: 0 % if it diverges."""
    chosen = data.settings
    facts, task = DATA[chosen["dataset"]], open_classification(chosen["dataset"], request.data, device=request.device)
    shape = {"inputs": facts.shape[0], "classes": facts.classes, "enlarged": chosen["enlarged"]}
    cells = list(product(range(chosen["seeds"]), chosen["sigma_mean"], chosen["sigma_std"]))
    rows = data.numbers.setdefault("cells", [])
    for seed, mean, std in cells[len(rows) :]:
        plan = training_settings(request, epochs=EPOCHS, seed=seed, cosine=True)
        plan = replace(plan, unit=plan.step_batch)  # the statistics are those of the whole step
        name = f"{data.path.stem}, σ_μ {mean:g}, σ_σ {std:g}, seed {seed}"
        model = build(mean, std, seed=seed, **shape)
        accuracy = 0.0
        with contextlib.suppress(Diverged):
            outcome = train_network(name, model, task, plan, request, listener, evaluate_epochs=plan.epochs)
            accuracy = 100 - outcome.figures["top1"]
        rows.append({"sigma_mean": mean, "sigma_std": std, "seed": seed, "accuracy": accuracy})
        data.save_progress()


# --- drawing ----------------------------------------------------------------------------------------------------------


def mean_accuracies(numbers: Mapping[str, Any]) -> dict[tuple[float, float], float]:
    """Return the accuracy of each cell, averaged over seeds.

    Example:
        >>> cell = {"sigma_mean": 0.0, "sigma_std": 1.0}
        >>> mean_accuracies({"cells": [{**cell, "accuracy": 80.0}, {**cell, "accuracy": 90.0}]})
        {(0.0, 1.0): 85.0}
    """
    found: dict[tuple[float, float], list[float]] = {}
    for cell in numbers["cells"]:
        found.setdefault((cell["sigma_mean"], cell["sigma_std"]), []).append(cell["accuracy"])
    return {cell: sum(values) / len(values) for cell, values in found.items()}


def draw(data: Mapping[str, Any]) -> Any:
    """Draw circles whose size shows the accuracy above 70 %, and crosses below."""
    accuracies = mean_accuracies(data["numbers"])
    columns, rows = (sorted({cell[axis] for cell in accuracies}) for axis in (0, 1))
    figure, axes = subplots(figsize=(6.4, 5.9), layout="constrained")
    circle = {"color": COLOURS[0], "alpha": 0.8, "linewidths": 0}
    cross = {"marker": "x", "color": COLOURS[1], "linewidths": 2.2}
    for (mean, std), value in accuracies.items():
        x, y = columns.index(mean), rows.index(std)
        style = {"s": 130, **cross} if value < FAILED else {"s": _area(value), **circle}
        axes.scatter([x], [y], zorder=3, **style)
        axes.text(x, y - 0.29, f"{value:.0f}", ha="center", va="top", fontsize=7.5, color=QUIET)
    axes.set_xticks(range(len(columns)), labels=[f"{v:g}" for v in columns])
    axes.set_yticks(range(len(rows)), labels=[f"{v:g}" for v in rows])
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.set_ylim(-0.75, len(rows) - 0.4)
    axes.set_xlabel("$\\sigma_\\mu$, spread of the channels' means")
    axes.set_ylabel("$\\sigma_\\sigma$, spread of the logarithms of their deviations")
    apply_style(axes)
    for value in (100, 90, 80, 70):
        axes.scatter([], [], s=_area(value), label=f"{value} %", **circle)
    axes.scatter([], [], s=90, label="below 70 %", **cross)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.1), ncols=5, frameon=False, fontsize=8.5, labelcolor=TEXT)
    chosen = data["settings"]
    lines = (
        f"Test accuracy in % of a 4-layer, 32-channel network on {DATA[chosen['dataset']].title}, averaged over "
        f"{chosen['seeds']} seeds.",
        f"BN is the lower left corner. We chose the grid and the schedule ({chosen['training']['epochs']} epochs).",
    )
    return add_caption(figure, "Accuracy and distance to BN", lines, width=104)


def _area(accuracy: float) -> float:
    return 14 + 330 * ((max(accuracy, FAILED) - FAILED) / (100 - FAILED)) ** 1.5


FIGURE = Figure(
    name="fig:dist",
    title="Accuracy of a 4-layer network whose channels are normalized to preset means and deviations",
    paper=(
        "CIFAR-10, 4 convolutions of 32 channels, each followed by mean pooling by 2. The closer to the origin (BN), "
        "the higher the accuracy; it falls as σ_μ or σ_σ grows, and extreme cases fail (below 70 %). The text gives "
        "neither the grid nor the accuracies."
    ),
    ours=(
        "the grid of σ_μ and σ_σ, the seeds and the schedule",
        "3×3 kernels without bias, ReLU after the norm and before the pooling, BatchNorm's running statistics at test",
        "cells of one seed share the standard normal draws that σ_μ and σ_σ scale, and the first weights",
        "σ̂ = exp(σ_σ z) is taken as a deviation, as the equation uses it; the text calls it a variance",
        "8×8 digits are enlarged to 16×16 by repeating pixels, because four poolings by two need it",
    ),
    settings=settings,
    measure=measure,
    draw=draw,
    datasets=("digits", "cifar10"),
)
