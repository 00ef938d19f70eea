"""Figure `fig:front`: BN, GN, GN+WS and BCN+WS beside one another, from the tables' figures and recorded runs."""

from collections.abc import Mapping
from typing import Any

from micronorm.recipes.figures.figure import Figure, Request, Work
from micronorm.recipes.figures.style import COLOURS, QUIET, TEXT, caption, panel, tidy
from micronorm.recipes.registry import find
from micronorm.recipes.results import gather, packaged, read_runs

METHODS = ("BN", "GN", "GN+WS", "BCN+WS")
PANELS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ImageNet, ResNet-50": (
        "top-1 error in %, lower is better",
        ("imagenet_ws/rn50-bn", "imagenet_ws/rn50-gn", "imagenet_ws/rn50-gn-ws", "imagenet/rn50-bcn-ws"),
    ),
    "CIFAR-10, ResNet-20, 30 epochs": (
        "test error in %, lower is better",
        ("quick/rn20-bn", "quick/rn20-gn", "quick/rn20-gn-ws", "quick/rn20-bcn-ws"),
    ),
    "digits, small ResNet": (
        "test error in %, lower is better",
        ("digits/bn-64", "digits/gn", "digits/gn-ws", "digits/bcn-ws"),
    ),
}
"""Title, what is measured, and the recipes of the four methods."""

COCO = {"BN": None, "GN": 39.8, "GN+WS": 40.8, "BCN+WS": 41.4}
"""Box AP of Mask R-CNN with ResNet-50 (tab:mask). The text has no value for the frozen BN that the figure shows."""


def settings(request: Request) -> dict[str, Any]:
    """What is looked up."""
    return {"panels": {title: list(recipes) for title, (_, recipes) in PANELS.items()}}


def measure(work: Work) -> None:
    """The paper's figure and ours of every bar, with where ours come from."""
    results = [*packaged(), *read_runs(work.request.runs)[0]]
    panels = []
    for title, (unit, recipes) in PANELS.items():
        bars = []
        for method, name in zip(METHODS, recipes, strict=True):
            recipe = find(name)
            found = gather(recipe, results)
            ours = found.mean()
            bars.append(
                {
                    "method": method,
                    "recipe": name,
                    "paper": None if recipe.paper is None else recipe.paper.get("top1"),
                    "ours": None if ours is None else ours.get("top1"),
                    "seeds": found.seeds,
                    "run": [result.where for result in found.counted],
                }
            )
        panels.append({"title": title, "unit": unit, "bars": bars})
    coco = [{"method": method, "paper": value, "ours": None} for method, value in COCO.items()]
    panels.insert(1, {"title": "COCO, Mask R-CNN, ResNet-50", "unit": "box AP in %, higher is better", "bars": coco})
    work.sheet.numbers["panels"] = panels


def draw(pyplot: Any, sheet: Mapping[str, Any]) -> Any:
    """A panel per data set that has any figure: the paper's as rings, ours as dots."""
    panels = [p for p in sheet["numbers"]["panels"] if any(b["paper"] or b["ours"] for b in p["bars"])]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(1.2 + 2.9 * len(panels), 4.0), layout="constrained", squeeze=False
    )
    for axis, found in zip(axes[0], panels, strict=True):
        _draw_panel(axis, found)
    seeds = sorted({seed for p in panels for bar in p["bars"] for seed in bar.get("seeds", ())})
    ran = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds)) or 'none'}"
    lines = (
        "Rings: the paper's figures, from its tables; the text has none for the frozen BN on COCO. Dots: ours, from "
        f"recorded runs ({ran}). Not all axes begin at 0. What is missing was not measured.",
        'BCN of our runs is statistics="step", of which the paper has no figure.',
    )
    return caption(figure, "Normalization methods beside one another", lines, width=52 * len(panels))


def _draw_panel(axis: Any, found: Mapping[str, Any]) -> None:
    values = [bar[who] for bar in found["bars"] for who in ("paper", "ours") if bar[who] is not None]
    spread = max(values) - min(values) or 1.0
    floor = max(0.0, min(values) - 0.3 * spread)
    both = any(bar["paper"] is not None for bar in found["bars"]) and any(
        bar["ours"] is not None for bar in found["bars"]
    )
    for place, bar in enumerate(found["bars"]):
        for who, offset in (("paper", -0.21), ("ours", 0.21)):
            value = bar[who]
            if value is None:
                continue
            x = place + (offset if both else 0)
            # Marks, not bars: the length of a bar on an axis that does not begin at 0 would say something untrue.
            own = {"color": COLOURS[0]} if who == "ours" else {"facecolor": "white", "edgecolor": COLOURS[7]}
            axis.scatter([x], [value], s=64, zorder=3, linewidth=1.6, clip_on=False, **own)
            axis.annotate(
                f"{value:.2f}" if found["unit"] != "box AP in %, higher is better" else f"{value:.1f}",
                (x, value),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
                color=TEXT if who == "ours" else QUIET,
            )
        if bar["paper"] is None and bar["ours"] is None:
            axis.annotate("–", (place, floor), xytext=(0, 3), textcoords="offset points", ha="center", color=QUIET)
    axis.set_xticks(range(len(found["bars"])), labels=[bar["method"] for bar in found["bars"]])
    axis.set_xlim(-0.6, len(found["bars"]) - 0.4)
    axis.set_ylim(floor, max(values) + 0.2 * spread)
    axis.set_ylabel(found["unit"])
    panel(axis, found["title"])
    tidy(axis, grid="y")


FIGURE = Figure(
    name="fig:front",
    title="BN, GN, GN+WS and BCN+WS on ImageNet and COCO, and on what we have run",
    paper=(
        "On ImageNet BN and BCN+WS of large batches, GN and GN+WS of one image per GPU; on COCO a frozen BN and the "
        "micro-batch BCN. GN+WS outperforms BN and GN, and BCN+WS is better still."
    ),
    ours=("panels of CIFAR-10 and digits, from recorded runs, stand beside the paper's two",),
    settings=settings,
    measure=measure,
    draw=draw,
    from_records=True,
)
