"""Tell a forward pass from its repetition by activation checkpointing."""

import torch
from torch import Tensor

from micronorm.ops.private_api import graph_task_id


def inside_backward() -> bool:
    """Return whether the caller runs inside a backward pass, where activation checkpointing repeats forwards.

    A repeated forward must not move running statistics again.

    While code is traced (torch.compile, export), return False: the result would become a constant of the graph. Call
    this function inside a custom operator, which a compiled graph calls at run time.
    """
    if torch.compiler.is_compiling():
        return False
    return graph_task_id() != -1


def write_once(buffer: Tensor, value: Tensor) -> None:
    """Copy `value` into `buffer`, unless activation checkpointing repeats this forward; also in compiled code."""
    if torch.compiler.is_compiling():
        torch.ops.micronorm.write_once(buffer, value)
    else:
        _write_once(buffer, value)


def _write_once(buffer: Tensor, value: Tensor) -> None:
    if not inside_backward():
        buffer.copy_(value)


torch.library.custom_op("micronorm::write_once", _write_once, mutates_args=("buffer",)).register_fake(
    lambda buffer, value: None
)
