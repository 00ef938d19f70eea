"""Hooks that look and change nothing."""

from collections.abc import Callable
from typing import Any


class Onlooker:
    """A hook that changes nothing, and sees nothing in a copy of the model, which nobody observes."""

    onlooker = True  # for `micronorm.nn.norm_act.has_hooks`: norms stay fused with what follows them

    def __init__(self, see: Callable[..., None]) -> None:
        self.see = see

    def __call__(self, *args: Any) -> None:
        """What the model calls."""
        self.see(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Onlooker":
        return Onlooker(_see_nothing)

    def __reduce__(self) -> Any:
        return Onlooker, (_see_nothing,)


def _see_nothing(*args: Any) -> None: ...


def watch_weight(layer: Any, see: Callable[..., None]) -> Callable[[], None]:
    """Show `see` the effective weight of every forward of a reparameterized layer; returns what ends it."""
    onlooker = Onlooker(see)
    layer.onlookers = (*layer.onlookers, onlooker)

    def end() -> None:
        left = tuple(other for other in layer.onlookers if other is not onlooker)
        if left:
            layer.onlookers = left
        else:
            vars(layer).pop("onlookers", None)

    return end
