"""The one tolerance table, and the one comparison that reads it.

An error is measured against the *tensor's* maximum: max|actual − expected| ≤ tol · max|expected|. Element by element, a
value near zero (one that cancelled) would ask for digits that no order of summation can keep.

Where the numbers come from, with eps the distance from 1 to the next number of the dtype:

- A normalization is a sum over n elements and about ten roundings per element after it. torch adds in pairs or blocks,
  so a sum errs by at most about log2(n)·eps of the sum of magnitudes, 16 eps for n = 2¹⁶. Errors of either sign mostly
  cancel: float32 against float64 measured 1.5 eps (group normalization, n to 2¹⁵), 1.0 (standardized weight), 2.9 (the
  convolution with it, fan-in to 4,608). `output` allows 16: the bound, and five times what was seen.
- A parameter's gradient is a sum whose terms have either sign, so its maximum is smaller than its terms. Measured: 3.4
  eps (affine, n to 2¹⁶), 6.0 (a standardized weight under its convolution). `gradient` allows 64.
- Half dtypes compute in float32 and round once, at the end: half an eps. Measured: 0.54 (outputs), 0.75 (gradients
  through a convolution, which rounds in between). `output` allows 2, `gradient` 4.
- The expected value is always float64, computed from the input *as rounded to the dtype*: rounding the input is the
  caller's error, not the layer's.
- `one_step` compares two equal computations whose sums are cut differently, through a whole network: depth multiplies
  the above. Measured on a small network: 1e-14 (float64) and 3e-6 (float32). `fifty_steps` is for learning rates up to
  0.02, where float64 measured 5e-11; training amplifies rounding, float32 trajectories drift apart altogether, and so
  float32 has no entry.
- `folded` compares a network with the same function in other layers: estimates folded into the weights, so every layer
  rounds differently and depth multiplies it. Measured on ten networks: 9e-14 (float64) and, in float32, 4e-6, but 5e-5
  for the dilated ResNet-50 of DeepLabV3 with random weights, which in float32 is 2e-5 from itself in float64.

Nothing here depends on the machine, and nothing is looser in CI. A test that fails by a hair has found something: a
number in this table changes only together with its reason above.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def _eps(factor: float, *dtypes: torch.dtype) -> dict[torch.dtype, float]:
    return {dtype: factor * torch.finfo(dtype).eps for dtype in dtypes}


_WIDE = (torch.float64, torch.float32)
_HALF = (torch.float16, torch.bfloat16)

TOLERANCES: Mapping[str, Mapping[torch.dtype, float]] = {
    "output": _eps(16, *_WIDE) | _eps(2, *_HALF),
    "gradient": _eps(64, *_WIDE) | _eps(4, *_HALF),
    "one_step": {torch.float64: 1e-12, torch.float32: 1e-5},
    "folded": {torch.float64: 1e-9, torch.float32: 1e-4},
    "fifty_steps": {torch.float64: 1e-10},
}


def tolerance(operation: str, dtype: torch.dtype, *, condition: float = 1.0) -> float:
    """The table's entry, times the conditioning of the input.

    Args:
        operation: a row of TOLERANCES.
        dtype: the dtype of the result under test.
        condition: how much the operation magnifies a rounding of its input's mean, max(1, |mean|/std): 10⁴ for an input
            with mean 100 and std 0.01.
    """
    row = TOLERANCES.get(operation)
    if row is None:
        raise ValueError(f"no operation {operation!r} in the tolerance table; it has {', '.join(TOLERANCES)}")
    if dtype not in row:
        raise ValueError(f"{operation!r} has no tolerance for {dtype}; it has {', '.join(map(str, row))}")
    if condition < 1:
        raise ValueError(f"condition is max(1, |mean|/std), got {condition}")
    return row[dtype] * condition


def assert_close_to_max(actual: Tensor, expected: Tensor, *, tol: float, scale: float | None = None) -> None:
    """Assert max|actual − expected| ≤ tol · max|expected|, in float64 and on the CPU.

    Args:
        actual: the result under test.
        expected: what it should be, of the same shape; any dtype and device.
        tol: from `tolerance`.
        scale: replaces max|expected| where that says nothing of the terms that made it: a gradient that cancels to zero
            has the size of its rounding errors. An `expected` of zeros without a scale asks for exact zeros.

    Empty tensors are equal if their shapes are. Anything not finite, on either side, fails.
    """
    __tracebackhide__ = True
    if actual.shape != expected.shape:
        raise AssertionError(f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)} expected")
    if expected.numel() == 0:
        return
    a = actual.detach().to("cpu", torch.float64)
    e = expected.detach().to("cpu", torch.float64)
    for name, t in (("actual", a), ("expected", e)):
        bad = int((~torch.isfinite(t)).sum())
        if bad:
            raise AssertionError(f"{name} has {bad} of {t.numel()} elements that are not finite")
    error = (a - e).abs()
    worst = error.max().item()
    size = e.abs().max().item() if scale is None else scale
    if worst <= tol * size:
        return
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    ratio = f"{worst / size:.3g}" if size else "infinite"
    measure = "max|expected|" if scale is None else "scale"
    raise AssertionError(
        f"max|actual − expected| = {worst:.3g} > {tol:.3g} · {size:.3g} ({measure}); "
        f"relative error {ratio}, worst at {at}: {a[at].item():.17g} where {e[at].item():.17g} was expected; "
        f"{int((error > tol * size).sum())} of {error.numel()} elements are beyond the tolerance"
    )
