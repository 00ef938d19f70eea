"""The shapes that are measured, and why these."""

from dataclasses import dataclass

Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Case:
    """One activation, N×C×H×W."""

    shape: Shape
    reason: str

    @property
    def name(self) -> str:
        """The shape as in tables: 16x64x56x56."""
        return "x".join(map(str, self.shape))


CASES = (
    Case((16, 64, 56, 56), "ResNet-50's first stage on ImageNet: the usual shape, where passes over memory decide"),
    Case((1, 256, 100, 168), "a detector's stage at stride 8, one 800×1344 image: the micro-batch this library is for"),
    Case((128, 16, 32, 32), "CIFAR ResNets' first stage: many samples, few channels, so the N×C arithmetic shows"),
)


def parse_case(text: str) -> Case:
    """A case from NxCxHxW on the command line.

    Example:
        >>> parse_case("2x8x6x6").shape
        (2, 8, 6, 6)
    """
    sizes = [int(size) if size.isdecimal() else 0 for size in text.split("x")]
    if len(sizes) != 4 or min(sizes) < 1:
        raise ValueError(f"a shape is four positive sizes as in 16x64x56x56, got {text!r}")
    n, c, h, w = sizes
    return Case((n, c, h, w), "given on the command line")
