"""Check the arguments and inputs of layers and specs. Each error states the rule, the value and the likely fix."""

import math

from torch import Tensor

from micronorm.ops.group import check_count


def check_input(x: Tensor, num_channels: int, name: str) -> None:
    """Raise if x is not floating-point N×C×… of rank 2 to 5 with `num_channels` channels; `name` is the layer's."""
    if not x.is_floating_point():
        raise TypeError(f"{name} takes floating-point input, got {x.dtype}; convert it with x.float()")
    shape = x.shape
    if not 2 <= len(shape) <= 5:
        raise ValueError(
            f"{name} takes N×C to N×C×D×H×W, rank 2 to 5, got shape {tuple(shape)}; "
            "a single sample needs a batch axis: x.unsqueeze(0)"
        )
    if shape[1] != num_channels:
        unbatched = len(shape) == 3 and shape[0] == num_channels
        raise ValueError(
            f"{name} has {num_channels} channels, got {shape[1]} in axis 1 of shape {tuple(shape)}; "
            + (
                "if that is one sample, add a batch axis: x.unsqueeze(0)"
                if unbatched
                else "channels come second, whatever the memory format: x.movedim(-1, 1) if yours are last"
            )
        )
    if 0 in shape[2:]:
        raise ValueError(f"{name} accepts an empty batch but no empty map, got shape {tuple(shape)}; drop such inputs")


def check_residual(residual: Tensor, x: Tensor) -> None:
    """Raise if the residual is not a tensor with the input's shape."""
    if not isinstance(residual, Tensor):
        raise TypeError(f"residual must be a tensor of the input's shape, or None, got {residual!r}; add it afterwards")
    if residual.shape != x.shape:
        raise ValueError(
            f"residual must have the shape of the input, {tuple(x.shape)}, got {tuple(residual.shape)}; "
            "to add a tensor that broadcasts, add it after the norm"
        )


def check_groups(c: int, g: int) -> None:
    """Raise if g groups do not divide c channels."""
    check_count("num_channels", c)
    check_count("num_groups", g)
    if c % g:
        raise ValueError(
            f"num_groups must divide num_channels, got {c} channels and {g} groups; try num_groups={math.gcd(c, g)}"
        )


def check_flag(name: str, value: bool) -> None:
    """Raise if the value is not True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_micro_batch(value: int | None) -> None:
    """Raise if the value is neither None nor an int of at least 1."""
    if value is not None:
        check_count("micro_batch (samples per micro-batch; None for the whole batch)", value)


def check_eps(value: float) -> None:
    """Raise if eps is negative or not finite: it is added under a square root."""
    if not 0 <= value < math.inf:
        raise ValueError(f"eps must be finite and at least 0, got {value}; try 1e-5")


def check_momentum(value: float | None, *, cumulative: bool = True) -> None:
    """Raise if the momentum is not in [0, 1]. With `cumulative`, None (the average of all batches) is allowed too."""
    if value is None and cumulative:
        return
    if value is None or not 0 <= value <= 1:
        hint = "0.1 as in torch, or None for the average of all batches" if cumulative else "0.01 as in the paper"
        raise ValueError(f"momentum is the share of the new batch, between 0 and 1, got {value}; try {hint}")


def check_rate(rate: object) -> float:
    """Return a rate as a float, or raise if it is not a number in [0, 1]."""
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise TypeError(f'rate must be "lr" or a float in [0, 1], got {rate!r}')
    if not 0 <= rate <= 1:  # NaN compares false
        raise ValueError(f"a float rate must lie in [0, 1], got {rate!r}: it is the fraction by which estimates move")
    return float(rate)
