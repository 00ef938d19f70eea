"""Segmentation of volumes: Dice and cross entropy of each sample alone, deep supervision, and the Dice by class."""

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.data.files import FOLDS
from micronorm.data.volumes import Size, open_decathlon
from micronorm.tasks.pictures import colour_code, draw_image, draw_labels, in_eval_mode, load_few
from micronorm.tasks.scores import SumLoss, SumScore, widen

PATCH = (32, 48, 32)
"""Depth, height and width of the patches of the hippocampus, whose volumes have about 35×50×36 voxels."""

WINDOWS = 8
"""Windows of a volume that share a forward pass in testing."""

SMOOTH = 1.0
"""Added to numerator and denominator of the soft Dice, so that it is defined for a class that does not occur."""


def dice_and_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the soft Dice, the mean over the classes but the background, and the mean cross entropy of each sample.

    Args:
        logits: N×classes×…
        labels: N×…, whole numbers.

    Returns:
        Two tensors of N numbers, in float32 at least. Each number depends on its sample alone, so that their sums do
        not depend on how a batch is cut. A Dice over all voxels of a batch ("batch Dice") is not such a sum.

    Example:
        >>> labels = torch.tensor([[0, 1, 1, 2]])
        >>> sure = 50 * F.one_hot(labels, 3).movedim(-1, 1).float()
        >>> [round(part.item(), 3) for part in dice_and_entropy(sure, labels)]
        [1.0, 0.0]
    """
    wide = widen(logits)
    entropy = F.cross_entropy(wide, labels, reduction="none").flatten(1).mean(1)
    chance = wide.softmax(1)[:, 1:].flatten(2)
    truth = labels.flatten(1)[:, None] == torch.arange(1, wide.shape[1], device=labels.device)[:, None]
    common, both = (chance * truth).sum(2), chance.sum(2) + truth.sum(2)
    return ((2 * common + SMOOTH) / (both + SMOOTH)).mean(1), entropy


def sliding_window(model: nn.Module, volume: Tensor, *, patch: Size) -> Tensor:
    """Return the logits of a whole volume, averaged over windows that overlap by half or more.

    A window's centre counts most: weights fall off as a Gaussian whose standard deviation is an eighth of the window.

    Args:
        model: maps N×C×patch to N×classes×patch; in eval mode.
        volume: C×D×H×W, of any size. A smaller one is padded with zeros to the patch.
        patch: depth, height and width of a window.

    Example:
        >>> sliding_window(nn.Conv3d(1, 3, 1), torch.randn(1, 9, 5, 12), patch=(4, 8, 8)).shape
        torch.Size([3, 9, 5, 12])
    """
    size = volume.shape[1:]
    before = [max(0, length - have) // 2 for have, length in zip(size, patch, strict=True)]
    after = [max(0, length - have) - start for have, length, start in zip(size, patch, before, strict=True)]
    padded = F.pad(volume, [pad for axis in (2, 1, 0) for pad in (before[axis], after[axis])])
    starts = [_starts(have, length) for have, length in zip(padded.shape[1:], patch, strict=True)]
    corners = list(itertools.product(*starts))
    weight = _window_weight(patch, volume)
    total = weights = volume.new_zeros(())
    for first in range(0, len(corners), WINDOWS):
        places = [_box(corner, patch) for corner in corners[first : first + WINDOWS]]
        logits = model(torch.stack([padded[place] for place in places])).to(volume.dtype)
        if not first:
            total, weights = (padded.new_zeros(count, *padded.shape[1:]) for count in (logits.shape[1], 1))
        for place, part in zip(places, logits, strict=True):
            total[place] += weight * part
            weights[place] += weight
    return (total / weights)[_box(before, size)]


def _box(corner: Sequence[int], size: Sequence[int]) -> tuple[Any, ...]:
    """Return the index of a box in a tensor whose last axes are depth, height and width."""
    return (..., *(slice(start, start + length) for start, length in zip(corner, size, strict=True)))


def _starts(size: int, length: int) -> list[int]:
    """Return where windows start along an axis: evenly spaced, at most half a window apart, from end to end."""
    gaps = math.ceil(2 * (size - length) / length)
    return [round(k * (size - length) / gaps) for k in range(gaps + 1)] if gaps else [0]


def _window_weight(patch: Size, like: Tensor) -> Tensor:
    weight = like.new_ones(())
    for length in patch:
        along = (torch.arange(length, device=like.device, dtype=like.dtype) - (length - 1) / 2) / (length / 8)
        weight = weight[..., None] * torch.exp(-(along**2) / 2)
    return weight


class Volumes:
    """Predict the class of each voxel. A batch is (volumes, labels): N×1×D×H×W and N×D×H×W, or lists for testing.

    In training the model returns logits of N×classes×D×H×W, or a list of them whose later members are coarser (deep
    supervision). The weights of the levels are 1, 1/2, 1/4 and so on, divided by their sum.

    Args:
        train: the training samples, in patches of one size.
        test: the test samples, whole volumes.
        names: the names of the classes; the first is the background.
        patch: depth, height and width of a window in testing.
    """

    sample = "volume"
    evaluation_batch = 8

    def __init__(self, train: Any, test: Any, *, names: tuple[str, ...], patch: Size) -> None:
        self.train, self.test = train, test
        self.names, self.patch = names, patch

    def loss(self, model: nn.Module, batch: tuple[Any, ...]) -> SumLoss:
        """Return the sum over samples of cross entropy + 1 − soft Dice, in float32 at least."""
        volumes, labels = batch
        outputs = model(volumes)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        self._check(outputs[0], volumes)
        shares = [2.0**-level for level in range(len(outputs))]
        total, finest = labels.new_zeros((), dtype=torch.float32), None
        for share, logits in zip(shares, outputs, strict=True):
            dice, entropy = dice_and_entropy(logits, _resize_labels(labels, logits.shape[2:]))
            total = total + share / sum(shares) * (entropy + 1 - dice).sum()
            finest = dice if finest is None else finest
        assert finest is not None
        return SumLoss(total, len(labels), {"soft_dice": finest.detach().sum()})

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss per volume, and the mean soft Dice of the patches in per cent."""
        count = max(sums["count"], 1)
        return {"loss": sums["loss"] / count, "soft_dice": 100 * sums["soft_dice"] / count}

    def new_score(self) -> SumScore:
        """Return the score of no samples."""
        return SumScore(self._dice_figures)

    def score(self, model: nn.Module, batch: tuple[Any, ...]) -> SumScore:
        """Return the sum of each class's Dice over volumes, and the number of volumes in which the class occurs."""
        total = self.new_score()
        for volume, labels in zip(*batch, strict=True):
            answer = self._answer(model, volume)[1]
            sums = {}
            for k, name in self._foreground():
                found, true = answer == k, labels == k
                both, occurs = (found.sum() + true.sum()).double(), (found | true).any()
                sums[f"dice_{name}"] = 2 * (found & true).sum() / both.clamp_min(1)
                sums[f"volumes_{name}"] = occurs
            total.merge(SumScore(self._dice_figures, sums))
        return total

    def _dice_figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return each class's mean Dice over volumes in per cent, and the mean of the classes."""
        by_class = {
            f"dice_{name}": 100 * sums[f"dice_{name}"] / sums[f"volumes_{name}"]
            for _, name in self._foreground()
            if sums[f"volumes_{name}"]
        }
        if not by_class:
            raise ValueError("no class occurs in the test volumes: there is no Dice to score")
        return {"dice": sum(by_class.values()) / len(by_class), **by_class}

    @torch.no_grad()
    def examples(self, model: nn.Module, *, count: int = 8) -> list[dict[str, Any]]:
        """Return the slice with the most foreground of `count` test volumes, with true and predicted labels."""
        found = []
        with in_eval_mode(model) as parameter:
            for (volume,), (labels,) in load_few(self.test, count):
                chance, answer = self._answer(model, volume.to(parameter.device, parameter.dtype))
                at = int((labels > 0).sum((1, 2)).argmax())
                truth, guess = labels[at].cpu(), answer[at].cpu()
                found.append(
                    {
                        "image": draw_image(volume[:, at]),
                        "truth": draw_labels(truth),
                        "answer": draw_labels(guess),
                        "label": self._present(truth),
                        "prediction": self._present(guess),
                        "probability": chance[at].mean().item(),
                        "note": f"slice {at} of {len(labels)}",
                        "colours": {name: colour_code(k) for k, name in self._foreground()},
                    }
                )
        return found

    def _answer(self, model: nn.Module, volume: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probability and the number of the likeliest class of each voxel."""
        logits = sliding_window(model, volume, patch=self.patch)
        self._check(logits[None], volume[None])
        probability, classes = logits.softmax(0).max(0)
        return probability, classes

    def _check(self, logits: Tensor, volumes: Tensor) -> None:
        wanted = (len(volumes), len(self.names), *volumes.shape[2:])
        if logits.shape != wanted:
            raise ValueError(
                f"the model gives shape {tuple(logits.shape)} for volumes of {tuple(volumes.shape)} and "
                f"{len(self.names)} classes; it must give {wanted}, in training as the first of a list"
            )

    def _foreground(self) -> list[tuple[int, str]]:
        return [(k, name.lower()) for k, name in enumerate(self.names) if k]

    def _present(self, labels: Tensor) -> str:
        return ", ".join(name for k, name in self._foreground() if bool((labels == k).any())) or "nothing"


def _resize_labels(labels: Tensor, size: torch.Size) -> Tensor:
    """Return N×D×H×W labels at another size, each from the nearest voxel."""
    if labels.shape[1:] == size:
        return labels
    return F.interpolate(labels[:, None].float(), size, mode="nearest-exact")[:, 0].long()


def _open_hippocampus(fold: int, folder: Path | str | None = None, *, device: torch.device | str = "cpu") -> Volumes:
    """Open the hippocampus (Medical Segmentation Decathlon, task 4), tested on one of its folds."""
    train, test, names = open_decathlon(folder, name="hippocampus", fold=fold, patch=PATCH, device=device)
    return Volumes(train, test, names=names, patch=PATCH)


DATA_SETS = {f"hippocampus-fold{fold}": partial(_open_hippocampus, fold) for fold in range(FOLDS)}
