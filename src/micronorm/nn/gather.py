"""What a training forward of BatchChannelNorm does with its statistics, by mode.

"step" adds them to the layer's window, "batch" and "sequential" move the estimates. Whether activation checkpointing
repeats this forward, whether gathering is paused, the rate, and the number of forwards are read when the forward
*runs*. For compiled graphs these functions are custom operators, so none of these values is traced and none causes a
recompilation. Eager code calls the functions directly.
"""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from micronorm.nn.checkpointing import inside_backward
from micronorm.nn.window import MAX_SCANNED, ScannedForward, Window, find_window
from micronorm.ops.bcn import batch_statistics, kernels, move_by_batch, scan, window_sums
from micronorm.ops.moments import Moments, bounded, compute_dtype, wide_dtype
from micronorm.ops.private_api import functorch_transforms_active

BATCH_MOMENTUM = 0.1
"""The momentum of "batch" layers whose rate is not a number, as in nn.BatchNorm2d."""

# Groups with fewer elements keep little but the signs of their values.
_FEW_ELEMENTS = 4


def gather(
    mean: Tensor, var: Tensor, around: Tensor, elements: int, groups: int, sums: Tensor, lost: Tensor, counter: Tensor
) -> None:
    """Add one forward to the window of a "step" layer, without the samples whose sums are not finite.

    `mean` and `var` are the moments of every sample and channel over its `elements` positions.
    """
    window = _gathering_window(counter, elements * (mean.shape[1] // groups))
    if window is None:
        return
    _count_forward(window, counter)
    contribution, left_out = window_sums(Moments(mean, var), elements=elements, around=around)
    sums.add_(torch.cat(contribution))
    lost[:1].add_(left_out)


def gather_numbers(
    numbers: Tensor,
    around: Tensor,
    samples: int,
    channels: int,
    elements: int,
    groups: int,
    sums: Tensor,
    lost: Tensor,
    counter: Tensor,
) -> None:
    """Add one forward to the window, from the packed numbers that its kernels left, by one more kernel."""
    window = _gathering_window(counter, elements * (channels // groups))
    if window is not None:
        _count_forward(window, counter)
        # Into the arguments, not into the window: compiled graphs pass copies, and copy them back afterwards.
        kernels().gather(numbers, around, sums, lost, (samples, channels, elements), groups)


def estimates_from_moments(
    mean: Tensor,
    var: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    elements: int,
    groups: int,
    micro_batch: int | None,
    lost: Tensor,
    counter: Tensor,
) -> tuple[Tensor, Tensor]:
    """Move the estimates of a "sequential" layer, or of a "batch" layer if `micro_batch` is None, by one forward.

    Returns:
        The mean and the variance to normalize with: N×C for "sequential", C for "batch".
    """
    data, running = bounded(Moments(mean, var), running_var.dtype), Moments(running_mean, running_var)
    samples = mean.shape[0]
    window = _gathering_window(counter, elements * (mean.shape[1] // groups))
    if micro_batch is None:
        batch = Moments(*(s.squeeze(0) for s in batch_statistics(data)))
        if window is not None:
            moved = move_by_batch(running, batch, elements=elements * samples, momentum=_batch_momentum(window))
            _move(running, moved, lost, samples=samples)
            counter[0] += 1
        return batch.mean, batch.var
    if window is not None:
        rate = window.known_rate()
        rate = rate.clamp(0, 1) if isinstance(rate, Tensor) else rate
        found, left_out = scan(running, data, rate=rate, micro_batch=micro_batch)
        lost[0].add_(left_out)
        _move(running, Moments(*(e[-1] for e in found)), lost, samples=samples)
        window.scanned.append(ScannedForward(data, found))
        counter[0] += 1
    else:
        found = _estimates_of_uncounted(counter, data, running, samples)
    return found.mean.clone(), found.var.clone()


def estimates_from_input(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    groups: int,
    micro_batch: int | None,
    lost: Tensor,
    counter: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do `estimates_from_moments` by kernels, which read x themselves.

    Returns:
        The `parts` that the kernels of the normalization take, and the mean and the variance to normalize with.
    """
    running = Moments(running_mean, running_var)
    window = _gathering_window(counter, x.numel() // (x.shape[0] * groups))
    rate: float | Tensor = 0.0
    if window is not None:
        rate = _batch_momentum(window) if micro_batch is None else window.known_rate()
        counter.numpy()[0] += 1
    parts, found, data = kernels().estimates(x, running, lost, rate, groups, micro_batch or 0, window is not None)
    if data is not None and window is not None:
        window.scanned.append(ScannedForward(data, found))
    elif data is not None:
        found = _estimates_of_uncounted(counter, data, running, x.shape[0])
    return parts, found.mean, found.var


def run(function: Callable, *args: object) -> Any:
    """Call one of the functions above, or the operator of the same name while a graph is being compiled.

    Raises:
        RuntimeError: under a transform of torch.func, which forbids layers to change their state.
    """
    if torch.compiler.is_compiling():
        return getattr(torch.ops.micronorm, function.__name__)(*args)
    if functorch_transforms_active():
        raise RuntimeError(
            "a BatchChannelNorm in training mode collects statistics, and transforms of torch.func (grad, vmap, jvp, "
            '...) do not allow that. Call model.eval(): in "step" mode this changes no output. Or freeze the layer '
            "with layer.requires_grad_(False)"
        )
    return function(*args)


def _gathering_window(counter: Tensor, group_elements: int) -> Window | None:
    """Return the window with this counter. Warn of small groups.

    Return None if the forward does not count: while gathering is paused, in a forward that checkpointing repeats, or if
    the layer is gone.
    """
    window = find_window(counter)
    if window is None:
        return None
    if group_elements < _FEW_ELEMENTS and not window.warned:
        window.warned = True
        warnings.warn(
            f"{window.describe()} normalizes over groups of {group_elements} elements: this keeps little but their "
            "signs. Use fewer groups for maps as small as this.",
            UserWarning,
            stacklevel=2,
        )
    return None if window.paused or inside_backward() else window


def _count_forward(window: Window, counter: Tensor) -> None:
    """Count a forward of the window, or raise if too many came without a commit; `counter` is its own or a copy."""
    counts = counter.numpy()  # faster than indexing the tensor, which takes microseconds
    if counts[0] >= window.control.max_forwards:
        raise RuntimeError(
            f"{window.describe()} has gathered {counts[0]} training forwards without a commit: its estimates do "
            "not move. Does a torch.optim optimizer hold the layer's weight, and does it step? In any other loop, call "
            "handle = mn.attach(model, rate=...) once and handle.commit() after each update. Run forwards that do not "
            "train after model.eval(), or in `with handle.paused():`. Freeze a layer that no optimizer holds: "
            "layer.requires_grad_(False). If a step really takes more forwards, raise the limit: "
            "mn.attach(model, max_forwards=...)."
        )
    counts[0] += 1
    window.ran = True


def _batch_momentum(window: Window) -> float:
    return window.rate if isinstance(window.rate, float) else BATCH_MOMENTUM


def _move(running: Moments, new: Moments, lost: Tensor, *, samples: int) -> None:
    """Write both estimates, or neither if any number is not finite in the buffers' dtype; then count the samples."""
    mean, var = new.mean.to(running.mean.dtype), new.var.to(running.var.dtype)
    finite = mean.isfinite().all() & var.isfinite().all()
    running.mean.copy_(torch.where(finite, mean, running.mean))
    running.var.copy_(torch.where(finite, var, running.var))
    lost[0].add_(finite.logical_not(), alpha=samples)


def _estimates_of_uncounted(counter: Tensor, data: Moments, running: Moments, samples: int) -> Moments:
    """Return the N×C estimates for a "sequential" forward that does not count.

    They are those of the earlier forward that activation checkpointing repeats; otherwise the running ones.
    """
    window = find_window(counter) if inside_backward() else None
    if window is None or window.paused:
        return Moments(*(r.to(data.mean.dtype).expand(samples, -1).clone() for r in running))
    alike = [forward for forward in window.scanned if all(map(torch.equal, forward.data, data))]
    if len(alike) != 1:
        raise RuntimeError(
            f'{window.describe()} is in "sequential" mode and a checkpointed forward is being recomputed, but '
            f"{len(alike) or 'none'} of the passes since the last step (the latest {MAX_SCANNED} are kept) match it: "
            "the estimates to repeat are unknown. Run the backward before the optimizer steps, with distinct inputs, "
            'or use statistics="step".'
        )
    return alike[0].estimates


def register_operator(function: Callable, mutates: str, fake: Callable[..., Any] = lambda *args: None) -> None:
    """Register a function as an operator of its name, which compiled graphs call."""
    operator = torch.library.custom_op(f"micronorm::{function.__name__}", function, mutates_args=mutates.split())
    operator.register_fake(fake)


register_operator(gather, "sums lost counter")
register_operator(gather_numbers, "sums lost counter")


def _fake_estimates_from_moments(
    mean: Tensor, var: Tensor, running_mean: Tensor, running_var: Tensor, elements: int, groups: int, *rest: Any
) -> tuple[Tensor, Tensor]:
    shape = mean.shape[1:] if rest[0] is None else mean.shape
    return mean.new_empty(shape), mean.new_empty(shape)


register_operator(estimates_from_moments, "running_mean running_var lost counter", _fake_estimates_from_moments)


def _fake_estimates(
    x: Tensor, running_mean: Tensor, running_var: Tensor, groups: int, micro_batch: int | None, *rest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    parts = x.new_empty(kernels().parts_size(x, groups), dtype=compute_dtype(x.dtype))
    mean = x.new_empty(x.shape[1:2] if micro_batch is None else x.shape[:2], dtype=wide_dtype(x.device))
    return parts, mean, torch.empty_like(mean)


@wraps(estimates_from_input)
def _with_copies(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    parts, mean, var = estimates_from_input(*args)
    return parts, mean.clone(), var.clone()  # compiled code may overwrite its results, and the window keeps these


register_operator(_with_copies, "running_mean running_var lost counter", _fake_estimates)
