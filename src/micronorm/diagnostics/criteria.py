"""The thresholds of the diagnosis: how close each norm is to them, and what to do about a norm beyond them."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from micronorm.diagnostics.activations import ZERO_BELOW_ZERO
from micronorm.diagnostics.norm_stats import NormStatistics

Problem = Literal["non_finite", "estimates", "stat_diff", "dead", "rare"]


@dataclass(frozen=True)
class Thresholds:
    """The limits beyond which a layer is reported, with the reason for each.

    "Measured" refers to timm's ResNet-18, -50, -50d, DenseNet-121, VGG-11, RegNetX-002, MobileNetV2-050,
    HRNet-W18-small, Xception-41, DLA-34 and ResNeXt-50. They had random weights, and group or layer normalization
    without WS, and ran on 96 photographs of 96×96 pixels. Such networks can be trained, so they must pass.

    Args:
        stat_diff: StatDiff of a layer's worst group. At 4, a channel whose mean lies one deviation of the means below
            the others is positive in 0.003 % of positions (Φ(−4)). Measured: up to 3.4; with WS at most 0.3; BN has 0.
        pushed: share of channels that are never active behind a ReLU although their normalized values would be: the
            weight and bias push them below zero. Measured: 1 % (resnet50_gn). A single channel never counts, here and
            below.
        dead: share of channels that are never active behind a ReLU, for any reason. Measured: up to 14 %; none for BN
            or with WS.
        rare: share of channels that are never or rarely active. Measured: up to 21 %.
        offset: median distance between estimated and actual mean, in estimated deviations. At 1, half of the channels
            are shifted so far that up to a third of their values change sign.
        far: the second largest of these distances. At 8, all values of a normal channel have the wrong sign. A nearly
            constant channel can reach this alone; two channels cannot by chance.
        scale: median ratio between the estimated and the actual deviation, in either direction.
        positions: positions per channel that a finding needs. A channel that is never active in 300 positions is
            active in fewer than 1 %, with 95 % confidence (the rule of three).
        samples: samples that a finding needs, because the positions of one image are alike.
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


LIMITS = Thresholds()


class Measure(NamedTuple):
    """A figure, its limit, the numbers that explain it, and the channels at fault."""

    figure: float
    limit: float
    evidence: dict[str, Any]
    channels: tuple[int, ...] = ()

    @property
    def severity(self) -> float:
        """Return the figure over its limit, or infinity if the figure is NaN."""
        return math.inf if math.isnan(self.figure) else self.figure / self.limit


def measure_problems(stats: NormStatistics, *, trained: bool) -> dict[Problem, Measure]:
    """Return the measure of each problem that can be judged for one norm, in the order of `Problem`.

    A severity above 1 is a problem.
    """
    if stats.not_finite:  # nothing else can be measured
        channels = () if "input" in stats.not_finite else _indices(stats.not_finite_channels)
        return {"non_finite": Measure(math.inf, 1.0, {"not finite": ", ".join(stats.not_finite)}, channels)}
    found: dict[Problem, Measure] = {}
    # Estimates that differ from the data are no problem in a layer that was trained with them: it computes what it
    # computed in training. If they push channels below zero, the other measures find it.
    differs_from_training = stats.by_estimates and not stats.trained_by_estimates
    if differs_from_training and trained and stats.positions >= LIMITS.samples:  # one position has no deviation
        found["estimates"] = _measure_estimates(stats)
    if stats.activation is not None and has_enough_data(stats):
        found["stat_diff"] = _measure_stat_diff(stats)
    if stats.activation in ZERO_BELOW_ZERO and has_enough_data(stats):
        dead, either = stats.dead, stats.dead | stats.rare
        pushed = _measure_share(stats, dead & _active_without_affine(stats), LIMITS.pushed)
        # Report the one of the two limits on dead channels that is exceeded further.
        found["dead"] = max(pushed, _measure_share(stats, dead, LIMITS.dead), key=lambda one: one.severity)
        found["rare"] = _measure_share(stats, either, LIMITS.rare)
    return found


def has_enough_data(stats: NormStatistics) -> bool:
    """Return whether there are enough samples and positions to judge channels."""
    return stats.samples >= LIMITS.samples and stats.positions >= LIMITS.positions


def _measure_estimates(stats: NormStatistics) -> Measure:
    """Measure how far channels normalized by estimates are from mean 0 and deviation 1."""
    half = stats.grouped if stats.family == "batch-channel" else stats.normalized  # the half that uses estimates
    distances = half.mean.abs()
    offset, second = float(distances.median()), float(distances.sort().values[-2:][0])
    factor = float((half.var.clamp(min=stats.eps).log() / 2).abs().median().exp())
    figures = offset / LIMITS.offset, second / LIMITS.far, math.log(factor) / math.log(LIMITS.scale)
    figure = math.nan if any(map(math.isnan, figures)) else max(figures)
    evidence = {
        "offset in deviations, median": offset,
        "second largest": second,
        "factor of deviations, median": factor,
    }
    return Measure(figure, 1.0, evidence, _indices(distances > LIMITS.far))


def _measure_stat_diff(stats: NormStatistics) -> Measure:
    differences = stats.stat_diff
    worst, size = int(differences.argmax()), stats.channels // stats.groups
    channels = tuple(range(worst * size, (worst + 1) * size))
    mean = stats.grouped.mean[list(channels)]
    evidence = {
        "StatDiff of the worst group": float(differences[worst]),
        "mean over groups": float(differences.mean()),
        "group": f"{worst} of {stats.groups}, channels {channels[0]} to {channels[-1]}",
        "their means": f"{float(mean.min()):.3g} to {float(mean.max()):.3g}",
        **_activity(stats),
    }
    return Measure(float(differences[worst]), LIMITS.stat_diff, evidence, channels)


def _measure_share(stats: NormStatistics, channels: Tensor, limit: float) -> Measure:
    """Measure the share of these channels. A single channel counts as none."""
    count = int(channels.sum())
    share = count / channels.numel() if count > 1 else 0.0
    return Measure(share, limit, _activity(stats), _indices(channels))


def _activity(stats: NormStatistics) -> dict[str, Any]:
    counts = f"{int(stats.dead.sum())} and {int(stats.rare.sum())} of {stats.channels}"
    return {"dead and rare channels": counts, "positions each": stats.positions}


def _indices(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero().flatten().tolist())


def _active_without_affine(stats: NormStatistics) -> Tensor:
    """Return which channels would be active in at least 1 % of positions without the affine transformation.

    A normal channel is if its mean is above −2.33 deviations.
    """
    mean, var = stats.normalized
    return (mean > -2.33 * var.sqrt()) & (var > stats.eps)


# --- advice ----------------------------------------------------------------------------------------------------------


def advise(
    problem: Problem, stats: NormStatistics, standardized: bool, *, name: str, channels: tuple[int, ...]
) -> tuple[str, str]:
    """Return the remedy for a layer and its expected effect, each in words."""
    if problem == "non_finite":
        return _fix_not_finite(stats), "the layers behind this one cannot be judged until then"
    if problem == "estimates":
        return (
            "mn.calibrate(model, batches) with training images; first make sure that the network was trained on images "
            "like these",
            "normalized channels have mean 0 and deviation 1 again, as in training",
        )
    by_affine = bool(_active_without_affine(stats)[list(channels)].double().mean() > 0.5)
    if problem != "stat_diff" and by_affine:
        shown = list(channels[:8])
        return (
            f"model.get_submodule({name!r}).bias.data[{shown}{' + …' if len(channels) > 8 else ''}] = 0, then train on "
            "with a smaller learning rate or a warm-up: the normalized channels are fine, but their weight and bias "
            "push them below zero. No conversion changes that",
            "about half of these channels' positions are active again and pass gradients",
        )
    if stats.trained_by_estimates:
        return (
            "train with estimates that follow the data more closely: mn.BCN(bias_correction=True), or a larger rate "
            "by mn.attach(model, rate=0.1). mn.calibrate(model, batches) sets the estimates now, but changes the "
            "network's function, so train it further afterwards",
            f"StatDiff of this layer goes from {float(stats.stat_diff.max()):.2g} to 0 as the estimates settle",
        )
    if stats.family in ("batch", "instance", "batch-channel"):
        return (
            "check the images and the layers before: this norm already normalizes each channel by itself",
            "unknown",
        )
    layer_norm = ", layer_norm=True" if stats.family == "layer" else ""
    weight = "None" if standardized else "mn.WS()"
    weaker = "" if standardized else "; mn.convert(model, None, mn.WS()) keeps the norm and helps less"
    by_ws = "" if standardized else "; WS alone brings it closer to 0 (the paper's fig:stat_diff)"
    return (
        f"mn.convert(model, mn.BCN(), {weight}{layer_norm}), then train on or from scratch{weaker}",
        f"StatDiff of this layer goes from {float(stats.stat_diff.max()):.2g} to 0 as BCN's estimates settle, so no "
        f"channel is pushed below zero by its neighbours{by_ws}",
    )


def _fix_not_finite(stats: NormStatistics) -> str:
    held = [part for part in stats.not_finite if part not in ("input", "output")]
    if held:
        again = "" if any("running" not in part for part in held) else ", or call mn.calibrate(model, batches)"
        return f"{', '.join(held)} of this layer cannot be used: load a checkpoint in which they are finite{again}"
    if "input" not in stats.not_finite:
        return (
            "this layer itself overflows: check its estimates (is a variance below 0?), the size of its input and its "
            "dtype"
        )
    return "find the overflow before this layer: the learning rate, half precision, or a division by zero"
