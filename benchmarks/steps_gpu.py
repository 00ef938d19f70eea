"""Whole training steps on one GPU: BatchNorm against BCN + WS, time and peak memory; and one image at a time.

    python benchmarks/steps_gpu.py --out benchmarks/results/steps_gpu.csv
    python benchmarks/steps_gpu.py --tiny --device cpu          # the same logic in seconds, without graphs

A step is that of training_step.py. cuDNN searches for its fastest algorithms. Methods take turns, round by round.
BatchNorm's baseline is its best of eager, captured, compiled, and both; ours is compiled too. Captured steps come
first, then compiled ones as long as `--budget` seconds last, then one image at a time and eager steps.

Peak memory is the allocator's: the most that was allocated at once during a step, less what was before the method was
built, so with parameters, gradients and momenta. Of a captured step it is read during the capture, which allocates what
every replay then uses. Ratios of memory compare methods by the same route.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tables import write_csv
from training_step import (
    BN,
    BN_COMPILED,
    PLAIN,
    SHARED,
    SHARED_COMPILED,
    TINY,
    WORKLOADS,
    Method,
    TrainingStep,
    Workload,
    facts,
)

import micronorm as mn
from micronorm.bench.timing import Captured, device_ms, host_ms, repeats_for, spread, warm_up

CHUNK = 50  # times `repeats_for`'s 2 ms: how long one round of one method takes
LITERAL_STEPS = 2


def chosen_methods(weights: str) -> list[Method]:
    """Ours by `--weights`, each with recomputation too where this micronorm has it."""
    ours = {"plain": [PLAIN], "shared": [SHARED], "both": [PLAIN, SHARED]}[weights]
    if hasattr(mn, "recompute"):
        ours += [Method(f"{m.name} recompute", is_ours=True, shares=m.shares, recomputes=True) for m in ours]
    else:
        print("this micronorm has no mn.recompute: its rows are left out", flush=True)
    return [BN, *ours]


@dataclass
class Row:
    workload: Workload
    method: Method
    route: str
    what: str = "step"
    ms: tuple[float, float, float] | None = None
    img_per_s: float | None = None
    peak: int | None = None
    reserved: int | None = None
    loss: float | None = None
    fault: str = ""
    ratios: dict[str, float] = field(default_factory=dict)
    bn_best: str = ""


# --- measuring --------------------------------------------------------------------------------------------------------


class Timed:
    """One method by one route, ready to be timed, with the peak of its memory."""

    def __init__(
        self, workload: Workload, method: Method, route: str, device: torch.device, step: TrainingStep | None = None
    ) -> None:
        self.row = Row(workload, method, route)
        self.device = device
        self.taken: list[float] = []
        try:
            self.step = TrainingStep(workload, method, device) if step is None else step
            self._prepare(route, self.step.held)
        except Exception as error:  # one method's failure leaves the others their figures
            self.row.fault = " ".join(f"{type(error).__name__}: {error}".split())[:300]

    def _prepare(self, route: str, held: tuple[int, int]) -> None:
        call: Callable[[], object] = self.step
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            warm_up(self.step)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if route == "graph":
            self.step.optimizer.zero_grad(set_to_none=True)
            call = Captured(self.step)
        else:
            self.step()
        if on_gpu:
            torch.cuda.synchronize()
            self.row.peak = torch.cuda.max_memory_allocated() - held[0]
            self.row.reserved = torch.cuda.max_memory_reserved() - held[1]
        clock = device_ms if on_gpu else host_ms
        one = min(clock(call) for _ in range(2))
        repeats = min(50, max(1, repeats_for(one / CHUNK)))
        self.timer = lambda: clock(call, repeats)

    def finish(self) -> Row:
        if not self.row.fault:
            found = spread(self.taken)
            self.row.ms = (found.q25, found.median, found.q75)
            self.row.img_per_s = 1e3 * self.row.workload.samples / found.median
            self.row.loss = float(self.step.loss)
            if self.row.loss != self.row.loss:
                self.row.fault = "the loss is not a number"
        return self.row


def measure(
    workload: Workload,
    methods: Sequence[Method],
    route: str,
    device: torch.device,
    rounds: int,
    *,
    step: TrainingStep | None = None,
) -> Iterator[Row]:
    """All methods by one route, in turn; routes one after the other, since every model alive costs each step a look.

    A `step` that is there already, one method's, is taken in place of a new one: compiled code is made once.
    """
    every = [Timed(workload, method, route, device, step) for method in methods]
    sound = [timed for timed in every if not timed.row.fault]
    for _ in range(rounds):
        for timed in sound:
            timed.taken.append(timed.timer())
    for timed in every:
        yield timed.finish()
        handle = None if timed.row.fault else timed.step.handle
        if handle is not None and hasattr(handle, "report"):
            print(f"recompute: {' '.join(str(handle.report()).split())[:300]}", flush=True)


def literal(workload: Workload, method: Method, routes: Sequence[str], device: torch.device) -> Iterator[Row]:
    """One image per forward and backward, the step of `workload.samples` of them: from Python, and by replays."""
    clock = device_ms if device.type == "cuda" else host_ms
    for route in routes:
        row = Row(workload, method, route, what="literal")
        try:
            step = TrainingStep(workload, method, device)
            call = _replayed_literal(step) if route == "graph" else step.literal
            call()
            taken = [clock(call) for _ in range(LITERAL_STEPS)]
            row.ms = (min(taken), sum(taken) / len(taken), max(taken))
            row.img_per_s = 1e3 * workload.samples / row.ms[1]
        except Exception as error:
            row.fault = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        yield row


def _replayed_literal(step: TrainingStep) -> Callable[[], None]:
    """A graph of one image's pass, replayed for each; it adds to the gradients, which the update clears."""
    image, label = step.images[:1].clone(), step.labels[:1].clone()
    warm_up(step.literal, 1)  # momenta, and gradients to add to
    one_image = Captured(lambda: step.backward(image, label))
    update = Captured(lambda: (step.optimizer.step(), step.optimizer.zero_grad(set_to_none=False)))

    def call() -> None:
        for k in range(step.workload.samples):
            image.copy_(step.images[k : k + 1])
            label.copy_(step.labels[k : k + 1])
            one_image()
        update()

    return call


# --- ratios, and what is printed and written --------------------------------------------------------------------------


def compare(rows: Sequence[Row]) -> None:
    """Ratios within one workload: time to BatchNorm's best, time and peak to BatchNorm by the same route."""
    steps = [row for row in rows if row.what == "step" and row.ms is not None]
    bn = [row for row in steps if not row.method.is_ours]
    best = min(bn, key=_median, default=None)
    for row in steps:
        same = next((r for r in bn if r.method == BN and r.route == row.route), None)
        row.ratios = {}
        if best is not None:
            row.ratios["to_bn_best"] = _median(row) / _median(best)
            row.bn_best = f"{best.method.name}, {best.route}"
        if same is not None:
            row.ratios["to_bn"] = _median(row) / _median(same)
            if row.peak and same.peak:
                row.ratios["peak_to_bn"] = row.peak / same.peak
    batched = [row for row in steps if row.method.is_ours and not row.method.recomputes]
    for row in rows:
        if row.what == "literal" and row.ms is not None and batched:
            row.ratios = {"batched_over_literal": _median(row) / min(map(_median, batched))}


def _median(row: Row) -> float:
    assert row.ms is not None
    return row.ms[1]


def line(row: Row) -> str:
    what = f"{row.workload.name:<26}{row.what:<9}{row.method.name:<26}{row.route:<7}"
    if row.ms is None or row.fault:
        return f"{what}{row.fault}"
    q25, median, q75 = row.ms
    peak = "" if row.peak is None else f"  peak {row.peak / 1e6:,.0f} MB"
    ratios = "".join(f"  {name} {value:.3f}" for name, value in row.ratios.items())
    return f"{what}{median:>10.3f} ms ({q25:.3f} to {q75:.3f}) {row.img_per_s:>9.1f} img/s{peak}{ratios}"


def verdicts(rows: Sequence[Row], workload: Workload) -> list[str]:
    """What the captured steps of ours say of the targets; eager ones where nothing was captured."""
    route = "graph" if any(row.route == "graph" for row in rows) else "eager"
    lines = []
    for row in rows:
        if not row.method.is_ours or row.what != "step" or row.route != route:
            continue
        peak_target = workload.recompute_target if row.method.recomputes else workload.memory_target
        for name, most in (("to_bn_best", workload.time_target), ("peak_to_bn", peak_target)):
            value = row.ratios.get(name)
            if most is not None and value is not None:
                word = "met" if value <= most else "missed"
                lines.append(
                    f"{workload.name}, {row.method.name}, {route}: {name} {value:.3f}, target {most:g}: {word}"
                )
    return lines


def record(row: Row) -> dict[str, object]:
    q25, median, q75 = row.ms or (None, None, None)
    ratios = ("to_bn_best", "to_bn", "peak_to_bn", "batched_over_literal")

    def number(value: float | None, digits: int = 3) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    return {
        "what": row.what,
        "network": row.workload.network,
        "samples": row.workload.samples,
        "size": "x".join(map(str, row.workload.size)),
        "dtype": "bfloat16",
        "layout": "nhwc",
        "method": row.method.name,
        "route": row.route,
        "ms": number(median),
        "q25_ms": number(q25),
        "q75_ms": number(q75),
        "img_per_s": number(row.img_per_s, 1),
        **{name: number(row.ratios.get(name), 4) for name in ratios},
        "bn_best": row.bn_best,
        "peak_mb": number(None if row.peak is None else row.peak / 1e6, 1),
        "reserved_mb": number(None if row.reserved is None else row.reserved / 1e6, 1),
        "loss": number(row.loss),
        "fault": row.fault,
    }


def _without_out(arguments: Sequence[str]) -> list[str]:
    """The arguments without --out, which names a path."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != "--out" and not argument.startswith("--out="):
            kept.append(argument)
        skip = argument == "--out"
    return kept


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [workload.name for workload in (*WORKLOADS, *TINY)]
    parser.add_argument("--workload", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--weights", choices=("plain", "shared", "both"), default="both", help="how WS is computed")
    parser.add_argument("--route", nargs="+", choices=("graph", "eager"), default=["graph", "eager"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled forms out")
    parser.add_argument("--no-literal", action="store_true", help="leave out one image at a time")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds after which nothing more is compiled")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small networks and images, to try the script")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    if options.device == "cpu":
        options.route = ["eager"]
    elif not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --device cpu --tiny tries the script without one")
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2 for quartiles, got {options.rounds}")
    return options


def main() -> None:
    options = parse_arguments()
    device = torch.device(options.device)
    torch.backends.cudnn.benchmark = True
    started = time.perf_counter()
    workloads = [w for w in (TINY if options.tiny else WORKLOADS) if not options.workload or w.name in options.workload]
    rows: dict[Workload, list[Row]] = {workload: [] for workload in workloads}
    command = shlex.join(["python", "benchmarks/steps_gpu.py", *_without_out(sys.argv[1:])])

    def take(workload: Workload, found: Iterator[Row]) -> None:
        new = list(found)
        rows[workload] += new
        compare(rows[workload])
        print("\n".join(map(line, new)), flush=True)
        if options.out is not None:
            known = facts(device, command)
            write_csv(options.out, [{**record(row), **known} for members in rows.values() for row in members])

    methods = chosen_methods(options.weights)
    first, *others = options.route
    for workload in workloads:
        take(workload, measure(workload, methods, first, device, options.rounds))
    for workload in () if options.no_compile else workloads:
        if time.perf_counter() - started > options.budget:
            print(f"{workload.name}: not compiled, {options.budget:.0f} s are over", flush=True)
            continue
        for method in (BN_COMPILED, SHARED_COMPILED):
            torch.compiler.reset()
            step = TrainingStep(workload, method, device)
            for route in options.route:
                take(workload, measure(workload, [method], route, device, options.rounds, step=step))
            del step
    if workloads and not options.no_literal:
        take(workloads[0], literal(workloads[0], methods[1], options.route, device))
    for workload in workloads:
        for route in others:
            take(workload, measure(workload, methods, route, device, options.rounds))
    print()
    for workload, members in rows.items():
        print("\n".join([*map(line, members), *verdicts(members, workload)]))
    print(f"{time.perf_counter() - started:.0f} s")
    if any(row.fault and row.method.is_ours for members in rows.values() for row in members):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
