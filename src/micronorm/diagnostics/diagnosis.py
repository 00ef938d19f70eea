"""`diagnose`: which layers of a network are near an elimination singularity, and what to do about them.

A layer is reported for its first problem in the order of `Problem`, because the later ones usually follow from it.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from micronorm.diagnostics.activations import ZERO_BELOW_ZERO
from micronorm.diagnostics.criteria import LIMITS, Problem, advise, has_enough_data, measure_problems
from micronorm.diagnostics.norm_stats import NormStatistics, StatisticsSource, measure_norms
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.weight import WSConv1d, WSConv2d, WSConv3d

TITLES: dict[Problem, str] = {
    "non_finite": "has values that are not finite",
    "estimates": "normalizes by estimates that are far from the data",
    "stat_diff": "normalizes channels together that differ too much",
    "dead": "has dead channels",
    "rare": "has under-represented channels",
}


@dataclass(frozen=True)
class LayerFinding:
    """A problem of one layer: the numbers that show it, the remedy, and its expected effect.

    `severity` is the figure over its threshold. `channels` are those at fault.
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
        numbers = "; ".join(
            f"{name}: {f'{value:.3g}' if isinstance(value, float) else value}" for name, value in self.evidence.items()
        )
        return (
            f"{self.layer or 'the model'} ({self.norm}) {TITLES[self.problem]} [{self.problem}]\n"
            f"  evidence: {numbers}\n  fix: {self.remedy}\n  effect: {self.effect}"
        )


@dataclass(frozen=True)
class Diagnosis:
    """The findings of `diagnose`, in the order in which the layers run. It is true if it has none, and no collapse.

    Fix the first finding first: the later ones may follow from it. `judged` counts the norms with enough samples and a
    known activation; for the others, only finite values and estimates are checked. `severities` holds each layer's
    largest figure over its threshold.
    """

    findings: list[LayerFinding]
    statistics: dict[str, NormStatistics]
    judged: int
    severities: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    collapse: str | None = None
    """How training collapsed at its start and what to do, from the losses of its run (`records.collapse`)."""

    @property
    def ok(self) -> bool:
        """Return whether there are no findings and no collapse."""
        return not self.findings and self.collapse is None

    def __bool__(self) -> bool:
        return self.ok

    def summary(self) -> str:
        """Return the diagnosis in a sentence or two."""
        return f"TRAINING FAILED: {self.collapse}. {self._judgement()}" if self.collapse else self._judgement()

    def _judgement(self) -> str:
        norms = len(self.statistics)
        behind_relu = [stats for stats in self.statistics.values() if stats.activation in ZERO_BELOW_ZERO]
        dead, rare = (sum(int(getattr(stats, kind).sum()) for stats in behind_relu) for kind in ("dead", "rare"))
        totals = (
            f"{self.judged} of {norms} norms judged; {dead} dead and {rare} under-represented channels behind ReLUs "
            "in all"
        )
        if self.findings:
            where = ", ".join(finding.layer or "the model" for finding in self.findings[:3])
            more = f" and {len(self.findings) - 3} more" if len(self.findings) > 3 else ""
            head = "1 LAYER IS" if len(self.findings) == 1 else f"{len(self.findings)} LAYERS ARE"
            return f"{head} IN TROUBLE: {where}{more}. {totals}."
        if self.judged:
            return f"No layer is near an elimination singularity. {totals}."
        if any(stats.activation for stats in self.statistics.values()):
            return f"Nothing could be judged: there were too few samples for any of {norms} norms."
        return f"Nothing could be judged: no activation was found behind any of {norms} norms."

    def table(self, rows: int = 10) -> str:
        """Return the worst layers, one per line. `limit` is the layer's largest figure over its threshold."""
        head = ("layer", "norm", "then", "limit", "StatDiff", "σ_mean", "σ_std", "active", "dead", "rare", "of", "")
        problems = {finding.layer: finding.problem for finding in self.findings}
        worst = sorted(self.statistics, key=lambda name: -self.severities.get(name, 0.0))[:rows]
        lines = [head, *(self._line(name, problems.get(name, "")) for name in worst)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text_columns = (0, 1, 2, len(head) - 1)

        def cell(i: int, text: str) -> str:
            return text.ljust(widths[i]) if i in text_columns else text.rjust(widths[i])

        return "\n".join("  ".join(cell(i, text) for i, text in enumerate(line)).rstrip() for line in lines)

    def _line(self, name: str, problem: str) -> tuple[str, ...]:
        stats = self.statistics[name]
        figures = stats.figures()
        then = f"{'+ ' if stats.residual else ''}{stats.activation or '?'}"
        numbers = [f"{figures[key]:.2f}" for key in ("stat_diff_worst", "sigma_mean", "sigma_std", "active")]
        counts = [str(figures[key]) for key in ("dead", "rare", "channels")]
        severity = f"{self.severities.get(name, 0.0):.0%}"
        return (name or "the model", stats.norm, then, severity, *numbers, *counts, problem)

    def __str__(self) -> str:
        return "\n".join(
            [self.summary(), *(str(finding) for finding in self.findings), *(f"note: {note}" for note in self.notes)]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis in the types of JSON. Numbers that are not finite become text."""
        more = ("activation", "residual", "samples", "positions")
        data = {
            "ok": self.ok,
            "summary": self.summary(),
            "collapse": self.collapse,
            "judged": self.judged,
            "severities": self.severities,
            "findings": [asdict(finding) for finding in self.findings],
            "layers": {
                name: {**stats.figures(), **{key: getattr(stats, key) for key in more}}
                for name, stats in self.statistics.items()
            },
            "notes": self.notes,
        }
        # JSON has no infinity.
        return json.loads(json.dumps(data), parse_constant=lambda constant: str(float(constant)))


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    statistics: StatisticsSource = "estimates",
    trained: bool = True,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> Diagnosis:
    """Measure the norms of a model on some data and report those near an elimination singularity.

    Args:
        model: as in `measure_norms`, which does not change it.
        batches: as in `measure_norms`. A finding about channels needs at least 32 samples of the network's own data.
        statistics: as in `measure_norms`.
        trained: whether running estimates should match the data; those of a new network do not.
        forward: as in `measure_norms`.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU())
        >>> batches = [torch.randn(32, 3, 8, 8)]
        >>> bool(diagnose(model, batches))
        True
        >>> with torch.no_grad():
        ...     model[0].bias[:2] += 100  # two of the four channels of a group, far from the others
        >>> diagnosis = diagnose(model, batches)
        >>> [(finding.layer, finding.problem) for finding in diagnosis.findings]
        [('1', 'stat_diff')]
    """
    measured = measure_norms(model, batches, statistics=statistics, forward=forward)
    diagnosis = judge(measured, standardized=_is_standardized(model), trained=trained)
    unmoved = _unmoved_estimates(model) if trained else []
    if unmoved:
        diagnosis.notes.append(
            f"the estimates of {len(unmoved)} BatchChannelNorm layers have never moved from (0, 1), at first "
            f"{unmoved[0]!r}: no optimizer that holds their weights has stepped; see mn.attach"
        )
    return diagnosis


def judge(measured: Mapping[str, NormStatistics], *, standardized: bool = False, trained: bool = True) -> Diagnosis:
    """Return the diagnosis for the statistics that `measure_norms` returned.

    StatDiff is judged for norms with a known activation, dead and rare channels for norms followed by a ReLU. Both need
    as many samples and positions as `Thresholds` says. Estimates and finite values are always judged.

    Args:
        measured: the result of `measure_norms`.
        standardized: whether the convolutions use Weight Standardization, so that no remedy suggests it.
        trained: as in `diagnose`.
    """
    findings, few, severities = [], [], {}
    for name, stats in measured.items():
        measures = measure_problems(stats, trained=trained)
        severities[name] = max((one.severity for one in measures.values()), default=0.0)
        problem: Problem | None = next((kind for kind, one in measures.items() if one.severity > 1), None)
        if problem is not None:
            one = measures[problem]
            remedy, effect = advise(problem, stats, standardized, name=name, channels=one.channels)
            findings.append(
                LayerFinding(name, stats.norm, problem, one.severity, one.evidence, one.channels, remedy, effect)
            )
        elif stats.activation is not None and not has_enough_data(stats):
            few.append(name)
    followed = sum(stats.activation is not None for stats in measured.values())
    notes = []
    if few:
        notes.append(
            f"{len(few)} layers saw fewer than {LIMITS.samples} samples or {LIMITS.positions} positions, too few to "
            f"judge their channels: {', '.join(few[:3])}{', …' if len(few) > 3 else ''}. Use more images."
        )
    if followed < len(measured):
        notes.append(f"{len(measured) - followed} norms have no known activation behind them: listed, but not judged")
    return Diagnosis(findings, dict(measured), followed - len(few), severities, notes=notes)


def _unmoved_estimates(model: nn.Module) -> list[str]:
    """Return the names of the layers that train with estimates and still have their initial ones."""
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, BatchChannelNorm) and layer.statistics != "batch"
        if bool((layer.running_mean == 0).all() and (layer.running_var == 1).all())
    ]


def _is_standardized(model: nn.Module) -> bool:
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    ours = sum(isinstance(module, WSConv1d | WSConv2d | WSConv3d) for module in convolutions)
    return bool(convolutions) and 2 * ours >= len(convolutions)  # a plan leaves some convolutions plain
