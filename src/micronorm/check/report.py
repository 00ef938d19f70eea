"""What `check_cuts` found: differences, the first place they come from, the cause, and the way out."""

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
    "non_finite",
    "unknown",
]

FIXES: dict[Cause, str] = {
    "batch_statistics": "Put mn.BCN() or mn.GN() in its place, or freeze it with .eval() and requires_grad_(False).",
    "averaged_loss": "Return the sum and its count, (F.cross_entropy(..., reduction='sum'), count): the division "
    "belongs to the step, once, by the count of all its samples.",
    "loss_count": "Return as count what the sum was taken over (samples, or pixels that are not ignored), so that the "
    "counts of parts add up to the count of the whole.",
    "cross_sample_loss": "A term between samples needs its samples together: compute it per group that is never cut "
    "(both views of one image), against a memory bank that moves once per step, or on features gathered for the whole "
    "step.",
    "padding": "Pad every sample to a size of its own (a fixed one, or its next multiple of 32) or run ragged samples "
    "one by one; if padding must stay, mask it out of normalization, attention and loss.",
    "randomness": "Draw from a generator keyed by (seed, epoch, sample index), or set the probability to zero.",
    "mixes_samples": "Make a sample's output a function of the sample alone: reduce over its own axes, never over the "
    "batch axis.",
    "state": "Let it read what stood at the last optimizer step: gather updates during the step and apply them in a "
    "hook after it, not in the forward.",
    "batch_size": "Do not use the number of samples inside the network; divide once, at the step, by the count of all "
    "its samples.",
    "buffer": "Gather sums in the forward and move the buffer once per optimizer step (as mn.BCN does), or keep it out "
    "of the model.",
    "fails_when_cut": "Make the forward work for any number of samples, one included.",
    "gradient": "Look for what acts on gradients per backward pass: a tensor or backward hook, a clipping inside the "
    "accumulation loop, a custom autograd.Function that reduces over samples.",
    "non_finite": "Find what overflows or divides by zero; a mean over nothing (no positive, every pixel ignored) is "
    "the usual one: return sum and count instead.",
    "unknown": "No recorded module shows it. Cut the model down, or give the operation a module of its own, and check "
    "again.",
}
assert set(FIXES) == set(get_args(Cause))

TITLES: dict[Cause, str] = {
    "batch_statistics": "normalizes by statistics of whatever samples share its batch",
    "averaged_loss": "averages over its part, so cutting a step changes the weight of its samples",
    "loss_count": "returns counts that do not add up",
    "cross_sample_loss": "compares samples with each other, so it is not a sum over samples",
    "padding": "pads to the largest sample of the part, so a sample's shape depends on its companions",
    "randomness": "draws random numbers that are not keyed by sample",
    "mixes_samples": "mixes samples",
    "state": "keeps state from one forward to the next, so later parts meet another function",
    "batch_size": "depends on how many samples there are",
    "buffer": "moves a buffer in every forward",
    "fails_when_cut": "raises when the samples are cut",
    "gradient": "outputs agree and gradients do not",
    "non_finite": "gives values that are not finite",
    "unknown": "differs, and no module was found to blame",
}


@dataclass(frozen=True)
class Difference:
    """One tensor that came out differently: its largest deviation, relative to its largest entry."""

    cut: str
    kind: Literal["gradient", "estimate", "buffer", "loss", "count"]
    name: str
    error: float
    allowed: float


@dataclass(frozen=True)
class Finding:
    """Where the law breaks first, why, and what to do about it.

    `where` is a module's name in the model ("model" for the model itself) or "loss"; `type` the module's class, or
    "loss function". `evidence` holds the numbers the cause was told by.
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
    """The outcome of `check_cuts`; true where the law holds.

    `findings` come in execution order, the first to mend first: what lies behind a fault is only seen once it is gone.
    `differences` lists every gradient, estimate, buffer and loss that came out differently, the worst first.
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
        """Whether the step does not depend on how its samples were cut up."""
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
        """The report as numbers, strings, lists and dictionaries, for json.dumps."""
        return {"ok": self.ok, **_jsonable(asdict(self))}


def finding(where: str, type: str, cause: Cause, **evidence: Any) -> Finding:
    """A finding with the fix of its cause."""
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
