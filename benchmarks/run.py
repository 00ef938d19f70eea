"""Norm + ReLU on the CPU, forward and backward: time and memory of our layer beside its peers. See README.md."""

import argparse
import csv
import datetime
import os
import platform
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from cases import CASES, Case, parse_case
from peers import METHODS, RATIOS, Method, groups_for
from torch import Tensor, nn

import micronorm as mn

LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
WARM_UP = 3  # rounds: the first calls allocate, and the estimates leave (0, 1)
SEED = 0
QUIET = 0.1  # cores busy elsewhere, up to which times are worth keeping


class Contestant:
    """A method's layer at one shape, with the times it took."""

    def __init__(self, method: Method, channels: int) -> None:
        self.method = method
        self.layer = method.build(channels)
        self.handle = mn.attach(self.layer) if method.is_ours else None
        self.seconds: list[float] = []

    def settle(self) -> None:
        """What an optimizer step would do between two rounds: move the estimates of "step" layers."""
        if self.handle is not None:
            self.handle.commit()


@dataclass
class Result:
    """One row: a method at a shape and a layout."""

    case: Case
    layout: str
    method: Method
    median_ms: float
    q25_ms: float
    q75_ms: float
    saved_bytes: int
    busy_elsewhere: float | None
    ratios: dict[str, float] = field(default_factory=dict)

    @property
    def saved_activations(self) -> float:
        """Bytes saved for backward as multiples of one fp32 activation."""
        n, c, h, w = self.case.shape
        return self.saved_bytes / (4 * n * c * h * w)


def forward_backward(layer: nn.Module, x: Tensor, grad_y: Tensor) -> None:
    """The timed function, the same for every method; it leaves no gradient behind."""
    y = layer(x)
    y.backward(grad_y)
    x.grad = None
    for parameter in layer.parameters():
        parameter.grad = None


def saved_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes one forward keeps for its backward: every distinct storage once, without the parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    # Storages, not addresses alone: what is held here cannot be freed and its address given to another tensor.
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return sum(storage.nbytes() for storage in saved.values())


def measure(case: Case, layout: str, *, repeats: int, order: random.Random) -> list[Result]:
    """All methods at one shape: in each round every method once, in an order drawn anew."""
    generator = torch.Generator().manual_seed(SEED)
    x, grad_y = (torch.randn(case.shape, generator=generator).to(memory_format=LAYOUTS[layout]) for _ in range(2))
    x.requires_grad_()
    contestants = [Contestant(method, case.shape[1]) for method in METHODS]
    kept = {c.method: saved_bytes(c.layer, x) for c in contestants}
    neighbours = Neighbours()
    for round_number in range(WARM_UP + repeats):
        for c in order.sample(contestants, len(contestants)):
            start = time.perf_counter()
            forward_backward(c.layer, x, grad_y)
            elapsed = time.perf_counter() - start
            c.settle()
            if round_number >= WARM_UP:
                c.seconds.append(elapsed)
    busy = neighbours.cores()
    return _with_ratios([_result(case, layout, c, kept[c.method], busy) for c in contestants])


def _result(case: Case, layout: str, contestant: Contestant, kept: int, busy: float | None) -> Result:
    q25, median, q75 = statistics.quantiles((1e3 * s for s in contestant.seconds), n=4, method="inclusive")
    return Result(case, layout, contestant.method, median, q25, q75, kept, busy)


def _with_ratios(results: list[Result]) -> list[Result]:
    median_of = {result.method: result.median_ms for result in results}
    for result in results:
        result.ratios = {name: result.median_ms / median_of[peer] for name, peer in RATIOS.items()}
    return results


def cpu_model() -> str:
    """The processor's name, without anything that tells which machine it is."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def busy_seconds() -> float | None:
    """CPU time all processes of this machine have used, summed over its cores; None where the kernel does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _iowait, *interrupts = map(int, stat.read_text().splitlines()[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


class Neighbours:
    """How many cores other processes kept busy since this was made: above a tenth or so the times mean little."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.machine, self.own = busy_seconds(), time.process_time()

    def cores(self) -> float | None:
        machine = busy_seconds()
        if machine is None or self.machine is None:
            return None
        others = (machine - self.machine) - (time.process_time() - self.own)
        return max(0.0, others / (time.perf_counter() - self.started))


def environment(args: argparse.Namespace) -> dict[str, object]:
    """What every row says of the run. The command is rebuilt from the arguments: a typed one could hold a path."""
    shapes = "".join(f" --shape {case.name}" for case in args.shape or ())
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": args.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/run.py --repeats {args.repeats} --threads {args.threads} "
        f"--memory-format {args.memory_format}{shapes}",
    }


def csv_row(result: Result, run: dict[str, object], *, repeats: int) -> dict[str, object]:
    return {
        "shape": result.case.name,
        "layout": result.layout,
        "method": result.method.name,
        "mode": result.method.mode,
        "groups": groups_for(result.case.shape[1]),
        "dtype": "float32",
        "rounds": repeats,
        "median_ms": f"{result.median_ms:.6f}",
        "q25_ms": f"{result.q25_ms:.6f}",
        "q75_ms": f"{result.q75_ms:.6f}",
        **{name: f"{ratio:.6f}" for name, ratio in result.ratios.items()},
        "saved_bytes": result.saved_bytes,
        "saved_activations": f"{result.saved_activations:.6f}",
        "busy_elsewhere": "" if result.busy_elsewhere is None else f"{result.busy_elsewhere:.2f}",
        **run,
    }


def write_csv(path: Path, results: Sequence[Result], run: dict[str, object], *, repeats: int) -> None:
    rows = [csv_row(result, run, repeats=repeats) for result in results]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def table(results: Sequence[Result]) -> str:
    """One shape and layout as text."""
    case, layout = results[0].case, results[0].layout
    ratio_heads = "".join(f"{'÷ ' + peer.label:>22}" for peer in RATIOS.values())
    lines = [
        f"{case.name} {layout}, {groups_for(case.shape[1])} groups: {case.reason}",
        f"{'method':<16}{'mode':<12}{'ms':>8}{'quartiles':>18}{ratio_heads}{'saved MB':>11}{'activations':>13}",
    ]
    for r in results:
        quartiles = f"{r.q25_ms:.2f} to {r.q75_ms:.2f}"
        ratios = "".join(f"{r.ratios[name]:>22.2f}" for name in RATIOS)
        lines.append(
            f"{r.method.name:<16}{r.method.mode:<12}{r.median_ms:>8.2f}{quartiles:>18}{ratios}"
            f"{r.saved_bytes / 1e6:>11.2f}{r.saved_activations:>13.3f}"
        )
    busy = results[0].busy_elsewhere
    if busy is not None and busy > QUIET:
        lines.append(f"preliminary: other processes kept {busy:.1f} cores busy")
    return "\n".join(lines)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    def shape(text: str) -> Case:
        try:
            return parse_case(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=25, metavar="N", help="timed rounds; 15 or more for the record")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--out", type=Path, help="write the rows to this CSV file; without it they are only printed")
    parser.add_argument("--memory-format", choices=[*LAYOUTS, "both"], default="both")
    parser.add_argument(
        "--shape", type=shape, action="append", metavar="NxCxHxW", help="in place of the shapes of cases.py"
    )
    args = parser.parse_args(argv)
    if args.repeats < 2:
        parser.error(f"--repeats must be at least 2 for quartiles, got {args.repeats}")
    if args.threads < 1:
        parser.error(f"--threads must be positive, got {args.threads}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    run = environment(args)
    order = random.Random(SEED)
    layouts = list(LAYOUTS) if args.memory_format == "both" else [args.memory_format]
    print(f"{run['cpu']}, {args.threads} threads, torch {run['torch']}, float32, {args.repeats} rounds\n")
    results: list[Result] = []
    for case in args.shape or CASES:
        for layout in layouts:
            rows = measure(case, layout, repeats=args.repeats, order=order)
            print(table(rows), end="\n\n", flush=True)
            results += rows
    if args.out is not None:
        write_csv(args.out, results, run, repeats=args.repeats)


if __name__ == "__main__":
    main()
