"""Whether somebody differentiates or batches a computation from outside, so that it must be plain operations."""

import torch
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is under way; compilers see for themselves.

    Example:
        >>> is_transformed(), torch.func.vmap(lambda x: x * is_transformed())(torch.ones(2)).tolist()
        (False, [1.0, 1.0])
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
