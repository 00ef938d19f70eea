"""Commit when an optimizer steps, by process-wide hooks of torch.optim.

The hooks find the layers by the identity of their weight. Any loop that ends in `optimizer.step()` therefore commits
without further code.
"""

import sys
import warnings
import weakref
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from micronorm.commit.idle import count_idle_steps, warn_of_group_affine_left_out
from micronorm.commit.merge import commit
from micronorm.nn.window import Window, call_at_first_window, live_windows
from micronorm.ops.private_api import disable_dynamo, foreach_copy_
from micronorm.ops.runtime import capturing

# Optimizers that another optimizer steps, which commits for them.
_inner: weakref.WeakSet[Optimizer] = weakref.WeakSet()
# Optimizers for which the warning about a learning rate above one was given.
_clamped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
# Optimizers that were searched for a group affine that they leave out.
_searched: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _install() -> None:
    """Register the hooks. A compiled optimizer step leaves its graph for them instead of tracing them."""
    # Not torch.compiler.disable: that would import the compiler, for a second, when the first layer is made.
    register_optimizer_step_pre_hook(disable_dynamo(_before_step))
    register_optimizer_step_post_hook(disable_dynamo(_after_step))


call_at_first_window(_install)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    # ZeroRedundancyOptimizer steps an inner optimizer, which holds only the parameters of its rank's shard.
    sharded = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if sharded is not None and isinstance(optimizer, sharded.ZeroRedundancyOptimizer):
        _inner.add(optimizer.optim)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _inner:
        return
    alive = live_windows()
    held = _held_by(optimizer, alive)
    committed = {id(window) for window, _ in held}
    if held:
        _refresh_rates(held, optimizer)
        # A fused optimizer under GradScaler runs this hook also when it skips the step; found_inf then says so.
        commit([window for window, _ in held], skip=getattr(optimizer, "found_inf", None))
        if optimizer not in _searched:
            _searched.add(optimizer)
            warn_of_group_affine_left_out([pair for pair in alive if id(pair[0]) in committed], optimizer)
    count_idle_steps(alive, committed)


def _refresh_rates(held: list[tuple[Window, dict[str, Any]]], optimizer: Optimizer) -> None:
    """Write each layer's rate to its device. Read the learning rate of a group once for all its layers."""
    group_rates: dict[int, float | Tensor] = {}
    on_device: list[tuple[Window, Tensor]] = []
    for window, group in held:
        rate = window.rate
        if not isinstance(rate, float):
            if id(group) not in group_rates:
                group_rates[id(group)] = limited(group_rate(window, group, optimizer))
            rate = group_rates[id(group)]
        if isinstance(rate, Tensor) and rate.device == window.device:
            on_device.append((window, rate))
        else:
            refresh_rate(window, rate)
    if on_device:
        # One launch for all layers.
        foreach_copy_([window.device_rate for window, _ in on_device], [rate for _, rate in on_device])
        for window, _ in on_device:
            window.written_rate = None


def _held_by(optimizer: Optimizer, alive: list[tuple[Window, Any]]) -> list[tuple[Window, dict[str, Any]]]:
    """Return the windows of the layers whose weight the optimizer holds, each with its parameter group.

    They are in the optimizer's order, which is the same on every rank. The order in which layers were made may differ.
    """
    places = {id(p): (i, j) for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])}
    found = []
    for window, layer in alive:
        # A layer that was frozen in mid-window keeps its estimates and its window. One with affine=False is not frozen.
        live = [p for p in layer.weight_parameters() if p.requires_grad or not layer.affine]
        own = [places[id(p)] for p in live if id(p) in places]
        if own and _is_bound(window, optimizer):
            found.append((min(own), window))
    found.sort(key=lambda item: item[0])
    return [(window, optimizer.param_groups[place[0]]) for place, window in found]


def _is_bound(window: Window, optimizer: Optimizer) -> bool:
    """Return whether this optimizer commits the layer. A wrapper shares its groups with the optimizer it wraps."""
    bound = [o for o in (ref() for ref in window.control.optimizers) if o is not None]
    return not bound or any(o is optimizer or o.param_groups is optimizer.param_groups for o in bound)


def group_rate(window: Window, group: dict[str, Any], optimizer: Optimizer) -> float | Tensor:
    """Return the learning rate of the parameter group that holds the layer's weight.

    A number is limited to [0, 1]. A tensor is not: the code that uses it limits it, in a kernel without another launch.
    """
    rate = group.get("lr")
    if rate is None:
        raise RuntimeError(
            f'{window.describe()} has rate="lr", but the parameter group of {type(optimizer).__name__} that holds its '
            "weight has no learning rate; give one with mn.attach(model, rate=...)"
        )
    if isinstance(rate, Tensor):
        return rate.detach().reshape(1)
    if rate > 1 and optimizer not in _clamped:
        _clamped.add(optimizer)
        warnings.warn(
            f"the learning rate {rate} is above 1; estimates move by 1 (mn.attach(model, rate=...) sets another rate)",
            UserWarning,
            stacklevel=2,
        )
    return min(max(float(rate), 0.0), 1.0)


def limited(rate: float | Tensor) -> float | Tensor:
    """Return the rate, limited to [0, 1] if it is a tensor."""
    return rate.clamp(0, 1) if isinstance(rate, Tensor) else rate


def refresh_rate(window: Window, rate: float | Tensor) -> None:
    """Write the rate of the next commit to the device, if it has changed."""
    captured = capturing(window.device)
    if isinstance(rate, Tensor):
        if not captured or rate.device == window.device:
            window.device_rate.copy_(rate.clamp(0, 1))
            window.written_rate = None
    elif not captured and rate != window.written_rate:  # for a captured commit, `Handle.refresh` writes it
        window.device_rate.fill_(rate)
        window.written_rate = rate
