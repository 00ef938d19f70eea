"""The layers that are compared: our layer in its modes, and what a user would write with PyTorch's own.

Every method is norm + ReLU on C channels with the same number of groups. A separate ReLU works in place, as in
torchvision. BatchNorm and our layer keep float32 parameters beside half activations, as in training under autocast.
GroupNorm's CUDA kernels need parameters in the dtype of the activations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.nn.backends import explain_backend
from micronorm.nn.bcn import BCN, BatchChannelNorm, Statistics
from micronorm.nn.spec import SPECS, NormSpec

RATE = 0.1  # a float, so that "sequential" needs no optimizer; its value does not change the operations
MODES = ("step", "sequential", "batch")


@dataclass(frozen=True)
class NormMethod:
    """One way to compute norm + ReLU.

    Args:
        key: name for `--method`.
        name: name in tables.
        mode: in which mode the layer is measured.
        build: makes the layer, in that mode, from the number of channels and the dtype of the activations.
        is_ours: whether it is our layer.
        is_compiled: whether `torch.compile` compiles the layer.
    """

    key: str
    name: str
    mode: str
    build: Callable[[int, torch.dtype], nn.Module]
    is_ours: bool = False
    is_compiled: bool = False

    @property
    def label(self) -> str:
        """Name and mode together."""
        return f"{self.name} ({self.mode})"

    def computed_by(self, device: torch.device) -> str:
        """Return what computes the method on this device: our backend, inductor or torch."""
        if self.is_ours:
            return explain_backend(device).backend
        return "inductor" if self.is_compiled else "torch"


class PlainBatchNorm(nn.Module):
    """`F.batch_norm` with running statistics, without nn.BatchNorm's counter of batches, which is one more launch."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize with the batch's statistics in training, with the running statistics in eval mode."""
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


def groups_for(channels: int) -> int:
    """Return the number of groups that all methods use at this width, by the library's rule.

    Example:
        >>> groups_for(64)
        32
    """
    return BCN().groups_for(channels)


def _group_norm(channels: int, dtype: torch.dtype) -> nn.GroupNorm:
    return nn.GroupNorm(groups_for(channels), channels, dtype=dtype)


def _bcn(mode: str) -> NormMethod:
    statistics = cast(Statistics, "step" if mode == "eval" else mode)

    def build(channels: int, dtype: torch.dtype) -> nn.Module:
        layer = BatchChannelNorm(channels, groups_for(channels), statistics=statistics, rate=RATE, activation="relu")
        return layer.train(mode != "eval")

    return NormMethod(f"bcn-{mode}", "BCN+ReLU", mode, build, is_ours=True)


def _batch(channels: int, dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(PlainBatchNorm(channels), nn.ReLU(inplace=True))


def _group(channels: int, dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(_group_norm(channels, dtype), nn.ReLU(inplace=True))


def _batch_group(channels: int, dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(PlainBatchNorm(channels), _group_norm(channels, dtype), nn.ReLU(inplace=True))


OURS = tuple(_bcn(mode) for mode in (*MODES, "eval"))
BN = NormMethod("bn", "BN>ReLU", "train", _batch)
BN_COMPILED = NormMethod("bn-compiled", "BN>ReLU compiled", "train", _batch, is_compiled=True)
GN = NormMethod("gn", "GN>ReLU", "train", _group)
BN_GN = NormMethod("bn-gn", "BN>GN>ReLU", "train", _batch_group)
BN_GN_COMPILED = NormMethod("bn-gn-compiled", "BN>GN>ReLU compiled", "train", _batch_group, is_compiled=True)

ON_CPU = (*OURS, BN, GN, BN_GN)
ON_GPU = METHODS = (*OURS, BN, BN_COMPILED, GN, BN_GN, BN_GN_COMPILED)


def _registered() -> list[NormMethod]:
    """Return a method, norm then ReLU, for every registered norm spec."""
    specs = [(name, spec) for name, spec in SPECS.items() if issubclass(spec, NormSpec)]

    def build(spec: type[NormSpec], channels: int, dtype: torch.dtype) -> nn.Module:
        return nn.Sequential(spec()(channels).to(dtype), nn.ReLU(inplace=True))

    return [NormMethod(name.lower(), f"{name}>ReLU", "train", partial(build, spec)) for name, spec in specs]


def choose_methods(wanted: Sequence[str], *, on_gpu: bool, compiled: bool = True) -> list[NormMethod]:
    """Return the methods with these keys; without keys, the default methods of the device.

    Example:
        >>> [method.label for method in choose_methods(["bcn-step", "bn"], on_gpu=False)]
        ['BCN+ReLU (step)', 'BN>ReLU (train)']
    """
    known = {method.key: method for method in METHODS}
    for method in _registered():
        known.setdefault(method.key, method)
    for key in wanted:
        if key not in known:
            raise ValueError(f"no method {key!r}; there are {', '.join(known)}")
    chosen = list(dict.fromkeys(known[key] for key in wanted)) or list(ON_GPU if on_gpu else ON_CPU)
    if not compiled:
        chosen = [method for method in chosen if not method.is_compiled]
    if not chosen:
        raise ValueError("--no-compile leaves none of the methods that were named")
    return chosen
