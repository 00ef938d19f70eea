"""Measure test error against images per micro-batch on the digits, and draw the README's picture from the record.

    python benchmarks/micro_batch_digits.py            # train (about five minutes of one CPU core), record and draw
    python benchmarks/micro_batch_digits.py --draw     # draw the recorded rows again

Every method trains the network of `micronorm train digits` with that recipe's settings, 64 images per optimizer step.
BatchNorm computes its statistics over m images (`mn.BN(micro_batch=m)`, the exact batched form of training m images at
a time). GN, GN+WS and BCN+WS give the same step for every m, so each seed trains them once.

Writes results/micro_batch_digits.csv and results/micro_batch_digits.png.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from micronorm.bench.results import read_csv, write_csv
from micronorm.engine.environment import environment
from micronorm.engine.settings import Execution
from micronorm.nn import BN
from micronorm.recipes import Recipe, find
from micronorm.recipes.run import Variation, run_recipe

RESULTS = Path(__file__).parents[1] / "results" / "micro_batch_digits.csv"
COMMAND = "python benchmarks/micro_batch_digits.py"
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
SEEDS = (0, 1, 2)
INDEPENDENT = {"GN": "digits/gn", "GN+WS": "digits/gn-ws", "BCN+WS": "digits/bcn-ws"}
COLOURS = {"BCN+WS": "#1f5fa8", "GN+WS": "#2f7d4f", "GN": "#b07d12", "BN": "#c0392b"}  # flat lines from below


def recipes() -> Iterator[tuple[str, int | None, Recipe]]:
    """Yield method, images per micro-batch (None if the method does not depend on it) and recipe."""
    bn = find("digits/bn")
    for size in MICRO_BATCHES:
        settings = replace(bn.settings, unit=size, largest=None)
        yield "BN", size, replace(bn, norm=BN(micro_batch=size), settings=settings)
    for method, name in INDEPENDENT.items():
        yield method, None, find(name)


def train(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Train every recipe once per seed on one CPU thread and return one row per run."""
    torch.set_num_threads(1)
    found = environment()
    rows = []
    for seed in seeds:
        for method, size, recipe in recipes():
            execution = Execution(device=torch.device("cpu"))
            outcome = run_recipe(recipe, out=None, variation=Variation(seed=seed), execution=execution)
            row = {
                "method": method,
                "micro_batch": "" if size is None else size,
                "seed": seed,
                "test_error_percent": round(outcome.figures["top1"], 2),
                "epochs": recipe.settings.epochs,
                "step_batch": recipe.settings.step_batch,
                "cpu": found["cpu"]["model"],
                "threads": 1,
                **{name: found[name] for name in ("micronorm", "revision", "torch", "python")},
                "date": found["date"][:10],
                "command": COMMAND,
            }
            print(f"{method:7} {row['micro_batch']!s:3} seed {seed}: {row['test_error_percent']:6.2f} %", flush=True)
            rows.append(row)
    return rows


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the mean over seeds, and a band from the best to the worst seed, one labelled line per method."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.6), dpi=200)
    # A square root spreads the small errors apart and still has a zero, which some seeds reach.
    axes.set_yscale("function", functions=(np.sqrt, np.square))
    axes.set_xscale("log", base=2)
    label_height = 0.0
    for method, colour in COLOURS.items():
        means, lows, highs = np.array([_errors(rows, method, size) for size in MICRO_BATCHES]).T
        axes.plot(MICRO_BATCHES, means, color=colour, linewidth=2.2, marker="o" if method == "BN" else None)
        axes.fill_between(MICRO_BATCHES, lows, highs, color=colour, alpha=0.13, linewidth=0)
        style: dict[str, Any] = {"color": colour, "fontsize": 11, "fontweight": "bold", "va": "center"}
        if method == "BN":
            axes.annotate(f"BN {means[0]:.1f} %", (1, means[0]), (1.12, means[0]), **style)
        else:  # flat lines: labels at their end, at least a line of text apart on the scale of roots
            label_height = max(np.sqrt(means[-1]), label_height + 0.3)
            axes.annotate(f"{method} {means[-1]:.1f} %", (64, means[-1]), (72, label_height**2), **style)
    axes.set_xticks(MICRO_BATCHES, [str(size) for size in MICRO_BATCHES])
    axes.set_yticks([0, 1, 2, 5, 10, 20], ["0", "1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.set_ylim(0, 25)
    axes.set_xlabel("images per micro-batch (every optimizer step uses 64 images)")
    axes.set_ylabel("test error, %")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    epochs, seeds = rows[0]["epochs"], len({row["seed"] for row in rows})
    title = f"scikit-learn digits, small ResNet, {epochs} epochs; mean of {seeds} seeds, band from best to worst"
    axes.set_title(title, fontsize=10, loc="left")
    figure.tight_layout()
    figure.savefig(path, facecolor="white")


def _errors(rows: Sequence[dict[str, Any]], method: str, size: int) -> tuple[float, float, float]:
    """Return mean, lowest and highest test error of a method over the seeds."""
    of_method = (row for row in rows if row["method"] == method and str(row["micro_batch"]) in ("", str(size)))
    errors = [float(row["test_error_percent"]) for row in of_method]
    return sum(errors) / len(errors), min(errors), max(errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the recorded rows, train nothing")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="seeds to train with")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the CSV file; the picture is written beside it")
    options = parser.parse_args()
    if not options.draw:
        write_csv(options.out, train(options.seeds))
    draw(read_csv(options.out), options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
