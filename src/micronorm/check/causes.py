"""Find the first call that returns another output for a sample in another cut, and the cause by experiments."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal

from torch import nn

from micronorm.check.report import Finding, finding
from micronorm.check.runs import Experiment, StepRun
from micronorm.check.trace import ROUNDING, Call, Match, compare
from micronorm.nn.batch import GhostBatchNorm
from micronorm.nn.batch_renorm import BatchRenorm
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.switchable import SwitchableNorm
from micronorm.ops.private_api import BatchNormBase

_SAME = 1e-8  # experiments compare values that differ by far more than this, or only by rounding
Side = Literal["inputs", "output"]


def uses_batch_statistics(module: nn.Module | None) -> bool:
    """Return whether this is a normalization that uses batch statistics in training mode."""
    if isinstance(module, BatchChannelNorm):
        return module.statistics != "step"
    return isinstance(module, (BatchNormBase, GhostBatchNorm, SwitchableNorm, BatchRenorm))


@dataclass(frozen=True)
class Fault:
    """The call at fault, and which tensor shows it: `match.path` in the inputs or output of `seen`.

    `seen` is a child of the call if the call's own code between two children is at fault. It is None if the value of
    the loss shows the fault.
    """

    call: Call
    match: Match
    seen: Call | None = None
    side: Side = "output"

    def __str__(self) -> str:
        if self.seen is None:
            return "its inputs agree, but its parts do not add up to the whole"
        if self.side == "inputs":
            return f"its inputs agree, but what it passes to {self.seen.name} does not"
        return f"its inputs agree, but its output{''.join(f'[{key!r}]' for key in self.match.path)} does not"

    def value_in(self, run: StepRun) -> float:
        """Return the number that shows the fault in a run of one part, or NaN if that run has none."""
        if run.error is not None:
            return math.nan
        if self.seen is None:
            return run.sums[0]
        try:
            tree: Any = getattr(run.traces[0].by_name[self.seen.name][self.seen.index], self.side)
            for key in self.match.path:
                tree = tree[key]
            return tree.first.flatten()[0].item()
        except (LookupError, TypeError, AttributeError):  # the call is missing, or returns something else
            return math.nan


@dataclass(frozen=True)
class Comparison:
    """Compare a run in one piece with another run of the same samples, call by call, and explain what differs.

    An experiment costs a forward or two of a copy of the model. A tensor may differ by what it moved in the run
    `noise`, whose parameters are perturbed.
    """

    experiment: Experiment
    whole: StepRun
    other: StepRun
    tol: float
    noise: StepRun | None = None

    # --- the first call at fault -------------------------------------------------------------------------------------

    def first_fault(self) -> Fault | None:
        """Return the first, innermost call at fault, or the loss if all modules agree and the loss does not."""
        root = self.whole.traces[0].root
        return self._fault_inside(root) or self._loss_fault(root)

    def _fault_inside(self, call: Call) -> Fault | None:
        for child in call.children:
            others = self._counterparts(child)
            if others is None:  # called a different number of times: compare what it calls
                if fault := self._fault_inside(child):
                    return fault
                continue
            match = self._match(child, "inputs")
            if match.status != "agree":  # the code of `call` between its children is at fault
                return Fault(call, match, child, "inputs")
            if not all(other.ended for other in others[0]):  # a part raised inside this child
                return self._fault_inside(child)
            match = self._match(child, "output")
            if match.status != "agree":
                return self._fault_inside(child) or Fault(child, match, child)
        return None

    def _loss_fault(self, root: Call) -> Fault | None:
        whole, parts = sum(self.whole.sums), self.other.sums
        scale = max(abs(whole), sum(map(abs, parts)))
        error = abs(whole - sum(parts)) / scale if scale else 0.0
        allowed = self.tol
        if self.noise is not None and scale:
            allowed += ROUNDING * abs(sum(self.noise.sums) - whole) / scale
        return None if error <= allowed else Fault(root, Match("differ", error))

    def _counterparts(self, call: Call) -> tuple[list[Call], Sequence[int]] | None:
        """Return the calls of the other run that correspond to `call`, and the samples of each, or None."""
        expected = len(self.whole.traces[0].by_name[call.name])
        calls = [trace.by_name.get(call.name, []) for trace in self.other.traces]
        if all(len(of_part) == expected for of_part in calls):
            return [of_part[call.index] for of_part in calls], self.other.sizes[: len(calls)]
        # One call per sample, in a loop: take the calls of all parts in order.
        return ([[*chain(*calls)][call.index]], [1]) if sum(map(len, calls)) == expected else None

    def _match(self, call: Call, side: Side) -> Match:
        others, sizes = self._counterparts(call) or ([], [])
        perturbed = [] if self.noise is None else self.noise.traces[0].by_name.get(call.name, [])
        noise = getattr(perturbed[call.index], side) if call.index < len(perturbed) else None
        return compare(getattr(call, side), [getattr(o, side) for o in others], sizes, tol=self.tol, noise=noise)

    # --- its cause ---------------------------------------------------------------------------------------------------

    def explain(self, fault: Fault) -> Finding:
        """Return the finding for a fault."""
        evidence: dict[str, Any] = {"seen": str(fault)}
        if fault.match.status != "shape":
            evidence["relative error"] = fault.match.error
        cause, more = self._cause(fault)
        return finding(fault.call.name, fault.call.type, cause, **evidence, **more)

    def explain_error(self) -> Finding:
        """Return the finding for a part that raised an exception; an earlier call may be at fault."""
        fresh = dataclasses.replace(self, other=self._fresh, noise=None)  # each part runs until it raises
        fault = fresh._fault_inside(self.whole.traces[0].root)
        if fault is not None:
            return fresh.explain(fault)
        trace, error = self.other.traces[-1], self.other.error
        call = trace.open[-1]
        cause = (
            "batch_statistics" if uses_batch_statistics(self.experiment.modules.get(call.name)) else "fails_when_cut"
        )
        what = f"raises with {trace.samples} of {len(self.whole.cut[0])} samples"
        return finding(call.name, call.type, cause, **{what: f"{type(error).__name__}: {error}"})

    @cached_property
    def _fresh(self) -> StepRun:
        """Return the other run with a fresh copy of the model for each part."""
        return self.experiment.run(self.other.cut, backward=False, fresh=True)

    def _cause(self, fault: Fault) -> tuple[str, dict[str, Any]]:
        draws = fault.call.draws or any(c.draws for trace in self.other.traces for c in trace.calls(fault.call.name))
        if draws and self._depends_on_the_seed(fault):
            return "randomness", {"random numbers drawn during the call": True}
        if self._agrees_when_fresh(fault):
            return "state", {"with a fresh copy for each part": "agrees"}
        if fault.seen is None:
            return self._reduction(fault)
        if uses_batch_statistics(self.experiment.modules.get(fault.call.name)):
            alike = sum(map(uses_batch_statistics, self.experiment.modules.values()))
            return "batch_statistics", {"modules of this kind in the model": alike}
        if fault.match.status == "shape":
            return _shapes(fault.match)
        if {math.prod(shape) for shape in (fault.match.whole, *fault.match.parts)} == {1}:
            return self._reduction(fault)
        return "mixes_samples", {}

    def _depends_on_the_seed(self, fault: Fault) -> bool:
        """Return whether another seed changes the whole or its first part. A choice of one draws without effect."""
        return any(self._seed_changes(samples, fault) for samples in (self.whole.cut[0], self.other.cut[0]))

    def _seed_changes(self, samples: Sequence[int], fault: Fault) -> bool:
        one, another = (self.experiment.run([samples], seed=seed, backward=False) for seed in (0, 1))
        if one.error is not None or another.error is not None:
            return True
        again = dataclasses.replace(self, whole=one, other=another, noise=None)
        if fault.seen is None:
            return again.first_fault() is not None
        calls = one.traces[0].by_name.get(fault.seen.name, [])
        if fault.seen.index >= len(calls) or again._counterparts(calls[fault.seen.index]) is None:
            return True
        return again._match(calls[fault.seen.index], fault.side).status != "agree"

    def _agrees_when_fresh(self, fault: Fault) -> bool:
        """Return whether the parts reproduce the whole if each has a fresh copy: then kept state is the cause."""
        if self._fresh.error is not None:
            return False
        fresh = dataclasses.replace(self, other=self._fresh)
        if fault.seen is None:
            return fresh.first_fault() is None
        return fresh._counterparts(fault.seen) is not None and fresh._match(fault.seen, fault.side).status == "agree"

    def _reduction(self, fault: Fault) -> tuple[str, dict[str, Any]]:
        """Explain a number per part that does not add up: an average, or another function of the samples together."""
        everyone = list(range(len(self.whole.cut[0])))
        cuts = (everyone, everyone + everyone, *([i] for i in everyone))
        whole, doubled, *singles = (fault.value_in(self.experiment.run([cut], backward=False)) for cut in cuts)
        evidence = {"whole": whole, "sum of single samples": sum(singles), "every sample twice": doubled}
        slack = _SAME * max(map(abs, singles))
        # A mean, whatever the weights of the samples: pixels that are not ignored, for example.
        is_mean = abs(doubled - whole) <= slack and min(singles) - slack <= whole <= max(singles) + slack
        return "averaged_loss" if is_mean else "cross_sample_loss", evidence


def _shapes(match: Match) -> tuple[str, dict[str, Any]]:
    """Explain shapes that differ: padding, or a mixture of samples."""
    whole, parts = match.whole, match.parts
    evidence = {"shape in the whole": whole, "shapes in the parts": list(parts)}
    if whole and len({len(shape) for shape in (whole, *parts)}) == 1:
        # The batch axis is longer in the whole. A padded axis is as long as in the largest part.
        largest = map(max, zip(*parts, strict=True))
        if sum(a != b for a, b in zip(whole, largest, strict=True)) <= 1:
            return "padding", evidence
    return "mixes_samples", evidence
