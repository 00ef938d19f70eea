"""Figure `fig:imagenet`: training and validation error by epoch of GN, GN+WS and BCN+WS, from run directories."""

from collections.abc import Mapping
from typing import Any

from micronorm import records
from micronorm.recipes.figures.figure import Figure, Request, Work
from micronorm.recipes.figures.style import COLOURS, caption, panel, tidy
from micronorm.recipes.recipe import DATA
from micronorm.recipes.registry import find
from micronorm.recipes.results import gather, read_runs

ROWS: Mapping[str, Mapping[str, str]] = {
    "digits": {"GN": "digits/gn", "GN+WS": "digits/gn-ws", "BCN+WS": "digits/bcn-ws"},
    "cifar10": {"GN": "quick/rn20-gn", "GN+WS": "quick/rn20-gn-ws", "BCN+WS": "quick/rn20-bcn-ws"},
    "imagenet": {"GN": "imagenet/rn50-gn", "GN+WS": "imagenet/rn50-gn-ws", "BCN+WS": "imagenet/rn50-bcn-ws"},
}


def settings(request: Request) -> dict[str, Any]:
    """What is looked up."""
    dataset = request.dataset or "digits"
    return {"dataset": dataset, "recipes": dict(ROWS[dataset])}


def measure(work: Work) -> None:
    """Errors by epoch of the first seed that counts for each recipe, and the paper's figure at the end.

    Recipes without a run that counts are kept as `missing`, with the reason.

    ValueError where no run directory counts, with the command that makes them.
    """
    dataset, runs = work.settings["dataset"], work.request.runs
    results, _ = read_runs(runs)
    curves, missing = {}, {}
    for method, name in work.settings["recipes"].items():
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
        table = next(iter(ROWS[dataset].values())).partition("/")[0]
        short = ",".join(name.partition("/")[2] for name in ROWS[dataset].values())
        raise ValueError(
            f"{runs} holds no finished run of {', '.join(ROWS[dataset].values())}; make them with "
            f"micronorm reproduce {table} --rows {short}"
        )
    work.sheet.numbers["curves"] = curves
    work.sheet.numbers["missing"] = missing


def draw(pyplot: Any, sheet: Mapping[str, Any]) -> Any:
    """Training error on the left, test error on the right; dotted, the paper's figure where it has one."""
    curves, dataset = sheet["numbers"]["curves"], sheet["settings"]["dataset"]
    held_out = "validation" if dataset == "imagenet" else "test"
    colours = {"GN": COLOURS[1], "GN+WS": COLOURS[2], "BCN+WS": COLOURS[0]}
    figure, axes = pyplot.subplots(1, 2, figsize=(8.8, 4.2), layout="constrained")
    for axis, part in zip(axes, ("train", "test"), strict=True):
        for method, found in curves.items():
            points = [(e, v) for e, v in zip(found["epoch"], found[part], strict=True) if v is not None]
            last = f", at the end {points[-1][1]:.2f}" if points else ""
            x, y = zip(*points, strict=True) if points else ((), ())
            axis.plot(x, y, color=colours[method], linewidth=1.9, label=f"{method}{last}")
            if part == "test" and found["paper"] is not None:
                axis.axhline(found["paper"], color=colours[method], linewidth=1, linestyle=":", label="the paper's")
        panel(axis, {"train": "training error, %", "test": f"{held_out} error, %"}[part])
        axis.set_xlabel("epoch")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=8.5)
        tidy(axis, grid="y")
    first = next(iter(curves.values()))
    missing = sheet["numbers"].get("missing", {})
    lines = (
        f"Recipes {', '.join(found['recipe'] for found in curves.values())} on {DATA[dataset].title}, "
        f"seed {first['seed']}, {first['device'] or 'unknown device'}.",
        "The paper's figure is ResNet-50 on ImageNet."
        + ("" if dataset == "imagenet" else " There is no figure of the paper for this one."),
        *(f"Missing: {name} ({why})." for name, why in missing.items()),
    )
    return caption(figure, "Training dynamics", lines, width=120)


FIGURE = Figure(
    name="fig:imagenet",
    title="Training and validation error by epoch of GN, GN+WS and BCN+WS",
    paper=(
        "ResNet-50 on ImageNet: BCN+WS trains faster than GN and GN+WS and ends lower. Top-1 errors at the end "
        "(tab:imagenet): 24.81 (GN), 23.72 (GN+WS), 23.09 (BCN+WS)."
    ),
    ours=('on digits and CIFAR-10 our tables `digits` and `quick`, where BCN is statistics="step"',),
    settings=settings,
    measure=measure,
    draw=draw,
    options=("dataset",),
    datasets=("digits", "cifar10", "imagenet"),
    from_records=True,
)
