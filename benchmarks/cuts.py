"""Compare the weights of the same training run, cut into micro-batches and ranks in different ways.

Micro-batches of 1, 3, 8 and 32, on 1, 2 and 4 ranks, replicated and sharded, with augmentation. See README.md.
"""

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from digits_runs import ROOT, distance, provenance, run, weights
from torch import nn

from micronorm import records
from micronorm.bench.results import markdown_table, write_csv
from micronorm.engine.settings import Execution
from micronorm.recipes import find
from micronorm.recipes.run import Variation, run_recipe

STEP_BATCH = 32
LR = 0.02
WHOLE = (STEP_BATCH, 1, "ddp")
# (micro-batch, ranks, parallel)
CUTS = [(1, 1, "ddp"), (3, 1, "ddp"), (8, 1, "ddp"), (8, 2, "ddp"), (3, 4, "ddp"), (8, 2, "fsdp"), (3, 4, "fsdp")]
LIMITS = {"float64": 1e-10, "float32": 1e-5}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=50, help="length of the float64 runs; the limit holds for up to 50"
    )
    parser.add_argument("--epochs", type=int, default=4, help="length of the float32 runs whose drift is shown")
    parser.add_argument("--quick", action="store_true", help="two cuts and two steps, to try the script")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "cuts.csv")
    options = parser.parse_args(argv)
    cuts = [CUTS[1], CUTS[3]] if options.quick else CUTS
    steps = 2 if options.quick else options.steps
    with tempfile.TemporaryDirectory() as folder:
        runs = CutRuns(Path(folder))
        runs.compare("float64", steps, cuts)
        runs.compare("float32", 1, cuts[:1] if options.quick else cuts)
        if options.quick:
            runs.drift(cuts[:1], steps=steps)
        else:
            runs.drift([CUTS[0], CUTS[2], CUTS[3]], epochs=options.epochs)
    write_csv(options.out, runs.rows)
    options.out.with_suffix(".md").write_text(page(runs.rows))
    print(f"{options.out} and {options.out.with_suffix('.md').name} written")
    beyond = [row for row in runs.rows if row["limit"] and not float(row["distance"]) <= float(row["limit"])]
    return 1 if beyond else 0


class CutRuns:
    """Runs in separate folders, and the rows of the table."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[dict[str, object]] = []

    def compare(self, dtype: str, steps: int, cuts: list[tuple[int, int, str]]) -> None:
        """Take the same few steps with every cut and compare with the uncut run; the difference is rounding."""
        expected = self._train(WHOLE, dtype, steps=steps)
        for cut in cuts:
            out = self._train(cut, dtype, steps=steps)
            self._add(cut, dtype, steps, distance(weights(out), weights(expected)), limit=LIMITS[dtype])

    def drift(self, cuts: list[tuple[int, int, str]], **length: Any) -> None:
        """Train float32 runs to the end; the control shows how much training amplifies rounding."""
        whole = self._train(WHOLE, "float32", **length)
        control = self._train(WHOLE, "float32", **length, nudged=True)
        steps = records.read(whole).steps[-1]["step"]
        self._add(WHOLE, "float32", steps, 0.0, error=_error(whole))
        far = distance(weights(control), weights(whole))
        self._add(WHOLE, "float32", steps, far, error=_error(control), note="one-ulp control")
        for cut in cuts:
            out = self._train(cut, "float32", **length)
            self._add(cut, "float32", steps, distance(weights(out), weights(whole)), error=_error(out))

    def _train(
        self,
        cut: tuple[int, int, str],
        dtype: str,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        nudged: bool = False,
    ) -> Path:
        """Train the digits with this cut: on one rank in this process, on several by the command line."""
        micro_batch, ranks, parallel = cut
        out = self.folder / "-".join(map(str, (*cut, dtype, steps, epochs, nudged)))
        if ranks == 1:
            recipe = find("digits")
            variation = Variation(step_batch=STEP_BATCH, lr=LR, dtype=dtype, epochs=epochs)
            execution = Execution(micro_batch=micro_batch, device=torch.device("cpu"), steps=steps)
            model = nudge(recipe.build(recipe.settings.seed)) if nudged else None
            run_recipe(recipe, out=out, variation=variation, execution=execution, model=model)
        else:
            length = ["--steps", str(steps)] if epochs is None else ["--epochs", str(epochs)]
            settings = ["--step-batch", str(STEP_BATCH), "--lr", str(LR), "--dtype", dtype, *length]
            execution = ["--micro-batch", str(micro_batch), "--parallel", parallel, "--device", "cpu"]
            run(["train", "digits", *settings, *execution, "--out", str(out)], ranks=ranks, log=self.folder / "log")
        return out

    def _add(
        self,
        cut: tuple[int, int, str],
        dtype: str,
        steps: int,
        far: float,
        *,
        limit: float | None = None,
        error: float | None = None,
        note: str = "",
    ) -> None:
        row = dict(zip(("micro_batch", "ranks", "parallel"), cut, strict=True))
        row |= {"dtype": dtype, "steps": steps, "distance": f"{far:.3g}", "limit": limit, "test_error": error}
        self.rows.append(row | {"note": note, "provenance": provenance()})
        print(", ".join(f"{key} {value}" for key, value in list(self.rows[-1].items())[:-1] if value not in (None, "")))


@torch.no_grad()
def nudge(model: nn.Module) -> nn.Module:
    """Move every parameter to the next larger number; return the model."""
    for parameter in model.parameters():
        parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))
    return model


def _error(out: Path) -> float:
    outcome = records.read(out).outcome
    assert outcome is not None
    return outcome["figures"]["top1"]


def page(rows: list[dict[str, object]]) -> str:
    def cut(row: dict[str, object]) -> list[object]:
        return [row["micro_batch"], row["ranks"], row["parallel"] if row["ranks"] != 1 else ""]

    parts = [
        "# The same run, cut differently",
        f"`python benchmarks/cuts.py{''.join(f' {shlex.quote(a)}' for a in sys.argv[1:])}`. {rows[0]['provenance']}",
        f"`micronorm train digits --step-batch {STEP_BATCH} --lr {LR}`, augmentation on, on the CPU; ranks by "
        "`torch.distributed.run` over gloo. Each run is compared with the one that computes a step's 32 samples at "
        "once on one rank. The distance is the largest difference in any tensor of the model, statistics included, "
        "divided by the largest magnitude in that tensor.",
    ]
    for dtype in ("float64", "float32"):
        chosen = [row for row in rows if row["dtype"] == dtype and row["limit"]]
        worst = max(float(str(row["distance"])) for row in chosen)
        steps = f"{chosen[0]['steps']} step{'s' * (chosen[0]['steps'] != 1)}"
        parts.append(f"## {dtype}, {steps}: at most {worst:.2g}, {chosen[0]['limit']:g} allowed")
        parts.append(
            markdown_table(["micro-batch", "ranks", "", "distance"], [[*cut(row), row["distance"]] for row in chosen])
        )
    drifted = [row for row in rows if not row["limit"]]
    parts.append(f"## float32, {drifted[0]['steps']} steps: the drift, beside that of one unit in the last place")
    parts.append(
        "Training amplifies rounding: two float32 runs that differ by one unit in the last place of their first "
        "weights end far apart, and so do two that round differently. The first row is the run that the others are "
        "compared with; the control is the same run from weights that are one unit in the last place larger."
    )
    lines = [[*cut(row), row["note"], row["distance"], f"{row['test_error']:.2f} %"] for row in drifted]
    parts.append(markdown_table(["micro-batch", "ranks", "", "", "distance", "test error"], lines))
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
