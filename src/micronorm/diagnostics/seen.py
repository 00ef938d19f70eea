"""What one normalization did to some data: the figures, and how they are gathered."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from micronorm.diagnostics.channels import (
    RARE,
    RunningMoments,
    dead_channels,
    distance_to_bn,
    positives,
    rare_channels,
)
from micronorm.diagnostics.norms import Family, NormLayer
from micronorm.diagnostics.statdiff import stat_diff
from micronorm.ops.moments import Moments, moments


@dataclass(frozen=True, eq=False)
class NormLook:
    """What one normalization did to some data. Tensors lie on the CPU and hold C numbers, float64.

    Args:
        norm: the layer's class.
        family: "batch", "instance", "group", "layer" or "batch-channel".
        groups: how many groups of channels are normalized together; a group per channel for "batch" and "instance".
        samples: how many samples came by, a sample once for each call of the layer.
        positions: elements per channel, over all samples.
        input: mean and variance of each channel of the input: of what the convolution before it gave.
        grouped: likewise of what is normalized together. That is the input, except for Batch-Channel Normalization,
            whose group half is given channels that its channel half has normalized.
        normalized: likewise after normalization, without any affine transformation.
        positive: the share of each channel's outputs that are above 0, before any activation.
        negative: the share of those below 0.
        active: the share of positive outputs of the activation. Where none could be seen to follow, it is `positive`.
        activation: the first one that the output meets, "relu" or the like; None where none could be seen.
        residual: whether something was added to the output before the activation.
        by_estimates: whether channels were normalized by statistics that the layer keeps.
        eps: the layer's.
        not_finite: what of the layer holds numbers that are not finite: "input", parameters and, where channels were
            normalized by them, estimates by their names, "output"; empty where all are.
        spoiled: which channels (C booleans) of the layer's output are not finite in some position.
    """

    norm: str
    family: Family
    groups: int
    samples: int
    positions: int
    input: Moments
    grouped: Moments
    normalized: Moments
    positive: Tensor
    negative: Tensor
    active: Tensor
    activation: str | None
    residual: bool
    by_estimates: bool
    eps: float
    not_finite: tuple[str, ...]
    spoiled: Tensor

    @property
    def finite(self) -> bool:
        """Whether everything that went in, was computed with, and came out is finite."""
        return not self.not_finite

    @property
    def channels(self) -> int:
        """C."""
        return self.active.numel()

    @property
    def stat_diff(self) -> Tensor:
        """StatDiff (label `eq:sd`) of each group of channels that are normalized together: G numbers.

        0 for batch and instance normalization: no two channels are.
        """
        return stat_diff(*self.grouped, self.groups)

    @property
    def dead(self) -> Tensor:
        """Which channels (C booleans) were never active.

        After an addition that is what became of a sum; there a channel counts only if the norm's own output was below 0
        in 99 % of positions: otherwise it is the other summand that keeps it down.
        """
        return dead_channels(self.active) & self._own()

    @property
    def rare(self) -> Tensor:
        """Which channels (C booleans) were active, but in less than 1 % of positions; after an addition as `dead`."""
        return rare_channels(self.active) & self._own()

    def _own(self) -> Tensor:
        return self.negative > 1 - RARE if self.residual else torch.ones_like(self.active, dtype=torch.bool)

    def figures(self) -> dict[str, Any]:
        """The row of kind "norm" that a run's records keep; see `micronorm.records`."""
        differences = self.stat_diff
        spread = distance_to_bn(*self.normalized, eps=self.eps)
        return {
            "kind": "norm",
            "norm": self.norm,
            "channels": self.channels,
            "groups": self.groups,
            "stat_diff": float(differences.mean()),
            "stat_diff_worst": float(differences.max()),
            "sigma_mean": spread.sigma_mean,
            "sigma_std": spread.sigma_std,
            "active": float(self.active.mean()),
            "dead": int(self.dead.sum()),
            "rare": int(self.rare.sum()),
        }


class Seen:
    """What one layer has seen so far."""

    def __init__(self, norm: NormLayer) -> None:
        self.norm = norm
        self.by_estimates = norm.by_estimates
        self.input, self.grouped, self.normalized = RunningMoments(), RunningMoments(), RunningMoments()
        self.samples = self.calls = self.activated = 0
        self.positive: Tensor | int = 0
        self.negative: Tensor | int = 0
        self.active: Tensor | int = 0
        self.kinds: set[str] = set()
        self.residual = False
        self.finite_input: Tensor | bool = True
        self.spoiled: Tensor | bool = False

    def take(self, x: Tensor) -> None:
        """An input, N×C×…."""
        data = moments(x)
        passage = self.norm.pass_through(x, data)
        per_channel = x.numel() // (x.shape[0] * x.shape[1])
        for running, one in (
            (self.input, data),
            (self.grouped, passage.grouped),
            (self.normalized, passage.normalized),
        ):
            running.add(one, positions=per_channel)
        self.samples += x.shape[0]
        self.calls += 1
        self.finite_input = self.finite_input & x.isfinite().all()

    def give(self, y: Tensor, axis: int) -> None:
        """The norm's own output."""
        self.positive = self.positive + positives(y, axis=axis)
        self.negative = self.negative + positives(-y, axis=axis)
        broken = y.isfinite().logical_not().movedim(axis, 0).flatten(1).any(1)
        self.spoiled = self.spoiled | broken

    def activate(self, kind: str, added: bool, counts: Tensor) -> None:
        """An activation was seen; called at most once for each output."""
        self.kinds.add(kind)
        self.residual |= added
        self.active = self.active + counts
        self.activated += 1

    def look(self) -> NormLook:
        """All of it, on the CPU."""
        told = self.activated == self.calls and len(self.kinds) == 1
        count = self.input.count

        def share(counts: Tensor | int) -> Tensor:
            return torch.as_tensor(counts).cpu().to(torch.float64) / count

        on_cpu = (
            Moments(*(m.cpu().to(torch.float64) for m in running.moments))
            for running in (self.input, self.grouped, self.normalized)
        )
        return NormLook(
            type(self.norm.module).__name__,
            self.norm.family,
            self.norm.groups,
            self.samples,
            count,
            *on_cpu,
            positive=share(self.positive),
            negative=share(self.negative),
            active=share(self.active if told else self.positive),
            activation=next(iter(self.kinds)) if told else None,
            residual=self.residual and told,
            by_estimates=self.by_estimates,
            eps=self.norm.eps,
            not_finite=self._not_finite(),
            spoiled=torch.as_tensor(self.spoiled).cpu().expand(self.norm.channels),
        )

    def _not_finite(self) -> tuple[str, ...]:
        given = [] if self.finite_input else ["input"]
        held = [name for name, tensor in self.norm.numbers().items() if not tensor.isfinite().all()]
        return (*given, *held, *(["output"] if torch.as_tensor(self.spoiled).any() else []))
