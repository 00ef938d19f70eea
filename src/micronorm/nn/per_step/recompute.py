"""`mn.recompute`: compute normalized activations again in the backward pass instead of keeping them."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from micronorm.nn.backends import explain_backend, kernel_problem
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.group import GroupNorm
from micronorm.nn.per_step import recorder
from micronorm.nn.per_step.recorder import Recorder, Spared
from micronorm.ops.private_api import top_saved_tensors_hooks


def recompute(model: nn.Module, *, filter: Callable[[nn.Module, str], bool] | None = None) -> "Recomputation":
    """Keep fewer activations for the backward pass: compute normalized ones again from the normalization's input.

    A normalization saves its input x. Its output, with a residual and an activation, is an elementwise function of x.
    The layers that save this output need not keep it: the backward computes it again, by the operations of the forward
    and hence to the bit. Results do not change. Peak memory falls, and the backward takes one more elementwise pass per
    activation. In chains of residual blocks every third output is kept, so that no block is computed many times.

    Compiled code decides by itself what it keeps, so `recompute` has no effect there. Inside activation checkpointing
    and under other hooks for saved tensors, those apply instead.

    Args:
        model: a module with `mn.nn.BatchChannelNorm` layers, or with `mn.nn.GroupNorm` layers on a device where kernels
            compute them. The change applies to all its later forwards in grad mode.
        filter: filter(module, name) returns whether to recompute the output of this normalization; without it, all are.
            Select a few layers if little memory is missing: the stem of a ResNet-50 holds a twentieth of it all.

    Returns:
        A handle with `report()` and `remove()`, also usable in a `with` statement.

    Raises:
        TypeError: `model` is not a module.
        ValueError: the model has no normalization that can be recomputed, or the filter selects none.

    Example:
        >>> norm = BatchChannelNorm(8)
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> handle = recompute(model)
        >>> loss = model(torch.ones(4, 3, 32, 32)).sum()
        >>> print(handle.report())
        1 activation not kept: 0.1 MiB
        >>> loss.backward()
        >>> handle.remove()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r}; mn.recompute(model) takes the model itself")
    able = {module: name for name, module in model.named_modules() if _can_be_recomputed(module)}
    if not able:
        raise ValueError(
            f"{type(model).__name__} has no BatchChannelNorm to recompute, and no mn.nn.GroupNorm on a device with "
            "kernels; call mn.convert(model) first, or move the model to a GPU"
        )
    excluded = frozenset(module for module, name in able.items() if filter is not None and not filter(module, name))
    if len(excluded) == len(able):
        names = ", ".join(list(able.values())[:4])
        raise ValueError(f"the filter leaves none of the {len(able)} norms that could be recomputed: {names}…")
    return Recomputation(model, excluded)


def _can_be_recomputed(module: nn.Module) -> bool:
    if not isinstance(module, GroupNorm):
        return isinstance(module, BatchChannelNorm)
    if module.backend not in ("auto", "triton") or module.weight is None:
        return False  # without a parameter the layer's device is unknown
    device = module.weight.device
    by_default = explain_backend(device).backend == "triton"
    return by_default or (module.backend == "triton" and kernel_problem(device.type, device.index) is None)


class Recomputation:
    """Handle returned by `mn.recompute`.

    `report()` returns what the last forward did not keep; `remove()` turns recomputation off. A handle of a part has no
    effect while the whole model is being called under a handle of its own.
    """

    def __init__(self, model: nn.Module, excluded: frozenset[nn.Module] = frozenset()) -> None:
        self._excluded = excluded
        self._last: Spared | None = None
        self._hooks = (
            model.register_forward_pre_hook(self._enter, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
        )

    def report(self) -> Spared:
        """Return what the last forward in grad mode did not keep: `.tensors`, `.bytes`, and both as text.

        Raises:
            RuntimeError: there was no such forward.
        """
        if self._last is None:
            raise RuntimeError(
                "nothing to report: call the model in grad mode after mn.recompute. Compiled code does not count: "
                "recomputation has no effect on it"
            )
        return self._last

    def remove(self) -> None:
        """Keep all activations from the next forward on. Backward passes of earlier forwards still work."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _enter(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        current = recorder.active()
        if current is not None:
            current.calls += current.owner is self
        elif torch.is_grad_enabled():
            if _others_have_hooks():
                self._last = Spared()
            else:
                recorder.activate(Recorder(self, self._excluded))

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        current = recorder.active()
        # This hook also runs if another hook raised before `_enter`.
        if current is None or current.owner is not self:
            return
        current.calls -= 1
        if current.calls == 0:
            recorder.activate(None)
            self._last = current.spared
            current.close()


def _others_have_hooks() -> bool:
    """Return whether other saved-tensor hooks are in force: offloading, or a checkpoint around the whole model."""
    return top_saved_tensors_hooks is not None and top_saved_tensors_hooks(False) is not None
