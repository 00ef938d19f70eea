"""The result of `check_cuts`: what differs, where that starts, the cause, and the fix."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["gradient", "estimate", "buffer", "loss", "count"]
"""What is compared."""

CAUSES: dict[str, tuple[str, str]] = {
    "batch_statistics": (
        "normalizes by statistics of the samples in its batch",
        "Convert the model with mn.convert(model), replace this layer by mn.BCN() or mn.GN(), or freeze it with "
        ".eval() and requires_grad_(False).",
    ),
    "averaged_loss": (
        "averages over its part, so the weight of a sample depends on the size of the part",
        "Return the sum and its count, (F.cross_entropy(..., reduction='sum'), count). The step divides once, by the "
        "count of all its samples.",
    ),
    "loss_count": (
        "returns counts that do not add up",
        "Return the number of terms in the sum (samples, or pixels that are not ignored). The counts of the parts "
        "must add up to the count of the whole.",
    ),
    "cross_sample_loss": (
        "is not a sum over samples: it compares samples with each other, or depends on their number",
        "A loss that compares samples needs all of them in one part. Compare samples that are never cut apart (both "
        "views of one image), or with a memory bank that changes once per step, or with features gathered for the "
        "whole step. Do not divide by the number of samples: return it as the count.",
    ),
    "padding": (
        "pads to the largest sample of the part, so a sample's shape depends on the others",
        "Pad each sample independently of the others (to a fixed size, or to its next multiple of 32), or run samples"
        " one by one. If padding must stay, mask it in normalization, attention and loss.",
    ),
    "randomness": (
        "draws random numbers that do not depend on the sample alone",
        "Draw from a generator keyed by (seed, epoch, sample index), or set the probability to zero. For torchvision's "
        "R-CNNs, call micronorm.tasks.detection.detection_losses: it samples by key.",
    ),
    "mixes_samples": (
        "mixes samples, or depends on their number",
        "Compute each output from one sample alone: reduce over its own axes, not the batch axis. Replace a "
        "normalization by batch statistics by mn.BCN() or mn.GN().",
    ),
    "state": (
        "keeps state between forwards, so later parts compute another function",
        "Do not change the state in the forward. Collect updates during the step and apply them once, in a hook after"
        " the optimizer step.",
    ),
    "buffer": (
        "changes a buffer in every forward",
        "Collect sums in the forward and update the buffer once per optimizer step (as mn.BCN does), or keep it out "
        "of the model.",
    ),
    "fails_when_cut": (
        "raises when the samples are cut",
        "Make the forward work for any number of samples, including one.",
    ),
    "gradient": (
        "has outputs that agree and gradients that do not",
        "Look for code that changes gradients in each backward pass: a hook, clipping inside the accumulation loop, "
        "or a custom autograd.Function that reduces over samples.",
    ),
    "shared_gradient": (
        "has a gradient that shares memory with the gradient of another parameter",
        "torch gives both parameters one gradient tensor if they enter a sum through views, and the second backward "
        "pass then adds both gradients into it. Write (a + b).view(...) instead of a.view(...) + b.view(...), or use "
        "a.view(...).clone().",
    ),
    "non_finite": (
        "returns values that are not finite",
        "Find the overflow or the division by zero. A common case is a mean over nothing (no positive sample, all "
        "pixels ignored): return sum and count instead. If parameters are not finite, the training before this check "
        "has diverged: load an earlier checkpoint, and use a smaller learning rate or a warm-up.",
    ),
    "unknown": (
        "differs for an unknown reason",
        "No module shows the difference. Reduce the model, or put the operation into its own module, and check again.",
    ),
}
"""The meaning of each cause, after the name of a module, and the fix."""


@dataclass(frozen=True)
class Difference:
    """One tensor that differs. `error` is its largest deviation, relative to its largest entry."""

    cut: str
    kind: Kind
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
    cause: str
    evidence: dict[str, Any]
    fix: str

    def __str__(self) -> str:
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in self.evidence.items()}
        numbers = "; ".join(f"{value}" if key == "seen" else f"{key}: {value}" for key, value in shown.items())
        title = CAUSES[self.cause][0]
        return f"{self.where} ({self.type}) {title} [{self.cause}]\n  evidence: {numbers}\n  fix: {self.fix}"


@dataclass(frozen=True)
class CutsReport:
    """The result of `check_cuts`. It is true if the step does not depend on the cut.

    `findings` are in execution order. Fix the first one first: it may hide or cause the later ones. `differences` lists
    every gradient that differs, the largest first, then every estimate, buffer and loss.
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
        cuts = ", ".join(f"{name} ({_sizes(sizes)})" for name, sizes in self.cuts.items())
        head = f"{self.samples} samples, split as {cuts}: "
        if self.ok:
            lines = [
                head
                + f"the step does not depend on the split. {self.compared} gradients, statistics, buffers and losses "
                f"agree; the largest relative difference is {self.worst:.1e}."
            ]
        else:
            lines = [head + "THE STEP DEPENDS ON THE SPLIT.", *(str(finding) for finding in self.findings)]
            if self.differences:
                first = ", ".join(f"{d.kind} {d.name} {d.error:.1e} ({d.cut})" for d in self.differences[:3])
                more = f" and {len(self.differences) - 3} more" if len(self.differences) > 3 else ""
                lines.append(f"differences (relative to each tensor's maximum): {first}{more}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Return the report in the types of JSON."""
        text = json.dumps({"ok": self.ok, **asdict(self)}, default=str)
        return json.loads(text, parse_constant=lambda constant: str(float(constant)))  # JSON has no infinity


def _sizes(sizes: list[int]) -> str:
    """Return the sizes of the parts of one cut, "3+3", or "32×1" for many parts of one size."""
    return f"{len(sizes)}×{sizes[0]}" if len(sizes) > 2 and len(set(sizes)) == 1 else "+".join(map(str, sizes))


def finding(where: str, type: str, cause: str, **evidence: Any) -> Finding:
    """Return a finding with the fix for its cause."""
    return Finding(where, type, cause, evidence, CAUSES[cause][1])
