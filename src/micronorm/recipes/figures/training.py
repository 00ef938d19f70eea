"""A plain training loop for figures, of one network or of several side by side.

Order and augmentation are functions of the seed, the epoch and a sample's index, so that the network's and the
optimizer's state are all there is to go on from.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.engine.listener import Listener
from micronorm.engine.settings import Settings
from micronorm.ops.keyed import permutation
from micronorm.tasks.classification import Classification


@dataclass(frozen=True)
class Figures:
    """Mean loss and error in % of each of K networks; one has K = 1."""

    loss: list[float]
    error: list[float]


class Training:
    """Networks in training: epochs are run one by one, and anything may be looked at in between.

    Args:
        model: images to N×classes logits, or to N×K×classes of K networks that share no parameter.
        task: data.
        settings: epochs, samples per step, optimizer, schedule and seed. `unit` and `largest` must be left alone: a
            step is one batch.
        device: where to compute.
        listener: hears of every step.
        description: of this training, for the listener.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Classification,
        settings: Settings,
        *,
        device: torch.device,
        listener: Listener,
        description: str,
    ) -> None:
        self.model: nn.Module = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.task = task
        self.settings = settings
        self.optimizer = settings.optimizer(self.model.parameters())
        self.epoch = 0
        self._listener = listener
        self._description = description
        self.steps_per_epoch = -(-len(task.train) // settings.step_batch)

    def state(self) -> dict[str, Any]:
        """All that the next epoch depends on."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": self.epoch}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]

    def start(self) -> None:
        """Tell the listener that epochs will follow."""
        total = self.settings.epochs * self.steps_per_epoch
        self._listener.on_start(total, self.epoch * self.steps_per_epoch, self._description)

    def run_epoch(self, *, first: Callable[[], AbstractContextManager[None]] = nullcontext) -> Figures:
        """One epoch; its figures are those of the samples as they were trained on, before each step.

        Args:
            first: a context around the forward and backward of the first step, left before the optimizer steps.
        """
        self.model.train()
        settings, batches = self.settings, self._batches()
        meter = _Meter()
        for index, (images, labels) in enumerate(self.task.train.load(batches, seed=settings.seed)):
            began = time.monotonic()
            step = self.epoch * self.steps_per_epoch + index
            factor = settings.schedule.factor(
                step, steps_per_epoch=self.steps_per_epoch, total_steps=settings.epochs * self.steps_per_epoch
            )
            for group in self.optimizer.param_groups:
                group["lr"] = settings.optimizer.lr * factor
            self.optimizer.zero_grad()
            with first() if index == 0 else nullcontext():
                losses, wrong = _losses(self.model(images.contiguous(memory_format=torch.channels_last)), labels)
                losses.sum().div(len(labels)).backward()
            self.optimizer.step()
            meter.add(losses.detach(), wrong, len(labels))
            self._listener.on_step(
                {
                    "step": step + 1,
                    "epoch": self.epoch,
                    "lr": settings.optimizer.lr * factor,
                    "samples": len(labels),
                    "seconds": time.monotonic() - began,
                }
            )
        self.epoch += 1
        return meter.figures()

    def test(self) -> Figures:
        """Loss and error on the test samples."""
        self.model.eval()
        meter = _Meter()
        shares = ((0, part) for part in torch.arange(len(self.task.test)).split(500))
        with torch.no_grad():
            for images, labels in self.task.test.load(shares, seed=0):
                losses, wrong = _losses(self.model(images.contiguous(memory_format=torch.channels_last)), labels)
                meter.add(losses, wrong, len(labels))
        found = meter.figures()
        self._listener.on_epoch(
            {
                "epoch": max(self.epoch - 1, 0),
                "step": self.epoch * self.steps_per_epoch,
                "test": {"top1": sum(found.error) / len(found.error)},
            }
        )
        return found

    def _batches(self) -> list[tuple[int, Tensor]]:
        order = permutation(len(self.task.train), seed=self.settings.seed, epoch=self.epoch)
        return [(self.epoch, part) for part in order.split(self.settings.step_batch)]


def _losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross entropy and wrong answers of each network, K each. What is not finite is wrong."""
    logits_nkc = logits.unsqueeze(1) if logits.ndim == 2 else logits
    wrong = (logits_nkc.detach().argmax(-1) != labels[:, None]) | ~logits_nkc.detach().isfinite().all(-1)
    each = labels[:, None].expand(logits_nkc.shape[:2])
    losses = F.cross_entropy(logits_nkc.flatten(0, 1), each.flatten(), reduction="none").unflatten(0, each.shape)
    return losses.sum(0), wrong.sum(0)


class _Meter:
    """Sums that stay on the device until they are asked for."""

    def __init__(self) -> None:
        self._sums: list[tuple[Tensor, Tensor]] = []
        self._count = 0

    def add(self, losses: Tensor, wrong: Tensor, count: int) -> None:
        self._sums.append((losses, wrong))
        self._count += count

    def figures(self) -> Figures:
        loss, wrong = (torch.stack(column).sum(0) for column in zip(*self._sums, strict=True))
        return Figures((loss / self._count).tolist(), (100 * wrong / self._count).tolist())
