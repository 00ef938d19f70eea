"""Whole training steps on one GPU: BatchNorm against BCN + WS, time and peak memory; and one image at a time.

    python benchmarks/steps_gpu.py --out benchmarks/results/steps_gpu.csv
    python benchmarks/steps_gpu.py --tiny --device cpu          # the same logic in seconds, without graphs
    python benchmarks/steps_gpu.py --statistics step batch sequential --workload cifar-resnet110-128x32x32

A step is that of training_step.py. cuDNN searches for its fastest algorithms. Methods take turns, round by round.
BatchNorm's baseline is its best of eager, captured, compiled, and both; ours is compiled too. Captured steps are
measured first, then compiled ones until `--budget` seconds have passed, then one image at a time, then eager steps.
The report lists eager steps first. With `--statistics`, BatchNorm and these statistics of BCN are measured, with
weights that are not shared, and nothing else; the report compares the statistics with "step".

Peak memory is the most that the allocator had given out during a step, less what it had before the method was built. It
includes parameters, gradients and momenta. For a captured step it is read during the capture, which allocates what
every replay uses. Ratios of memory compare methods by the same route.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from step_rounds import facts_of
from training_step import (
    BN,
    BN_COMPILED,
    BY_STATISTICS,
    PLAIN,
    SHARED,
    SHARED_COMPILED,
    TINY,
    WORKLOADS,
    StepMethod,
    TrainingStep,
    Workload,
)

from micronorm.bench.measure import one_line
from micronorm.bench.results import number, write_csv
from micronorm.bench.timing import Captured, device_ms, host_ms, repeats_for, spread, warm_up

CHUNK = 50  # times `repeats_for`'s 2 ms: how long one round of one method takes
LITERAL_STEPS = 2
ROUTES = ("eager", "graph")
RATIOS = ("to_bn_best", "to_bn", "peak_to_bn", "batched_over_literal")


STATISTICS_TARGET = 1.15  # the time of "batch" and "sequential", as a multiple of that of "step"


def chosen_methods(weights: str, statistics: Sequence[str] | None = None) -> list[StepMethod]:
    """Return BatchNorm and ours by `--weights`, each of ours with recomputation too; or ours by `--statistics`."""
    if statistics is not None:
        return [BN, *(BY_STATISTICS[name] for name in statistics)]
    ours = {"plain": [PLAIN], "shared": [SHARED], "both": [PLAIN, SHARED]}[weights]
    again = [StepMethod(f"{m.name} recompute", is_ours=True, shares=m.shares, recomputes=True) for m in ours]
    return [BN, *ours, *again]


@dataclass
class StepTiming:
    """What was measured for one method by one route; `what` is "step", or "literal" for one image at a time."""

    workload: Workload
    method: StepMethod
    route: str
    what: str = "step"
    ms: tuple[float, float, float] | None = None
    peak: int | None = None
    reserved: int | None = None
    loss: float | None = None
    fault: str = ""
    ratios: dict[str, float] = field(default_factory=dict)
    bn_best: str = ""

    @property
    def median(self) -> float:
        assert self.ms is not None
        return self.ms[1]

    @property
    def img_per_s(self) -> float | None:
        return None if self.ms is None else 1e3 * self.workload.samples / self.median


# --- measuring --------------------------------------------------------------------------------------------------------


class Timed:
    """One method by one route, ready to be timed, with the peak of its memory."""

    def __init__(
        self, workload: Workload, method: StepMethod, route: str, device: torch.device, step: TrainingStep | None = None
    ) -> None:
        self.result = StepTiming(workload, method, route)
        self.device = device
        self.taken: list[float] = []
        try:
            self.step = TrainingStep(workload, method, device) if step is None else step
            self._prepare(route)
        except Exception as error:  # the other methods are still measured
            self.result.fault = one_line(error)

    def _prepare(self, route: str) -> None:
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
            allocated, reserved = self.step.memory_before
            self.result.peak = torch.cuda.max_memory_allocated() - allocated
            self.result.reserved = torch.cuda.max_memory_reserved() - reserved
        clock = device_ms if on_gpu else host_ms
        one = min(clock(call) for _ in range(2))
        repeats = min(50, max(1, repeats_for(one / CHUNK)))
        self.timer = lambda: clock(call, repeats)

    def finish(self) -> StepTiming:
        if not self.result.fault:
            found = spread(self.taken)
            self.result.ms = (found.q25, found.median, found.q75)
            self.result.loss = float(self.step.loss)
            if self.result.loss != self.result.loss:
                self.result.fault = "the loss is not a number"
        return self.result


def measure(
    workload: Workload,
    methods: Sequence[StepMethod],
    route: str,
    device: torch.device,
    rounds: int,
    *,
    step: TrainingStep | None = None,
) -> Iterator[StepTiming]:
    """Yield the results of all methods by one route, which take turns.

    A given `step` of one method is used instead of a new one, so that a compiled model is compiled once.
    """
    every = [Timed(workload, method, route, device, step) for method in methods]
    sound = [timed for timed in every if not timed.result.fault]
    for _ in range(rounds):
        for timed in sound:
            timed.taken.append(timed.timer())
    for timed in every:
        yield timed.finish()
        if not timed.result.fault and timed.step.recomputation is not None:
            print(f"recompute: {' '.join(str(timed.step.recomputation.report()).split())[:300]}", flush=True)


def literal(
    workload: Workload, method: StepMethod, routes: Sequence[str], device: torch.device
) -> Iterator[StepTiming]:
    """Yield the results of a step taken one image at a time: from Python, and by replays of a captured image."""
    clock = device_ms if device.type == "cuda" else host_ms
    for route in routes:
        result = StepTiming(workload, method, route, what="literal")
        try:
            step = TrainingStep(workload, method, device)
            call = _replayed_literal(step) if route == "graph" else step.literal
            call()
            taken = [clock(call) for _ in range(LITERAL_STEPS)]
            result.ms = (min(taken), sum(taken) / len(taken), max(taken))
        except Exception as error:
            result.fault = one_line(error)
        yield result


def _replayed_literal(step: TrainingStep) -> Callable[[], None]:
    """Capture one image's pass, which adds to the gradients, and the update, which clears them."""
    image, label = step.images[:1].clone(), step.labels[:1].clone()
    warm_up(step.literal, 1)  # allocates momenta and gradients
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


def compare(results: Sequence[StepTiming]) -> None:
    """Set the ratios within one workload: time to BatchNorm's best, time and peak to BatchNorm by the same route."""
    steps = [result for result in results if result.what == "step" and result.ms is not None]
    bn = [result for result in steps if not result.method.is_ours]
    best = min(bn, key=lambda result: result.median, default=None)
    for result in steps:
        same = next((r for r in bn if r.method == BN and r.route == result.route), None)
        result.ratios = {}
        if best is not None:
            result.ratios["to_bn_best"] = result.median / best.median
            result.bn_best = f"{best.method.name}, {best.route}"
        if same is not None:
            result.ratios["to_bn"] = result.median / same.median
            if result.peak and same.peak:
                result.ratios["peak_to_bn"] = result.peak / same.peak
    batched = [result.median for result in steps if result.method.is_ours and not result.method.recomputes]
    for result in results:
        if result.what == "literal" and result.ms is not None and batched:
            result.ratios = {"batched_over_literal": result.median / min(batched)}


def line(result: StepTiming) -> str:
    what = f"{result.workload.name:<26}{result.what:<9}{result.method.name:<26}{result.route:<7}"
    if result.ms is None or result.fault:
        return f"{what}{result.fault}"
    q25, median, q75 = result.ms
    peak = "" if result.peak is None else f"  peak {result.peak / 1e6:,.0f} MB"
    ratios = "".join(f"  {name} {value:.3f}" for name, value in result.ratios.items())
    return f"{what}{median:>10.3f} ms ({q25:.3f} to {q75:.3f}) {result.img_per_s:>9.1f} img/s{peak}{ratios}"


def compare_statistics(results: Sequence[StepTiming]) -> list[str]:
    """Return a line per step with other statistics than "step", with its time as a multiple of that of "step"."""
    lines = []
    for result in results:
        name = result.method.statistics
        step = next((r for r in results if r.method == PLAIN and r.route == result.route and r.what == "step"), None)
        if name != "step" and result.ms is not None and step is not None and step.ms is not None:
            ratio = result.median / step.median
            what = f'{result.workload.name}, {result.route}: "{name}" {ratio:.3f} of "step"'
            verdict = "met" if ratio <= STATISTICS_TARGET else "missed"
            lines.append(f"{what}, target {STATISTICS_TARGET}: {verdict}")
    return lines


def eager_first(results: Sequence[StepTiming]) -> list[StepTiming]:
    return sorted(results, key=lambda result: (result.what != "step", ROUTES.index(result.route)))


def record(result: StepTiming) -> dict[str, object]:
    q25, median, q75 = result.ms or (None, None, None)
    return {
        "what": result.what,
        "network": result.workload.network,
        "samples": result.workload.samples,
        "size": "x".join(map(str, result.workload.size)),
        "dtype": "bfloat16",
        "layout": "nhwc",
        "method": result.method.name,
        "route": result.route,
        "ms": number(median, 3),
        "q25_ms": number(q25, 3),
        "q75_ms": number(q75, 3),
        "img_per_s": number(result.img_per_s, 1),
        **{name: number(result.ratios.get(name), 4) for name in RATIOS},
        "bn_best": result.bn_best,
        "peak_mb": number(None if result.peak is None else result.peak / 1e6, 1),
        "reserved_mb": number(None if result.reserved is None else result.reserved / 1e6, 1),
        "loss": number(result.loss, 3),
        "fault": result.fault,
    }


# --- the command ------------------------------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [workload.name for workload in (*WORKLOADS, *TINY)]
    parser.add_argument("--workload", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--weights", choices=("plain", "shared", "both"), default="both", help="how WS is computed")
    parser.add_argument("--statistics", nargs="+", choices=list(BY_STATISTICS), help="compare these statistics alone")
    parser.add_argument("--route", nargs="+", choices=("graph", "eager"), default=["graph", "eager"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled methods")
    parser.add_argument("--no-literal", action="store_true", help="leave out one image at a time")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds after which nothing more is compiled")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small networks and images, to try the script")
    parser.add_argument("--out", type=Path, help="write the results to this CSV file")
    options = parser.parse_args(argv)
    if options.statistics is not None:
        options.no_compile = options.no_literal = True
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
    found: dict[Workload, list[StepTiming]] = {workload: [] for workload in workloads}
    facts = facts_of("steps_gpu.py", options)

    def add(workload: Workload, results: Iterator[StepTiming]) -> None:
        new = list(results)
        found[workload] = eager_first([*found[workload], *new])
        compare(found[workload])
        print("\n".join(map(line, new)), flush=True)
        if options.out is not None:
            write_csv(options.out, [{**record(result), **facts} for members in found.values() for result in members])

    methods = chosen_methods(options.weights, options.statistics)
    first, *others = options.route
    for workload in workloads:
        add(workload, measure(workload, methods, first, device, options.rounds))
    for workload in () if options.no_compile else workloads:
        if time.perf_counter() - started > options.budget:
            print(f"{workload.name}: not compiled, {options.budget:.0f} s are over", flush=True)
            continue
        for method in (BN_COMPILED, SHARED_COMPILED):
            torch.compiler.reset()
            step = TrainingStep(workload, method, device)
            for route in options.route:
                add(workload, measure(workload, [method], route, device, options.rounds, step=step))
            del step
    if workloads and not options.no_literal:
        add(workloads[0], literal(workloads[0], methods[1], options.route, device))
    for workload in workloads:
        for route in others:
            add(workload, measure(workload, methods, route, device, options.rounds))
    print()
    for members in found.values():
        print("\n".join([*map(line, members), *compare_statistics(members)]))
    print(f"{time.perf_counter() - started:.0f} s")
    if any(result.fault and result.method.is_ours for members in found.values() for result in members):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
