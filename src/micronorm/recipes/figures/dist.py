"""Figure `fig:dist`: accuracy against the distance to BN, over a grid of (σ_μ, σ_σ)."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch

from micronorm.engine.optimization import SGD, Cosine
from micronorm.engine.settings import Settings, describe
from micronorm.recipes.figures.figure import Figure, Request, Work
from micronorm.recipes.figures.preset import LAYERS, WIDTH, PresetNetwork, StackedNetworks
from micronorm.recipes.figures.style import COLOURS, QUIET, TEXT, caption, tidy
from micronorm.recipes.figures.training import Training
from micronorm.recipes.recipe import DATA
from micronorm.tasks.classification import Classification, open_classification

SIGMA_MEAN = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
SIGMA_STD = (0.0, 0.3, 0.6, 0.9, 1.2, 1.5, 1.8)
FAILED = 70.0
"""Accuracy in % below which the paper draws a cross."""
EPOCHS = {"digits": 10, "cifar10": 30}
STEP_BATCH = {"digits": 64, "cifar10": 128}
SEEDS = 3
ON_CPU = 2
"""Networks in one stack on a CPU, whose caches hold no more (docs/figures.md); a GPU takes the whole grid."""


def settings(request: Request) -> dict[str, Any]:
    """All that decides the numbers."""
    dataset = request.dataset or "digits"
    return {
        "dataset": dataset,
        "sigma_mean": list(SIGMA_MEAN),
        "sigma_std": list(SIGMA_STD),
        "seed": request.seed or 0,
        "seeds": SEEDS,
        "layers": LAYERS,
        "width": WIDTH,
        "enlarged": 2 if dataset == "digits" else 1,
        "training": describe(plan(request, seed=request.seed or 0)),
    }


def plan(request: Request, *, seed: int) -> Settings:
    """How each network is trained."""
    dataset = request.dataset or "digits"
    return Settings(
        epochs=request.epochs or EPOCHS[dataset],
        step_batch=STEP_BATCH[dataset],
        optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=1e-4),
        schedule=Cosine(),
        seed=seed,
    )


def make(sigma_mean: float, sigma_std: float, *, seed: int, inputs: int, classes: int) -> PresetNetwork:
    """The network of one cell. Cells with one seed differ in the two spreads alone: draws and first weights are equal.

    Example:
        >>> network = make(1.0, 0.0, seed=0, inputs=1, classes=10)
        >>> bool((network.norms[0].preset_std == 1).all())
        True
    """
    generator = torch.Generator().manual_seed(seed)
    z_mean, z_std = torch.randn(2, LAYERS, WIDTH, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        return PresetNetwork(sigma_mean * z_mean, (sigma_std * z_std).exp(), inputs=inputs, classes=classes)


def measure(work: Work) -> None:
    """Accuracy of every cell and seed: stacks of networks, one after the other, each kept when it is done."""
    request, chosen = work.request, work.settings
    dataset = chosen["dataset"]
    task = open_classification(dataset, request.data, device=request.device)
    cells = [(m, s) for m in chosen["sigma_mean"] for s in chosen["sigma_std"]]
    together = len(cells) if request.device.type == "cuda" else ON_CPU
    stacks = [
        (seed, cells[start : start + together])
        for seed in range(chosen["seed"], chosen["seed"] + chosen["seeds"])
        for start in range(0, len(cells), together)
    ]
    rows = work.sheet.numbers.setdefault("cells", [])
    ends = list(accumulate(len(stack) for _, stack in stacks))
    while rows and len(rows) not in ends:  # kept where the stacks were others
        rows.pop()
    for number, ((seed, stack), end) in enumerate(zip(stacks, ends, strict=True)):
        if end <= len(rows):
            continue
        training = _train(
            work, task, stack, seed=seed, title=f"{work.sheet.path.stem}, stack {number + 1}/{len(stacks)}"
        )
        errors = training.test().error
        for (mean, std), error in zip(stack, errors, strict=True):
            rows.append({"sigma_mean": mean, "sigma_std": std, "seed": seed, "accuracy": 100 - error})
        work.sheet.keep({})
    work.listener.on_end()
    work.sheet.numbers["together"] = together


def _train(work: Work, task: Classification, stack: list[tuple[float, float]], *, seed: int, title: str) -> Training:
    facts = DATA[work.settings["dataset"]]
    networks = [make(m, s, seed=seed, inputs=facts.shape[0], classes=facts.classes) for m, s in stack]
    model = Enlarged(StackedNetworks(networks), work.settings["enlarged"])
    training = Training(
        model,
        task,
        plan(work.request, seed=seed),
        device=work.request.device,
        listener=work.listener,
        description=title,
    )
    training.start()
    while training.epoch < training.settings.epochs:
        training.run_epoch()
    return training


class Enlarged(torch.nn.Module):
    """A model of images whose pixels are repeated: 8×8 digits have no four halvings in them, 16×16 ones do."""

    def __init__(self, model: torch.nn.Module, times: int) -> None:
        super().__init__()
        self.model = model
        self.times = times

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """What the model makes of the larger images."""
        for axis in (2, 3):
            images = images.repeat_interleave(self.times, axis) if self.times > 1 else images
        return self.model(images)


# --- drawing ----------------------------------------------------------------------------------------------------------


def means(numbers: Mapping[str, Any]) -> dict[tuple[float, float], float]:
    """Accuracy of each cell, the mean over seeds.

    Example:
        >>> cell = {"sigma_mean": 0.0, "sigma_std": 1.0}
        >>> means({"cells": [{**cell, "accuracy": 80.0}, {**cell, "accuracy": 90.0}]})
        {(0.0, 1.0): 85.0}
    """
    found: dict[tuple[float, float], list[float]] = {}
    for cell in numbers["cells"]:
        found.setdefault((cell["sigma_mean"], cell["sigma_std"]), []).append(cell["accuracy"])
    return {at: sum(values) / len(values) for at, values in found.items()}


def draw(pyplot: Any, sheet: Mapping[str, Any]) -> Any:
    """Circles as large as the accuracy above 70 %, red crosses below."""
    accuracy = means(sheet["numbers"])
    columns, rows = (sorted({at[axis] for at in accuracy}) for axis in (0, 1))
    figure, axis = pyplot.subplots(figsize=(6.4, 5.9), layout="constrained")
    for (mean, std), value in accuracy.items():
        x, y = columns.index(mean), rows.index(std)
        if value < FAILED:
            axis.scatter([x], [y], s=130, marker="x", color=COLOURS[1], linewidths=2.2, zorder=3)
        else:
            axis.scatter([x], [y], s=_area(value), color=COLOURS[0], alpha=0.8, linewidths=0, zorder=3)
        axis.annotate(
            f"{value:.0f}",
            (x, y),
            xytext=(0, -17),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=7.5,
            color=QUIET,
        )
    axis.set_xticks(range(len(columns)), labels=[f"{v:g}" for v in columns])
    axis.set_yticks(range(len(rows)), labels=[f"{v:g}" for v in rows])
    axis.set_xlim(-0.6, len(columns) - 0.4)
    axis.set_ylim(-0.75, len(rows) - 0.4)
    axis.set_xlabel("$\\sigma_\\mu$, spread of the channels' means")
    axis.set_ylabel("$\\sigma_\\sigma$, spread of the logarithms of their deviations")
    tidy(axis)
    for value in (100, 90, 80, 70):
        axis.scatter([], [], s=_area(value), color=COLOURS[0], alpha=0.8, linewidths=0, label=f"{value} %")
    axis.scatter([], [], s=90, marker="x", color=COLOURS[1], linewidths=2.2, label="below 70 %")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, 1.1), ncols=5, frameon=False, fontsize=8.5, labelcolor=TEXT)
    chosen = sheet["settings"]
    lines = (
        f"Test accuracy in % of a 4-layer, 32-channel network on {DATA[chosen['dataset']].title}, mean of "
        f"{chosen['seeds']} seeds.",
        f"BN is the lower left corner. Grid and schedule ({chosen['training']['epochs']} epochs) are ours.",
    )
    return caption(figure, "Accuracy and distance to BN", lines)


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
        "8×8 digits are enlarged to 16×16 by repeating pixels: four halvings need it",
    ),
    settings=settings,
    measure=measure,
    draw=draw,
    options=("dataset", "epochs", "seed"),
    datasets=("digits", "cifar10"),
)
