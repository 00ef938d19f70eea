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
from micronorm.bench.timing import device_ms, host_ms, spread

ROUTES = ("eager", "captured", "compiled")
Row = dict[str, Any]
Build = Callable[[Row, torch.device, bool], tuple[Callable[[], object], float | None]]
"""Makes what to time from a row's columns, the device and whether it is tiny; returns it and its peak memory in MB."""


def parse_arguments(description: str | None, choices: Mapping[str, Sequence[str]]) -> argparse.Namespace:
    """Read the options of a script. Each of `choices` is an option of that name with its values, all by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, values in {"route": ROUTES, **choices}.items():
        parser.add_argument(f"--{name}", nargs="+", choices=values, default=list(values))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3, help="steps per round and method")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small network and small inputs, to try the script")
    parser.add_argument("--out", type=Path, help="write the results to this CSV file")
    options = parser.parse_args()
    if options.device == "cpu":
        options.route = ["eager"]
    return options


def facts_of(script: str, options: argparse.Namespace) -> dict[str, object]:
    """Return versions, device, date and the command."""
    command = shlex.join(["python", f"benchmarks/{script}", *without_out(sys.argv[1:])])
    return provenance(torch.device(options.device), command, packages=("torchvision", "triton"))


def without_out(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without --out, which names a path."""
    before = ["", *arguments]
    return [a for a, last in zip(arguments, before, strict=False) if "--out" not in (last, a.partition("=")[0])]


def run(script: str, options: argparse.Namespace, keys: Sequence[Row], build: Build, *, base: str, suffix: str) -> None:
    """Time all rows by each route, print them, and write them to the CSV file of the options.

    Args:
        script: the script's name, for the command in the CSV file.
        options: what `parse_arguments` returned.
        keys: the columns that tell the rows apart, without the route.
        build: makes what to time.
        base: the method that times and memory are divided by, in its fastest row.
        suffix: names the columns of the ratios: "ms_to_SUFFIX".
    """
    torch.backends.cudnn.benchmark = True
    device = torch.device(options.device)
    rows: list[Row] = []
    for route in options.route:
        new = _measure([{**key, "route": route} for key in keys], build, device, options)
        _compare(new, base, suffix)
        rows += new
        for row in new:
            print({name: number(v, 3) if isinstance(v, float) else v for name, v in row.items()}, flush=True)
    if options.out is not None:
        facts = facts_of(script, options)
        figures = ["ms", "q25_ms", "q75_ms", f"ms_to_{suffix}", "peak_mb", f"peak_mb_to_{suffix}"]
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


def _compare(rows: Sequence[Row], base: str, suffix: str) -> None:
    """Add each row's time and memory as multiples of those of `base`."""
    timed = [row for row in rows if row["method"] == base and "ms" in row]
    fastest = min(timed, key=lambda row: row["ms"], default=None)
    for row in rows if fastest is not None else ():
        for name in ("ms", "peak_mb"):
            if name in row and fastest is not None:
                row[f"{name}_to_{suffix}"] = row[name] / fastest[name]
