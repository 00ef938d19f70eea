"""What becomes of a norm's output: which activation it meets, directly or after an addition.

By watching operations, not modules: `F.relu(norm(x) + shortcut)` has no module to hook.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from micronorm.diagnostics.channels import positives
from micronorm.ops.private_api import TorchDispatchMode

CUTTING = ("relu", "relu6")
"""Activations that are constant below zero, where a channel that is never positive gets no gradient."""

_aten: Any = torch.ops.aten
_ADDITIONS = (_aten.add, _aten.add_)
_ACTIVATIONS: dict[Any, str] = {
    getattr(_aten, operator): name
    for name in ("relu", "silu", "gelu", "leaky_relu", "elu", "hardswish", "mish", "hardsigmoid", "sigmoid", "tanh")
    for operator in (name, name + "_")
    if hasattr(_aten, operator)
}
_ACTIVATIONS |= {_aten._prelu_kernel: "prelu"}
_LIMITS = (_aten.hardtanh, _aten.hardtanh_, _aten.clamp, _aten.clamp_, _aten.clamp_min, _aten.clamp_min_)

Report = Callable[[str, bool, Tensor], None]
"""Called with an activation's name, whether something was added before it, and the positives of its output (C)."""


class _Call:
    """One output of one norm on its way to an activation."""

    def __init__(self, axis: int, report: Report) -> None:
        self.axis, self.report = axis, report
        self.done = False


class Followers(TorchDispatchMode):
    """Within this mode every operation is seen; outputs handed to `follow` are followed to their first activation.

    Through additions of the output's shape, in place or not, and through what returns its input (nn.Identity, dropout
    in eval mode). A view, a product or a cast ends the trail.

    Example:
        >>> with Followers() as followers:
        ...     y = torch.tensor([[-2.0, 1.0]])
        ...     followers.follow(y, 1, lambda *seen: print(*seen))
        ...     z = torch.nn.functional.relu(y + 1)
        relu True tensor([0, 1])
    """

    def __init__(self) -> None:
        super().__init__()
        self._trails: dict[int, tuple[weakref.ref[Tensor], list[tuple[_Call, bool]]]] = {}
        self._looking = True

    def follow(self, y: Tensor, axis: int, report: Report) -> None:
        """Watch for the activation of `y`, whose channels lie along `axis`; report it at most once."""
        self._leave_trail(y, [(_Call(axis, report), False)])

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Within this block operations pass unseen: those of the measurement itself."""
        before, self._looking = self._looking, False
        try:
            yield
        finally:
            self._looking = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it was."""
        if not self._looking or not self._trails:
            return func(*args, **(kwargs or {}))
        trails = [self._trail(arg) for arg in args[:2] if isinstance(arg, Tensor)]
        result = func(*args, **(kwargs or {}))
        calls = [entry for trail in trails for entry in trail if not entry[0].done]
        if calls and isinstance(result, Tensor):
            self._see(func, args, result, calls)
        return result

    def _see(self, func: Any, args: Any, result: Tensor, calls: list[tuple[_Call, bool]]) -> None:
        operator = func.overloadpacket
        same_shape = result.shape == args[0].shape
        if operator in _ADDITIONS and all(not isinstance(a, Tensor) or a.shape == result.shape for a in args[:2]):
            self._leave_trail(result, [(call, True) for call, _ in calls])
        elif (kind := _kind(operator, args)) is not None and same_shape:
            for call, added in calls:
                call.done = True
                call.report(kind, added, positives(result, axis=call.axis))
            self._trails.pop(id(result), None)

    def _trail(self, tensor: Tensor) -> list[tuple[_Call, bool]]:
        found = self._trails.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else []

    def _leave_trail(self, tensor: Tensor, calls: list[tuple[_Call, bool]]) -> None:
        key = id(tensor)
        self._trails[key] = (weakref.ref(tensor, lambda _: self._trails.pop(key, None)), calls)


def _kind(operator: Any, args: Any) -> str | None:
    if operator in _ACTIVATIONS:
        return _ACTIVATIONS[operator]
    if operator in _LIMITS and len(args) > 1 and not isinstance(args[1], Tensor) and args[1] == 0:
        return "relu" if len(args) < 3 or args[2] is None else "relu6"
    return None
