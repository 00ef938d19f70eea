"""Compare the outputs of two models on inputs of several sizes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from micronorm.convert.trace import as_call, tensors_in


def verify(
    expected: Callable[..., Any], actual: Callable[..., Any], inputs: Iterable[Any], *, tol: float = 1e-4
) -> float:
    """Return the largest difference between the outputs of two models over all inputs.

    The difference of an output tensor is max|actual − expected| / max|expected|. Outputs may be nested; their tensors
    are compared in order.

    Args:
        expected: the reference model.
        actual: the model to compare with it.
        inputs: the inputs of both, each a tuple of arguments, a dictionary of keyword arguments or the one argument.
        tol: the largest difference allowed.

    Raises:
        RuntimeError: an output differs by more than `tol`, in its shape, or is not finite.
        ValueError: there are no inputs, or the outputs contain no tensor.

    Example:
        >>> verify(torch.sin, lambda x: torch.sin(x) * (1 + 1e-6), [torch.ones(2), torch.ones(3, 4)]) < 1e-5
        True
    """
    worst, count = 0.0, 0
    for example in inputs:
        args, kwargs = as_call(example)
        with torch.no_grad():
            pair = [tensors_in(model(*args, **kwargs)) for model in (expected, actual)]
        where = f"on inputs {' and '.join(_shapes(example))}"
        if len(pair[0]) != len(pair[1]):
            raise RuntimeError(f"{len(pair[1])} outputs where {len(pair[0])} were expected, {where}")
        if not pair[0]:
            raise ValueError(f"no tensor among the outputs {where}: there is nothing to compare")
        for index, (right, other) in enumerate(zip(*pair, strict=True)):
            difference = _difference(right, other, f"output {index} {where}")
            if not difference <= tol:
                raise RuntimeError(f"output {index} {where} differs by {difference:.3g} of its maximum, above {tol:g}")
            worst = max(worst, difference)
        count += 1
    if count == 0:
        raise ValueError("no inputs to compare on")
    return worst


def _difference(expected: Tensor, actual: Tensor, label: str) -> float:
    if expected.shape != actual.shape:
        raise RuntimeError(f"{label} has shape {tuple(actual.shape)} where {tuple(expected.shape)} was expected")
    if expected.numel() == 0:
        return 0.0
    right, other = (t.detach().to("cpu", torch.float64) for t in (expected, actual))
    for name, tensor in (("expected", right), ("actual", other)):
        if not bool(tensor.isfinite().all()):
            raise RuntimeError(f"{label} is not finite ({name}): it cannot be compared")
    error, size = (right - other).abs().max().item(), right.abs().max().item()
    return error / size if size else (0.0 if error == 0 else float("inf"))


def _shapes(example: Any) -> list[str]:
    return ["×".join(map(str, tensor.shape)) or "scalar" for tensor in tensors_in(example)] or ["without tensors"]
