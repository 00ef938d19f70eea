"""`check_cuts`: run one step whole, in halves and one sample at a time, and find where the results start to differ."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from micronorm.check.causes import Comparison, Fault, uses_batch_statistics
from micronorm.check.report import CutsReport, Difference, Finding, finding
from micronorm.check.runs import Experiment, StepRun, check_batch, check_model
from micronorm.check.trace import MOST_ROUNDING, ROUNDING, Call, Leaf, deviation

# For one step, relative to each tensor's maximum, if the model computes in float64 or float32. Narrower types are
# compared at a multiple of their rounding.
_TOLERANCE = {torch.finfo(torch.float64).eps: 1e-12, torch.finfo(torch.float32).eps: 1e-5}
_HALF_EPS = 4.0
# A fault changes activations by its full size. Rounding stays below this factor times the tolerance.
_ACTIVATIONS = 100.0


def check_cuts(model: nn.Module, batch: tuple, loss: Callable[[nn.Module, tuple], Any]) -> CutsReport:
    """Check whether an optimizer step depends on how its samples are cut into micro-batches; if so, find the cause.

    The check runs one step whole, in two halves and one sample at a time, in float64, on copies of the model. It does
    not change the model, its gradients, buffers, flags and hooks, or the random states. It compares gradients, running
    estimates (after a commit) and buffers, with a tolerance of 1e-12 relative to each tensor's maximum. If they differ,
    it compares the calls of all modules sample by sample and runs experiments on the first call that differs. A model
    passes only if another random seed gives the same step.

    Args:
        model: a model in training mode, on a device that supports float64.
        batch: a tuple of tensors or lists, each indexed by sample. It needs at least two samples; six of different
            sizes are better.
        loss: a function loss(model, part), where `part` is a part of the batch. It returns (sum, count), or one tensor
            that is the sum over the part. A loss that is a module is copied with the model; variables of a closure are
            not.

    Returns:
        A printable report, which is true if the step does not depend on the cut. `findings` are in execution order.

    Raises:
        TypeError: if an argument has the wrong type, or the loss returns something else than tensors and a count.
        ValueError: if the batch has fewer than two samples or parts of different lengths, if nothing trains (eval mode,
            frozen or lazy parameters), or if the model cannot be copied or the loss has no gradient.
        Exception: whatever the loss raises on the whole batch.

    Example:
        >>> import torch.nn.functional as F
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 5))
        >>> batch = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
        >>> def loss(model, part):
        ...     images, labels = part
        ...     return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)
        >>> report = check_cuts(model, batch, loss)
        >>> report.ok, report.findings[0].where, report.findings[0].cause
        (False, '1', 'batch_statistics')
        >>> model[1] = nn.GroupNorm(4, 8)
        >>> check_cuts(model, batch, loss).ok
        True
    """
    check_model(model)
    samples = check_batch(batch)
    if not callable(loss):
        raise TypeError(f"loss must be callable as loss(model, part), got {type(loss).__name__}")
    return _Check(Experiment(model, batch, loss), samples).report()


def _cuts(samples: int) -> dict[str, list[list[int]]]:
    half = samples // 2
    cuts = {"whole": [list(range(samples))], "halved": [list(range(half)), list(range(half, samples))]}
    if samples > 2:
        cuts["one by one"] = [[i] for i in range(samples)]
    return cuts


class _Check:
    """The runs of one check and their findings."""

    def __init__(self, experiment: Experiment, samples: int) -> None:
        self.experiment, self.samples, self.cuts = experiment, samples, _cuts(samples)
        self.control: StepRun | None = None
        self.aliased: dict[str, str] = {}
        self.differences: list[Difference] = []
        self.findings: list[Finding] = []
        self.compared, self.worst = 0, 0.0

    def report(self) -> CutsReport:
        self.whole = self._run_whole()
        self.tol = _tolerance(self.whole)
        self.order: dict[str, int] = {}
        for call in _in_order(self.whole.traces[0].root):
            self.order.setdefault(call.name, len(self.order))
        found = self._not_finite(self.whole, "whole")
        if found is None:
            self._find_randomness()
            self._compare_cuts()
        else:
            self.findings.append(found)
        notes = []
        if self.tol > 1e-12:
            notes.append(f"parts of the model compute in a narrower type than float64; the tolerance is {self.tol:.0e}")
        if not (self.findings or self.differences) and (alone := self._norms_of_single_samples()):
            more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
            notes.append(
                f"batch statistics of {alone[0]}{more}: every forward had one sample only, so this batch does not show "
                "whether samples mix. Give the model several samples per forward (detection_losses: two neighbouring "
                "images of equal padded size)"
            )
        return CutsReport(
            samples=self.samples,
            cuts={name: [len(part) for part in cut] for name, cut in self.cuts.items()},
            tolerance=self.tol,
            compared=self.compared,
            worst=self.worst,
            findings=self.findings,
            differences=sorted(self.differences, key=lambda d: (d.kind != "gradient", -d.error)),
            notes=notes,
        )

    def _norms_of_single_samples(self) -> list[str]:
        """Return the norms by batch statistics that got one sample in every call, although the batch has more."""
        found = []
        for name, module in self.experiment.modules.items():
            if uses_batch_statistics(module) and module.training:
                inputs = [call.inputs for call in self.whole.traces[0].calls(name)]
                if {len(x[0].first) for x in inputs if isinstance(x, list) and isinstance(x[0], Leaf)} == {1}:
                    found.append(name)
        return found

    def _run_whole(self) -> StepRun:
        whole = self.experiment.run(self.cuts["whole"])
        if whole.error is not None:
            whole.error.add_note(
                "check_cuts called loss(model, part) with the whole batch as part, in float64. The loss calls "
                "the model itself and returns (sum over the samples, number of samples)."
            )
            raise whole.error
        if not whole.gradients:
            raise ValueError(
                "no parameter of the model got a gradient; the loss must use the model in its first argument, not a "
                "model from outside"
            )
        return whole

    def _not_finite(self, run: StepRun, cut: str) -> Finding | None:
        for trace, value, part in zip(run.traces, run.sums, run.cut, strict=False):
            if not math.isfinite(value):
                call, model = trace.first_not_finite() or trace.root, self.experiment.model
                tensors = (*model.named_parameters(), *model.named_buffers())
                broken = [name for name, tensor in tensors if not tensor.isfinite().all()][:3]
                evidence = {"parameters": broken} if broken else {"cut": cut, "samples": list(part)}
                return finding(call.name, call.type, "non_finite", loss=value, **evidence)
        for name, gradient in run.gradients.items():
            if not gradient.isfinite().all():
                owner, type_name = self._owner(name)
                return finding(owner, type_name, "non_finite", cut=cut, gradient=name)
        return None

    def _find_randomness(self) -> None:
        """Repeat the whole step from another seed and, if it differs, from the same seed."""
        fault = self._repeat(seed=1)
        if fault is None:
            return
        evidence = {"relative change from another seed": fault.match.error}
        same = self._repeat(seed=0)
        if same is None:
            self.findings.append(finding(fault.call.name, fault.call.type, "randomness", **evidence))
        else:
            evidence = {"relative change between two equal runs": same.match.error}
            self.findings.append(finding(same.call.name, same.call.type, "state", **evidence))

    def _repeat(self, *, seed: int) -> Fault | None:
        again = self.experiment.run(self.cuts["whole"], seed=seed, backward=False)
        if again.error is not None:
            raise again.error
        return Comparison(self.experiment, self.whole, again, _ACTIVATIONS * self.tol).first_fault()

    def _compare_cuts(self) -> None:
        runs: list[StepRun] = []
        for name in list(self.cuts)[1:]:
            run = self.experiment.run(self.cuts[name])
            differences = [] if run.error is not None else self._differences(name, run)
            if differences and self.control is None:
                self.control = self.experiment.run(self.cuts["whole"], perturbed=True)
                self.tol = _tolerance(self.control)
                differences = self._differences(name, run)
            if differences or run.error is not None:
                runs.append(run)
            self.differences += differences
            self.aliased |= run.aliased
            run.state = {}
        for run in runs:
            if self._explain(run):
                return
        if self.differences and not self.findings:
            self.findings.append(self._without_a_call())

    def _differences(self, cut: str, run: StepRun) -> list[Difference]:
        found = []
        whole, parts = self.whole.compared(), run.compared()
        control = {} if self.control is None else self.control.compared()
        largest = max((g.abs().max().item() for g in self.whole.gradients.values() if g.numel()), default=0.0)
        for key in dict.fromkeys((*whole, *(key for key in parts if key[0] == "gradient"))):
            (kind, name), perturbed = key, control.get(key)
            expected = whole[key] if key in whole else torch.zeros_like(parts[key])
            missing = torch.zeros_like(expected) if kind == "gradient" else expected.new_zeros(0)
            actual = parts.get(key, missing)
            error, size = deviation(expected, actual)
            exact = not (expected.is_floating_point() or expected.is_complex())
            allowed = 0.0 if exact else self.tol * size
            if perturbed is not None and not exact:
                most = max(MOST_ROUNDING, self.tol) * (max(size, largest) if kind == "gradient" else size)
                allowed += min(ROUNDING * deviation(expected, perturbed)[0], most)
            self.compared += 1
            if error > allowed:
                relative = error / size if size else math.inf
                found.append(Difference(cut, kind, name, relative, allowed / size if size else 0.0))
            elif size:
                # A gradient that differs by more than its tolerance here is itself rounding of larger terms.
                cancelled = kind == "gradient" and error > self.tol * size
                self.worst = max(self.worst, error / (max(size, largest) if cancelled else size))
        return found

    def _explain(self, run: StepRun) -> bool:
        """Add the finding of this run in execution order. Return whether there is one."""
        comparison = Comparison(self.experiment, self.whole, run, _ACTIVATIONS * self.tol, self.control)
        if run.error is not None:
            self.findings.append(comparison.explain_error())
            return True
        found = self._not_finite(run, "+".join(map(str, run.sizes)))
        if found is not None:
            self.findings.append(found)
            return True
        fault = comparison.first_fault()
        if fault is None:
            return False
        if any(f.where == fault.call.name for f in self.findings):
            return True  # the call draws random numbers, which hide its other faults
        found = comparison.explain(fault)
        known, place = self.findings, self._place(found.where)
        if found.cause == "randomness" and known and known[0].cause == "randomness":
            # Report only the first of several calls that draw random numbers.
            self.findings = [found] if place < self._place(known[0].where) else known
        else:
            self.findings = sorted([*known, found], key=lambda f: self._place(f.where))
        return True

    def _place(self, where: str) -> int:
        """Return when a module first returns in the whole run; modules that are never called come last."""
        return self.order.get(where, len(self.order))

    def _without_a_call(self) -> Finding:
        """Return the finding if all calls and the loss agree: a count, a buffer or the backward pass differs."""

        def first(kind: str) -> Difference | None:
            """Return the difference of this kind in the module that runs first."""
            found = [d for d in self.differences if d.kind == kind]
            return min(found, key=lambda d: (self._place(self._owner(d.name)[0]), -d.error), default=None)

        d = first("count")
        if d is not None:
            evidence: dict[str, Any] = {"whole": self.whole.count, "cut": d.cut, "off by": d.error}
            return finding("loss", "loss function", "loss_count", **evidence)
        d = first("buffer") or first("estimate")
        if d is not None:
            where, type_name = self._owner(d.name)
            cause = "batch_statistics" if uses_batch_statistics(self.experiment.modules.get(where)) else "buffer"
            return finding(where, type_name, cause, buffer=d.name, cut=d.cut, **{"relative error": d.error})
        # The backward pass reaches the last module in execution order first.
        gradients = [d for d in self.differences if d.kind == "gradient"]
        if gradients:
            d = max(gradients, key=lambda d: (d.name in self.aliased, self._place(self._owner(d.name)[0])))
            where, type_name = self._owner(d.name)
            evidence = {"parameter": d.name, "cut": d.cut, "relative error": d.error}
            if d.name in self.aliased:
                return finding(where, type_name, "shared_gradient", **evidence, **{"shared with": self.aliased[d.name]})
            return finding(where, type_name, "gradient", **evidence)
        return finding("loss", "loss function", "unknown", **{"relative error": self.differences[0].error})

    def _owner(self, name: str) -> tuple[str, str]:
        """Return the name and class of the module that holds a parameter or buffer."""
        where = name.rpartition(".")[0] or "model"
        return where, type(self.experiment.modules.get(where)).__name__


def _tolerance(run: StepRun) -> float:
    return _TOLERANCE.get(run.coarsest, _HALF_EPS * run.coarsest)


def _in_order(call: Call) -> Iterator[Call]:
    for child in call.children:
        yield from _in_order(child)
    yield call
