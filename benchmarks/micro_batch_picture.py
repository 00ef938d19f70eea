"""Draw the README's picture: test error against images per micro-batch, from the records of table `micro_batch`.

    micronorm reproduce micro_batch --seed 0 --dtype bfloat16 --channels-last --cuda-graph --evaluate-every 30
    python benchmarks/record.py runs/micro_batch/*/*      # adds finished runs to the records
    python benchmarks/micro_batch_picture.py              # draws results/micro_batch_cifar10.png

GN, GN+WS and BCN+WS give the same step for every micro-batch, so each seed trains them once: they are flat lines.
"""

from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt

from micronorm.recipes import find
from micronorm.recipes.cifar import SIZES
from micronorm.recipes.results import gather, packaged
from micronorm.report.plots import LIGHT, METHOD_COLOURS

PICTURE = Path(__file__).parents[1] / "results" / "micro_batch_cifar10.png"
FLAT = {"BCN+WS": "bcn-ws", "GN+WS": "gn-ws", "GN": "gn"}
BY_SIZE = {"BN": "bn", "BRN": "brn"}
COLOURS = {**METHOD_COLOURS, "BRN": LIGHT["c3"]}


def recorded_errors() -> dict[str, dict[int, list[float]]]:
    """Return the test errors of all recorded seeds, by method and images per micro-batch."""
    results = packaged()

    def of(row: str) -> list[float]:
        return [result.figures["top1"] for result in gather(find(f"micro_batch/{row}"), results).counted]

    errors = {method: dict.fromkeys(SIZES, found) for method, row in FLAT.items() if (found := of(row))}
    for method, row in BY_SIZE.items():
        errors[method] = {size: found for size in SIZES if (found := of(f"{row}-{size}"))}
    return {method: by_size for method, by_size in errors.items() if {SIZES[0], SIZES[-1]} <= by_size.keys()}


def draw(errors: Mapping[str, Mapping[int, list[float]]], path: Path) -> None:
    """Draw the mean over seeds, and a band from the best to the worst seed, one labelled line per method."""
    figure, axes = plt.subplots(figsize=(8, 3.8), dpi=200)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    label_height = 0.0
    means_of = {method: [sum(e) / len(e) for e in by_size.values()] for method, by_size in errors.items()}
    for method in sorted(errors, key=lambda name: means_of[name][-1]):  # labels stand above one another, from below
        means, colour, sizes = means_of[method], COLOURS[method], list(errors[method])
        lows, highs = ([pick(e) for e in errors[method].values()] for pick in (min, max))
        axes.plot(sizes, means, color=colour, linewidth=2.2, marker="o" if method in BY_SIZE else None)
        axes.fill_between(sizes, lows, highs, color=colour, alpha=0.13, linewidth=0)
        label_height = max(means[-1], 1.14 * label_height)
        end = f"{method} {means[0]:.1f} → {means[-1]:.1f} %" if method in BY_SIZE else f"{method} {means[-1]:.1f} %"
        text = {"color": colour, "fontsize": 11, "fontweight": "bold", "va": "center"}
        axes.annotate(end, (SIZES[-1], means[-1]), (1.12 * SIZES[-1], label_height), **text)
    axes.set_xticks(SIZES, [str(size) for size in SIZES])
    axes.set_ylim(bottom=9.5)
    ticks = [tick for tick in (10, 15, 20, 30, 50, 90) if tick < 1.2 * max(max(means) for means in means_of.values())]
    axes.set_yticks(ticks, [f"{tick} %" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("images per micro-batch (every optimizer step uses 128 images)")
    axes.set_ylabel("test error")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    counts = {len(e) for by_size in errors.values() for e in by_size.values()}
    seeds = str(counts.pop()) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    shown = "one seed" if seeds == "1" else f"mean of {seeds} seeds, band from best to worst"
    epochs = find("micro_batch/bcn-ws").settings.epochs
    axes.set_title(f"CIFAR-10, ResNet-20, {epochs} epochs; {shown}", fontsize=10, loc="left")
    figure.tight_layout()
    figure.savefig(path, facecolor="white")


if __name__ == "__main__":
    found = recorded_errors()
    if not found:
        raise SystemExit(
            "no row of table micro_batch is recorded for every micro-batch size; train and record it first"
        )
    draw(found, PICTURE)
