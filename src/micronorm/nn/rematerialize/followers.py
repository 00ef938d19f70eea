"""Elementwise operations after a normalization: their results are formulas too.

They are recognised by the nodes that autograd records for them, which know their constants and where their inputs come
from. So it does not matter whether a network calls a module or a function, nor whether in place or not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Operation = Callable[[Tensor], Tensor]


def _unary(function: Callable[..., Tensor], **constants: str) -> Callable[[Any], Operation]:
    """What makes the operation from its node; `constants`: arguments of `function` and the node's names for them."""

    def make(node: Any) -> Operation:
        return partial(function, **{name: getattr(node, saved) for name, saved in constants.items()})

    return make


# In place: they are given memory of their own.
_leaky_relu = _unary(partial(F.leaky_relu, inplace=True), negative_slope="_saved_negative_slope")
_hardtanh = _unary(partial(F.hardtanh, inplace=True), min_val="_saved_min_val", max_val="_saved_max_val")

UNARY: dict[str, Callable[[Any], Operation]] = {
    "ReluBackward0": _unary(torch.relu_),
    "LeakyReluBackward0": _leaky_relu,
    "LeakyReluBackward1": _leaky_relu,  # where the network called it in place
    "SiluBackward0": _unary(partial(F.silu, inplace=True)),
    "HardtanhBackward0": _hardtanh,
    "HardswishBackward0": _unary(partial(F.hardswish, inplace=True)),
    "GeluBackward0": _unary(F.gelu, approximate="_saved_approximate"),
}
"""By the name of their node: what makes the operation. ReLU6 is a hardtanh."""

ADD = "AddBackward0"


def addition(node: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """a + alpha·b."""
    return partial(torch.add, alpha=node._saved_alpha)


def then(operation: Operation, before: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """operation(before(*given))."""
    return operation(before(*given))
