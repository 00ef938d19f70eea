"""Find the activation function behind a norm's output, directly or after an addition.

This watches operations instead of modules, because `F.relu(norm(x) + shortcut)` has no module to hook.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from micronorm.diagnostics.norms import count_positive
from micronorm.ops.private_api import TorchDispatchMode

ZERO_BELOW_ZERO = ("relu", "relu6")
"""Activations that are constant below zero. A channel that is never positive gets no gradient from them."""

_aten: Any = torch.ops.aten
_ADDITIONS = (_aten.add, _aten.add_)
_ACTIVATIONS: dict[Any, str] = {
    getattr(_aten, operator): name
    for name in ("relu", "silu", "gelu", "leaky_relu", "elu", "hardswish", "mish", "hardsigmoid", "sigmoid", "tanh")
    for operator in (name, name + "_")
} | {_aten._prelu_kernel: "prelu"}
_CLAMPS = (_aten.hardtanh, _aten.hardtanh_, _aten.clamp, _aten.clamp_, _aten.clamp_min, _aten.clamp_min_)

OnActivation = Callable[[str, bool, Tensor], None]
"""Called with an activation's name, whether something was added before it, and its positive outputs per channel."""


class _Tracked:
    """One output of a norm whose activation was not found yet."""

    def __init__(self, axis: int, on_activation: OnActivation) -> None:
        self.axis, self.on_activation = axis, on_activation
        self.done = False


class ActivationTracker(TorchDispatchMode):
    """Follow tensors passed to `track` to their first activation function.

    The tracker follows additions of equal shapes and operations that return their input (nn.Identity, dropout in eval
    mode). It stops at views, products and casts.

    Example:
        >>> with ActivationTracker() as tracker:
        ...     y = torch.tensor([[-2.0, 1.0]])
        ...     tracker.track(y, 1, lambda *found: print(*found))
        ...     z = torch.nn.functional.relu(y + 1)
        relu True tensor([0, 1])
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[weakref.ref[Tensor], list[tuple[_Tracked, bool]]]] = {}
        self._active = True

    def track(self, y: Tensor, axis: int, on_activation: OnActivation) -> None:
        """Call `on_activation` when the first activation of `y` runs. The channels of `y` lie along `axis`."""
        self._remember(y, [(_Tracked(axis, on_activation), False)])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore the operations in this block, such as those of the measurement itself."""
        before, self._active = self._active, False
        try:
            yield
        finally:
            self._active = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and update what is known of its result."""
        if not self._active or not self._known:
            return func(*args, **(kwargs or {}))
        known = [self._lookup(arg) for arg in args[:2] if isinstance(arg, Tensor)]
        result = func(*args, **(kwargs or {}))
        tracked = [entry for entries in known for entry in entries if not entry[0].done]
        if tracked and isinstance(result, Tensor):
            self._update(func.overloadpacket, args, result, tracked)
        return result

    def _update(self, operator: Any, args: Any, result: Tensor, tracked: list[tuple[_Tracked, bool]]) -> None:
        if operator in _ADDITIONS and all(not isinstance(a, Tensor) or a.shape == result.shape for a in args[:2]):
            self._remember(result, [(one, True) for one, _ in tracked])
        elif (name := _activation_name(operator, args)) is not None and result.shape == args[0].shape:
            for one, added in tracked:
                one.done = True
                one.on_activation(name, added, count_positive(result, axis=one.axis))
            self._known.pop(id(result), None)

    def _lookup(self, tensor: Tensor) -> list[tuple[_Tracked, bool]]:
        found = self._known.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else []

    def _remember(self, tensor: Tensor, tracked: list[tuple[_Tracked, bool]]) -> None:
        key = id(tensor)
        self._known[key] = (weakref.ref(tensor, lambda _: self._known.pop(key, None)), tracked)


def _activation_name(operator: Any, args: Any) -> str | None:
    if operator in _ACTIVATIONS:
        return _ACTIVATIONS[operator]
    if operator in _CLAMPS and len(args) > 1 and not isinstance(args[1], Tensor) and args[1] == 0:
        return "relu" if len(args) < 3 or args[2] is None else "relu6"
    return None
