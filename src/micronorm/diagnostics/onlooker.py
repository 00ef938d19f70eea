"""Observe the effective weight of reparameterized layers."""

from collections.abc import Callable
from typing import Any

from micronorm.nn.passive_hook import PassiveHook


def watch_weight(layer: Any, observe: Callable[..., None]) -> Callable[[], None]:
    """Call `observe` with the effective weight of every forward of `layer`; return a function that stops it."""
    hook = PassiveHook(observe)
    layer.weight_observers = (*layer.weight_observers, hook)

    def stop() -> None:
        remaining = tuple(other for other in layer.weight_observers if other is not hook)
        if remaining:
            layer.weight_observers = remaining
        else:
            vars(layer).pop("weight_observers", None)

    return stop
