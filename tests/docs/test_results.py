"""The figures in the README, docs/results.md and docs/speed.md are those of the records."""

import csv
import importlib
import json
import statistics
from pathlib import Path

from micronorm import recipes
from micronorm.recipes.cifar import SIZES
from micronorm.recipes.results import Findings, RunResult, gather, packaged

ROOT = Path(__file__).parents[2]
RESULTS, SPEED = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("results", "speed"))
README = (ROOT / "README.md").read_text()
PLAIN, SHARED = "BCN+WS", "BCN+WS shared"
WORKLOADS = {
    "ResNet-50, 64×224²": ("resnet50", "64"),
    "ResNet-50, 2×800×1344": ("resnet50", "2"),
    "ResNet-50, 1×224²": ("resnet50", "1"),
    "ResNet-110, 128×32²": ("cifar-resnet110", "128"),
}


def rows_of(path: str) -> list[dict[str, str]]:
    with (ROOT / path).open(newline="") as file:
        return list(csv.DictReader(file))


def steps() -> dict[str, dict[tuple[str, str], tuple[float, float]]]:
    """Return milliseconds and relative peak memory of a step, by workload, then method and route."""
    recorded = [row for row in rows_of("benchmarks/results/steps_gpu.csv") if row["what"] == "step"]
    return {
        workload: {
            (row["method"], row["route"]): (float(row["ms"]), float(row["peak_to_bn"]))
            for row in recorded
            if (row["network"], row["samples"]) == (network, samples)
        }
        for workload, (network, samples) in WORKLOADS.items()
    }


def test_the_table_of_recorded_rows_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    record = importlib.import_module("record")
    rows = record.PAGE.read_text()
    assert record.page() == rows, "run `python benchmarks/record.py`"
    assert "| `cifar1/c10-micro-gn-ws` | 6.82 | 7.01 | 0 | +0.19 | 11 | 5 days |" in rows


def test_a_row_with_several_seeds_has_mean_spread_difference_and_the_cost_of_single_images(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    record = importlib.import_module("record")
    entries = [{"minutes": 10.0, "gpu": "NVIDIA H200"}, {"minutes": 12.0, "gpu": "NVIDIA H200"}]
    (tmp_path / "recorded.json").write_text(json.dumps(entries))
    monkeypatch.setattr(record, "TARGET", tmp_path / "recorded.json")
    made = {"recipe": "", "settings": {}, "data": {}}
    counted = tuple(
        RunResult(seed=seed, figures={"top1": error}, where=f"recorded.json#{seed}", **made)
        for seed, error in enumerate((6.0, 7.0))
    )
    recipe = recipes.find("cifar1/c10-micro-bcn-ws")  # 164 epochs of 50,000 images
    line = record._line(Findings(recipe, counted, ()), 2 * 86_400 / 8.2e6)
    assert line[1:] == ["6.31", "6.50 ± 0.71", "0, 1", "+0.19", "11", "2 days"]


def test_the_table_of_the_plain_loop_is_the_record():
    for workload, found in steps().items():
        (bn, _), (ours, memory), (shared, _) = (found[method, "eager"] for method in ("BN", PLAIN, SHARED))
        ratios = f"{ours:.1f} | {ours / bn:.2f}× | {shared:.1f} | {shared / bn:.2f}×"
        assert f"| {workload} | {bn:.1f} | {ratios} | {memory:.2f}× |" in SPEED


def test_the_table_of_captured_steps_is_the_record():
    text = SPEED.replace("**", "")
    for workload, found in steps().items():
        (bn, _), (ours, memory) = found["BN", "graph"], found[SHARED, "graph"]
        again, less = found[f"{SHARED} recompute", "graph"]
        assert (
            f"| {workload} | {bn:.2f} | {ours:.2f} | {ours / bn:.2f}× | {again:.2f} | {memory:.2f}×, {less:.2f}× |"
        ) in text


def test_the_table_of_single_images_is_the_record():
    found = {
        (row["workload"], row["method"], row["route"]): float(row["ms"])
        for row in rows_of("benchmarks/results/steps_gpu_2026-11-19.csv")
    }
    for title, workload in {"ResNet-110": "cifar-resnet110-8x32x32", "ResNet-20": "cifar-resnet20-8x32x32"}.items():
        batched, literal = (
            [found[workload, method, route] for route in ("eager", "captured")]
            for method in ("BCN+WS", "BCN+WS one at a time")
        )
        times = f"{batched[0]:.1f}, {batched[1]:.2f} | {literal[0]:.1f}, {literal[1]:.2f}"
        ratios = ", ".join(f"{slow / fast:.1f}×" for fast, slow in zip(batched, literal, strict=True))
        assert f"| {title} | {times} | {ratios} |" in SPEED


def test_the_readme_has_the_range_of_the_record_for_resnet50():
    found = [row for workload, row in steps().items() if workload.startswith("ResNet-50")]

    def span(method: str, route: str, digits: int) -> str:
        ratios = [row[method, route][0] / row["BN", route][0] for row in found]
        return f"{min(ratios):.{digits}f}–{max(ratios):.{digits}f}"

    assert f"{span(PLAIN, 'eager', 1)} in a plain loop, {span(SHARED, 'eager', 1)} with [shared weights]" in README
    assert f"{span(SHARED, 'graph', 2)} as a CUDA graph" in README
    memory, less = (found[0][method, "graph"][1] for method in (SHARED, f"{SHARED} recompute"))
    assert f"{memory:.2f}; {less:.2f} with recomputation" in README


def test_the_table_of_the_digits_is_the_record():
    rows = rows_of("results/micro_batch_digits.csv")

    def cell(method: str, size: str) -> str:
        errors = [float(r["test_error_percent"]) for r in rows if (r["method"], r["micro_batch"]) == (method, size)]
        assert len(errors) == 3
        return f"{statistics.mean(errors):.1f} ({min(errors):.1f}–{max(errors):.1f})"

    sizes = ("1", "2", "4", "8", "16", "32", "64")
    assert f"| BN | {' | '.join(cell('BN', size) for size in sizes)} |" in RESULTS
    for method in ("GN", "GN+WS", "BCN+WS"):
        assert f"| {method} | {cell(method, '')} |{' same |' * 6}" in RESULTS


def figures_of(*rows: str) -> dict[str, list[float]]:
    """Return the figures of recorded rows, one value per run."""
    found = [result.figures for row in rows for result in gather(recipes.find(row), packaged()).counted]
    return {name: [figures[name] for figures in found] for name in found[0]}


def test_the_table_of_cifar10_by_micro_batch_is_the_record():
    def cell(row: str) -> str:
        errors = figures_of(f"micro_batch/{row}")["top1"]
        assert len(errors) == 3
        return f"{statistics.mean(errors):.2f} ± {statistics.stdev(errors):.2f}"

    text = RESULTS.replace("**", "")
    for name in ("BN", "BRN"):
        assert f"| {name} | {' | '.join(cell(f'{name.lower()}-{size}') for size in SIZES)} |" in text
    for row, title in {"gn": "GN", "gn-ws": "GN+WS", "bcn-ws": "BCN+WS"}.items():
        assert f"| {title} | {cell(row)} |{' same |' * 7}" in text


def test_the_table_of_resnet110_is_the_record():
    for row in ("gn", "gn-ws", "bcn-ws", "bcn-ws-step"):
        (error,), paper = figures_of(f"cifar1/c10-micro-{row}")["top1"], recipes.find(f"cifar1/c10-micro-{row}").paper
        assert f"| {error:.2f} | {paper['top1'] if paper else 'none'} |" in RESULTS.replace("**", "")


def test_the_table_of_coco128_is_the_record():
    figures = figures_of("coco128/bcn-ws")
    cells = " | ".join(f"{figures[name][0]:.1f}" for name in ("AP50", "AP", "mask_AP50", "mask_AP"))
    assert f"| the 128 images of that split | {cells} |" in RESULTS.replace("**", "")


def test_the_table_of_the_nuclei_is_the_record():
    titles = {"bn": "BN", "gn": "GN", "gn-ws": "GN+WS", "bcn-ws": "BCN+WS"}
    titles |= {"pretrained-frozen-bn": "frozen BN, pretrained", "pretrained-bcn-ws": "BCN+WS, pretrained"}
    for row, title in titles.items():
        figures = figures_of(f"nuclei/{row}")
        means = (statistics.mean(figures[name]) for name in ("AP", "AP50", "mask_AP", "mask_AP50"))
        cells = " | ".join(f"{mean:.1f}" for mean in means)
        assert f"| {title} | {cells} |" in RESULTS.replace("**", "")


def test_the_table_of_rates_is_the_record():
    for optimizer, title in {"sgd-0.1": "SGD, 0.1", "sgd-0.01": "SGD, 0.01", "adamw-0.001": "AdamW, 0.001"}.items():
        rates = ("lr", "corrected", "0.1", "0.01", "0.001")
        errors = [figures_of(f"rates/{optimizer}-rate-{rate}")["top1"] for rate in rates]
        assert {len(values) for values in errors} == {3}
        cells = " | ".join(f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}" for values in errors)
        assert f"| {title} | {cells} |" in RESULTS


def test_the_tables_of_clips_and_volumes_are_the_record():
    rows = ("bcn-ws", "gn-ws", "gn", "bn-ws", "bn", "no-shift-gn-ws", "no-shift-bcn-ws")
    motion = [figures_of(f"motion/{row}")["top1"] for row in rows]
    assert {len(errors) for errors in motion} == {3}
    cells = " | ".join(f"{statistics.mean(errors):.1f} ± {statistics.stdev(errors):.1f}" for errors in motion)
    assert f"| test error, % | {cells} |" in RESULTS.replace("**", "")
    with_shift, without = (
        figures_of(*(f"clips/{row}-fold{k}" for k in range(5)))["top1"] for row in ("shift", "no-shift")
    )
    text = RESULTS.replace("**", "")
    assert f"{statistics.mean(with_shift):.1f} ± {statistics.stdev(with_shift):.1f} % test error with the shift" in text
    assert f"{statistics.mean(without):.1f} ± {statistics.stdev(without):.1f} % without it" in text
    for row, title in {"in": "IN", "bn": "BN", "gn": "GN", "gn-ws": "GN+WS", "bcn-ws": "BCN+WS"}.items():
        figures = figures_of(*(f"hippocampus/{row}-fold{k}" for k in range(3)))
        dice = (figures[name] for name in ("dice_anterior", "dice_posterior", "dice"))
        cells = " | ".join(f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}" for values in dice)
        assert f"| {title} | {cells} |" in RESULTS


def test_the_table_of_the_unet_is_the_record():
    rows = {(row["method"], row["layout"]): row for row in rows_of("benchmarks/results/volume_step.csv")}
    for method in ("IN of torch", "IN", "GN", "BCN", "BCN+WS"):
        both = [rows[method, layout] for layout in ("nchw", "nhwc")]
        times = (f"{float(row['ms']):.1f} | {float(row['ms_to_torch']):.2f}×" for row in both)
        memory = ", ".join(f"{float(row['peak_mb_to_torch']):.2f}×" for row in both)
        assert f"| {method} | {' | '.join(times)} | {memory} |" in SPEED


def test_the_table_of_the_detector_is_the_record():
    rows = {(row["method"], row["route"]): row for row in rows_of("benchmarks/results/detector_step_compiled.csv")}
    alone = rows_of("benchmarks/results/detector_step.csv")
    rows |= {(row["method"], "eager"): row for row in alone if row["route"] == "eager"}
    for method in ("frozen BN", "BN", "GN", "GN+WS", "BCN+WS"):
        found = [rows[method, route] for route in ("eager", "captured", "compiled")]
        times = (f"{float(r['ms']):.1f} | {float(r['ms_to_frozen_bn']):.2f}×" for r in found)
        peaks = (float(r["peak_mb"]) / float(rows["frozen BN", r["route"]]["peak_mb"]) for r in found)
        memory = ", ".join(f"{peak:.2f}×" for peak in peaks)
        assert f"| {method} | {' | '.join(times)} | {memory} |" in SPEED.replace("**", "")


def test_the_accuracy_of_the_readme_is_the_record():
    def mean(row: str) -> str:
        found = gather(recipes.find(f"micro_batch/{row}"), packaged())
        assert len(found.seeds) == 3
        return f"{(found.mean() or {})['top1']:.1f} %"

    large, small, ours = (mean(row) for row in ("bn-128", "bn-1", "bcn-ws"))
    assert f"| {large} with 128 images at a time, {small} with one | {ours} with one image at a time |" in README
