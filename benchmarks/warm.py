"""Convert a trained BatchNorm network to BCN + WS on digits: abruptly, abruptly with new statistics, and warm.

A BatchNorm network is trained with 32 images per forward, converted in each way, and fine-tuned with one image per
micro-batch. BCN computes the same step if the 32 images of a step go through one forward; for BatchNorm the exact
batched form is `mn.BN(micro_batch=1)`. The learning rate of each method is chosen on validation images.

    python benchmarks/warm.py --out benchmarks/results/warm_conversion.csv
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import micronorm as mn
from micronorm.bench.results import provenance, write_csv
from micronorm.data.digits import Labelled, read_digits
from micronorm.recipes.networks import build_network
from micronorm.report.plots import COLOURS, apply_style, save_figure, subplots

TRAIN_IMAGES = 1000  # of the 1,297; the others validate
PRETRAIN_EPOCHS = 6
SAMPLES_PER_STEP = 32
STEPS = 64
WARM_STEPS = 32  # half of the fine-tuning; not tuned
EVERY = 8  # steps between two evaluations
PRETRAIN_RATE = 0.05
LEARNING_RATES = (0.005, 0.02, 0.05)


def calibrated(model: nn.Module, train: Labelled) -> nn.Module:
    """Convert abruptly, then set the statistics by all training images."""
    model = mn.convert(model)
    mn.calibrate(model, [train.images])
    return model


METHODS: dict[str, Callable[[nn.Module, Labelled], nn.Module]] = {
    "BN kept": lambda model, train: mn.convert(model, mn.BN(micro_batch=1), None),
    "abrupt": lambda model, train: mn.convert(model),
    "abrupt + calibrate": calibrated,
    "warm": lambda model, train: mn.convert(model, warm_steps=WARM_STEPS),
}


@torch.no_grad()
def error(model: nn.Module, part: Labelled) -> float:
    """Return the share of wrong answers in %."""
    model.eval()
    wrong = (model(part.images).argmax(1) != part.labels).double().mean().item()
    model.train()
    return 100 * wrong


def make_optimizer(model: nn.Module, *, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Labelled) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch.images), batch.labels, reduction="sum").backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= len(batch.labels)
    optimizer.step()


def step_indices(samples: int, *, epochs: int, seed: int) -> Tensor:
    """Return the samples of each step, steps×SAMPLES_PER_STEP: a new order in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(samples, generator=generator) for _ in range(epochs)])
    steps = samples * epochs // SAMPLES_PER_STEP
    return order[: steps * SAMPLES_PER_STEP].view(steps, SAMPLES_PER_STEP)


def build(seed: int) -> nn.Module:
    """Return the network of the digits with BatchNorm and torch's default initial weights."""
    model = build_network("digits", classes=10)
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.reset_parameters()
    return model


def pretrained(train: Labelled, *, seed: int) -> nn.Module:
    """Train a network with BatchNorm and 32 images per forward."""
    model = build(seed)
    optimizer = make_optimizer(model, lr=PRETRAIN_RATE)
    indices = step_indices(len(train.labels), epochs=PRETRAIN_EPOCHS, seed=seed)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(indices))
    for chosen in indices:
        take_step(model, optimizer, Labelled(*(p[chosen] for p in train)))
        schedule.step()
    return model


def blend_of(model: nn.Module) -> float | None:
    blends = [m.blend.item() for m in model.modules() if isinstance(m, mn.nn.BatchChannelNorm)]
    return statistics.mean(blends) if blends else None


def fine_tune(
    model: nn.Module, train: Labelled, validation: Labelled, test: Labelled, *, lr: float, seed: int
) -> list[dict[str, Any]]:
    """Return the errors before the first step and after every few steps, at a constant learning rate."""
    optimizer = make_optimizer(model, lr=lr)
    rows = []
    indices = step_indices(len(train.labels), epochs=4, seed=100 + seed)[:STEPS]
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            rows.append(
                {
                    "step": step,
                    "blend": blend_of(model),
                    "validation_error": round(error(model, validation), 3),
                    "test_error": round(error(model, test), 3),
                }
            )
        if step < STEPS:
            take_step(model, optimizer, Labelled(*(p[indices[step]] for p in train)))
    return rows


def measure(seeds: int) -> list[dict[str, Any]]:
    digits = read_digits()
    order = torch.randperm(len(digits.train.labels), generator=torch.Generator().manual_seed(0))
    train, validation = (
        Labelled(*(p[chosen] for p in digits.train)) for chosen in (order[:TRAIN_IMAGES], order[TRAIN_IMAGES:])
    )
    rows = []
    for seed in range(seeds):
        original = pretrained(train, seed=seed)
        original.eval()
        with torch.no_grad():
            expected = original(digits.test.images)
        before = {"bn_validation_error": error(original, validation), "bn_test_error": error(original, digits.test)}
        for name, convert in METHODS.items():
            start = convert(copy.deepcopy(original), train)
            start.eval()
            with torch.no_grad():
                distance = (start(digits.test.images) - expected).abs().max() / expected.abs().max()
            start.train()
            for lr in LEARNING_RATES:
                tuned = fine_tune(copy.deepcopy(start), train, validation, digits.test, lr=lr, seed=seed)
                same = {"method": name, "lr": lr, "seed": seed}
                rest = {"output_distance_at_0": float(f"{distance:.3g}"), **{k: round(v, 3) for k, v in before.items()}}
                rows += [same | row | rest for row in tuned]
    return rows


def mean_error(rows: Sequence[dict[str, Any]], what: str, **where: Any) -> float:
    values = [row[what] for row in rows if all(row[k] == v for k, v in where.items())]
    assert values
    return statistics.mean(values)


def chosen_rates(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return for each method the learning rate with the lowest mean validation error in the last four evaluations."""
    late = [row for row in rows if row["step"] > STEPS - 4 * EVERY]
    return {
        name: min(LEARNING_RATES, key=lambda lr, name=name: mean_error(late, "validation_error", method=name, lr=lr))
        for name in METHODS
    }


def table(rows: Sequence[dict[str, Any]], rates: dict[str, float]) -> str:
    shown = [step for step in (0, 8, 16, 32, 48, 64) if step <= STEPS]
    lines = [f"{'method':<20}{'lr':>7}  outputs at 0" + "".join(f"{f'step {s}':>9}" for s in shown) + "   mean"]
    for name, lr in rates.items():
        distance = max(row["output_distance_at_0"] for row in rows if row["method"] == name)
        errors = "".join(f"{mean_error(rows, 'test_error', method=name, lr=lr, step=s):>9.2f}" for s in shown)
        mean = mean_error(rows, "test_error", method=name, lr=lr)
        lines.append(f"{name:<20}{lr:>7}  {distance:>12.1e}{errors}{mean:>7.2f}")
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], rates: dict[str, float], path: Path) -> None:
    """Draw the test error over steps: mean and range over seeds."""
    figure, axes = subplots(figsize=(7, 4), layout="constrained")
    apply_style(axes, grid="y")
    steps = range(0, STEPS + 1, EVERY)
    for colour, (name, lr) in zip(COLOURS, rates.items(), strict=False):
        at = [[r["test_error"] for r in rows if (r["method"], r["lr"], r["step"]) == (name, lr, s)] for s in steps]
        means = [statistics.mean(errors) for errors in at]
        axes.plot(steps, means, color=colour, marker="o", markersize=3, label=f"{name}, lr {lr:g}")
        axes.fill_between(steps, list(map(min, at)), list(map(max, at)), color=colour, alpha=0.12, linewidth=0)
    before = statistics.mean({row["seed"]: row["bn_test_error"] for row in rows}.values())
    axes.axvline(WARM_STEPS, color="grey", linewidth=0.5)
    axes.text(WARM_STEPS, 0.02, " warm-up ends", transform=axes.get_xaxis_transform(), fontsize=8, color="grey")
    axes.axhline(before, color="grey", linestyle=":", label="the BN network before")
    axes.set(xlabel="optimizer step", ylabel="test error %", yscale="log", title="Fine-tuning after conversion, digits")
    ticks = [t for t in (1, 2, 5, 10, 20, 50, 100) if t < 2 * max(row["test_error"] for row in rows)]
    axes.set_yticks(ticks, labels=[str(t) for t in ticks])
    axes.legend(fontsize=8, frameon=False)
    save_figure(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the rows there as CSV, and a plot beside them")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    start = time.perf_counter()
    rows = measure(args.seeds)
    rates = chosen_rates(rows)
    print(f"test error %, mean over {args.seeds} seeds; {time.perf_counter() - start:.0f} s\n{table(rows, rates)}")
    if args.out is None:
        return
    facts = provenance(torch.device("cpu"), f"python benchmarks/warm.py --seeds {args.seeds}", packages=())
    chosen = [row | {"chosen": int(rates[row["method"]] == row["lr"])} | facts for row in rows]
    write_csv(args.out, chosen)
    plot(rows, rates, args.out.with_suffix(""))


if __name__ == "__main__":
    main()
