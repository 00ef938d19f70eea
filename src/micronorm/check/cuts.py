"""`check_cuts`: one step whole, halved and one by one, what came out differently, and where that begins."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.check.blame import Comparison, Fault
from micronorm.check.causes import Diagnosis, uses_batch_statistics
from micronorm.check.inputs import check_batch, check_model
from micronorm.check.report import CutsReport, Difference, Finding, finding
from micronorm.check.step import Experiment, Run
from micronorm.check.trace import Call, first_not_finite

# One step, relative to each tensor's maximum: the project's law (float64 and float32). A model that computes in half
# precision inside can be held to its rounding only.
_TOLERANCE = {torch.finfo(torch.float64).eps: 1e-12, torch.finfo(torch.float32).eps: 1e-5}
_HALF_EPS = 4.0
# Activations feed what they disturb: a fault shows in them at full size, rounding stays below this times the tolerance.
_ACTIVATIONS = 100.0
# Deep networks magnify rounding, and a gradient that cancels to zero *is* rounding. What a perturbation of every
# parameter by one unit in the last place moves by d may move by this many d here.
_ROUNDING = 64.0
# But not by more than this, of the tensor's maximum, or of the largest gradient: a model that a last digit turns upside
# down would hide everything.
_MOST_ROUNDING = 1e-6


def check_cuts(model: nn.Module, batch: tuple, loss: Callable[[nn.Module, tuple], Any]) -> CutsReport:
    """Whether an optimizer step of this model depends on how its samples were cut up; if so, where and why.

    One step is run whole, in two halves and one sample at a time, in float64, on private copies: the model, its
    gradients, buffers, flags and hooks and the random states stay as they are. Gradients, estimates (after a commit)
    and buffers are compared, relative to each tensor's maximum, at 1e-12; where they differ, the calls of all modules
    are compared sample by sample, and experiments on the first that differs tell the cause. A model that passes also
    gives the same from another random seed.

    Args:
        model: in training mode and on any device that has float64.
        batch: a tuple of tensors or lists, each indexed by sample; two samples at least, better six of unequal size.
        loss: called as loss(model, part) with a part of the batch in its structure; returns (sum, count), or one
            tensor taken as a sum over the part. A loss that is a module is copied with the model; what a closure holds
            is not.

    Returns:
        The report: true where the law holds, printable, with `findings` in execution order.

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
    """The state of one check: the runs so far, and what was found in them."""

    def __init__(self, experiment: Experiment, samples: int) -> None:
        self.experiment, self.samples, self.cuts = experiment, samples, _cuts(samples)
        self.control: Run | None = None
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
            self._look_for_randomness()
            self._compare_cuts()
        else:
            self.findings.append(found)
        notes = []
        if self.tol > 1e-12:
            notes.append(
                f"parts of the model compute in a narrower type than float64, so the tolerance is {self.tol:.0e}"
            )
        return CutsReport(
            samples=self.samples,
            cuts={name: [len(part) for part in cut] for name, cut in self.cuts.items()},
            tolerance=self.tol,
            compared=self.compared,
            worst=self.worst,
            findings=self.findings,
            differences=sorted(self.differences, key=lambda d: -d.error),
            notes=notes,
        )

    def _run_whole(self) -> Run:
        whole = self.experiment.run(self.cuts["whole"])
        if whole.error is not None:
            whole.error.add_note("check_cuts ran the loss on the whole batch, with model and batch in float64")
            raise whole.error
        if not whole.gradients:
            raise ValueError(
                "the loss must reach parameters of the model it is given, none got a gradient; use the function's "
                "first argument, not a model from outside"
            )
        return whole

    # --- runs that should be the same ----------------------------------------------------------------------------

    def _not_finite(self, run: Run, cut: str) -> Finding | None:
        for trace, value, part in zip(run.traces, run.sums, run.cut, strict=False):
            if not math.isfinite(value):
                call = first_not_finite(trace) or trace.root
                return finding(call.name, call.type, "non_finite", loss=value, cut=cut, samples=list(part))
        for name, gradient in run.gradients.items():
            if not gradient.isfinite().all():
                owner, type_name = self._owner(name)
                return finding(owner, type_name, "non_finite", cut=cut, gradient=name)
        return None

    def _look_for_randomness(self) -> None:
        """The whole step from another seed; and, where it differs, once more from the same one."""
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
        return Comparison(self.whole, again, tol=_ACTIVATIONS * self.tol).first_fault()

    def _compare_cuts(self) -> None:
        runs: list[Run] = []
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
            run.gradients, run.buffers = {}, {}
        for run in runs:
            if self._explain(run):
                return
        if self.differences and not self.findings:
            self.findings.append(self._without_a_call())

    # --- numbers -------------------------------------------------------------------------------------------------

    def _differences(self, cut: str, run: Run) -> list[Difference]:
        found = []
        largest = max((g.abs().max().item() for g in self.whole.gradients.values() if g.numel()), default=0.0)
        for kind, name, expected, actual, quiet in self._pairs(run):
            error, size = _deviation(expected, actual)
            exact = not (expected.is_floating_point() or expected.is_complex())
            allowed = 0.0 if exact else self.tol * size
            if quiet is not None and not exact:
                most = max(_MOST_ROUNDING, self.tol) * (max(size, largest) if kind == "gradient" else size)
                allowed += min(_ROUNDING * _deviation(expected, quiet)[0], most)
            self.compared += 1
            if error > allowed:
                relative = error / size if size else math.inf
                found.append(Difference(cut, kind, name, relative, allowed / size if size else 0.0))
            elif size:
                cancelled = kind == "gradient" and error > self.tol * size  # itself a rounding error of larger ones
                self.worst = max(self.worst, error / (max(size, largest) if cancelled else size))
        return found

    def _pairs(self, run: Run) -> Iterator[tuple[Any, str, Tensor, Tensor, Tensor | None]]:
        whole, quiet = self.whole, self.control
        yield (
            "loss",
            "sum",
            _number(sum(whole.sums)),
            _number(sum(run.sums)),
            _number(sum(quiet.sums)) if quiet else None,
        )
        yield "count", "count", _number(whole.count), _number(run.count), None
        for name in whole.gradients.keys() | run.gradients.keys():
            a, b = whole.gradients.get(name), run.gradients.get(name)
            like = a if a is not None else b
            assert like is not None
            zero = torch.zeros_like(like)
            c = quiet.gradients.get(name) if quiet else None
            yield "gradient", name, zero if a is None else a, zero if b is None else b, c
        for name, a in whole.buffers.items():
            kind = "estimate" if name in whole.estimates else "buffer"
            yield kind, name, a, run.buffers.get(name, a.new_zeros(0)), quiet.buffers.get(name) if quiet else None

    # --- places --------------------------------------------------------------------------------------------------

    def _explain(self, run: Run) -> bool:
        """Add the finding that this run shows, in execution order; whether there was one."""
        diagnosis = Diagnosis(self.experiment, self.whole, _ACTIVATIONS * self.tol, self.control)
        if run.error is not None:
            self.findings.append(diagnosis.explain_error(run))
            return True
        found = self._not_finite(run, "+".join(map(str, run.sizes)))
        if found is not None:
            self.findings.append(found)
            return True
        fault = Comparison(self.whole, run, tol=diagnosis.tol, noise=self.control).first_fault()
        if fault is None:
            return False
        if any(f.where == fault.call.name for f in self.findings):
            return True  # it draws random numbers: what else it does is not to be seen
        found = diagnosis.explain(fault, run)
        known, place = self.findings, self._place(found.where)
        if found.cause == "randomness" and known and known[0].cause == "randomness":
            # Two of the same kind: the first in execution order stands for both.
            self.findings = [found] if place < self._place(known[0].where) else known
        else:
            self.findings = sorted([*known, found], key=lambda f: self._place(f.where))
        return True

    def _place(self, where: str) -> int:
        """When a module is first left, in the whole run: the loss ends last, and a module never called after it."""
        return self.order.get(where, len(self.order))

    def _without_a_call(self) -> Finding:
        """Every call and the loss agree, sample by sample: a count, a buffer or the backward is left."""
        by_kind = {
            d.kind: d for d in sorted(self.differences, key=lambda d: (-self._place(self._owner(d.name)[0]), d.error))
        }
        if "count" in by_kind:
            d = by_kind["count"]
            return finding(
                "loss", "loss function", "loss_count", **{"whole": self.whole.count, "cut": d.cut, "off by": d.error}
            )
        for kind in ("buffer", "estimate"):
            if kind in by_kind:
                d = by_kind[kind]
                where, type_name = self._owner(d.name)
                known = uses_batch_statistics(self._module(where))
                cause = "batch_statistics" if known else "buffer"
                return finding(where, type_name, cause, buffer=d.name, cut=d.cut, **{"relative error": d.error})
        # The last module in execution order is the first the backward meets.
        gradients = [d for d in self.differences if d.kind == "gradient"]
        if gradients:
            d = max(gradients, key=lambda d: self._place(self._owner(d.name)[0]))
            where, type_name = self._owner(d.name)
            return finding(where, type_name, "gradient", parameter=d.name, cut=d.cut, **{"relative error": d.error})
        return finding("loss", "loss function", "unknown", **{"relative error": self.differences[0].error})

    def _module(self, where: str) -> nn.Module | None:
        model = self.experiment.model
        return model if where == "model" else dict(model.named_modules()).get(where)

    def _owner(self, name: str) -> tuple[str, str]:
        """The module that holds a parameter or buffer, and its class."""
        where = name.rpartition(".")[0] or "model"
        return where, type(self._module(where)).__name__


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _tolerance(run: Run) -> float:
    return _TOLERANCE.get(run.coarsest, _HALF_EPS * run.coarsest)


def _in_order(call: Call) -> Iterator[Call]:
    for child in call.children:
        yield from _in_order(child)
    yield call


def _deviation(expected: Tensor, actual: Tensor) -> tuple[float, float]:
    """The largest deviation and the largest entry; infinite where shapes or finiteness differ."""
    if expected.shape != actual.shape:
        return math.inf, 1.0
    if expected.numel() == 0:
        return 0.0, 0.0
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (expected, actual))
    a, b = a.to(torch.float64), b.to(torch.float64)
    deviation = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=math.inf).max().item()
    return deviation, torch.where(a.isfinite(), a.abs(), 0.0).max().item()
