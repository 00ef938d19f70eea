"""Where two cuts of one step part: the first call, in execution order, whose inputs agree and whose outputs do not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from micronorm.check.digest import Leaf, Match, Tree, compare, leaf_at
from micronorm.check.step import Run
from micronorm.check.trace import Call


@dataclass(frozen=True)
class Point:
    """A tensor that can be read in any run: of a call's inputs or output, by module and number of the call."""

    name: str
    index: int
    side: Literal["inputs", "output"]
    path: tuple[str | int, ...]

    def read(self, run: Run, part: int = 0) -> Leaf | None:
        """The tensor in one part of a run; None where that run has none."""
        calls = run.traces[part].by_name.get(self.name, []) if part < len(run.traces) else []
        return leaf_at(getattr(calls[self.index], self.side), self.path) if self.index < len(calls) else None


@dataclass(frozen=True)
class Fault:
    """A call to blame, and the tensor that shows it.

    `point` is None where the loss's own value shows it. It is an input of a child where code of the call itself,
    between its children, is at fault.
    """

    call: Call
    match: Match
    point: Point | None


class Comparison:
    """A run in one piece against another run of the same samples, call by call."""

    def __init__(self, whole: Run, other: Run, *, tol: float, noise: Run | None = None) -> None:
        self.whole, self.other, self.tol, self.noise = whole, other, tol, noise

    def first_fault(self) -> Fault | None:
        """The first call to blame, innermost; the loss function if every module is right and their values are not."""
        return self.first_faulty_call() or self._loss(self.whole.traces[0].root)

    def first_faulty_call(self) -> Fault | None:
        """As `first_fault`, by what modules were given and gave alone: the other run may have ended in mid-forward."""
        return self._inside(self.whole.traces[0].root)

    def at(self, point: Point) -> Match | None:
        """How the inputs or the output that a point belongs to compare; None where the calls do not match up."""
        calls = self.whole.traces[0].by_name.get(point.name, [])
        if point.index >= len(calls) or not self._is_matched(calls[point.index]):
            return None
        return self._match(calls[point.index], point.side)

    def _inside(self, call: Call) -> Fault | None:
        for child in call.children:
            if not self._is_matched(child):  # called more or less often in the other cut: look through it
                fault = self._inside(child)
                if fault is not None:
                    return fault
                continue
            match = self._match(child, "inputs")
            if match.status != "agree":  # between its children the call's own code did it
                return Fault(call, match, Point(child.name, child.index, "inputs", match.path))
            if not all(call.ended for call in self._others(child)[0]):  # a part raised in it: the fault is before that
                return self._inside(child)
            match = self._match(child, "output")
            if match.status != "agree":
                return self._inside(child) or Fault(child, match, Point(child.name, child.index, "output", match.path))
        return None

    def _loss(self, root: Call) -> Fault | None:
        whole, parts = sum(self.whole.sums), self.other.sums
        scale = max(abs(whole), sum(map(abs, parts)))
        error = abs(whole - sum(parts)) / scale if scale else 0.0
        allowed = self.tol
        if self.noise is not None and scale:
            allowed += 64 * abs(sum(self.noise.sums) - whole) / scale
        return None if error <= allowed else Fault(root, Match("differ", error, "sum"), None)

    def _counts(self, name: str) -> tuple[int, list[int]]:
        return len(self.whole.traces[0].by_name[name]), [len(t.by_name.get(name, ())) for t in self.other.traces]

    def _is_matched(self, call: Call) -> bool:
        whole, parts = self._counts(call.name)
        return all(n == whole for n in parts) or sum(parts) == whole

    def _others(self, call: Call) -> tuple[list[Call], Sequence[int]]:
        """The calls of the other run that a matched call stands for, and the samples of each."""
        traces = self.other.traces
        whole, counts = self._counts(call.name)
        if all(n == whole for n in counts):
            return [trace.by_name[call.name][call.index] for trace in traces], self.other.sizes[: len(traces)]
        # one call per sample, in a loop: the calls of the parts after one another
        return [[c for trace in traces for c in trace.by_name.get(call.name, ())][call.index]], [1]

    def _match(self, call: Call, side: Literal["inputs", "output"]) -> Match:
        others, sizes = self._others(call)
        tree: Tree = getattr(call, side)
        return compare(tree, [getattr(o, side) for o in others], sizes, tol=self.tol, noise=self._quiet(call, side))

    def _quiet(self, call: Call, side: str) -> Tree:
        if self.noise is None or not self.noise.traces:
            return None
        calls = self.noise.traces[0].by_name.get(call.name, [])
        return getattr(calls[call.index], side) if call.index < len(calls) else None
