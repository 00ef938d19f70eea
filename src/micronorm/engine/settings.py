"""What a run computes, and how: two values, because only the first may change its result."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from micronorm.engine.optimization import OptimizerSpec, Schedule

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""By the name a command line uses. The half types compute under autocast and keep parameters in float32."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is computed. Runs with equal settings and models end alike, beyond rounding, however they are executed.

    Args:
        epochs: passes over the training samples.
        step_batch: samples per optimizer step, over all ranks. The last step of an epoch takes what is left.
        optimizer: its kind and rates.
        schedule: the learning rate over the run.
        seed: of the order and of every sample's augmentation.
        dtype: of parameters and computation; bfloat16 and float16 compute under autocast.
        unit: samples that must stay in one micro-batch, in whole multiples: 64 for a BatchNorm over 64 images. At 1 the
            step may be cut anywhere.
        largest: samples that one micro-batch may hold at most; None for any number.
    """

    epochs: int
    step_batch: int
    optimizer: OptimizerSpec
    schedule: Schedule
    seed: int = 0
    dtype: torch.dtype = torch.float32
    unit: int = 1
    largest: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "step_batch", "unit"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.largest is not None and self.largest < self.unit:
            raise ValueError(f"largest must be at least unit={self.unit}, got {self.largest}")
        if isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must be a spec such as micronorm.engine.SGD(0.1), got {type(self.optimizer).__name__}: "
                "the engine makes the optimizer, once the parameters are where they belong"
            )
        if self.dtype not in DTYPES.values():
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How it is computed: for speed and memory. Nothing here changes the result beyond rounding.

    Args:
        micro_batch: samples per forward and backward; None begins with what fits and halves when memory runs out.
        device: where to compute; None for the GPU where there is one.
        channels_last: keep images and convolutions in NHWC.
        compile: compile the model with torch.compile.
        cuda_graph: capture the whole step, commit included, and replay it.
        recompute: keep less for the backward, see `mn.recompute`. Not with `compile`, which decides that itself.
        parallel: how several ranks share the model: replicated ("ddp") or sharded ("fsdp").
        steps: stop after so many optimizer steps; None for all epochs.
        minutes: stop after so many minutes of training, save, and let the run be resumed; None for no limit.
        save_steps: steps between checkpoints within an epoch; None for checkpoints at the end of epochs and every ten
            minutes.
        evaluate_epochs: evaluate after every so many epochs, and after the last.
        observe: look into the network every so many steps; None for never. Not with `compile` and `cuda_graph`.
    """

    micro_batch: int | None = None
    device: torch.device | None = None
    channels_last: bool = False
    compile: bool = False
    cuda_graph: bool = False
    recompute: bool = False
    parallel: Literal["ddp", "fsdp"] = "ddp"
    steps: int | None = None
    minutes: float | None = None
    save_steps: int | None = None
    evaluate_epochs: int = 1
    observe: int | None = None

    def __post_init__(self) -> None:
        for name in ("micro_batch", "steps", "save_steps", "evaluate_epochs", "observe"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes must be above 0, got {self.minutes}")
        if self.device is not None and not isinstance(self.device, torch.device):
            raise TypeError(f"device must be a torch.device, got {self.device!r}; write torch.device({self.device!r})")
        if self.compile and self.recompute:
            raise ValueError(
                "recompute has no effect in compiled code, which decides itself what it keeps; leave one of them out"
            )
        if self.observe is not None and (self.compile or self.cuda_graph):
            raise ValueError(
                "observe looks by hooks, which neither compiled nor captured code runs; leave one of them out"
            )
        if self.parallel not in ("ddp", "fsdp"):
            raise ValueError(f'parallel must be "ddp" or "fsdp", got {self.parallel!r}')


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    steps: int
    figures: dict[str, float]
    digest: str
    """Over the raw bytes of model, optimizer, random and sampler state: equal digests are equal runs."""
    finished: bool
    """False where a signal or `steps` ended it early."""
    checkpoint: Path | None
    signal: int | None = None
    """The signal that ended it."""
    first: bool = True
    """Whether this is rank 0, which alone writes and speaks."""


def describe(value: Settings | Execution) -> dict[str, Any]:
    """Settings or execution as plain values for a record."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(v) for key, v in item.items()}
        if isinstance(item, (list, tuple)):
            return [plain(v) for v in item]
        return item if item is None or isinstance(item, (bool, int, float, str)) else str(item).removeprefix("torch.")

    described = {key: plain(item) for key, item in asdict(value).items()}
    if isinstance(value, Settings):
        for name in ("optimizer", "schedule"):
            described[name] = {"kind": type(getattr(value, name)).__name__, **described[name]}
    return described
