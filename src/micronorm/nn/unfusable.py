"""An eps that stops code which folds BatchNorm into convolutions from folding our layers as well."""

from typing import Any, NoReturn


class UnfusableEps(float):
    """A float that raises when it is added to a tensor.

    Such code (torch.nn.utils.fusion, Ultralytics' `fuse`, mmcv) recognizes a BatchNorm by its running statistics, and
    computes `running_var + eps` first. For Batch-Channel Normalization the result would be wrong without a word. The
    operations of torch call `__torch_function__` of their arguments, also of a float.

    Example:
        >>> import torch
        >>> UnfusableEps(1e-5) == 1e-5
        True
        >>> torch.ones(1) + UnfusableEps(1e-5)
        Traceback (most recent call last):
        ...
        RuntimeError: Batch-Channel Normalization cannot be folded into a convolution like BatchNorm...
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise RuntimeError(
            "Batch-Channel Normalization cannot be folded into a convolution like BatchNorm, with running_var + eps: "
            "fold the whole model with mn.fold(model) before other tools see it. To compute with eps, use float(eps)."
        )
