"""Add finished runs to the recorded figures of the package.

    python benchmarks/record.py RUN...

Writes src/micronorm/recipes/recorded.json. A run that does not count for its recipe is an error.
"""

import json
import sys
from pathlib import Path
from typing import Any

from micronorm import recipes, records
from micronorm.recipes.results import RECORDED, fault, read_runs

TARGET = Path(__file__).parents[1] / "src" / "micronorm" / "recipes" / RECORDED


def entry(run: Path) -> dict[str, Any]:
    """Return the entry of one run."""
    record = records.read(run, rows=False)
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
    }


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    known = {(e["recipe"], e["seed"]): e for e in json.loads(TARGET.read_text("utf-8"))}
    for run in map(Path, sys.argv[1:]):
        new = entry(run)
        known[new["recipe"], new["seed"]] = new
    ordered = [known[key] for key in sorted(known)]
    TARGET.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
