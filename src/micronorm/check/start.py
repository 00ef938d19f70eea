"""`check_start`: take the first steps of training on a copy, and warn if the loss jumps."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from micronorm.check.runs import check_batch, check_model, copy_together, read_loss
from micronorm.commit import Handle
from micronorm.commit.snapshot import RandomState
from micronorm.records.collapse import JUMP


def check_start(
    model: nn.Module, batch: tuple, loss: Callable[[nn.Module, tuple], Any], *, lr: float, steps: int = 20
) -> str | None:
    """Return a warning if the loss jumps in the first steps of SGD with momentum 0.9, or None.

    A network whose loss rises to several times its first value often ends at chance: deep residual networks at the
    usual learning rates, with any normalization. The steps use one batch and run on a copy; the model is not changed.

    Args:
        model: a model in training mode.
        batch: as in `check_cuts`. A batch as large as that of training is best.
        loss: as in `check_cuts`.
        lr: the learning rate of the first step of training. With a warm-up, that is the small one.
        steps: the number of steps.

    Example:
        >>> model, batch = nn.Linear(4, 2), (torch.randn(8, 4), torch.randn(8, 2))
        >>> def loss(model, part):
        ...     return (model(part[0]) - part[1]).square().sum(), len(part[0])
        >>> check_start(model, batch, loss, lr=0.01) is None
        True
        >>> "the loss rose from" in check_start(model, batch, loss, lr=10.0)
        True
    """
    check_model(model)
    check_batch(batch)
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 < lr < math.inf:
        raise ValueError(f"lr must be a number above 0, got {lr!r}")
    with RandomState.preserved(list({p.device for p in model.parameters()})), torch.enable_grad():
        losses = _losses(*copy_together(model, loss), batch, lr=lr, steps=steps)
    peak = next((value for value in losses if not math.isfinite(value)), max(losses))
    if peak <= JUMP * losses[0]:
        return None
    return (
        f"at lr {lr:g} the loss rose from {losses[0]:.3g} to {peak:.3g} within {losses.index(peak)} steps of SGD: the "
        "network may collapse at the start; begin with residual branches at zero (mn.convert(..., "
        "zero_init_residual=True)), with a warm-up, or with both, or lower the learning rate"
    )


def _losses(model: nn.Module, loss: Callable, batch: tuple, *, lr: float, steps: int) -> list[float]:
    """Train on the batch, and return the mean losses before each step and after the last, up to one not finite."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    Handle(model, [optimizer], process_group=None)  # "sequential" layers need the learning rate in the forward
    losses: list[float] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the learning rate .* is above 1")
        for _ in range(steps + 1):
            total, count = read_loss(loss(model, batch))
            mean = total / (len(batch[0]) if count is None else count)
            losses.append(float(mean.detach()))
            if not math.isfinite(losses[-1]):
                break
            optimizer.zero_grad()
            mean.backward()
            optimizer.step()
    return losses
