"""Elementwise operations after a normalization: their results are formulas too.

They are recognised by the nodes that autograd records for them, which know their constants and where their inputs come
from. So it does not matter whether a network calls a module or a function, nor whether in place or not.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _unary(function: Callable[..., Tensor], **constants: str) -> Callable[[Any], Callable[[Tensor], Tensor]]:
    """A function that makes the operation from its node; constants: an argument of `function` and the node's name."""

    def make(node: Any) -> Callable[[Tensor], Tensor]:
        values = {name: getattr(node, saved) for name, saved in constants.items()}
        return lambda x: function(x, **values)

    return make


UNARY: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    # In place where torch can: they are given memory of their own.
    "ReluBackward0": _unary(torch.relu_),
    "LeakyReluBackward0": _unary(torch._C._nn.leaky_relu_, negative_slope="_saved_negative_slope"),
    "LeakyReluBackward1": _unary(torch._C._nn.leaky_relu_, negative_slope="_saved_negative_slope"),  # in place
    "SiluBackward0": _unary(torch._C._nn.silu_),
    "HardtanhBackward0": _unary(torch._C._nn.hardtanh_, min_val="_saved_min_val", max_val="_saved_max_val"),
    "HardswishBackward0": _unary(torch._C._nn.hardswish_),
    "GeluBackward0": _unary(F.gelu, approximate="_saved_approximate"),
}
"""By the name of their node: what makes the operation. ReLU6 is a hardtanh."""

ADD = "AddBackward0"


def addition(node: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """a + alpha·b."""
    alpha = node._saved_alpha
    return lambda a, b: torch.add(a, b, alpha=alpha)
