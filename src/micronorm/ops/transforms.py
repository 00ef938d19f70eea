"""Whether somebody differentiates or batches a computation from outside, so that it must be plain operations."""

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
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


def is_plain_backward(*grads: Tensor) -> bool:
    """Whether a backward pass is just that, so that a kernel may compute it; in it, and given its gradients.

    It is not under create_graph, in which it is differentiated again, nor with `is_grads_batched`.

    Example:
        >>> with torch.no_grad():
        ...     is_plain_backward(torch.ones(2))
        True
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
        return False
    return not any(map(is_legacy_batchedtensor, grads))
