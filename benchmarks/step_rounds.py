"""Time training steps of several methods in turns, round by round: shared by the scripts that time steps."""

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from micronorm.bench.measure import one_line
from micronorm.bench.results import number, provenance, write_csv
from micronorm.bench.timing import device_ms, host_ms, spread, warm_up

ROUTES = ("eager", "captured", "compiled")
Row = dict[str, Any]
Build = Callable[[Row, torch.device, bool], tuple[Callable[[], object], float | None]]
"""Makes what to time from a row's columns, the device and whether it is tiny; returns it and its peak memory in MB."""


def parse_arguments(
    description: str | None, choices: Mapping[str, Sequence[str]], usual: Mapping[str, Sequence[str]] | None = None
) -> argparse.Namespace:
    """Read the options. Each of `choices` is an option with its values; the default is all, or the usual ones."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, values in {"route": ROUTES, **choices}.items():
        parser.add_argument(f"--{name}", nargs="+", choices=values, default=list((usual or {}).get(name, values)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3, help="steps per round and method")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small network and small inputs, to try the script")
    parser.add_argument("--out", type=Path, help="write the results to this CSV file")
    options = parser.parse_args()
    if options.device == "cpu":
        options.route = ["eager"]
    elif not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --device cpu --tiny tries the script without one")
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2 for quartiles, got {options.rounds}")
    return options


def facts_of(script: str, options: argparse.Namespace) -> dict[str, object]:
    """Return versions, device, date and the command."""
    command = shlex.join(["python", f"benchmarks/{script}", *without_out(sys.argv[1:])])
    return provenance(torch.device(options.device), command, packages=("torchvision", "triton"))


def without_out(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without --out, which names a path."""
    before = ["", *arguments]
    return [a for a, last in zip(arguments, before, strict=False) if "--out" not in (last, a.partition("=")[0])]


def prepare(step: Any, *, captured: bool) -> tuple[Callable[[], object], float | None]:
    """Return what to time, the step or its CUDA graph, and the peak of its memory in MB on a GPU.

    For a captured step the peak is read during the capture, which allocates what every replay uses.
    """
    if step.device.type != "cuda":
        step()
        return step, None
    warm_up(step)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call = step.capture() if captured else step
    call()
    torch.cuda.synchronize()
    return call, (torch.cuda.max_memory_allocated() - step.memory_before) / 1e6


def run(
    script: str,
    options: argparse.Namespace,
    groups: Sequence[Sequence[Row]],
    build: Build,
    *,
    base: str,
    suffix: str,
) -> None:
    """Time all rows by each route, print them, and write them to the CSV file of the options.

    Args:
        script: the script's name, for the command in the CSV file.
        options: what `parse_arguments` returned.
        groups: the columns that tell the rows apart, without the route. Rows of a group are timed in turns.
        build: makes what to time.
        base: the method that times and memory are divided by: its fastest row of the group.
        suffix: names the columns of ratios by the same route, "ms_to_SUFFIX", and to any: "ms_to_best_SUFFIX".

    Raises:
        SystemExit: a row could not be timed.
    """
    torch.backends.cudnn.benchmark = True
    device, facts = torch.device(options.device), facts_of(script, options)
    figures = ["ms", "q25_ms", "q75_ms", f"ms_to_{suffix}", f"ms_to_best_{suffix}", "peak_mb", f"peak_mb_to_{suffix}"]
    rows: list[Row] = []
    for keys in groups:
        group: list[Row] = []
        for route in options.route:
            torch.compiler.reset()  # torch limits recompilations per function, and networks share their forwards
            new = _measure([{**key, "route": route} for key in keys], build, device, options)
            _compare(new, base, {"ms": f"ms_to_{suffix}", "peak_mb": f"peak_mb_to_{suffix}"})
            group += new
        _compare(group, base, {"ms": f"ms_to_best_{suffix}"})
        for row in group:
            print({name: number(v, 3) if isinstance(v, float) else v for name, v in row.items()}, flush=True)
        rows += group
        if options.out is not None:
            named = [*keys[0], "route"]
            write_csv(
                options.out,
                [
                    {name: row[name] for name in named}
                    | {name: number(row.get(name), 3) for name in figures}
                    | {"fault": row.get("fault", ""), **facts}
                    for row in rows
                ],
            )
    if any("fault" in row for row in rows):
        raise SystemExit(1)


def _measure(rows: list[Row], build: Build, device: torch.device, options: argparse.Namespace) -> list[Row]:
    clock: Callable[..., float] = device_ms if device.type == "cuda" else host_ms
    calls: dict[int, Callable[[], object]] = {}
    times: dict[int, list[float]] = {}
    for k, row in enumerate(rows):
        try:
            calls[k], peak = build(dict(row), device, options.tiny)
        except Exception as error:  # the other methods are still measured
            row["fault"] = one_line(error)
            continue
        times[k] = []
        row |= {} if peak is None else {"peak_mb": peak}
    for _ in range(options.rounds):
        for k, call in calls.items():
            times[k].append(clock(call, options.repeats))
    for k, taken in times.items():
        found = spread(taken)
        rows[k] |= {"ms": found.median, "q25_ms": found.q25, "q75_ms": found.q75}
    return rows


def _compare(rows: Sequence[Row], base: str, ratios: Mapping[str, str]) -> None:
    """Add each row's figures as multiples of those of `base` in its fastest row, under the names given."""
    timed = [row for row in rows if row["method"] == base and "ms" in row]
    if timed:
        fastest = min(timed, key=lambda row: row["ms"])
        for row in rows:
            row |= {ratio: row[name] / fastest[name] for name, ratio in ratios.items() if name in row}
