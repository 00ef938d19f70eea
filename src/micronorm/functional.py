"""The operations behind the layers, as functions of tensors: state in, state out."""

from micronorm.ops.batch import Running, batch_norm
from micronorm.ops.batch_renorm import batch_renorm
from micronorm.ops.bcn import algorithm1, batch_channel_norm, batch_channel_norm_reference, scan
from micronorm.ops.frn_evonorm import evonorm_s0, filter_response_norm
from micronorm.ops.group import choose_groups
from micronorm.ops.moments import Moments, moments
from micronorm.ops.switchable import switchable_norm
from micronorm.ops.weight import (
    centered_weight_normalize,
    weight_normalize,
    weight_standardize,
    weight_standardize_many,
)

__all__ = [
    "Moments",
    "Running",
    "algorithm1",
    "batch_channel_norm",
    "batch_channel_norm_reference",
    "batch_norm",
    "batch_renorm",
    "centered_weight_normalize",
    "choose_groups",
    "evonorm_s0",
    "filter_response_norm",
    "moments",
    "scan",
    "switchable_norm",
    "weight_normalize",
    "weight_standardize",
    "weight_standardize_many",
]
