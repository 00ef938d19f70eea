"""Planted faults, each beside the clean twin that differs from it in that one thing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import micronorm as mn
from tests.check.parts import (
    Apply,
    CenteredLoss,
    ChoosesSize,
    Codebook,
    DropPath,
    FunctionalMixing,
    MovingBatchNorm,
    Net,
    OwnStream,
    Padding,
    PerSampleDropout,
    ReturnsLoss,
    RunningMax,
    ScaledGradient,
    SummedViews,
    batch_hard,
    contrastive,
    images,
    mixup,
    noisy_input,
    one_by_one,
    pads_in_loss,
    pixel_loss,
    ragged,
    refuse,
    summed,
)


@dataclass(frozen=True)
class Planted:
    """A fault: where it is, of which cause, and the twin without it."""

    where: str
    cause: str
    model: Callable[[], nn.Module]
    twin: Callable[[], nn.Module]
    loss: Callable[..., Any] = summed
    twin_loss: Callable[..., Any] | None = None
    batch: Callable[[], tuple] = images


def in_model(cause: str, middle: Callable[[], nn.Module], twin: Callable[[], nn.Module], **other: Any) -> Planted:
    """A fault in the middle of Net."""
    where = other.pop("where", "middle")
    return Planted(where, cause, lambda: Net(middle()), lambda: Net(twin()), **other)


def in_loss(cause: str, loss: Callable[..., Any], twin: Callable[..., Any], **other: Any) -> Planted:
    """A fault in the loss function, of a Net that is right."""
    where = other.pop("where", "loss")
    return Planted(where, cause, lambda: Net(nn.Identity()), lambda: Net(nn.Identity()), loss, twin, **other)


def group_norm() -> nn.Module:
    return nn.GroupNorm(4, 8)


FAULTS: dict[str, Planted] = {
    "BatchNorm": in_model("batch_statistics", lambda: nn.BatchNorm2d(8), lambda: nn.BatchNorm2d(8).eval()),
    "SyncBatchNorm": in_model("batch_statistics", lambda: nn.SyncBatchNorm(8), group_norm),
    "GhostBatchNorm of two": in_model(
        "batch_statistics", lambda: mn.BN(micro_batch=2)(8), lambda: mn.BN(micro_batch=1)(8)
    ),
    "SwitchableNorm": in_model("batch_statistics", lambda: mn.SN()(8), group_norm),
    "BatchRenorm": in_model("batch_statistics", lambda: mn.BRN()(8), lambda: mn.BRN(micro_batch=1)(8)),
    "BCN in batch mode": in_model(
        "batch_statistics", lambda: mn.BCN(groups=2, statistics="batch")(8), lambda: mn.BCN(groups=2)(8)
    ),
    "BCN in sequential mode, two at a time": in_model(
        "batch_statistics",
        lambda: mn.nn.BatchChannelNorm(8, 2, statistics="sequential", micro_batch=2),
        lambda: mn.nn.BatchChannelNorm(8, 2, statistics="sequential", micro_batch=1),
    ),
    "a batch normalization of one's own": in_model("mixes_samples", MovingBatchNorm, lambda: MovingBatchNorm().eval()),
    "centering over the batch": in_model(
        "mixes_samples",
        lambda: Apply(lambda x: x - x.mean(0)),
        lambda: Apply(lambda x: x - x.mean((2, 3), keepdim=True)),
    ),
    "mixing between children": in_model(
        "mixes_samples", lambda: FunctionalMixing((0,)), lambda: FunctionalMixing((2, 3))
    ),
    "mixing deep inside": in_model(
        "mixes_samples",
        lambda: nn.Sequential(nn.ReLU(), nn.Sequential(nn.Conv2d(8, 8, 1), FunctionalMixing((0,)))),
        lambda: nn.Sequential(nn.ReLU(), nn.Sequential(nn.Conv2d(8, 8, 1), FunctionalMixing((2, 3)))),
        where="middle.1.1",
    ),
    "division by the number of samples": in_model(
        "mixes_samples", lambda: Apply(lambda x: x / x.shape[0]), lambda: Apply(lambda x: x / x.shape[1])
    ),
    "an offset by the number of samples": in_model(
        "mixes_samples", lambda: Apply(lambda x: x.relu() + 1 / len(x)), lambda: Apply(lambda x: x.relu() + 1)
    ),
    "dropout": in_model("randomness", lambda: nn.Dropout(0.2), lambda: nn.Dropout(0.0)),
    "drop path": in_model("randomness", DropPath, PerSampleDropout),
    "noise from a stream of one's own": in_model("randomness", OwnStream, nn.Identity),
    "codes that move in the forward": in_model("state", lambda: Codebook(True), lambda: Codebook(False)),
    "a buffer that nothing reads": in_model("buffer", lambda: RunningMax(0.1), lambda: RunningMax(0.0)),
    "a gradient normalized per backward": in_model(
        "gradient",
        lambda: Apply(lambda x: ScaledGradient.apply(x, True)),
        lambda: Apply(lambda x: ScaledGradient.apply(x, False)),
        where="norm",
    ),
    "two parameters with one gradient": in_model(
        "shared_gradient", lambda: SummedViews(before=False), lambda: SummedViews(before=True)
    ),
    "a forward for even numbers only": in_model(
        "fails_when_cut", lambda: Apply(lambda x: torch.cat(x.chunk(2)) if len(x) % 2 == 0 else refuse(x)), nn.Identity
    ),
    "padding in the model": Planted("model", "padding", lambda: Padding(None), lambda: Padding(12), batch=ragged),
    "padding by a module that draws without effect": Planted(
        "model", "padding", lambda: ChoosesSize(None), lambda: ChoosesSize(12), batch=ragged
    ),
    "padding in the loss": in_loss("padding", pads_in_loss, one_by_one, batch=ragged),
    "an averaged loss": in_loss("averaged_loss", lambda m, p: F.cross_entropy(m(p[0]), p[1]), summed),
    "an averaged loss counted once": in_loss("averaged_loss", lambda m, p: (F.cross_entropy(m(p[0]), p[1]), 1), summed),
    "an average over pixels": in_loss("averaged_loss", pixel_loss("mean"), pixel_loss("sum")),
    "an average inside the model": Planted(
        "criterion",
        "averaged_loss",
        lambda: ReturnsLoss("mean"),
        lambda: ReturnsLoss("sum"),
        loss=lambda m, p: m(*p)["classification"],
    ),
    "a loss over the root of the number of samples": in_loss(
        "cross_sample_loss", lambda m, p: summed(m, p)[0] / len(p[1]) ** 0.5, lambda m, p: summed(m, p)[0] / 6**0.5
    ),
    "a count of one": in_loss("loss_count", lambda m, p: (summed(m, p)[0], 1), summed),
    "a contrastive loss": in_loss(
        "cross_sample_loss",
        lambda m, p: contrastive(m, p, between_samples=True),
        lambda m, p: contrastive(m, p, between_samples=False),
    ),
    "a batch-hard loss, averaged": in_loss("cross_sample_loss", batch_hard, summed),
    "mixup between samples": in_loss("mixes_samples", mixup, summed),
    "noise in the loss": in_loss("randomness", noisy_input, summed),
    "a loss that moves its centre": in_loss("state", CenteredLoss(0.1), CenteredLoss(0.0)),
}
