"""Add finished runs to the recorded figures of the package, and write the table in results/recorded_rows.md.

    python benchmarks/record.py RUN...      # without runs: only write the table

Writes src/micronorm/recipes/recorded.json. A run that does not count for its recipe is an error.
"""

import csv
import itertools
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from micronorm import recipes, records
from micronorm.bench.results import markdown_table
from micronorm.recipes.protocols import method
from micronorm.recipes.recipe import DATA
from micronorm.recipes.results import RECORDED, Findings, fault, gather, packaged, read_runs

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "src" / "micronorm" / "recipes" / RECORDED
PAGE = ROOT / "results" / "recorded_rows.md"
LITERAL = ROOT / "benchmarks" / "results" / "steps_gpu_2026-11-19.csv"
"""A table of steps_gpu.py with methods "… one at a time"."""
# The figure of a row, and what is written behind it.
_UNITS = {"top1": "", "miou": " mIoU", "AP": " AP", "dice": " Dice"}
HEADER = ["row", "paper, %", "ours, %", "seeds", "difference", "GPU minutes", "one image at a time"]


def entry(run: Path) -> dict[str, Any]:
    """Return the entry of one run."""
    record = records.read(run)
    (result,), _ = read_runs(run)
    reason = fault(result, recipes.find(result.recipe))
    if reason is not None:
        raise SystemExit(f"{run} does not count for {result.recipe}: {reason}")
    assert record.outcome is not None
    facts, environment = record.facts, record.facts["environment"]
    gpu, cpu = environment.get("gpu"), environment.get("cpu")
    return {
        "recipe": facts["recipe"],
        "seed": facts["settings"]["seed"],
        "figures": record.outcome["figures"],
        "epochs": facts["settings"]["epochs"],
        "step_batch": facts["settings"]["step_batch"],
        "data": facts["data"],
        "dtype": facts["settings"]["dtype"],
        **({"gpu": gpu["name"]} if gpu else {"cpu": cpu["model"]}),
        "versions": {name: environment[name] for name in ("micronorm", "python", "torch", "revision")},
        "date": facts["date"],
        "command": facts["command"],
        "digest": record.outcome["digest"],
        "definition": facts["definition"],
        **({"weights": {"recipe": facts["weights"]["recipe"]}} if "weights" in facts else {}),
        "minutes": round(_seconds(record) / 60, 1),
    }


def _seconds(record: records.Record) -> float:
    evaluations = (row.get("evaluation_seconds", 0.0) for row in record.epochs)
    return sum(row["seconds"] for row in record.steps) + sum(evaluations)


def table() -> str:
    """Return the recorded rows as Markdown: the paper's error, ours, their difference, and what a row costs.

    An experiment that is a row of two tables appears once. The folds of a method are one line.
    """
    results, seconds = packaged(), literal_seconds()
    lines, shown = [], set()
    rows = (row for table in recipes.tables().values() for row in table.rows)
    for name, folds in itertools.groupby(rows, key=lambda row: re.sub(r"-fold\d+$", "", row.name)):
        members = list(folds)
        counted = tuple(result for recipe in members for result in gather(recipe, results).counted)
        records_of_row = {result.where for result in counted}
        if records_of_row - shown:
            first = members[0]
            line = _line(Findings(first, counted, ()), seconds.get((first.network, method(first.norm, first.weight))))
            lines.append([f"`{name}`, {len(counted)} folds", *line[1:]] if len(members) > 1 else line)
            shown |= records_of_row
    return markdown_table(HEADER, lines)


def _line(found: Findings, seconds_per_image: float | None) -> list[str]:
    recipe, mean, spread = found.recipe, found.mean() or {}, found.deviation() or {}
    figure, unit = next((name, unit) for name, unit in _UNITS.items() if name in mean)
    paper = None if recipe.paper is None else recipe.paper[figure]
    ours = f"{mean[figure]:.2f}" + (f" ± {spread[figure]:.2f}" if spread else "") + unit
    entries = json.loads(TARGET.read_text("utf-8"))
    own = [entries[int(result.where.partition("#")[2])] for result in found.counted]
    minutes = [entry["minutes"] for entry in own if "gpu" in entry and "minutes" in entry]
    days = None
    if seconds_per_image and recipe.micro_batch == 1:
        days = seconds_per_image * recipe.settings.epochs * DATA[recipe.data].train / 86_400
    return [
        f"`{recipe.name}`",
        "–" if paper is None else f"{paper:.2f}",
        ours,
        ", ".join(map(str, dict.fromkeys(found.seeds))),
        "–" if paper is None else f"{mean[figure] - paper:+.2f}",
        f"{statistics.fmean(minutes):.0f}" if len(minutes) == len(own) else "–",
        "–" if days is None else f"{days:.0f} days" if days >= 2 else f"{24 * days:.1f} hours",
    ]


def literal_seconds() -> dict[tuple[str, str], float]:
    """Return the seconds per image of an eager step taken one image at a time, by network and method."""
    found = {}
    with LITERAL.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name = row["method"].removesuffix(" one at a time")
            network, images = re.fullmatch(r"(.+)-(\d+)x\d+x\d+", row["workload"]).groups()
            if row["route"] == "eager" and row["method"] != name:
                found[network, name] = float(row["ms"]) / 1e3 / int(images)
    return found


def page() -> str:
    """Return results/recorded_rows.md with the table as the records have it now."""
    pattern = r"(<!-- recorded rows -->\n).*?(<!-- end of recorded rows -->)"
    text, count = re.subn(pattern, lambda m: f"{m[1]}{table()}\n{m[2]}", PAGE.read_text("utf-8"), flags=re.DOTALL)
    assert count == 1, f"{PAGE.name} needs the markers of the recorded rows once, found {count}"
    return text


def main() -> None:
    known = {(e["recipe"], e["seed"]): e for e in json.loads(TARGET.read_text("utf-8"))}
    for run in map(Path, sys.argv[1:]):
        new = entry(run)
        known[new["recipe"], new["seed"]] = new
    ordered = [known[key] for key in sorted(known)]
    TARGET.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", "utf-8")
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
