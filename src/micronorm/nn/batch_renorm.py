"""Batch renormalization (Ioffe 2017)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from micronorm.nn.backends import resolve_backend
from micronorm.nn.checkpointing import write_once
from micronorm.nn.inputs import check_momentum
from micronorm.nn.running import RunningNorm
from micronorm.nn.spec import NormSpec
from micronorm.ops.batch import Running
from micronorm.ops.batch_renorm import batch_renorm
from micronorm.ops.moments import wide_dtype


@dataclass(frozen=True)
class RenormSchedule:
    """The limits of the correction at each step; the defaults are the paper's.

    There is no correction for `warmup` steps. Then the limits rise linearly: that of r from 1 to `r_max` at step
    `r_until`, and that of d from 0 to `d_max` at step `d_until`.

    Example:
        >>> r_max, d_max = RenormSchedule().limits(torch.tensor(15_000))
        >>> round(r_max.item(), 3), d_max.item()
        (1.571, 2.5)
    """

    warmup: int = 5_000
    r_until: int = 40_000
    d_until: int = 25_000
    r_max: float = 3.0
    d_max: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup <= min(self.r_until, self.d_until):
            raise ValueError(f"ramps end at or after the warm-up, which is at least 0 steps, got {self}")
        if not (self.r_max >= 1 and self.d_max >= 0):
            raise ValueError(f"r_max is at least 1 and d_max at least 0 (plain batch norm at 1 and 0), got {self}")

    def limits(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return (r_max, d_max) at a step, the number of batches so far; on the step's device, without a sync."""
        step = step.to(wide_dtype(step.device))

        def ramp(until: int) -> Tensor:
            return ((step - self.warmup) / max(until - self.warmup, 1)).clamp(0, 1)

        return 1 + (self.r_max - 1) * ramp(self.r_until), self.d_max * ramp(self.d_until)


class BatchRenorm(RunningNorm):
    """Batch normalization corrected towards its running statistics, which evaluation uses; x is N×C×….

    y = γ ((x − μ_B)/σ_B·r + d) + β, r = clip(σ_B/σ, 1/r_max, r_max), d = clip((μ_B − μ)/σ, ±d_max), no gradient through
    r and d; σ = sqrt(var + eps). The limits follow `schedule` at num_batches_tracked. As in the paper, μ and σ (not σ²)
    are averaged, and σ_B is biased. running_var holds σ² − eps, so that evaluation is batch normalization and state
    dicts of nn.BatchNorm2d can be loaded.

    A forward that activation checkpointing repeats reads the statistics from before the layer last moved them, so
    gradients are exact if each backward directly follows its own forward.

    Args:
        num_channels: C.
        momentum: the share of the new batch in the running statistics.
        schedule: the limits of the correction at each step.
        options: `micro_batch`, `eps`, `device` and `dtype` of `GhostBatchNorm`. With `micro_batch=m` output, gradients
            and running statistics are those of a loop over the micro-batches.

    Example:
        >>> norm = BatchRenorm(8, schedule=RenormSchedule(warmup=10, r_until=20, d_until=30))
        >>> norm(torch.randn(2, 8, 4, 4)).shape
        torch.Size([2, 8, 4, 4])
    """

    scratch = ("before_mean", "before_var", "before_batches")
    """Buffers that only a repeated forward reads. What they hold depends on the last micro-batch."""

    momentum: float
    before_mean: Tensor
    before_var: Tensor
    before_batches: Tensor

    def __init__(
        self,
        num_channels: int,
        *,
        momentum: float = 0.01,
        schedule: RenormSchedule = RenormSchedule(),  # noqa: B008 (frozen)
        **options: Any,
    ) -> None:
        check_momentum(momentum, cumulative=False)
        super().__init__(num_channels, momentum=momentum, **options)
        self.schedule = schedule
        for name, buffer in zip(self.scratch, self.running(), strict=True):
            self.register_buffer(name, buffer.clone(), persistent=False)

    def compute(self, x: Tensor) -> tuple[Tensor, Running]:
        before = self.running()
        if self.training:
            before = Running(self.before_mean, self.before_var, self.before_batches)
            for buffer, value in zip(before, self.running(), strict=True):
                write_once(buffer, value)
        count = 1 if self.micro_batch is None else max(1, math.ceil(x.shape[0] / self.micro_batch))
        r_max, d_max = self.schedule.limits(before.batches + torch.arange(count, device=x.device))
        fused = x.numel() != 0 and resolve_backend("auto", x) == "triton"
        limits = {"r_max": r_max, "d_max": d_max}
        return batch_renorm(x, self.weight, self.bias, before, fused=fused, **limits, **self.options())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, schedule={self.schedule}"


@dataclass(frozen=True)
class BRN(NormSpec):
    """Batch renormalization; see `mn.nn.BatchRenorm`.

    Args:
        eps: added to the variance, inside the root.
        momentum: the share of the new batch in the running statistics.
        schedule: the limits of the correction at each step. The default is for the paper's 40,000 steps or more;
            shorter trainings need another one.
        micro_batch: treat a batch as successive batches of so many samples; None for one batch.

    Example:
        >>> BRN()(8).schedule.warmup
        5000
    """

    layer = BatchRenorm
    eps: float = 1e-5
    momentum: float = 0.01
    schedule: RenormSchedule = RenormSchedule()
    micro_batch: int | None = None
