"""Find the first call that returns another output for a sample in another cut, and the cause by experiments."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from micronorm.check.compare import Leaf, Match, Tree, TreePath, aligned, compare, relative
from micronorm.check.inputs import named_members
from micronorm.check.report import Finding, finding
from micronorm.check.runs import Experiment, Run
from micronorm.check.trace import Call
from micronorm.nn.batch import GhostBatchNorm
from micronorm.nn.batch_renorm import BatchRenorm
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.switchable import SwitchableNorm
from micronorm.ops.private_api import BatchNormBase

_SAME = 1e-8  # experiments compare values that differ by far more than this, or only by rounding
Side = Literal["inputs", "output"]


# --- the first call at fault -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """The address of a tensor in any run: a module, the number of its call, inputs or output, and the path there."""

    name: str
    index: int
    side: Side
    path: TreePath

    def read(self, run: Run) -> Leaf | None:
        """Return the tensor in the first part of a run, or None if that part has none."""
        calls = run.traces[0].by_name.get(self.name, [])
        tree: Tree = getattr(calls[self.index], self.side) if self.index < len(calls) else None
        for key in self.path:
            if isinstance(tree, list) and isinstance(key, int):
                tree = tree[key] if key < len(tree) else None
            else:
                tree = tree.get(str(key)) if isinstance(tree, dict) else None
        return tree if isinstance(tree, Leaf) else None


@dataclass(frozen=True)
class Fault:
    """The call at fault and the tensor that shows it.

    `point` is None if the value of the loss shows the fault. It is an input of a child if the call's own code between
    two children is at fault.
    """

    call: Call
    match: Match
    point: Point | None


class Comparison:
    """Compare a run in one piece with another run of the same samples, call by call."""

    def __init__(self, whole: Run, other: Run, *, tol: float, noise: Run | None = None) -> None:
        self.whole, self.other, self.tol, self.noise = whole, other, tol, noise

    def first_fault(self) -> Fault | None:
        """Return the first, innermost call at fault, or the loss if all modules agree and the loss does not."""
        return self.first_faulty_call() or self._loss_fault(self.whole.traces[0].root)

    def first_faulty_call(self) -> Fault | None:
        """Return the first call at fault. The other run may have stopped in the middle of a forward."""
        return self._fault_inside(self.whole.traces[0].root)

    def agrees_at(self, point: Point) -> bool:
        """Return whether the inputs or the output at this point agree. False if the calls do not correspond."""
        calls = self.whole.traces[0].by_name.get(point.name, [])
        if point.index >= len(calls) or not self._corresponds(calls[point.index]):
            return False
        return self._match(calls[point.index], point.side).status == "agree"

    def _fault_inside(self, call: Call) -> Fault | None:
        for child in call.children:
            if not self._corresponds(child):  # called a different number of times: compare what it calls
                fault = self._fault_inside(child)
                if fault is not None:
                    return fault
                continue
            match = self._match(child, "inputs")
            if match.status != "agree":  # the code of `call` between its children is at fault
                return Fault(call, match, Point(child.name, child.index, "inputs", match.path))
            if not all(other.ended for other in self._counterparts(child)[0]):  # a part raised inside this child
                return self._fault_inside(child)
            match = self._match(child, "output")
            if match.status != "agree":
                found = Fault(child, match, Point(child.name, child.index, "output", match.path))
                return self._fault_inside(child) or found
        return None

    def _loss_fault(self, root: Call) -> Fault | None:
        whole, parts = sum(self.whole.sums), self.other.sums
        scale = max(abs(whole), sum(map(abs, parts)))
        error = abs(whole - sum(parts)) / scale if scale else 0.0
        allowed = self.tol
        if self.noise is not None and scale:
            allowed += 64 * abs(sum(self.noise.sums) - whole) / scale
        return None if error <= allowed else Fault(root, Match("differ", error), None)

    def _counts(self, name: str) -> tuple[int, list[int]]:
        return len(self.whole.traces[0].by_name[name]), [len(t.by_name.get(name, ())) for t in self.other.traces]

    def _corresponds(self, call: Call) -> bool:
        whole, parts = self._counts(call.name)
        return all(n == whole for n in parts) or sum(parts) == whole

    def _counterparts(self, call: Call) -> tuple[list[Call], Sequence[int]]:
        """Return the calls of the other run that correspond to `call`, and the samples of each."""
        traces = self.other.traces
        whole, counts = self._counts(call.name)
        if all(n == whole for n in counts):
            return [trace.by_name[call.name][call.index] for trace in traces], self.other.sizes[: len(traces)]
        # One call per sample, in a loop: take the calls of all parts in order.
        return [[c for trace in traces for c in trace.by_name.get(call.name, ())][call.index]], [1]

    def _match(self, call: Call, side: Side) -> Match:
        others, sizes = self._counterparts(call)
        tree: Tree = getattr(call, side)
        noise: Tree = None
        if self.noise is not None and self.noise.traces:
            calls = self.noise.traces[0].by_name.get(call.name, [])
            noise = getattr(calls[call.index], side) if call.index < len(calls) else None
        return compare(tree, [getattr(o, side) for o in others], sizes, tol=self.tol, noise=noise)


# --- its cause -------------------------------------------------------------------------------------------------------


def uses_batch_statistics(module: nn.Module | None) -> bool:
    """Return whether this is a normalization that uses batch statistics in training mode."""
    if isinstance(module, BatchChannelNorm):
        return module.statistics != "step"
    return isinstance(module, (BatchNormBase, GhostBatchNorm, SwitchableNorm, BatchRenorm))


@dataclass
class CauseFinder:
    """Experiments that find the cause of a fault. Each one costs a forward or two of a copy of the model."""

    experiment: Experiment
    whole: Run
    tol: float
    noise: Run | None = None

    def __post_init__(self) -> None:
        names = named_members(self.experiment.model, self.experiment.loss)
        self.modules = {name: module for module, name in names.items()}
        self.samples = len(self.whole.cut[0])

    def explain(self, fault: Fault, other: Run) -> Finding:
        """Return the finding for a fault in which the run `other` differs from the whole run."""
        evidence: dict[str, object] = {"seen": _describe(fault)}
        if fault.match.status != "shape":
            evidence["relative error"] = fault.match.error
        cause, more = self._cause(fault, other)
        return finding(fault.call.name, fault.call.type, cause, **evidence, **more)

    def explain_error(self, run: Run) -> Finding:
        """Return the finding for a part that raised an exception; an earlier call may be at fault."""
        fresh = self.experiment.run(run.cut, backward=False, fresh=True)  # each part runs until it raises
        fault = Comparison(self.whole, fresh, tol=self.tol).first_faulty_call()
        if fault is not None:
            return self.explain(fault, fresh)
        call = run.traces[-1].open[-1]
        known = uses_batch_statistics(self.modules.get(call.name))
        cause = "batch_statistics" if known else "fails_when_cut"
        samples = run.traces[-1].samples
        message = f"{type(run.error).__name__}: {run.error}"
        return finding(call.name, call.type, cause, **{f"raises with {samples} of {self.samples} samples": message})

    def _cause(self, fault: Fault, other: Run) -> tuple[str, dict[str, object]]:
        if fault.call.draws or any(call.draws for trace in other.traces for call in trace.calls(fault.call.name)):
            return "randomness", {"random numbers drawn during the call": True}
        if self._agrees_when_fresh(fault, other):
            return "state", {"with a fresh copy for each part": "agrees"}
        if fault.point is None:
            return self._reduction(None)
        module = self.modules.get(fault.call.name)
        if uses_batch_statistics(module):
            alike = sum(uses_batch_statistics(m) for m in self.modules.values())
            return "batch_statistics", {"modules of this kind in the model": alike}
        if fault.match.status == "shape":
            return self._shapes(fault)
        if {math.prod(shape) for shape in (fault.match.whole, *fault.match.parts)} == {1}:
            return self._reduction(fault.point)
        return self._mixture(fault.point, fault, other)

    def _agrees_when_fresh(self, fault: Fault, other: Run) -> bool:
        """Return whether the parts reproduce the whole if each has a fresh copy: then kept state is the cause."""
        fresh = self.experiment.run(other.cut, backward=False, fresh=True)
        if fresh.error is not None:
            return False
        comparison = Comparison(self.whole, fresh, tol=self.tol, noise=self.noise)
        if fault.point is None:
            return comparison.first_fault() is None
        return comparison.agrees_at(fault.point)

    def _shapes(self, fault: Fault) -> tuple[str, dict[str, object]]:
        whole, parts = fault.match.whole, fault.match.parts
        evidence: dict[str, object] = {"shape in the whole": whole, "shapes in the parts": list(parts)}
        ranks = {len(s) for s in (whole, *parts)}
        if len(ranks) == 1 and whole:
            largest = tuple(max(s[a] for s in parts) for a in range(len(whole)))
            # The batch axis is longer in the whole. A padded axis is as long as in the largest part.
            if sum(w != m for w, m in zip(whole, largest, strict=True)) <= 1:
                return "padding", evidence
        return "mixes_samples", evidence

    def _reduction(self, point: Point | None) -> tuple[str, dict[str, object]]:
        """Explain a number per part that does not add up: an average, or a term between samples."""
        everyone = list(range(self.samples))

        def value(indices: list[int]) -> float:
            run = self.experiment.run([indices], backward=False)
            if run.error is not None:
                return math.nan
            if point is None:
                return run.sums[0]
            leaf = point.read(run)
            return math.nan if leaf is None else leaf.first.flatten()[0].item()

        whole, doubled = value(everyone), value(everyone + everyone)
        singles = [value([i]) for i in everyone]
        if not whole:
            return "cross_sample_loss", {"whole": whole, "sum of single samples": sum(singles)}
        evidence: dict[str, object] = {
            "sum of single samples / whole": sum(singles) / whole,
            "every sample twice / whole": doubled / whole,
        }
        if _close(doubled, whole) and _is_weighted_mean(value, whole, singles):
            return "averaged_loss", evidence
        power = math.log2(doubled / whole) if doubled / whole > 0 else math.nan
        if not _close(power, 1) and _close(sum(singles) / whole, self.samples ** (1 - power)):
            return "batch_size", {**evidence, "as a power of the number of samples": power - 1}
        return "cross_sample_loss", evidence

    def _mixture(self, point: Point, fault: Fault, other: Run) -> tuple[str, dict[str, object]]:
        moved = self._with_other_companions(point)
        evidence: dict[str, object] = {} if moved is None else {"relative change with other companions": moved}
        if moved is not None and moved <= self.tol:
            return "batch_size", evidence
        if self._agrees_in_eval(point, fault.call.name, other):
            return "batch_statistics", {**evidence, "in eval mode": "agrees"}
        return "mixes_samples", evidence

    def _with_other_companions(self, point: Point) -> float | None:
        """Return how much the first half of the samples changes when copies of it replace the second half."""
        n, half = self.samples, self.samples // 2
        run = self.experiment.run([[i % half for i in range(n)]], backward=False)
        whole, leaf = point.read(self.whole), point.read(run) if run.error is None else None
        if whole is None or leaf is None:
            return None
        for axis in (0, 1):
            pair = aligned(whole, [leaf], [n], f"axis {axis}")
            if pair is not None and len(whole.shape) > axis and whole.shape[axis] % n == 0:
                kept = len(pair[0]) * half // n
                return relative(pair[0][:kept], pair[1][:kept])
        return None

    def _agrees_in_eval(self, point: Point, name: str, other: Run) -> bool:
        module = self.modules.get(name)
        if module is None or not any(b.is_floating_point() for b in module.buffers(recurse=False)):
            return False  # the module has no buffers that could replace batch statistics
        if name.startswith("loss."):
            return False
        everyone = list(range(self.samples))
        run, cut = (self.experiment.run(c, backward=False, evaluating=name) for c in ([everyone], other.cut))
        if run.error is not None or cut.error is not None:
            return False
        return Comparison(run, cut, tol=self.tol).agrees_at(point)


def _describe(fault: Fault) -> str:
    if fault.point is None:
        return "its inputs agree, but its parts do not add up to the whole"
    term = "".join(f"[{step!r}]" for step in fault.point.path)
    if fault.point.side == "output":
        return f"its inputs agree, but its output{term} does not"
    return f"its inputs agree, but what it passes to {fault.point.name} does not"


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= _SAME * max(abs(a), abs(b))


def _is_weighted_mean(value: Callable[[list[int]], float], whole: float, singles: list[float]) -> bool:
    """Return whether the whole is a weighted mean of the single samples' values.

    Pairs of samples give the weights: a mean over pixels weighs a sample by its pixels. With a term between samples,
    the value of a pair is no mean of its two values, or the weights do not reproduce the whole.
    """
    high = max(range(len(singles)), key=lambda i: singles[i])
    low = min(range(len(singles)), key=lambda i: singles[i])
    if not all(map(math.isfinite, singles)):
        return False
    if _close(singles[high], singles[low]):
        return _close(whole, singles[low])

    def weight(j: int, anchor: int, anchor_weight: float) -> float:
        pair = value([anchor, j])
        apart = pair - singles[j]
        return anchor_weight * (singles[anchor] - pair) / apart if apart else math.nan

    weights = {high: 1.0}
    weights[low] = weight(low, high, 1.0)
    for j in range(len(singles)):
        if j not in weights:
            anchor = high if singles[high] - singles[j] >= singles[j] - singles[low] else low
            weights[j] = weight(j, anchor, weights[anchor])
    if not all(w > 0 for w in weights.values()):  # NaN is not above 0 either
        return False
    mean = sum(w * singles[j] for j, w in weights.items()) / sum(weights.values())
    return abs(mean - whole) <= 1e-6 * max(map(abs, singles))  # the weights are ratios of small differences
