"""Names for the positions in the packed tables that Python code and kernels share.

Several small results travel in one tensor, because one allocation is cheaper than many. Kernels take the positions from
here as `tl.constexpr`. N, C, S and G are the numbers of samples, channels, positions and groups.

`numbers`, which a BCN or group-normalization forward leaves for the backward and the window, holds in this order:

| part | entries |
|---|---|
| one block for each `Number` | 5 × N×C |
| the estimates that were used: mean, then variance (the first sample's, if every sample has its own) | 2 × C |
| for each sample and group, how many channels have moments that are not finite | N×G |
| the blend α | 1 |
"""

from enum import IntEnum

from torch import Tensor


class Number(IntEnum):
    """The N×C blocks of `numbers`: mean = PIVOT + RESIDUE, and y = SCALE·(x − PIVOT) + OFFSET."""

    PIVOT = 0
    RESIDUE = 1
    VAR = 2
    SCALE = 3
    OFFSET = 4


class Slope(IntEnum):
    """The N×C blocks of `slopes`: dx = SLOPE·g + CURVE·(x − pivot) + SHIFT."""

    SLOPE = 0
    CURVE = 1
    SHIFT = 2


class Part(IntEnum):
    """The N×pieces×C blocks of `parts`: mean and squared deviations (forward), or Σg and Σg·(x − pivot) (backward)."""

    FIRST = 0
    SECOND = 1


class RowStat(IntEnum):
    """The rows of the statistics of standardized weights: mean = PIVOT + RESIDUE, and RSTD = 1/σ."""

    PIVOT = 0
    RESIDUE = 1
    RSTD = 2


class Record(IntEnum):
    """The fields of the record that describes one block of rows to a launch over many weights."""

    ADDRESS = 0  # of the block's first row
    FAN_IN = 1
    ROWS = 2  # from the block's first row to the end of the weight
    COLUMN = 3  # of the first row in the statistics
    OFFSET = 4  # of the first row in its weight, in elements
    KIND = 5  # of the tile, see `weight.tables.tile_of`
    OWNER = 6  # index of the weight in the list
    PADDING = 7  # makes a record 64 bytes


def numbers_size(samples: int, channels: int, groups: int) -> int:
    """Return the number of entries of `numbers`."""
    return len(Number) * samples * channels + 2 * channels + samples * groups + 1


def kept_estimates(numbers: Tensor, samples: int, channels: int) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance that a forward normalized with, from its `numbers`."""
    start = len(Number) * samples * channels
    return numbers[start : start + channels], numbers[start + channels : start + 2 * channels]


def kept_blend(numbers: Tensor) -> Tensor:
    """Return the blend α that a forward used, from its `numbers`."""
    return numbers[-1]
