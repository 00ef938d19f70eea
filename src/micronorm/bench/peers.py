"""What is compared: our layer in its modes, and what a user would run instead.

Every method is norm + ReLU on C channels with the same number of groups. The rectifiers that are layers of their own
work in place, as torchvision writes them: none of the normalizations before them needs its own output in the backward,
and it is the faster form. Parameters are in the dtype in which each peer is fastest and torch accepts it: BatchNorm's
and ours in float32 beside half activations, as in training under autocast; GroupNorm's in the activations' dtype, which
is all that its CUDA kernels take.

Standardized convolutions, ours and timm's, are in another table, `benchmarks/ws_gpu.py`: here there is no weight.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.nn.backends import BACKENDS, explain_backend
from micronorm.nn.bcn import BCN, BatchChannelNorm, Statistics
from micronorm.ops.private_api import batch_norm_impl_index

RATE = 0.1  # a float, so that "sequential" needs no optimizer; its value changes no operation
MODES = ("step", "sequential", "batch")

Build = Callable[[int, torch.dtype], nn.Module]


@dataclass(frozen=True)
class Method:
    """One contestant: `build` makes its layer, in the mode it is measured in, from channels and activation dtype."""

    key: str
    """What `--method` calls it."""
    name: str
    mode: str
    build: Build
    is_ours: bool = False
    backend: str = ""
    """Of ours: the `backend` argument."""
    is_compiled: bool = False
    is_synced: bool = False
    """Needs a process group, and a GPU."""

    @property
    def label(self) -> str:
        """Name and mode in one."""
        return f"{self.name} ({self.mode})"


class PlainBatchNorm(nn.Module):
    """`F.batch_norm` with running statistics; nn.BatchNorm's counter of batches, one more launch, is left out."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize by the batch in training, by the running statistics in eval mode."""
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class SyncedBatchNorm(PlainBatchNorm):
    """The synchronized path of torch's SyncBatchNorm in a group of one rank.

    `nn.SyncBatchNorm` itself calls `F.batch_norm` where the group has one rank; what it runs in a group of several is
    this function, with its collectives.
    """

    def forward(self, x: Tensor) -> Tensor:
        """As SyncBatchNorm in training."""
        from micronorm.ops.private_api import SyncBatchNorm

        group = dist.group.WORLD
        arguments = (x, self.weight, self.bias, self.running_mean, self.running_var, 1e-5, 0.1, group, 1)
        return cast(Tensor, SyncBatchNorm.apply(*arguments))


def groups_for(channels: int) -> int:
    """The group count of all methods at this width: the library's own rule.

    Example:
        >>> groups_for(64)
        32
    """
    return BCN().groups_for(channels)


def _group_norm(channels: int, dtype: torch.dtype) -> nn.GroupNorm:
    return nn.GroupNorm(groups_for(channels), channels, dtype=dtype)


def _bcn(channels: int, mode: str, backend: str, activation: str | None) -> nn.Module:
    statistics = cast(Statistics, "step" if mode == "eval" else mode)
    layer = BatchChannelNorm(
        channels, groups_for(channels), statistics=statistics, rate=RATE, backend=backend, activation=activation
    )
    return layer.train(mode != "eval")


def _fused(mode: str, backend: str) -> Method:
    key = f"bcn-{mode}" if backend == "auto" else f"bcn-{mode}-{backend}"
    name = "BCN+ReLU" if backend == "auto" else f"BCN+ReLU {backend}"
    return Method(key, name, mode, lambda c, _: _bcn(c, mode, backend, "relu"), is_ours=True, backend=backend)


def _separate(mode: str) -> Method:
    def build(channels: int, dtype: torch.dtype) -> nn.Module:
        return nn.Sequential(_bcn(channels, mode, "auto", None), nn.ReLU(inplace=True))

    return Method(f"bcn-{mode}-then-relu", "BCN then ReLU", mode, build, is_ours=True, backend="auto")


def _batch(channels: int, dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(PlainBatchNorm(channels), nn.ReLU(inplace=True))


def _batch_group(channels: int, dtype: torch.dtype, *, training: bool = True) -> nn.Module:
    return nn.Sequential(PlainBatchNorm(channels).train(training), _group_norm(channels, dtype), nn.ReLU(inplace=True))


FUSED = tuple(_fused(mode, "auto") for mode in (*MODES, "eval"))
SEPARATE = tuple(_separate(mode) for mode in MODES)
FORMS = tuple(_fused(mode, form) for form in BACKENDS if form != "auto" for mode in (*MODES, "eval"))
"""Ours by a named backend: only where asked for."""

BN = Method("bn", "BN>ReLU", "train", _batch)
BN_COMPILED = Method("bn-compiled", "BN>ReLU compiled", "train", _batch, is_compiled=True)
GN = Method("gn", "GN>ReLU", "train", lambda c, dtype: nn.Sequential(_group_norm(c, dtype), nn.ReLU(inplace=True)))
SYNC_BN = Method(
    "sync-bn",
    "SyncBN>ReLU",
    "one rank",
    lambda c, _: nn.Sequential(SyncedBatchNorm(c), nn.ReLU(inplace=True)),
    is_synced=True,
)
BN_GN = Method("bn-gn", "BN>GN>ReLU", "train", _batch_group)
BN_EVAL_GN = Method("bn-eval-gn", "BN>GN>ReLU", "eval", lambda c, dtype: _batch_group(c, dtype, training=False))
BN_GN_COMPILED = Method("bn-gn-compiled", "BN>GN>ReLU compiled", "train", _batch_group, is_compiled=True)

ON_CPU = (*FUSED, *SEPARATE, BN, GN, BN_GN, BN_EVAL_GN)
ON_GPU = (*FUSED, BN, BN_COMPILED, GN, SYNC_BN, BN_GN, BN_GN_COMPILED)
METHODS = tuple(dict.fromkeys((*ON_GPU, *ON_CPU, *FORMS)))


def choose_methods(wanted: Sequence[str], *, on_gpu: bool, compiled: bool = True) -> list[Method]:
    """The methods of these keys; without any, those of the device.

    Example:
        >>> [method.label for method in choose_methods(["bcn-step", "bn"], on_gpu=False)]
        ['BCN+ReLU (step)', 'BN>ReLU (train)']
    """
    known = {method.key: method for method in METHODS}
    for key in wanted:
        if key not in known:
            raise ValueError(f"no method {key!r}; there are {', '.join(known)}")
    chosen = list(dict.fromkeys(known[key] for key in wanted)) or list(ON_GPU if on_gpu else ON_CPU)
    for method in chosen:
        if method.is_synced and not on_gpu:
            raise ValueError(f"{method.key} needs a GPU: torch's SyncBatchNorm takes no tensors of the CPU")
    return [method for method in chosen if compiled or not method.is_compiled]


def computed_by(method: Method, x: Tensor) -> str:
    """Which implementation computes a method on this input: ours by its backend, BatchNorm by native or cudnn."""
    if method.is_ours:
        return explain_backend(x.device).backend if method.backend == "auto" else method.backend
    if method.is_compiled:
        return "inductor"
    if method.name.startswith("BN"):
        return batch_norm_backend(x, training=method.mode == "train")
    return "native"


def batch_norm_backend(x: Tensor, *, training: bool = True) -> str:
    """Which of its implementations `F.batch_norm` takes for this input.

    Example:
        >>> batch_norm_backend(torch.randn(2, 4, 3, 3))
        'native'
    """
    one, zero = x.new_ones(x.shape[1], dtype=torch.float32), x.new_zeros(x.shape[1], dtype=torch.float32)
    with torch.no_grad():
        *_, index = batch_norm_impl_index(
            x, one, zero, zero.clone(), one.clone(), training, 0.1, 1e-5, torch.backends.cudnn.enabled
        )
    return {0: "native", 1: "cudnn", 2: "miopen"}.get(int(index), f"implementation {index}")


@contextlib.contextmanager
def one_rank(methods: Sequence[Method]) -> Iterator[None]:
    """A process group of this process alone, where a method needs one and none is open."""
    if not any(method.is_synced for method in methods) or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
