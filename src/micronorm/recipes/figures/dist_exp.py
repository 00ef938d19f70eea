"""Figure `fig:dist_exp`: histograms of two channels of one group before and after normalization."""

from collections.abc import Mapping
from typing import Any

import torch

from micronorm.diagnostics.norms import stat_diff
from micronorm.recipes.figures.figure import Figure, FigureData, Listener, Request, add_caption, add_title
from micronorm.report.plots import COLOURS, TEXT, apply_style, subplots

EXAMPLES = (((-0.25, 1.0), (0.25, 1.0)), ((-1.0, 1.0), (1.0, 0.5)), ((-3.0, 1.0), (3.0, 0.4)))
"""Mean and standard deviation of the two channels in each example."""
VALUES = 20_000
BINS = 60


def settings(request: Request) -> dict[str, Any]:
    """Return everything that decides the numbers."""
    return {"seed": 0, "examples": EXAMPLES, "values": VALUES, "bins": BINS}


def measure(request: Request, data: FigureData, listener: Listener) -> None:
    """Record histograms of the channels before and after eq:cn, StatDiff, and the share of values a ReLU keeps."""
    generator = torch.Generator().manual_seed(data.settings["seed"])
    found = []
    for example in data.settings["examples"]:
        mean, std = torch.tensor(example, dtype=torch.float64).T
        x = mean[:, None] + std[:, None] * torch.randn(2, VALUES, generator=generator, dtype=torch.float64)
        var, mean = torch.var_mean(x, 1, correction=0)
        y = (x - x.mean()) / x.std(correction=0)
        found.append(
            {
                "stat_diff": stat_diff(mean, var, 1).item(),
                "active": (y > 0).double().mean(1).tolist(),
                "before": _histogram(x),
                "after": _histogram(y),
            }
        )
    data.numbers["examples"] = found


def _histogram(values: torch.Tensor) -> dict[str, Any]:
    """Return the share of each channel's values in bins of equal width; one bin edge lies at 0."""
    width = (values.max() - values.min()).item() / (BINS - 1)
    first = torch.floor(values.min() / width).item() * width
    counts = [torch.histc(channel, BINS, first, first + BINS * width) / VALUES for channel in values]
    return {"first": first, "width": width, "shares": [channel.tolist() for channel in counts]}


def draw(data: Mapping[str, Any]) -> Any:
    """Draw a row per example: before, and after with the values that a ReLU sets to 0 transparent."""
    examples = data["numbers"]["examples"]
    figure, axes = subplots(len(examples), 2, figsize=(8.4, 6.6), layout="constrained", squeeze=False)
    for row, example in zip(axes, examples, strict=True):
        for axis, part in zip(row, ("before", "after"), strict=True):
            found = example[part]
            edges = [found["first"] + k * found["width"] for k in range(BINS + 1)]
            for channel, shares in enumerate(found["shares"]):
                for kept in (True, False):
                    shown = [s if _is_kept(e, found, part) == kept else 0 for s, e in zip(shares, edges, strict=False)]
                    axis.stairs(
                        shown,
                        edges,
                        fill=True,
                        color=COLOURS[channel],
                        alpha=0.75 if kept else 0.18,
                        linewidth=0,
                        zorder=2,
                        label=f"channel {channel + 1}" if kept else None,
                    )
            axis.set_ylim(0, 1.08 * max(max(shares) for shares in found["shares"]))
            if part == "after":
                axis.axvline(0, color=TEXT, linewidth=0.9, zorder=3)
                active = ", ".join(f"{100 * share:.0f} %" for share in example["active"])
                add_title(axis, f"after; above 0: {active}")
            else:
                add_title(axis, f"before, StatDiff = {example['stat_diff']:.2f}")
            axis.set_yticks([])
            apply_style(axis, grid="x")
    axes[0, 0].legend(frameon=False, fontsize=8.5)
    lines = (
        "Two channels that are normalized together (eq:cn). Transparent bars are 0 after the ReLU. We chose the means "
        "and deviations: the paper's text does not give them.",
    )
    return add_caption(figure, "Two channels in one group", lines, width=118)


def _is_kept(edge: float, found: Mapping[str, Any], part: str) -> bool:
    return part == "before" or edge > -found["width"] / 2


FIGURE = Figure(
    name="fig:dist_exp",
    title="Three examples of two channels before and after they are normalized together",
    paper=(
        "Three examples of two channels with different means and variances; bars that are 0 after the ReLU are "
        'transparent. "Large differences will inevitably lead to underrepresented channels."'
    ),
    ours=("means and deviations of the channels, drawn from normal distributions", "the number of values"),
    settings=settings,
    measure=measure,
    draw=draw,
)
