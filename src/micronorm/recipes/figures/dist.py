"""Figure `fig:dist`: accuracy against the distance to BN, over a grid of (σ_μ, σ_σ)."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from micronorm.engine import SGD, Cosine, Diverged, Settings, train
from micronorm.engine.settings import describe
from micronorm.recipes.figures.figure import Figure, Measurement, Request, add_caption
from micronorm.recipes.figures.methods import execution
from micronorm.recipes.figures.preset import LAYERS, WIDTH, PresetNetwork, StackedNetworks
from micronorm.recipes.recipe import DATA
from micronorm.report.plots import COLOURS, QUIET, TEXT, apply_style, subplots
from micronorm.tasks.classification import Classification, ClassificationLoss, open_classification
from micronorm.tasks.scores import SumScore

SIGMA_MEAN = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
SIGMA_STD = (0.0, 0.3, 0.6, 0.9, 1.2, 1.5, 1.8)
FAILED = 70.0
"""Accuracy in % below which the paper draws a cross."""
EPOCHS = {"digits": 10, "cifar10": 30}
STEP_BATCH = {"digits": 64, "cifar10": 128}
SEEDS = 3
ON_CPU = 2
"""Networks in one stack on a CPU; more do not fit into its caches (docs/figures.md). A GPU takes the whole grid."""


def settings(request: Request) -> dict[str, Any]:
    """Return everything that decides the numbers."""
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
        "training": describe(training_settings(request, seed=request.seed or 0)),
    }


def training_settings(request: Request, *, seed: int) -> Settings:
    """Return how each network is trained."""
    dataset = request.dataset or "digits"
    return Settings(
        epochs=request.epochs or EPOCHS[dataset],
        step_batch=STEP_BATCH[dataset],
        optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=1e-4),
        schedule=Cosine(),
        seed=seed,
    )


def build(sigma_mean: float, sigma_std: float, *, seed: int, inputs: int, classes: int) -> PresetNetwork:
    """Return the network of one cell. Cells with one seed share the normal draws and the initial weights.

    Example:
        >>> network = build(1.0, 0.0, seed=0, inputs=1, classes=10)
        >>> bool((network.norms[0].preset_std == 1).all())
        True
    """
    generator = torch.Generator().manual_seed(seed)
    z_mean, z_std = torch.randn(2, LAYERS, WIDTH, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        return PresetNetwork(sigma_mean * z_mean, (sigma_std * z_std).exp(), inputs=inputs, classes=classes)


class StackedClassification(Classification):
    """Classification by K networks in one model, which gives N×K×classes logits. Losses are summed over networks."""

    def loss(self, model: nn.Module, batch: tuple[Any, ...]) -> ClassificationLoss:
        """Return the cross entropy summed over networks and samples."""
        images, labels = batch
        logits_nkc = model(images)
        labels_nk = labels[:, None].expand(logits_nkc.shape[:2])
        entropy = F.cross_entropy(logits_nkc.flatten(0, 1), labels_nk.flatten(), reduction="sum")
        return ClassificationLoss(entropy, len(labels), {})

    def score(self, model: nn.Module, batch: tuple[Any, ...]) -> SumScore:
        """Return the number of samples and of each network's wrong answers; logits that are not finite are wrong."""
        images, labels = batch
        logits_nkc = model(images)
        wrong_nk = (logits_nkc.argmax(-1) != labels[:, None]) | ~logits_nkc.isfinite().all(-1)
        counts = {f"wrong{k}": count for k, count in enumerate(wrong_nk.sum(0))}
        return SumScore(self.figures, {"count": torch.full((), len(labels), device=logits_nkc.device), **counts})

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss in training, and in evaluation the accuracy in % of network k under "accuracyk"."""
        if "loss" in sums:
            return {"loss": sums["loss"] / sums["count"]}
        wrong = [sums[f"wrong{k}"] for k in range(len(sums) - 1)]
        return {f"accuracy{k}": 100 - 100 * count / sums["count"] for k, count in enumerate(wrong)}


def measure(measurement: Measurement) -> None:
    """Train every cell with every seed, in stacks of networks, and record the accuracies after each stack."""
    request, chosen, data = measurement.request, measurement.settings, measurement.data
    found = open_classification(chosen["dataset"], request.data, device=request.device)
    task = StackedClassification(found.train, found.test, classes=found.classes)
    cells = [(m, s) for m in chosen["sigma_mean"] for s in chosen["sigma_std"]]
    together = len(cells) if request.device.type == "cuda" else ON_CPU
    stacks = [
        (seed, cells[start : start + together])
        for seed in range(chosen["seed"], chosen["seed"] + chosen["seeds"])
        for start in range(0, len(cells), together)
    ]
    rows = data.numbers.setdefault("cells", [])
    ends = list(accumulate(len(stack) for _, stack in stacks))
    while rows and len(rows) not in ends:  # recorded with stacks of another size
        rows.pop()
    for (seed, stack), end in zip(stacks, ends, strict=True):
        if end <= len(rows):
            continue
        accuracies = _train(measurement, task, stack, seed=seed)
        for (mean, std), accuracy in zip(stack, accuracies, strict=True):
            rows.append({"sigma_mean": mean, "sigma_std": std, "seed": seed, "accuracy": accuracy})
        data.save_progress()
    data.numbers["together"] = together


def _train(
    measurement: Measurement, task: StackedClassification, stack: list[tuple[float, float]], *, seed: int
) -> list[float]:
    """Train the networks of some cells together and return their accuracies in %.

    If a network diverges, the stack is trained again in halves, until that network is alone. Its accuracy is 0.
    """
    facts, request = DATA[measurement.settings["dataset"]], measurement.request
    networks = [build(m, s, seed=seed, inputs=facts.shape[0], classes=facts.classes) for m, s in stack]
    # Four poolings by two need 16×16 pixels, and the digits have 8×8.
    enlarge = nn.Upsample(scale_factor=measurement.settings["enlarged"], mode="nearest")
    plan = training_settings(request, seed=seed)
    plan = replace(plan, unit=plan.step_batch)  # the statistics are those of the whole step
    where = replace(execution(request.device, plan.step_batch), evaluate_epochs=plan.epochs)
    model = nn.Sequential(enlarge, StackedNetworks(networks))
    first, last = stack[0], stack[-1]
    name = {"recipe": f"{measurement.data.path.stem}, seed {seed}, cells {first} to {last}"}
    try:
        outcome = train(model, task, plan, where, facts=name, listener=measurement.listener)
    except Diverged:
        if len(stack) == 1:
            return [0.0]
        half = len(stack) // 2
        return [a for part in (stack[:half], stack[half:]) for a in _train(measurement, task, part, seed=seed)]
    if not outcome.finished:
        raise KeyboardInterrupt
    return [outcome.figures[f"accuracy{k}"] for k in range(len(stack))]


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
    options=("dataset", "epochs", "seed"),
    datasets=("digits", "cifar10"),
)
