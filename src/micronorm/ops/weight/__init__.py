"""Weight Standardization (Sec. `sec:ws`), Weight Normalization and Centered Weight Normalization."""

from micronorm.ops.weight.reference import (
    centered_weight_normalize,
    check_fan_in,
    over_rows,
    row_statistics,
    weight_normalize,
)
from micronorm.ops.weight.standardize import (
    choose_backend,
    standardize_by_kernel,
    weight_standardize,
    weight_standardize_many,
)

__all__ = [
    "centered_weight_normalize",
    "check_fan_in",
    "choose_backend",
    "over_rows",
    "row_statistics",
    "standardize_by_kernel",
    "weight_normalize",
    "weight_standardize",
    "weight_standardize_many",
]
