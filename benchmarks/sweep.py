"""Convert every architecture of timm and torchvision on the meta device; report what changed, what stayed, and why.

Writes a CSV row for each architecture as soon as it is done, and a summary beside it at the end. See README.md.
"""

import argparse
import concurrent.futures
import csv
import datetime
import fnmatch
import inspect
import multiprocessing
import platform
import re
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import timm
import timm.models
import torch
import torchvision
from sweep_checks import CONVOLUTIONS, NORMS, Forward, check_converted, is_batchnorm, look, norms_of
from torch import nn

import micronorm as mn
from micronorm.bench.results import markdown_table
from micronorm.convert import Plan
from micronorm.engine.environment import environment

OUT = Path(__file__).parents[1] / "results" / "sweep.csv"
KINDS = ((*NORMS, nn.LayerNorm), CONVOLUTIONS)
LAYER_NAMES = re.compile(r" '[^']*'")
REVISION = environment()["revision"]
VERSIONS = {
    "micronorm": f"{mn.__version__}+{REVISION[:8]}" if REVISION else mn.__version__,
    "torch": torch.__version__,
    "timm": timm.__version__,
    "torchvision": torchvision.__version__,
    "python": platform.python_version(),
}
OUTCOMES = ("converted", "nothing to convert", "refused", "traceback")


@dataclass
class Row:
    """One architecture. Text columns are empty and counts 0 where there is nothing to say."""

    source: str
    name: str
    family: str
    outcome: str = ""  # one of OUTCOMES
    pairing: str = "none"  # fx, execution, order, none
    norms_converted: int = 0
    norms_left: int = 0
    norms_fused: int = 0  # with the addition or the activation after them
    convolutions_converted: int = 0
    convolutions_left: int = 0
    norms_left_because: str = ""
    convolutions_left_because: str = ""
    batchnorms_after_convolution_left: int = 0
    convolutions_directly_before_norm_left: int = 0
    checks: str = ""  # "ok", or what was found wrong with the converted model
    device: str = ""  # meta or cpu
    seconds: float = 0.0  # of plan and apply
    detail: str = ""  # how it was paired, or the error
    micronorm: str = ""
    torch: str = ""
    timm: str = ""
    torchvision: str = ""
    python: str = ""
    date: str = ""


Architecture = tuple[str, str, str]
"""Source (timm or torchvision), name and family."""


def architectures() -> list[Architecture]:
    """Return all architectures of both packages."""
    found = [("timm", n, timm.models.model_entrypoint(n).__module__.rpartition(".")[2]) for n in timm.list_models()]
    for name in torchvision.models.list_models():
        module = torchvision.models.get_model_builder(name).__module__
        found.append(("torchvision", name, module.removeprefix("torchvision.models.")))
    return found


def build(source: str, name: str) -> nn.Module:
    """Return the architecture with fresh weights; nothing is downloaded."""
    if source == "timm":
        return timm.create_model(name, pretrained=False)
    builder = torchvision.models.get_model_builder(name)
    accepted = inspect.signature(builder).parameters
    options: dict[str, Any] = {"weights_backbone": None} if "weights_backbone" in accepted else {}
    if "init_weights" in accepted or "init_weights" in inspect.signature(inspect.unwrap(builder)).parameters:
        options["init_weights"] = False
    return torchvision.models.get_model(name, weights=None, **options)


# --- one architecture ------------------------------------------------------------------------------------------------


def sweep_one(architecture: Architecture) -> Row:
    """Plan, apply and check one architecture. An exception becomes the row's outcome."""
    row = Row(*architecture, **VERSIONS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _fill(row)
    except Exception as fault:
        where = traceback.extract_tb(fault.__traceback__)[-1]
        row.outcome = "traceback"
        row.detail = f"{type(fault).__name__}: {_line(fault)} ({Path(where.filename).name}:{where.lineno})"
    row.date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return row


def _fill(row: Row) -> None:
    made, before = _planned(row)
    if made is None or before is None:
        return
    left: dict[str, Counter[str]] = defaultdict(Counter)
    for decision in made.decisions:
        if decision.becomes is None:
            left[decision.role][LAYER_NAMES.sub("", decision.reason)] += 1
    for role in ("norm", "convolution"):
        setattr(row, f"{role}s_converted", made.totals[f"{role}s converted"])
        setattr(row, f"{role}s_left", made.totals[f"{role}s left"])
        setattr(row, f"{role}s_left_because", " | ".join(f"{n}× {why}" for why, n in left[role].most_common()))
    row.norms_fused = made.totals["norms fused"]
    row.pairing, row.detail = made.pairing, made.pairing_detail
    # Convolutions left although a norm took their output, without a reason in the layer itself.
    row.convolutions_directly_before_norm_left = sum(
        d.role == "convolution"
        and d.becomes is None
        and d.module in before.into_norm
        and not d.reason.startswith("fan-in 1")
        for d in made.decisions
    )
    start = time.perf_counter()
    converted = made.apply()
    row.seconds = round(row.seconds + time.perf_counter() - start, 2)
    row.batchnorms_after_convolution_left = sum(map(is_batchnorm, converted.modules()))
    row.checks = "; ".join(check_converted(converted, before, made)) or "ok"
    row.outcome = "converted"


def _planned(row: Row) -> tuple[Plan | None, Forward | None]:
    """Plan on the meta device if the model can be built and run there, otherwise on the CPU."""
    made, before = None, None
    for device in ("meta", "cpu"):
        row.device = device
        try:
            with torch.device(device):
                model = build(row.source, row.name)
        except Exception:
            if device == "cpu":
                raise
            continue
        start = time.perf_counter()
        try:
            made = mn.plan(model)
        except ValueError as fault:
            # A model with a norm beside a convolution should have been converted.
            row.norms_left, row.convolutions_left = (sum(isinstance(m, k) for m in model.modules()) for k in KINDS)
            should_convert = bool(norms_of(model)) and row.convolutions_left > 0
            refused = should_convert or not str(fault).startswith("nothing to convert")
            row.outcome, row.detail = "refused" if refused else "nothing to convert", LAYER_NAMES.sub("", _line(fault))
            return None, None
        row.seconds = round(time.perf_counter() - start, 2)
        before = look(model)
        if made.pairing != "order" and before.shapes is not None:
            break
    return made, before


def _line(fault: Exception) -> str:
    return (str(fault).strip().splitlines() or [""])[0][:300]


# --- the summary -----------------------------------------------------------------------------------------------------


def summary(rows: Sequence[Row], *, command: str) -> str:
    """Return totals, shares of each family, faults and reasons as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in VERSIONS.items())
    parts = [
        "# Conversion of every architecture of timm and torchvision",
        f"`{command}` (or `make sweep`), {max(row.date for row in rows)[:10]}. {versions}.",
        "Models have fresh weights and live on the meta device, or on the CPU if that is impossible. The CSV of the "
        "same name has one row per architecture. A model without a BatchNorm, GroupNorm or InstanceNorm beside a "
        "convolution has nothing to convert. A model that has them and is refused, or raises, is a failure.",
        _totals(rows),
        "## Converted share per family, worst first",
        _families(rows),
    ]
    for title, column in (("norms", "norms_left_because"), ("convolutions", "convolutions_left_because")):
        parts += [f"## Why {title} were left", _reasons(rows, column)]
    for title, chosen, column in (
        ("Tracebacks", [r for r in rows if r.outcome == "traceback"], "detail"),
        ("Refused", [r for r in rows if r.outcome == "refused"], "detail"),
        ("Failed checks", [r for r in rows if r.checks not in ("", "ok")], "checks"),
        ("Paired by order", [r for r in rows if r.pairing == "order"], "detail"),
        ("BatchNorms left", [r for r in rows if r.batchnorms_after_convolution_left], "norms_left_because"),
        (
            "Convolutions left although a norm takes their output",
            [r for r in rows if r.convolutions_directly_before_norm_left],
            "convolutions_left_because",
        ),
    ):
        listed = "\n".join(f"- {r.source} {r.name}: {getattr(r, column)}" for r in chosen)
        parts += [f"## {title}", listed or "None."]
    return "\n\n".join(parts) + "\n"


def _totals(rows: Sequence[Row]) -> str:
    """Return counts of outcomes and pairings, and sums of the columns of counts."""
    columns = [[r for r in rows if r.source == source] for source in ("timm", "torchvision")] + [list(rows)]
    lines = [["architectures", *(len(part) for part in columns)]]
    lines += [[outcome, *(sum(r.outcome == outcome for r in part) for part in columns)] for outcome in OUTCOMES]
    for method in ("fx", "execution", "order"):
        lines.append([f"paired by {method}", *(sum(r.pairing == method for r in part) for part in columns)])
    for name in (field.name for field in fields(Row) if field.type is int):
        lines.append([name.replace("_", " "), *(sum(getattr(r, name) for r in part) for part in columns)])
    lines.append(["failed checks", *(sum(r.checks not in ("", "ok") for r in part) for part in columns)])
    return markdown_table(["", "timm", "torchvision", "all"], [[name, *(f"{n:,}" for n in ns)] for name, *ns in lines])


def _families(rows: Sequence[Row]) -> str:
    by_family: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_family[f"{row.source} {row.family}"].append(row)
    lines = []
    for family, part in by_family.items():
        able = [row for row in part if row.outcome != "nothing to convert"]
        done = sum(row.outcome == "converted" for row in able)
        changed, left = sum(r.convolutions_converted for r in able), sum(r.convolutions_left for r in able)
        if able:
            lines.append((done / len(able), changed / max(1, changed + left), f"{done} of {len(able)}", family))
    header = ["family", "converted", "convolutions converted"]
    return markdown_table(header, [(family, done, f"{share:.0%}") for _, share, done, family in sorted(lines)])


def _reasons(rows: Sequence[Row], column: str) -> str:
    layers: Counter[str] = Counter()
    models: Counter[str] = Counter()
    for row in rows:
        for entry in filter(None, getattr(row, column).split(" | ")):
            count, _, reason = entry.partition("× ")
            layers[reason] += int(count)
            models[reason] += 1
    lines = [(reason, f"{count:,}", f"{models[reason]:,}") for reason, count in layers.most_common(40)]
    return markdown_table(["the 40 most frequent reasons", "layers", "architectures"], lines)


# --- all of them -----------------------------------------------------------------------------------------------------


def run_all(todo: Sequence[Architecture], workers: int) -> Iterator[Row]:
    """Yield a row for each architecture as soon as it is done."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with concurrent.futures.ProcessPoolExecutor(
        workers, context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        jobs = [pool.submit(sweep_one, one) for one in todo]
        for done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            yield job.result()
            if done % 50 == 0 or done == len(jobs):
                print(f"{done} of {len(jobs)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="the CSV; the summary goes beside it as .md")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="names or families that match (shell style)")
    parser.add_argument("--sample", action="store_true", help="one architecture per family")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes")
    args = parser.parse_args()
    chosen = architectures()
    if args.only:
        chosen = [a for a in chosen if any(fnmatch.fnmatch(text, p) for p in args.only for text in a[1:])]
    if args.sample:
        chosen = list({(source, family): (source, name, family) for source, name, family in reversed(chosen)}.values())
    if not chosen:
        raise SystemExit(f"no architecture is called {args.only}")
    rows = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in run_all(chosen, args.workers):
            rows.append(row)
            writer.writerow(asdict(row))
            file.flush()
    # The command is rebuilt from the arguments, because --out could hold a private path.
    only = "".join(f" --only '{pattern}'" for pattern in args.only or ())
    command = f"python benchmarks/sweep.py --workers {args.workers}{only}{' --sample' if args.sample else ''}"
    text = summary(rows, command=command)
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    return 1 if any(row.outcome in ("refused", "traceback") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
