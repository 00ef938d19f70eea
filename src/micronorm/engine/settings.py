"""The settings of a run, which say what it computes, and its execution, which changes speed and memory only."""

import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from micronorm.engine.optimization import OptimizerSpec, ParameterGroup, Schedule

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""By the name a command line uses. The half types compute under autocast and keep parameters in float32."""


def _check_counts(values: Any, *names: str) -> None:
    """Raise ValueError if one of these attributes is neither None nor a positive number of 63 bits."""
    for name in names:
        value = getattr(values, name)
        if value is not None and not 1 <= value < 2**63:
            raise ValueError(f"{name} must be at least 1 and below 2**63, got {value}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run computes. Runs with equal settings and models give the same result up to rounding.

    Args:
        epochs: passes over the training samples. Give either `epochs` or `steps`.
        steps: the length of the run in optimizer steps.
        step_batch: samples per optimizer step, over all ranks. The last step of an epoch takes what is left.
        optimizer: its kind and rates.
        schedule: the learning rate over the run.
        groups: parameters with other rates than the rest; the first group that matches a parameter counts.
        ema: decay of a moving average of weights and estimates, such as 0.999; None keeps no average. The average is
            evaluated too (figures named `ema_…`), and saved as `ema.safetensors`.
        seed: of the order and of every sample's augmentation.
        dtype: of parameters and computation; bfloat16 and float16 compute under autocast.
        unit: samples that must stay in one micro-batch, in whole multiples: 64 for a BatchNorm over 64 images. With 1
            the step may be cut anywhere.
        largest: the most samples that one micro-batch may hold; None for any number.
    """

    epochs: int | None = None
    steps: int | None = None
    step_batch: int
    optimizer: OptimizerSpec
    schedule: Schedule
    groups: tuple[ParameterGroup, ...] = ()
    ema: float | None = None
    seed: int = 0
    dtype: torch.dtype = torch.float32
    unit: int = 1
    largest: int | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"give either epochs or steps, got epochs={self.epochs} and steps={self.steps}")
        _check_counts(self, "epochs", "steps", "step_batch", "unit")
        if self.largest is not None and self.largest < self.unit:
            raise ValueError(f"largest must be at least unit={self.unit}, got {self.largest}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema must lie between 0 and 1, such as 0.999, got {self.ema}")
        if isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must be a spec such as micronorm.engine.SGD(0.1), got {type(self.optimizer).__name__}: "
                "the engine builds the optimizer after it has moved the parameters to their device"
            )
        if self.dtype not in DTYPES.values():
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")

    @property
    def length(self) -> str:
        """Return the length of the run in words: "15 epochs" or "300 steps"."""
        return f"{self.epochs} epochs" if self.steps is None else f"{self.steps} steps"


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a run computes it: speed and memory. Nothing here changes the result beyond rounding.

    Args:
        micro_batch: samples per forward and backward; None starts with what fits and halves it when memory runs out.
        device: where to compute; None for the GPU if there is one.
        channels_last: store images and convolutions in NHWC, volumes and theirs in NDHWC.
        compile: compile the model with torch.compile.
        cuda_graph: capture the whole step, commit included, and replay it.
        recompute: store less for the backward, see `mn.recompute`. Not with `compile`, which decides that itself.
        parallel: how several ranks share the model: replicated ("ddp") or sharded ("fsdp").
        steps: stop after this many optimizer steps; None for the whole run.
        minutes: save and stop after this many minutes of training; None for no limit.
        save_steps: steps between checkpoints; None for ten minutes between them. There is always one after an
            evaluation.
        evaluate_epochs: epochs between evaluations; the last step is always evaluated.
        observe: steps between measurements of the layers; None for never. Not with `compile` and `cuda_graph`.
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
        _check_counts(self, "micro_batch", "steps", "save_steps", "evaluate_epochs", "observe")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes must be above 0, got {self.minutes}")
        if self.device is not None and not isinstance(self.device, torch.device):
            raise TypeError(f"device must be a torch.device, got {self.device!r}; write torch.device({self.device!r})")
        if self.compile and self.recompute:
            raise ValueError(
                "recompute has no effect in compiled code, which decides itself what it stores; leave one of them out"
            )
        if self.observe is not None and (self.compile or self.cuda_graph):
            raise ValueError(
                "observe needs hooks, which neither compiled nor captured code runs; leave one of them out"
            )
        if self.parallel not in ("ddp", "fsdp"):
            raise ValueError(f'parallel must be "ddp" or "fsdp", got {self.parallel!r}')


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    steps: int
    figures: dict[str, float]
    digest: str
    """Over the raw bytes of model, optimizer, random and sampler state: equal digests mean equal runs."""
    finished: bool
    """False if a signal or `Execution.steps` ended the run early."""
    checkpoint: Path | None
    signal: int | None = None
    """The signal that ended the run."""
    first: bool = True
    """Whether this is rank 0, the only one that writes files and messages."""


def describe(value: Settings | Execution) -> dict[str, Any]:
    """Return settings or execution as plain values for a record. Optional settings appear only if they are set."""
    optional = ("steps", "groups", "ema") if isinstance(value, Settings) else ()
    described = {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return {name: item for name, item in described.items() if name not in optional or item not in (None, [])}


def _plain(item: Any) -> Any:
    if is_dataclass(item):
        return {"kind": type(item).__name__, **{f.name: _plain(getattr(item, f.name)) for f in fields(item)}}
    if isinstance(item, (list, tuple)):
        return [_plain(v) for v in item]
    return item if item is None or isinstance(item, (bool, int, float, str)) else str(item).removeprefix("torch.")


_LAYER_OPTIONS = (
    *("statistics", "rate", "micro_batch", "bias_correction", "momentum", "schedule", "eps"),
    *("p", "drop_prob", "dropout"),
)


def describe_layers(model: nn.Module) -> dict[str, int]:
    """Return the options of layers that change a training but no tensor, with the number of layers that have them.

    Example:
        >>> describe_layers(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(8)))
        {'BatchNorm2d(momentum=0.1, eps=1e-05)': 2}
    """

    def options(layer: nn.Module) -> str:
        values = ((name, getattr(layer, name, None)) for name in _LAYER_OPTIONS)
        plain = [f"{name}={v!r}" for name, v in values if isinstance(v, (int, float, str)) or is_dataclass(v)]
        return f"{type(layer).__name__}({', '.join(plain)})" if plain else ""

    return dict(Counter(filter(None, map(options, model.modules()))))


def changes(was: Any, now: Any, name: str = "") -> list[str]:
    """Return "name: was → now" for each value that differs between two records. Nested values have dotted names.

    Example:
        >>> changes({"seed": 0, "optimizer": {"lr": 0.1}}, {"seed": 0, "optimizer": {"lr": 0.2}})
        ['optimizer.lr: 0.1 → 0.2']
    """
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        prefix = f"{name}." if name else ""
        return [text for key in {**was, **now} for text in changes(was.get(key), now.get(key), f"{prefix}{key}")]
    try:
        same = bool(was == now)
    except Exception:  # a tensor, for example
        same = False
    return [] if same else [f"{name}: {_shown(was)} → {_shown(now)}"]


def _shown(value: Any) -> str:
    """Return a value in at most a few hundred characters. What a file holds may be cyclic, deep or a huge integer."""
    if isinstance(value, int) and abs(value) >= 2**63:
        return "an integer of more than 64 bits"
    short = reprlib.Repr()
    short.maxstring = short.maxother = 300
    return value[:300] if isinstance(value, str) else short.repr(value)
