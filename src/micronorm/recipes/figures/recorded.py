"""Figures of recorded runs: `fig:front`, methods side by side, and `fig:imagenet`, errors by epoch."""

from collections.abc import Mapping
from typing import Any

from micronorm import records
from micronorm.recipes import find
from micronorm.recipes.figures.figure import Figure, FigureData, Listener, Request, add_caption, add_title
from micronorm.recipes.recipe import DATA
from micronorm.recipes.results import gather, packaged, read_runs
from micronorm.report.plots import COLOURS, METHOD_COLOURS, QUIET, TEXT, apply_style, subplots

# --- fig:front --------------------------------------------------------------------------------------------------------

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
"""Title, unit, and the recipes of the four methods."""

AP = "box AP in %, higher is better"
COCO = {"BN": None, "GN": 39.8, "GN+WS": 40.8, "BCN+WS": 41.4}
"""Box AP of Mask R-CNN with ResNet-50 (tab:mask). The text has no value for the frozen BN that the figure shows."""


def _front_settings(request: Request) -> dict[str, Any]:
    return {"panels": {title: list(recipes) for title, (_, recipes) in PANELS.items()}}


def _measure_front(request: Request, data: FigureData, listener: Listener) -> None:
    """Record the paper's figure and ours for every method, and which runs ours come from."""
    results = [*packaged(), *read_runs(request.runs)[0]]
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
    panels.insert(1, {"title": "COCO, Mask R-CNN, ResNet-50", "unit": AP, "bars": coco})
    data.numbers["panels"] = panels


def _draw_front(data: Mapping[str, Any]) -> Any:
    """Draw axes for each data set with a figure: the paper's figures as rings, ours as dots."""
    panels = [p for p in data["numbers"]["panels"] if any(b["paper"] or b["ours"] for b in p["bars"])]
    size = (1.2 + 2.9 * len(panels), 4.0)
    figure, grid = subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axes, panel in zip(grid[0], panels, strict=True):
        _draw_panel(axes, panel)
    seeds = sorted({seed for p in panels for bar in p["bars"] for seed in bar.get("seeds", ())})
    ran = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds)) or 'none'}"
    lines = (
        "Rings: the paper's figures, from its tables; the text has none for the frozen BN on COCO. Dots: ours, from "
        f"recorded runs ({ran}). Not all axes begin at 0. A missing mark was not measured.",
        'BCN in our runs is statistics="step", for which the paper has no figure.',
    )
    return add_caption(figure, "Normalization methods side by side", lines, width=52 * len(panels))


def _draw_panel(axes: Any, panel: Mapping[str, Any]) -> None:
    """Draw marks, not bars: the length of a bar means nothing if the axis does not begin at 0."""
    bars, digits = panel["bars"], 1 if panel["unit"] == AP else 2
    ring, dot = {"facecolor": "white", "edgecolor": COLOURS[7]}, {"color": COLOURS[0]}
    for who, shift, style, colour in (("paper", -0.15, ring, QUIET), ("ours", 0.15, dot, TEXT)):
        marks = [(place + shift, bar[who]) for place, bar in enumerate(bars) if bar[who] is not None]
        for x, value in marks:
            axes.scatter([x], [value], s=64, zorder=3, linewidth=1.6, clip_on=False, **style)
            label = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center", "fontsize": 8.5, "color": colour}
            axes.annotate(f"{value:.{digits}f}", (x, value), **label)
    axes.set_xticks(range(len(bars)), labels=[bar["method"] for bar in bars])
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.margins(y=0.25)
    axes.set_ylabel(panel["unit"])
    add_title(axes, panel["title"])
    apply_style(axes, grid="y")


FRONT = Figure(
    name="fig:front",
    title="BN, GN, GN+WS and BCN+WS on ImageNet and COCO, and on the data that we have run",
    paper=(
        "On ImageNet BN and BCN+WS of large batches, GN and GN+WS of one image per GPU; on COCO a frozen BN and the "
        "micro-batch BCN. GN+WS outperforms BN and GN, and BCN+WS is better still."
    ),
    ours=("CIFAR-10 and digits, from recorded runs, are added to the paper's two data sets",),
    settings=_front_settings,
    measure=_measure_front,
    draw=_draw_front,
    from_records=True,
)


# --- fig:imagenet -----------------------------------------------------------------------------------------------------

ROWS: Mapping[str, Mapping[str, str]] = {
    "digits": {"GN": "digits/gn", "GN+WS": "digits/gn-ws", "BCN+WS": "digits/bcn-ws"},
    "cifar10": {"GN": "quick/rn20-gn", "GN+WS": "quick/rn20-gn-ws", "BCN+WS": "quick/rn20-bcn-ws"},
    "imagenet": {"GN": "imagenet/rn50-gn", "GN+WS": "imagenet/rn50-gn-ws", "BCN+WS": "imagenet/rn50-bcn-ws"},
}


def _imagenet_settings(request: Request) -> dict[str, Any]:
    dataset = request.dataset or "digits"
    return {"dataset": dataset, "recipes": dict(ROWS[dataset])}


def _measure_imagenet(request: Request, data: FigureData, listener: Listener) -> None:
    """Record the errors by epoch of one run for each recipe, and the paper's figure at the end.

    A recipe without a run that counts is recorded under `missing`, with the reason.

    Raises:
        ValueError: no run counts; the message gives the command that makes them.
    """
    results, _ = read_runs(request.runs)
    curves, missing = {}, {}
    for method, name in data.settings["recipes"].items():
        recipe = find(name)
        found = gather(recipe, results)
        counted = found.counted
        if not counted:
            missing[name] = "; ".join(dict.fromkeys(why for _, why in found.rejected)) or "no finished run"
            continue
        rows = records.read(counted[0].where).epochs
        curves[method] = {
            "recipe": name,
            "run": counted[0].where,
            "seed": counted[0].seed,
            "device": counted[0].device,
            "paper": None if recipe.paper is None else recipe.paper["top1"],
            "epoch": [row["epoch"] + 1 for row in rows],
            "train": [(row.get("train") or {}).get("top1") for row in rows],
            "test": [(row.get("test") or {}).get("top1") for row in rows],
        }
    if not curves:
        names = list(data.settings["recipes"].values())
        table, short = names[0].partition("/")[0], ",".join(name.partition("/")[2] for name in names)
        raise ValueError(
            f"{request.runs} holds no finished run of {', '.join(names)}; make them with "
            f"micronorm reproduce {table} --rows {short}"
        )
    data.numbers |= {"curves": curves, "missing": missing}


def _draw_imagenet(data: Mapping[str, Any]) -> Any:
    """Draw training error on the left and test error on the right, with the paper's figure as a dotted line."""
    curves, dataset = data["numbers"]["curves"], data["settings"]["dataset"]
    held_out = "validation" if dataset == "imagenet" else "test"
    figure, both = subplots(1, 2, figsize=(8.8, 4.2), layout="constrained")
    for axes, part in zip(both, ("train", "test"), strict=True):
        for method, found in curves.items():
            colour = METHOD_COLOURS[method]
            points = [(e, v) for e, v in zip(found["epoch"], found[part], strict=True) if v is not None]
            last = f", at the end {points[-1][1]:.2f}" if points else ""
            x, y = zip(*points, strict=True) if points else ((), ())
            axes.plot(x, y, color=colour, linewidth=1.9, label=f"{method}{last}")
            if part == "test" and found["paper"] is not None:
                axes.axhline(found["paper"], color=colour, linewidth=1, linestyle=":", label="the paper's")
        add_title(axes, {"train": "training error, %", "test": f"{held_out} error, %"}[part])
        axes.set_xlabel("epoch")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8.5)
        apply_style(axes, grid="y")
    first = next(iter(curves.values()))
    missing = data["numbers"].get("missing", {})
    lines = (
        f"Recipes {', '.join(found['recipe'] for found in curves.values())} on {DATA[dataset].title}, "
        f"seed {first['seed']}, {first['device'] or 'unknown device'}.",
        "The paper's figure is ResNet-50 on ImageNet."
        + ("" if dataset == "imagenet" else " It has no figure for this data set."),
        *(f"Missing: {name} ({why})." for name, why in missing.items()),
    )
    return add_caption(figure, "Errors during training", lines, width=120)


IMAGENET = Figure(
    name="fig:imagenet",
    title="Training and validation error by epoch of GN, GN+WS and BCN+WS",
    paper=(
        "ResNet-50 on ImageNet: BCN+WS trains faster than GN and GN+WS and ends lower. Top-1 errors at the end "
        "(tab:imagenet): 24.81 (GN), 23.72 (GN+WS), 23.09 (BCN+WS)."
    ),
    ours=('on digits and CIFAR-10 our tables `digits` and `quick`, where BCN is statistics="step"',),
    settings=_imagenet_settings,
    measure=_measure_imagenet,
    draw=_draw_imagenet,
    datasets=("digits", "cifar10", "imagenet"),
    from_records=True,
)
