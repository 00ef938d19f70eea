"""Who commits: a process-wide post-step hook of torch.optim that finds layers by the identity of their weight.

Loops that end in `optimizer.step()`, whoever calls it, need no line of ours.
"""

import sys
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from micronorm.commit.merge import commit
from micronorm.nn.window import Window, live_windows, on_first_use
from micronorm.ops.private_api import disable_dynamo, foreach_copy_

# Optimizers stepped by another one that commits for them.
_inner: weakref.WeakSet[Optimizer] = weakref.WeakSet()
# Optimizers whose learning rate was above one and said so once.
_clamped: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _install() -> None:
    """Register the hooks; compiled optimizer steps leave the graph for them instead of tracing them."""
    # torch.compiler.disable would import the compiler (a second) for the first layer made; this waits for the first
    # step, by which time the optimizer has imported it.
    register_optimizer_step_pre_hook(disable_dynamo(_before_step))
    register_optimizer_step_post_hook(disable_dynamo(_after_step))


on_first_use.append(_install)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    # ZeroRedundancyOptimizer steps an inner optimizer that holds its own rank's shard: the outer one knows all layers.
    sharded = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if sharded is not None and isinstance(optimizer, sharded.ZeroRedundancyOptimizer):
        _inner.add(optimizer.optim)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _inner:
        return
    held = _held_by(optimizer)
    if held:
        _refresh_rates(held, optimizer)
        # A fused optimizer under GradScaler runs its hook even where it skips the step.
        commit([window for window, _ in held], skip=getattr(optimizer, "found_inf", None))


def _refresh_rates(held: list[tuple[Window, dict[str, Any]]], optimizer: Optimizer) -> None:
    """Write every layer's rate to the device; the learning rate of a group is read once for all its layers."""
    learning: dict[int, float | Tensor] = {}
    on_device: list[tuple[Window, Tensor]] = []
    for window, group in held:
        rate = window.rate
        if not isinstance(rate, float):
            rate = learning.get(id(group))
            if rate is None:
                rate = learning[id(group)] = group_rate(window, group, optimizer)
        if isinstance(rate, Tensor) and rate.device == window.device:
            on_device.append((window, rate))
        else:
            refresh_rate(window, rate)
    if on_device:
        # In one go: a launch per layer is half a network's worth of launches.
        foreach_copy_([window.device_rate for window, _ in on_device], [rate for _, rate in on_device])
        for window, _ in on_device:
            window.host_rate = None


def _held_by(optimizer: Optimizer) -> list[tuple[Window, dict[str, Any]]]:
    """The windows whose layer's weight the optimizer holds, with its group, in the optimizer's order.

    That order is the same on every rank; the order in which layers were made need not be.
    """
    places = {id(p): (i, j) for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])}
    found = []
    for window in live_windows():
        weight = window.layer.weight
        # A layer frozen in mid-window keeps its estimates, and its window for the day it is trained again.
        if id(weight) in places and weight.requires_grad and _is_bound(window, optimizer):
            found.append((places[id(weight)], window))
    found.sort(key=lambda item: item[0])
    return [(window, optimizer.param_groups[place[0]]) for place, window in found]


def _is_bound(window: Window, optimizer: Optimizer) -> bool:
    """Whether this optimizer may commit the layer; a wrapper and what it wraps share one list of groups."""
    bound = [o for o in (ref() for ref in window.control.optimizers) if o is not None]
    return not bound or any(o is optimizer or o.param_groups is optimizer.param_groups for o in bound)


def group_rate(window: Window, group: dict[str, Any], optimizer: Optimizer) -> float | Tensor:
    """The learning rate of a parameter group as the rate of a layer whose weight it holds."""
    rate = group.get("lr")
    if rate is None:
        raise RuntimeError(
            f'{window.describe()} has rate="lr", but the parameter group of {type(optimizer).__name__} that holds its '
            "weight has no learning rate; give one with mn.attach(model, rate=...)"
        )
    return clamp_rate(rate, optimizer)


def clamp_rate(rate: float | Tensor, optimizer: Optimizer) -> float | Tensor:
    """A learning rate as a rate: above one it would overshoot what was seen."""
    if isinstance(rate, Tensor):
        return rate.detach().reshape(()).clamp(0, 1)
    if rate > 1 and optimizer not in _clamped:
        _clamped.add(optimizer)
        warnings.warn(
            f"the learning rate {rate} is above 1; estimates move by 1 (mn.attach(model, rate=...) sets another rate)",
            UserWarning,
            stacklevel=2,
        )
    return min(max(float(rate), 0.0), 1.0)


def refresh_rate(window: Window, rate: float | Tensor) -> None:
    """Write the rate of the next commit to the device, where it changed."""
    capturing = window.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if isinstance(rate, Tensor):
        if not capturing or rate.device == window.device:
            window.device_rate.copy_(rate)
            window.host_rate = None
    elif not capturing and rate != window.host_rate:  # a captured commit reads what `Handle.refresh` writes
        window.device_rate.fill_(rate)
        window.host_rate = rate
