"""Batch-Channel Normalization: the plain equations, the one-pass form, the kernels, and the estimates' updates."""

from micronorm.ops.bcn.estimates import Sums, move_by_batch, move_by_window, scan, shift_sums, window_sums
from micronorm.ops.bcn.fused import batch_channel_norm_fused, elementwise_fused, group_norm_fused, kernels
from micronorm.ops.bcn.onepass import batch_channel_norm, batch_statistics, elementwise, no_grad_unless_traced
from micronorm.ops.bcn.reference import algorithm1, batch_channel_norm_reference

__all__ = [
    "Sums",
    "algorithm1",
    "batch_statistics",
    "move_by_batch",
    "move_by_window",
    "batch_channel_norm",
    "batch_channel_norm_fused",
    "batch_channel_norm_reference",
    "elementwise",
    "elementwise_fused",
    "group_norm_fused",
    "kernels",
    "scan",
    "no_grad_unless_traced",
    "shift_sums",
    "window_sums",
]
