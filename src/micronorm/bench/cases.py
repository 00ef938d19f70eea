"""What is compared: shapes, each with its reason, memory layouts, and ways to compute norm + ReLU.

The ways are our layer in its modes, and what a user would write with PyTorch's own. All have C channels and the same
number of groups. A separate ReLU works in place, as in torchvision. BatchNorm and our layer keep float32 parameters
beside half activations, as in training under autocast. GroupNorm's CUDA kernels need parameters in the dtype of the
activations.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.nn.backends import explain_backend
from micronorm.nn.bcn import BCN, BatchChannelNorm, Statistics
from micronorm.nn.spec import SPECS, NormSpec

LAYOUTS = ("nhwc", "nchw")
"""Channels last in memory (torch.channels_last and its equivalents for other ranks), and contiguous."""

LEAST_PER_GROUP, LEAST_PER_CHANNEL = 32, 16
"""Smallest number of elements in a group of one sample and in a channel of the batch.

Normalizing fewer elements keeps little but their signs. Rounding then decides the gradients, and the comparison with
float64 could not tell a right layer from a wrong one.
"""

GIVEN = "given"
"""Group name of a shape from the command line."""


@dataclass(frozen=True)
class Case:
    """One activation shape, N×C or N×C×…, of rank 2 to 5."""

    shape: tuple[int, ...]
    reason: str
    group: str = GIVEN

    @property
    def name(self) -> str:
        """The shape as in tables: 16x64x56x56."""
        return "x".join(map(str, self.shape))

    @property
    def channels(self) -> int:
        """C."""
        return self.shape[1]

    @property
    def elements(self) -> int:
        """N·C·S."""
        return math.prod(self.shape)


CASES: Mapping[str, Sequence[Case]] = {
    "large": (
        Case((2, 256, 200, 336), "a detector's first stage, two 800×1344 images", "large"),
        Case((64, 64, 112, 112), "ResNet-50's stem, 64 ImageNet images: the largest map of the network", "large"),
        Case((64, 256, 56, 56), "ResNet-50's first stage: the same bytes in four times the channels", "large"),
        Case((64, 512, 28, 28), "ResNet-50's second stage: maps of 784 pixels", "large"),
    ),
    "small": (
        Case((1, 64, 200, 336), "a detector's stem block, one 800×1344 image", "small"),
        Case((1, 256, 100, 168), "a detector's stage at stride 8, one image", "small"),
        Case((2, 1024, 50, 84), "a detector's stage at stride 16, two images", "small"),
        Case((16, 256, 56, 56), "ResNet-50's first stage, 16 images", "small"),
        Case((64, 2048, 7, 7), "ResNet-50's last stage: 49 pixels in many channels", "small"),
        Case((128, 16, 32, 32), "CIFAR ResNets' first stage: many samples, few channels", "small"),
        Case((128, 64, 8, 8), "CIFAR ResNets' last stage: a sample is 8 KB", "small"),
        Case((1, 64, 56, 56), "one ImageNet image: kernel launches dominate", "small"),
        Case((1, 32, 48, 96, 96), "a volume, as in medical segmentation", "small"),
    ),
    "cpu": (
        Case((16, 64, 56, 56), "ResNet-50's first stage: the usual shape, where memory traffic dominates", "cpu"),
        Case((1, 256, 100, 168), "a detector's stage at stride 8, one 800×1344 image: a typical micro-batch", "cpu"),
        Case((128, 16, 32, 32), "CIFAR ResNets' first stage: many samples, so the N×C arithmetic shows", "cpu"),
    ),
}
"""Groups of cases: `large` and `small` are for a GPU, `cpu` is for the CPU."""

GPU_GROUPS = ("large", "small")


def parse_case(text: str, known_groups: Sequence[str] = ()) -> Case:
    """Return the case for a shape such as NxCxHxW; a shape listed in `known_groups` keeps its group and reason.

    Raises:
        ValueError: `text` is not a shape of rank 2 to 5, or its groups or channels have too few elements.

    Example:
        >>> parse_case("2x8x6x6").shape
        (2, 8, 6, 6)
    """
    sizes = tuple(int(size) if size.isdecimal() else 0 for size in text.split("x"))
    if not 2 <= len(sizes) <= 5 or min(sizes) < 1:
        raise ValueError(
            f"a shape is two to five positive sizes as in 16x64x56x56, or one of {', '.join(CASES)}; got {text!r}"
        )
    per_group = math.prod(sizes[1:]) // groups_for(sizes[1])
    per_channel = math.prod(sizes) // sizes[1]
    if per_group < LEAST_PER_GROUP or per_channel < LEAST_PER_CHANNEL:
        raise ValueError(
            f"{text} has {per_group} elements per group and {per_channel} per channel; at least {LEAST_PER_GROUP} and "
            f"{LEAST_PER_CHANNEL} are needed to check a layer's gradients; use more pixels or samples"
        )
    known = next((case for group in known_groups for case in CASES[group] if case.shape == sizes), None)
    return known or Case(sizes, "given on the command line")


def choose_cases(wanted: Sequence[str], *, on_gpu: bool) -> list[Case]:
    """Return the cases named by group or shape; without names, all cases of the device.

    Example:
        >>> [case.name for case in choose_cases(["2x8x6x6"], on_gpu=False)]
        ['2x8x6x6']
    """
    own = GPU_GROUPS if on_gpu else ("cpu",)
    chosen: dict[tuple[int, ...], Case] = {}
    for text in wanted or own:
        if text in CASES and text not in own:
            raise ValueError(
                f"the cases {text!r} are for {'a GPU' if text in GPU_GROUPS else 'the CPU'}, this runs on "
                f"{'a GPU' if on_gpu else 'the CPU'}; a shape such as {CASES[text][0].name} runs on either"
            )
        for case in CASES.get(text) or (parse_case(text, own),):
            chosen.setdefault(case.shape, case)
    return list(chosen.values())


def lay_out(x: Tensor, layout: str) -> Tensor:
    """Return the tensor in a layout of `LAYOUTS`; its shape stays N×C×….

    Example:
        >>> import torch
        >>> lay_out(torch.zeros(2, 3, 4, 5), "nhwc").is_contiguous(memory_format=torch.channels_last)
        True
    """
    return x.contiguous() if layout == "nchw" else x.movedim(1, -1).contiguous().movedim(-1, 1)


# --- methods ---------------------------------------------------------------------------------------------------------

RATE = 0.1  # a float, so that "sequential" needs no optimizer; its value does not change the operations
MODES = ("step", "sequential", "batch")

Build = Callable[[int, torch.dtype], nn.Module]
"""Makes a layer from the number of channels and the dtype of the activations."""


@dataclass(frozen=True)
class NormMethod:
    """One way to compute norm + ReLU.

    Args:
        key: name for `--method`.
        name: name in tables.
        mode: in which mode the layer is measured.
        build: makes the layer, in that mode.
        is_ours: whether it is our layer.
        is_compiled: whether `torch.compile` compiles the layer.
    """

    key: str
    name: str
    mode: str
    build: Build
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


def _bcn(mode: str) -> NormMethod:
    statistics = cast(Statistics, "step" if mode == "eval" else mode)

    def build(channels: int, dtype: torch.dtype) -> nn.Module:
        layer = BatchChannelNorm(channels, groups_for(channels), statistics=statistics, rate=RATE, activation="relu")
        return layer.train(mode != "eval")

    return NormMethod(f"bcn-{mode}", "BCN+ReLU", mode, build, is_ours=True)


def _then_relu(*norms: Build) -> Build:
    return lambda channels, dtype: nn.Sequential(*(norm(channels, dtype) for norm in norms), nn.ReLU(inplace=True))


def _batch(channels: int, dtype: torch.dtype) -> nn.Module:
    return PlainBatchNorm(channels)


def _group(channels: int, dtype: torch.dtype) -> nn.Module:
    return nn.GroupNorm(groups_for(channels), channels, dtype=dtype)


OURS = tuple(_bcn(mode) for mode in (*MODES, "eval"))
_BN, _BN_GN = _then_relu(_batch), _then_relu(_batch, _group)
BN = NormMethod("bn", "BN>ReLU", "train", _BN)
BN_COMPILED = NormMethod("bn-compiled", "BN>ReLU compiled", "train", _BN, is_compiled=True)
GN = NormMethod("gn", "GN>ReLU", "train", _then_relu(_group))
BN_GN = NormMethod("bn-gn", "BN>GN>ReLU", "train", _BN_GN)
BN_GN_COMPILED = NormMethod("bn-gn-compiled", "BN>GN>ReLU compiled", "train", _BN_GN, is_compiled=True)

ON_CPU = (*OURS, BN, GN, BN_GN)
ON_GPU = METHODS = (*OURS, BN, BN_COMPILED, GN, BN_GN, BN_GN_COMPILED)


def _of_spec(name: str, spec: type[NormSpec]) -> NormMethod:
    build = _then_relu(lambda channels, dtype: spec()(channels).to(dtype))
    return NormMethod(name.lower(), f"{name}>ReLU", "train", build)


def choose_methods(wanted: Sequence[str], *, on_gpu: bool, compiled: bool = True) -> list[NormMethod]:
    """Return the methods with these keys; without keys, the default methods of the device.

    The keys of registered norm specs are their names in lower case.

    Example:
        >>> [method.label for method in choose_methods(["bcn-step", "bn"], on_gpu=False)]
        ['BCN+ReLU (step)', 'BN>ReLU (train)']
    """
    known = {method.key: method for method in METHODS}
    for name, spec in SPECS.items():
        if issubclass(spec, NormSpec):
            known.setdefault(name.lower(), _of_spec(name, spec))
    for key in wanted:
        if key not in known:
            raise ValueError(f"no method {key!r}; there are {', '.join(known)}")
    chosen = list(dict.fromkeys(known[key] for key in wanted)) or list(ON_GPU if on_gpu else ON_CPU)
    if not compiled:
        chosen = [method for method in chosen if not method.is_compiled]
    if not chosen:
        raise ValueError("--no-compile leaves none of the methods that were named")
    return chosen
