"""How far a norm goes towards each limit, measured on what `look` saw of it; `verdict` makes findings of it."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from micronorm.diagnostics.advice import Problem, would_be_active
from micronorm.diagnostics.followers import CUTTING
from micronorm.diagnostics.seen import NormLook


@dataclass(frozen=True)
class Thresholds:
    """From where on a layer is accused. All of them here, each with its reason.

    "Measured" below: timm's ResNet-18, -50, -50d, DenseNet-121, VGG-11, RegNetX-002, MobileNetV2-050, HRNet-W18-small,
    Xception-41, DLA-34 and ResNeXt-50 with random weights and their norms replaced by group or by layer normalization
    without WS, on 96 photographs of 96×96 pixels. Such networks train, so they must pass.

    Args:
        stat_diff: StatDiff of a layer's worst group. At 4 a channel whose mean is one deviation of the means below the
            others' is positive in 0.003 % of positions (Φ(−4)): as good as eliminated. Measured: up to 3.4; with WS at
            most 0.3, and 0 for BN.
        pushed: share of a layer's channels that are never active behind a ReLU although their normalized values would
            be: weight and bias push them below zero. Measured: 1 % (of resnet50_gn), by channels that are not normally
            distributed, since a fresh affine does not push. One channel alone accuses no layer, here and below.
        dead: share of a layer's channels that are never active behind a ReLU, for whatever reason. Measured: up to
            14 %; none for BN or with WS.
        rare: share of a layer's channels that are never or hardly ever active. Measured: up to 21 %.
        offset: median distance of an estimated mean from the data's, in estimated deviations. At 1, half of the
            channels are shifted so far that another sixth or third of their values fall on the other side of zero.
        far: distance of the second furthest of them. At 8, no value of a normal channel lies on the side of zero where
            it should; a channel that is nearly constant may do so by itself, two are an event.
        scale: median factor between the estimated deviation and the data's, either way.
        positions: a channel needs so many to be called dead: never active in 300 positions means, at 95 %, active in
            less than 1 % (3/n, the rule of three). StatDiff needs them too: of one position the deviations are 0.
        samples: and so many samples: positions of one image are alike.
    """

    stat_diff: float = 4.0
    pushed: float = 0.05
    dead: float = 0.20
    rare: float = 0.33
    offset: float = 1.0
    far: float = 8.0
    scale: float = 2.0
    positions: int = 300
    samples: int = 32


class Measure(NamedTuple):
    """A figure, its limit, the numbers that tell of it and the channels at fault."""

    figure: float
    limit: float
    evidence: dict[str, Any]
    channels: tuple[int, ...] = ()

    @property
    def severity(self) -> float:
        """The figure over its limit; infinite where it is no number, since NaN is above nothing."""
        return math.inf if math.isnan(self.figure) else self.figure / self.limit


def measure_norm(seen: NormLook, limits: Thresholds, *, trained: bool) -> dict[Problem, Measure]:
    """What could be measured of one norm, by the problem it would be accused of; `judge` says when that is."""
    if not seen.finite:  # nothing else can be measured then
        channels = () if "input" in seen.not_finite else tuple(seen.spoiled.nonzero().flatten().tolist())
        return {"non_finite": Measure(math.inf, 1.0, {"not finite": ", ".join(seen.not_finite)}, channels)}
    found: dict[Problem, Measure] = {}
    if seen.by_estimates and trained and seen.positions >= limits.samples:  # one position has no deviation
        found["estimates"] = _estimates(seen, limits)
    if seen.activation is not None and saw_enough(seen, limits):
        found["stat_diff"] = _differences(seen, limits)
    if seen.activation in CUTTING and saw_enough(seen, limits):
        dead, either = seen.dead, seen.dead | seen.rare
        pushed = _share(seen, dead & would_be_active(seen), limits.pushed)
        # Of the two reasons to be dead the one that is further beyond its limit.
        found["dead"] = max(pushed, _share(seen, dead, limits.dead), key=lambda one: one.severity)
        found["rare"] = _share(seen, either, limits.rare)
    return found


def _estimates(seen: NormLook, limits: Thresholds) -> Measure:
    """How far from mean 0 and deviation 1 the channels are that were normalized by estimates."""
    half = seen.grouped if seen.family == "batch-channel" else seen.normalized  # the half that has them
    distances = half.mean.abs()
    offset, second = float(distances.median()), float(distances.sort().values[-2:][0])
    factor = float((half.var.clamp(min=seen.eps).log() / 2).abs().median().exp())
    figures = offset / limits.offset, second / limits.far, math.log(factor) / math.log(limits.scale)
    figure = math.nan if any(map(math.isnan, figures)) else max(figures)
    evidence = {
        "offset in deviations, median": offset,
        "second largest": second,
        "factor of deviations, median": factor,
    }
    far = (distances > limits.far).nonzero().flatten().tolist()
    return Measure(figure, 1.0, evidence, tuple(far))


def _differences(seen: NormLook, limits: Thresholds) -> Measure:
    differences = seen.stat_diff
    worst, size = int(differences.argmax()), seen.channels // seen.groups
    channels = tuple(range(worst * size, (worst + 1) * size))
    mean = seen.grouped.mean[list(channels)]
    evidence = {
        "StatDiff of the worst group": float(differences[worst]),
        "mean over groups": float(differences.mean()),
        "group": f"{worst} of {seen.groups}, channels {channels[0]} to {channels[-1]}",
        "their means": f"{float(mean.min()):.3g} to {float(mean.max()):.3g}",
        **_activity(seen),
    }
    return Measure(float(differences[worst]), limits.stat_diff, evidence, channels)


def _share(seen: NormLook, channels: Tensor, limit: float) -> Measure:
    """The share of these channels; a single one is none."""
    count = int(channels.sum())
    share = count / channels.numel() if count > 1 else 0.0
    return Measure(share, limit, _activity(seen), tuple(channels.nonzero().flatten().tolist()))


def saw_enough(seen: NormLook, limits: Thresholds) -> bool:
    """Whether samples and positions are as many as a verdict on channels needs."""
    return seen.samples >= limits.samples and seen.positions >= limits.positions


def _activity(seen: NormLook) -> dict[str, Any]:
    counts = f"{int(seen.dead.sum())} and {int(seen.rare.sum())} of {seen.channels}"
    return {"dead and rare channels": counts, "positions each": seen.positions}
