"""Every architecture of timm and torchvision, converted on the meta device: what changed, what stayed, and why.

Writes one CSV row per architecture as it is done, so nothing is lost by Ctrl-C, and a summary at the end. Rows of the
same versions are kept unless --fresh. See README.md.
"""

import argparse
import collections
import concurrent.futures
import csv
import datetime
import fnmatch
import functools
import hashlib
import inspect
import multiprocessing
import platform
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import timm
import timm.models
import torch
import torchvision
from sweep_checks import (
    CONVOLUTIONS,
    NORMS,
    Forward,
    check_converted,
    has_batchnorm,
    holds_norm_after_convolution,
    record_forward,
)
from sweep_summary import summary
from torch import nn

import micronorm as mn
from micronorm.convert import Plan

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "sweep.csv"
TIME_LIMIT = 900  # seconds for one architecture, after which it counts as a traceback
KINDS = ((*NORMS, nn.LayerNorm), CONVOLUTIONS)
LAYER_NAMES = re.compile(r" '[^']*'")


@dataclass
class SweepRow:
    """One architecture. A text column without content is empty."""

    source: str
    name: str
    family: str
    outcome: str = ""  # converted, nothing to convert, refused, traceback
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

    @property
    def key(self) -> tuple[str, str]:
        return self.source, self.name

    @property
    def versions(self) -> tuple[str, ...]:
        return self.micronorm, self.torch, self.timm, self.torchvision, self.python


COLUMNS = [field.name for field in fields(SweepRow)]


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions that the result depends on; ours with a digest of the code of conversion."""
    source = Path(inspect.getfile(mn)).parent
    digest = hashlib.sha256()
    for path in sorted(source.glob("convert/**/*.py")):
        digest.update(path.read_bytes())
    return {
        "micronorm": f"{mn.__version__}+{digest.hexdigest()[:8]}",
        "torch": torch.__version__,
        "timm": timm.__version__,
        "torchvision": torchvision.__version__,
        "python": platform.python_version(),
    }


# --- the architectures -----------------------------------------------------------------------------------------------


def architectures() -> list[tuple[str, str, str]]:
    """Return (source, name, family) of every architecture."""
    ours = [("timm", name, _last(timm.models.model_entrypoint(name).__module__)) for name in timm.list_models()]
    for name in torchvision.models.list_models():
        module = torchvision.models.get_model_builder(name).__module__
        ours.append(("torchvision", name, module.removeprefix("torchvision.models.")))
    return ours


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def build(source: str, name: str) -> nn.Module:
    """Build the architecture with fresh weights; nothing is downloaded."""
    if source == "timm":
        return timm.create_model(name, pretrained=False)
    builder = torchvision.models.get_model_builder(name)
    takes = inspect.signature(builder).parameters
    options: dict[str, Any] = {"weights_backbone": None} if "weights_backbone" in takes else {}
    if "init_weights" in takes or "init_weights" in inspect.signature(inspect.unwrap(builder)).parameters:
        options["init_weights"] = False
    return torchvision.models.get_model(name, weights=None, **options)


# --- one architecture ------------------------------------------------------------------------------------------------


def sweep_one(source: str, name: str, family: str) -> SweepRow:
    """Plan, apply and check one architecture; the row records an error instead of raising it."""
    row = SweepRow(source, name, family, **versions())
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(TIME_LIMIT)
    try:
        _fill(row)
    except Exception as fault:
        where = traceback.extract_tb(fault.__traceback__)[-1]
        row.outcome = "traceback"
        row.detail = f"{type(fault).__name__}: {_line(fault)} ({Path(where.filename).name}:{where.lineno})"
    finally:
        signal.alarm(0)
    row.date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return row


def _fill(row: SweepRow) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made, before = _planned(row)
        if made is None or before is None:
            return
        left = collections.defaultdict(collections.Counter)
        for decision in made.decisions:
            if decision.becomes is None:
                left[decision.role][LAYER_NAMES.sub("", decision.reason)] += 1
        for role in ("norm", "convolution"):
            setattr(row, f"{role}s_converted", made.totals[f"{role}s converted"])
            setattr(row, f"{role}s_left", made.totals[f"{role}s left"])
            setattr(row, f"{role}s_left_because", " | ".join(f"{n}× {why}" for why, n in left[role].most_common()))
        row.norms_fused = made.totals["norms fused"]
        row.pairing, row.detail = made.pairing, made.pairing_detail
        row.convolutions_directly_before_norm_left = len(_passed_over(made, before))
        start = time.perf_counter()
        converted = made.apply()
        row.seconds = round(row.seconds + time.perf_counter() - start, 2)
        row.batchnorms_after_convolution_left = len(has_batchnorm(converted))
        row.checks = "; ".join(check_converted(converted, before, made)) or "ok"
        row.outcome = "converted"


def _planned(row: SweepRow) -> tuple[Plan | None, Forward | None]:
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
        try:
            start = time.perf_counter()
            made = mn.plan(model)
            row.seconds = round(time.perf_counter() - start, 2)
        except ValueError as fault:
            refused = holds_norm_after_convolution(model) or not str(fault).startswith("nothing to convert")
            row.outcome, row.detail = "refused" if refused else "nothing to convert", LAYER_NAMES.sub("", _line(fault))
            row.norms_left, row.convolutions_left = (sum(isinstance(m, k) for m in model.modules()) for k in KINDS)
            return None, None
        before = record_forward(model)
        if made.pairing != "order" and before.shapes is not None:
            break
    return made, before


def _passed_over(made: Plan, before: Forward) -> list[str]:
    """Return the convolutions left as they are although a norm takes their output, except those of fan-in 1."""
    return [
        decision.name
        for decision in made.decisions
        if decision.role == "convolution"
        and decision.becomes is None
        and decision.module in before.into_norm
        and not decision.reason.startswith("fan-in 1")
    ]


def _line(fault: Exception) -> str:
    return (str(fault).strip().splitlines() or [""])[0][:300]


def _out_of_time(*_: object) -> None:
    raise TimeoutError(f"over {TIME_LIMIT} s")


# --- all of them -----------------------------------------------------------------------------------------------------


def read(path: Path) -> list[SweepRow]:
    if not path.exists():
        return []
    kinds: dict[str, Callable[[str], Any]] = {
        field.name: {"int": int, "float": float}.get(str(getattr(field.type, "__name__", field.type)), str)
        for field in fields(SweepRow)
    }
    with path.open(newline="", encoding="utf-8") as file:
        return [SweepRow(**{name: kinds[name](value) for name, value in row.items()}) for row in csv.DictReader(file)]


def write(path: Path, rows: Sequence[SweepRow]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    with draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    draft.replace(path)


def append(path: Path, row: SweepRow) -> None:
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(asdict(row))


def run_all(todo: Sequence[tuple[str, str, str]], workers: int) -> Generator[SweepRow, None, None]:
    """Yield rows as they are finished. If a worker dies, try its architecture once more alone, then report it."""
    suspects = yield from _run_pool(todo, workers)
    for one in suspects:
        for _ in (yield from _run_pool([one], 1)):
            row = SweepRow(*one, outcome="traceback", detail="the worker process died", **versions())
            row.date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            yield row


def _run_pool(todo: Sequence[tuple[str, str, str]], workers: int) -> Any:
    """Yield rows; return the architectures that were not done because a worker died."""
    unfinished = dict.fromkeys(todo)
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context, initializer=_start_worker) as pool:
        jobs = {pool.submit(sweep_one, *one): one for one in todo}
        try:
            for job in concurrent.futures.as_completed(jobs):
                if job.exception() is None:
                    del unfinished[jobs[job]]
                    yield job.result()
        except BaseException:  # Ctrl-C: the next run repeats the architectures that are in progress now
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
    return list(unfinished)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    torch.set_num_threads(1)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="the CSV; the summary goes beside it as .md")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="names or families that match (shell style)")
    parser.add_argument("--fresh", action="store_true", help="do rows of the same versions again")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    chosen = architectures()
    if args.only:
        chosen = [a for a in chosen if any(fnmatch.fnmatch(text, p) for p in args.only for text in a[1:])]
    if not chosen:
        raise SystemExit(f"no architecture is called {args.only}")
    now = tuple(versions().values())
    wanted = {(source, name) for source, name, _ in chosen}
    rows = {row.key: row for row in read(args.out)}
    kept = {key: row for key, row in rows.items() if key not in wanted or (row.versions == now and not args.fresh)}
    todo = [one for one in chosen if one[:2] not in kept]
    print(f"{len(todo)} architectures to do, {len(chosen) - len(todo)} of {len(chosen)} already in {args.out.name}")
    write(args.out, list(kept.values()))
    interrupted = False
    try:
        with closing(run_all(todo, args.workers)) as done:
            for count, row in enumerate(done, 1):
                kept[row.key] = row
                append(args.out, row)
                if count % 50 == 0 or count == len(todo):
                    print(f"{count} of {len(todo)}: {row.source} {row.name}", flush=True)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted; the next run goes on from here")
    ordered = sorted(kept.values(), key=lambda row: row.key)
    write(args.out, ordered)
    text = summary(ordered, command=_command(args))
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    if interrupted:
        return 130
    return 1 if any(row.outcome in ("refused", "traceback") for row in ordered) else 0


def _command(args: argparse.Namespace) -> str:
    """Return the command without --out, which names a path."""
    only = "".join(f" --only '{pattern}'" for pattern in args.only or ())
    return f"python benchmarks/sweep.py --workers {args.workers}{only}{' --fresh' * args.fresh}"


if __name__ == "__main__":
    sys.exit(main())
