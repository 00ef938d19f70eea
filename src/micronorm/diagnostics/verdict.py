"""Is a network near elimination singularities, where, and what to do about it: a verdict on what `look` saw.

A layer is judged by its first fault, in the order of `PROBLEMS`: a later one is usually its consequence.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

from torch import nn

from micronorm.diagnostics.advice import Problem, advise
from micronorm.diagnostics.followers import CUTTING
from micronorm.diagnostics.look import NormLook, Statistics, look
from micronorm.diagnostics.measures import Measure, Thresholds, measure_norm, saw_enough
from micronorm.diagnostics.weights import PAPER_RESNET50, input_uses
from micronorm.nn.weight import WSConv1d, WSConv2d, WSConv3d

PROBLEMS: tuple[Problem, ...] = get_args(Problem)

TITLES: dict[Problem, str] = {
    "non_finite": "has values that are not finite",
    "estimates": "normalizes by estimates that are far from what it sees",
    "stat_diff": "normalizes channels together that differ too much",
    "dead": "has dead channels",
    "rare": "has under-represented channels",
}


@dataclass(frozen=True)
class Finding:
    """A layer that is accused: of what, by which figures, what to do, and what that would change.

    `severity` is the figure over its threshold; `channels` are those at fault.
    """

    layer: str
    norm: str
    problem: Problem
    severity: float
    evidence: dict[str, Any]
    channels: tuple[int, ...]
    remedy: str
    effect: str

    def __str__(self) -> str:
        numbers = "; ".join(f"{name}: {_show(value)}" for name, value in self.evidence.items())
        return (
            f"{self.layer or 'the model'} ({self.norm}) {TITLES[self.problem]} [{self.problem}]\n"
            f"  evidence: {numbers}\n  fix: {self.remedy}\n  effect: {self.effect}"
        )


@dataclass(frozen=True)
class Verdict:
    """What was found, in the order in which the layers run; true where nothing was.

    The first is to be mended first: what lies behind it may be its consequence. `table` has the worst first.

    `judged` counts the norms that an activation was seen to follow and that saw enough samples; of the others it is
    only said whether their numbers are finite and their estimates fit. `severities` has, by layer, the largest of its
    figures over its threshold.
    """

    findings: list[Finding]
    looks: dict[str, NormLook]
    judged: int
    severities: dict[str, float] = field(default_factory=dict)
    input_uses: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no layer is accused."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def summary(self) -> str:
        """The verdict in a sentence or two."""
        of = f"{self.judged} of {len(self.looks)} norms judged"
        dead, rare = (sum(int(getattr(seen, kind).sum()) for seen in self._behind_relu()) for kind in ("dead", "rare"))
        counts = f"{dead} dead and {rare} under-represented channels behind ReLUs in all"
        if not self.judged and self.ok:
            any_followed = any(seen.activation for seen in self.looks.values())
            why = "too few samples were seen by" if any_followed else "no activation was seen behind"
            return f"Nothing could be judged: {why} any of {len(self.looks)} norms."
        if self.ok:
            return f"No layer is near an elimination singularity. {of}; {counts}."
        where = ", ".join(finding.layer or "the model" for finding in self.findings[:3])
        more = f" and {len(self.findings) - 3} more" if len(self.findings) > 3 else ""
        return f"{len(self.findings)} LAYERS ARE IN TROUBLE: {where}{more}. {of}; {counts}.".replace(
            "1 LAYERS ARE", "1 LAYER IS", 1 if len(self.findings) == 1 else 0
        )

    def table(self, rows: int = 10) -> str:
        """The worst layers, a line each; `limit` is how far the worst of a layer's figures goes towards its limit."""
        head = ("layer", "norm", "then", "limit", "StatDiff", "σ_mean", "σ_std", "active", "dead", "rare", "of", "")
        accused = {finding.layer: finding.problem for finding in self.findings}
        worst = sorted(self.looks, key=lambda name: -self.severities.get(name, 0.0))[:rows]
        lines: list[tuple[str, ...]] = [head]
        for name in worst:
            lines.append(_line(name, self.looks[name], self.severities.get(name, 0.0), accused.get(name, "")))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        words = (0, 1, 2, len(head) - 1)

        def cell(i: int, text: str) -> str:
            return text.ljust(widths[i]) if i in words else text.rjust(widths[i])

        return "\n".join("  ".join(cell(i, text) for i, text in enumerate(line)).rstrip() for line in lines)

    def __str__(self) -> str:
        return "\n".join(
            [self.summary(), *(str(finding) for finding in self.findings), *(f"note: {note}" for note in self.notes)]
        )

    def to_dict(self) -> dict[str, Any]:
        """The verdict in JSON's types; figures that are not finite as text."""
        return _jsonable(
            {
                "ok": self.ok,
                "summary": self.summary(),
                "judged": self.judged,
                "severities": self.severities,
                "findings": [asdict(finding) for finding in self.findings],
                "layers": {name: described(seen) for name, seen in self.looks.items()},
                "input_use": self.input_uses,
                "notes": self.notes,
            }
        )

    def _behind_relu(self) -> list[NormLook]:
        return [seen for seen in self.looks.values() if seen.activation in CUTTING]


def described(seen: NormLook) -> dict[str, Any]:
    """The figures of a look with what they were measured on."""
    how = {"activation": seen.activation, "residual": seen.residual, "samples": seen.samples}
    return {**seen.figures(), **how, "positions": seen.positions}


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    statistics: Statistics = "estimates",
    trained: bool = True,
    thresholds: Thresholds | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> Verdict:
    """`look` at a model and judge what was seen.

    Args:
        model: as in `look`, which leaves it as it was.
        batches: as in `look`; a verdict on channels needs 32 samples or more, of the kind the network is for.
        statistics: as in `look`.
        trained: whether estimates should fit the data by now; those of a fresh network do not.
        thresholds: from where on a layer is accused.
        forward: as in `look`.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU())
        >>> batches = [torch.randn(32, 3, 8, 8)]
        >>> bool(diagnose(model, batches))
        True
        >>> with torch.no_grad():
        ...     model[0].bias[:2] += 100  # two of the four channels of a group, far from the others
        >>> verdict = diagnose(model, batches)
        >>> [(finding.layer, finding.problem) for finding in verdict.findings]
        [('1', 'stat_diff')]
    """
    seen = look(model, batches, statistics=statistics, forward=forward)
    verdict = judge(seen, standardized=_is_standardized(model), trained=trained, thresholds=thresholds)
    uses = input_uses(model)
    if uses:
        mean = sum(uses.values()) / len(uses)
        several = f"{len(uses)} layers" if len(uses) > 1 else "one layer"
        verdict.notes.append(
            f"min/mean use of input channels, averaged over {several}: {mean:.2f} (the paper's trained ResNet-50: "
            f"{PAPER_RESNET50}); no verdict rests on it"
        )
    return replace(verdict, input_uses=uses)


def judge(
    looks: Mapping[str, NormLook],
    *,
    standardized: bool = False,
    trained: bool = True,
    thresholds: Thresholds | None = None,
) -> Verdict:
    """A verdict on what `look` saw.

    StatDiff is judged where any activation was seen to follow the norm, dead and rare channels where that is a ReLU,
    each only by as many samples and positions as `Thresholds` asks for; estimates always (unless `trained` is False or
    there are fewer positions than that many samples), and whether everything is finite.

    Args:
        looks: what `look` returned.
        standardized: whether the network's convolutions have Weight Standardization, so that no remedy asks for it.
        trained: as in `diagnose`.
        thresholds: as in `diagnose`.
    """
    limits = thresholds or Thresholds()
    findings, few, severities = [], [], {}
    for name, seen in looks.items():
        measures = measure_norm(seen, limits, trained=trained)
        severities[name] = max((one.severity for one in measures.values()), default=0.0)
        found = _find(name, seen, measures, standardized=standardized)
        if found is not None:
            findings.append(found)
        elif seen.activation is not None and not saw_enough(seen, limits):
            few.append(name)
    followed = sum(seen.activation is not None for seen in looks.values())
    notes = []
    if few:
        notes.append(
            f"{len(few)} layers saw fewer than {limits.samples} samples or {limits.positions} positions, too few to "
            "call a channel dead or rare, or its statistics different from others': "
            f"{', '.join(few[:3])}{', …' if len(few) > 3 else ''}. Give more images."
        )
    if followed < len(looks):
        notes.append(
            f"{len(looks) - followed} norms have no activation that could be seen behind them: they are listed and not "
            "judged"
        )
    return Verdict(findings, dict(looks), followed - len(few), severities, notes=notes)


def _find(name: str, seen: NormLook, measures: dict[Problem, Measure], *, standardized: bool) -> Finding | None:
    for problem in PROBLEMS:
        one = measures.get(problem)
        if one is not None and one.severity > 1:
            remedy, effect = advise(problem, seen, standardized, name=name, channels=one.channels)
            return Finding(name, seen.norm, problem, one.severity, one.evidence, one.channels, remedy, effect)
    return None


def _line(name: str, seen: NormLook, severity: float, problem: str) -> tuple[str, ...]:
    figures = seen.figures()
    then = f"{'+ ' if seen.residual else ''}{seen.activation or '?'}"
    numbers = [f"{figures[key]:.2f}" for key in ("stat_diff_worst", "sigma_mean", "sigma_std", "active")]
    counts = [str(figures[key]) for key in ("dead", "rare", "channels")]
    return (name or "the model", seen.norm, then, f"{severity:.0%}", *numbers, *counts, problem)


def _is_standardized(model: nn.Module) -> bool:
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    ours = sum(isinstance(module, WSConv1d | WSConv2d | WSConv3d) for module in convolutions)
    return bool(convolutions) and 2 * ours >= len(convolutions)  # a plan leaves the odd one plain


def _show(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _jsonable(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    return value
