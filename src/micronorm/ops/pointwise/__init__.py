"""1×1 convolutions that stand beside another branch: the two gradients of their common input in one pass."""

from micronorm.ops.pointwise.operators import kernel_runs, pointwise_conv_and_input

__all__ = ["kernel_runs", "pointwise_conv_and_input"]
