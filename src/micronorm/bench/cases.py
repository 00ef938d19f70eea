"""The shapes to measure, with the reason for each, and the memory layouts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from micronorm.ops.group import choose_groups

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
    per_group = math.prod(sizes[1:]) // choose_groups(sizes[1])
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
