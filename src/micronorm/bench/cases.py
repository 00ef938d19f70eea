"""The shapes that are measured, and why these; and how a tensor of any rank is laid out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from micronorm.ops.group import choose_groups

LAYOUTS = ("nhwc", "nchw")
"""Channels last in memory (torch.channels_last, channels_last_3d and their like for other ranks), and contiguous."""

LEAST = 4
"""Elements of a group, below which a shape is refused: the layer itself warns there."""

GIVEN = "given"
"""The group of a shape from the command line."""


@dataclass(frozen=True)
class Targets:
    """What our layer is to reach, as multiples of `F.batch_norm` + ReLU in channels_last by the same route."""

    graph_to_bn: float
    eager_to_bn: float | None = None
    floors: float | None = None
    """Multiples of the floor of memory traffic, by CUDA graph."""


TARGETS: Mapping[str, Targets] = {
    "large": Targets(graph_to_bn=0.5, floors=2.0),
    "small": Targets(graph_to_bn=1.0, eager_to_bn=1.5),
}


@dataclass(frozen=True)
class Case:
    """One activation, N×C or N×C×…, of rank 2 to 5."""

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
        Case((64, 2048, 7, 7), "ResNet-50's last stage: 49 pixels under many channels", "small"),
        Case((128, 16, 32, 32), "CIFAR ResNets' first stage: many samples, few channels", "small"),
        Case((128, 64, 8, 8), "CIFAR ResNets' last stage: a sample is 8 KB", "small"),
        Case((1, 64, 56, 56), "one ImageNet image: launches decide, not bytes", "small"),
        Case((1, 32, 48, 96, 96), "a volume, as in medical segmentation", "small"),
    ),
    "cpu": (
        Case((16, 64, 56, 56), "ResNet-50's first stage: the usual shape, where passes over memory decide", "cpu"),
        Case(
            (1, 256, 100, 168),
            "a detector's stage at stride 8, one 800×1344 image: the micro-batch this library is for",
            "cpu",
        ),
        Case(
            (128, 16, 32, 32),
            "CIFAR ResNets' first stage: many samples, few channels, so the N×C arithmetic shows",
            "cpu",
        ),
    ),
}
"""Groups of cases: `large` and `small` are for a GPU, `cpu` for the CPU."""

GPU_GROUPS = ("large", "small")


def parse_case(text: str, known_groups: Sequence[str] = ()) -> Case:
    """A case from NxC, NxCxL, NxCxHxW or NxCxDxHxW on the command line; the one of these groups where it is there.

    Example:
        >>> parse_case("2x8x6x6").shape
        (2, 8, 6, 6)
    """
    sizes = tuple(int(size) if size.isdecimal() else 0 for size in text.split("x"))
    if not 2 <= len(sizes) <= 5 or min(sizes) < 1:
        raise ValueError(
            f"a shape is two to five positive sizes as in 16x64x56x56, or one of {', '.join(CASES)}; got {text!r}"
        )
    if math.prod(sizes) == sizes[1]:
        raise ValueError(f"{text}: BatchNorm refuses to train on one value per channel; give more samples or pixels")
    groups = choose_groups(sizes[1])
    elements = math.prod(sizes[1:]) // groups
    if elements < LEAST:
        raise ValueError(
            f"{text}: {groups} groups of {elements} elements each; fewer than {LEAST} are normalized to little but "
            "their signs, and rounding decides the rest, so that nothing tells a right result from a wrong one; give "
            "more pixels or channels"
        )
    known = next((case for group in known_groups for case in CASES[group] if case.shape == sizes), None)
    return known or Case(sizes, "given on the command line")


def choose_cases(wanted: Sequence[str], *, on_gpu: bool) -> list[Case]:
    """The cases that are asked for by group or shape; without any, those of the device.

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
    """The tensor in a layout of `LAYOUTS`; its shape stays N×C×….

    Example:
        >>> import torch
        >>> lay_out(torch.zeros(2, 3, 4, 5), "nhwc").is_contiguous(memory_format=torch.channels_last)
        True
    """
    return x.contiguous() if layout == "nchw" else x.movedim(1, -1).contiguous().movedim(-1, 1)
