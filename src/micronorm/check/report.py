"""The result of `check_cuts`: what differs, where that starts, the cause, and the fix."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Cause = Literal[
    "batch_statistics",
    "averaged_loss",
    "loss_count",
    "cross_sample_loss",
    "padding",
    "randomness",
    "mixes_samples",
    "state",
    "batch_size",
    "buffer",
    "fails_when_cut",
    "gradient",
    "shared_gradient",
    "non_finite",
    "unknown",
]

FIXES: dict[Cause, str] = {
    "batch_statistics": "Replace it by mn.BCN() or mn.GN(), or freeze it with .eval() and requires_grad_(False).",
    "averaged_loss": "Return the sum and its count, (F.cross_entropy(..., reduction='sum'), count). The step divides "
    "once, by the count of all its samples.",
    "loss_count": "Return the number of terms in the sum (samples, or pixels that are not ignored). The counts of the "
    "parts must add up to the count of the whole.",
    "cross_sample_loss": "A term between samples needs its samples in one part. Compute it within groups that are not "
    "cut (both views of one image), against a memory bank that changes once per step, or on features gathered for the "
    "whole step.",
    "padding": "Pad each sample independently of the others (to a fixed size, or to its next multiple of 32), or run "
    "samples one by one. If padding must stay, mask it in normalization, attention and loss.",
    "randomness": "Draw from a generator keyed by (seed, epoch, sample index), or set the probability to zero.",
    "mixes_samples": "Compute each output from one sample alone: reduce over its own axes, not the batch axis.",
    "state": "Do not change the state in the forward. Collect updates during the step and apply them once, in a hook "
    "after the optimizer step.",
    "batch_size": "Do not use the number of samples inside the network; divide once, at the step, by the count of all "
    "its samples.",
    "buffer": "Collect sums in the forward and update the buffer once per optimizer step (as mn.BCN does), or keep it "
    "out of the model.",
    "fails_when_cut": "Make the forward work for any number of samples, including one.",
    "gradient": "Look for code that changes gradients in each backward pass: a hook, clipping inside the accumulation "
    "loop, or a custom autograd.Function that reduces over samples.",
    "shared_gradient": "torch gives both parameters one gradient tensor if they enter a sum through views, and the "
    "second backward pass then adds both gradients into it. Write (a + b).view(...) instead of a.view(...) + "
    "b.view(...), or use a.view(...).clone().",
    "non_finite": "Find the overflow or the division by zero. A common case is a mean over nothing (no positive "
    "sample, all pixels ignored): return sum and count instead.",
    "unknown": "No module shows the difference. Reduce the model, or put the operation into its own module, and check "
    "again.",
}
assert set(FIXES) == set(get_args(Cause))

TITLES: dict[Cause, str] = {
    "batch_statistics": "normalizes by statistics of the samples in its batch",
    "averaged_loss": "averages over its part, so the weight of a sample depends on the cut",
    "loss_count": "returns counts that do not add up",
    "cross_sample_loss": "compares samples with each other, so it is no sum over samples",
    "padding": "pads to the largest sample of the part, so a sample's shape depends on the others",
    "randomness": "draws random numbers that do not depend on the sample alone",
    "mixes_samples": "mixes samples",
    "state": "keeps state between forwards, so later parts compute another function",
    "batch_size": "depends on the number of samples",
    "buffer": "changes a buffer in every forward",
    "fails_when_cut": "raises when the samples are cut",
    "gradient": "has outputs that agree and gradients that do not",
    "shared_gradient": "has a gradient that shares memory with the gradient of another parameter",
    "non_finite": "returns values that are not finite",
    "unknown": "differs for an unknown reason",
}


@dataclass(frozen=True)
class Difference:
    """One tensor that differs. `error` is its largest deviation, relative to its largest entry."""

    cut: str
    kind: Literal["gradient", "estimate", "buffer", "loss", "count"]
    name: str
    error: float
    allowed: float


@dataclass(frozen=True)
class Finding:
    """The first place where the step depends on its cut, the cause, and the fix.

    `where` is the name of a module ("model" for the model itself) or "loss". `type` is the module's class, or "loss
    function". `evidence` holds the numbers that show the cause.
    """

    where: str
    type: str
    cause: Cause
    evidence: dict[str, Any]
    fix: str

    def __str__(self) -> str:
        numbers = "; ".join(f"{key}: {_show(value)}" for key, value in self.evidence.items())
        return (
            f"{self.where} ({self.type}) {TITLES[self.cause]} [{self.cause}]\n  evidence: {numbers}\n  fix: {self.fix}"
        )


@dataclass(frozen=True)
class CutsReport:
    """The result of `check_cuts`. It is true if the step does not depend on the cut.

    `findings` are in execution order. Fix the first one first: it may hide or cause the later ones. `differences` lists
    every gradient, estimate, buffer and loss that differs, the largest first.
    """

    samples: int
    cuts: dict[str, list[int]]
    tolerance: float
    compared: int
    worst: float
    findings: list[Finding] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return whether the step is independent of the cut."""
        return not self.findings and not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        cuts = ", ".join(f"{name} ({'+'.join(map(str, sizes))})" for name, sizes in self.cuts.items())
        head = f"{self.samples} samples, cut as {cuts}: "
        if self.ok:
            lines = [
                head + f"the step does not depend on the cut. {self.compared} gradients, estimates, buffers and losses "
                f"agree; the largest relative difference is {self.worst:.1e}."
            ]
        else:
            lines = [head + "THE STEP DEPENDS ON THE CUT.", *(str(finding) for finding in self.findings)]
            if self.differences:
                first = ", ".join(f"{d.kind} {d.name} {d.error:.1e} ({d.cut})" for d in self.differences[:3])
                more = f" and {len(self.differences) - 3} more" if len(self.differences) > 3 else ""
                lines.append(f"differences (relative to each tensor's maximum): {first}{more}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Return the report in the types of JSON."""
        return {"ok": self.ok, **_jsonable(asdict(self))}


def finding(where: str, type: str, cause: Cause, **evidence: Any) -> Finding:
    """Return a finding with the fix for its cause."""
    return Finding(where, type, cause, evidence, FIXES[cause])


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)  # JSON has no infinity
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
