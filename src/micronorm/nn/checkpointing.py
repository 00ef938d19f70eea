"""Telling a forward pass from its repetition by activation checkpointing."""

import torch
from torch import Tensor


def inside_backward() -> bool:
    """Whether the caller runs inside a backward pass, as the forwards that activation checkpointing repeats do.

    Such a forward must not move running statistics: its first pass has moved them already.

    Code that is being traced (torch.compile, export) gets False: autograd's task id is a plain integer that Dynamo
    cannot put into a graph, and the answer of the traced pass would be frozen into all later ones. Ask inside a custom
    operator, which a compiled graph calls as it stands.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


def write_once(buffer: Tensor, value: Tensor) -> None:
    """Copy `value` into `buffer`, unless this forward repeats one that has done so; also in compiled code."""
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
