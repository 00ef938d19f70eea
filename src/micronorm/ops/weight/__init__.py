"""Weight Standardization (Sec. `sec:ws`), Weight Normalization and Centered Weight Normalization."""

from micronorm.ops.weight.reference import (
    centered_weight_normalize,
    check_fan_in,
    row_statistics,
    weight_normalize,
    weight_standardize,
)

__all__ = [
    "centered_weight_normalize",
    "check_fan_in",
    "row_statistics",
    "weight_normalize",
    "weight_standardize",
]
