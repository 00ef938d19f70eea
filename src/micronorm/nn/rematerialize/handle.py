"""`mn.recompute`: a model whose normalized activations are computed again in the backward instead of kept for it."""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from micronorm.nn.backends import explain_backend, kernel_problem
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.group import GroupNorm
from micronorm.nn.rematerialize import collector
from micronorm.nn.rematerialize.collector import Collector, Spared
from micronorm.nn.rematerialize.formula import unpack
from micronorm.ops.private_api import top_saved_tensors_hooks


def recompute(model: nn.Module, *, filter: Callable[[nn.Module, str], bool] | None = None) -> "Recomputation":
    """Keep less for the backward: what follows a normalization is computed again there, from the normalization's input.

    A normalization saves its input x, and its output is an elementwise function of that. So the output, with a residual
    and an activation behind it, need not be kept for the layers that take it: it is computed again when their backward
    asks for it, by the operations of the forward and hence to the bit. Results do not change; the peak of memory does,
    and a backward pass takes one more elementwise pass per activation. In chains of residual blocks every third output
    is kept, so that no block is computed again for the sake of another.

    Compiled code decides itself what it keeps: there this has no effect. So has it inside activation checkpointing
    and under other hooks for saved tensors, where those apply first.

    Args:
        model: any module with `mn.nn.BatchChannelNorm` in it, or with `mn.nn.GroupNorm` on a device where that is
            computed by kernels. From now on its forwards in grad mode are so treated.
        filter: filter(module, name) says of which normalizations; all of them without it. Time is saved where little
            memory is missing: the stem alone holds a twentieth of a ResNet-50's activations.

    Returns:
        A handle with `report()` and `remove()`, also usable in a `with` statement.

    Raises:
        TypeError: `model` is no module.
        ValueError: the model has no normalization of which this could be done, or the filter leaves none.

    Example:
        >>> norm = BatchChannelNorm(8)
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> handle = recompute(model)
        >>> loss = model(torch.ones(4, 3, 32, 32)).sum()
        >>> print(handle.report())
        1 activation not kept: 112 KiB
        >>> loss.backward()
        >>> handle.remove()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r}; mn.recompute(model) takes the model itself")
    able = {module: name for name, module in model.named_modules() if _is_recomputed(module)}
    if not able:
        raise ValueError(
            f"{type(model).__name__} has no BatchChannelNorm, whose outputs are what can be computed again, and no "
            "mn.nn.GroupNorm on a device with kernels; convert the model first, mn.convert(model), or move it there"
        )
    left_out = frozenset(module for module, name in able.items() if filter is not None and not filter(module, name))
    if len(left_out) == len(able):
        names = ", ".join(list(able.values())[:4])
        raise ValueError(f"the filter leaves none of the {len(able)} norms that could be recomputed: {names}…")
    return Recomputation(model, left_out)


def _is_recomputed(module: nn.Module) -> bool:
    if not isinstance(module, GroupNorm):
        return isinstance(module, BatchChannelNorm)
    if module.backend not in ("auto", "triton") or module.weight is None:
        return False  # without a parameter nothing says where it will compute
    device = module.weight.device
    taken = explain_backend(device).backend == "triton"
    return taken or (module.backend == "triton" and kernel_problem(device.type, device.index) is None)


class Recomputation:
    """What `mn.recompute` returns: says what the last forward did not keep, and ends the matter."""

    def __init__(self, model: nn.Module, left_out: frozenset[nn.Module] = frozenset()) -> None:
        self._left_out = left_out
        self._last: Spared | None = None
        self._hooks = (
            model.register_forward_pre_hook(self._enter, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
        )

    def report(self) -> Spared:
        """What the last forward in grad mode did not keep for its backward: `.tensors`, `.bytes`, and both as text.

        Raises:
            RuntimeError: there was none yet.
        """
        if self._last is None:
            raise RuntimeError(
                "nothing to report: since mn.recompute the model has not been called in grad mode, or by compiled code "
                "only, which decides itself what it keeps"
            )
        return self._last

    def remove(self) -> None:
        """Keep everything again, from the next forward on; backward passes still to come are not concerned."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _enter(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        begun = None
        if collector.active() is None and torch.is_grad_enabled() and not _others_have_hooks():
            begun = _Forward(self._left_out)
        current = collector.active()
        before = Spared() if current is None else current.spared.copy()
        _calls().append(_Call(self, begun, current, before, torch.is_grad_enabled()))

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        # Called without `_enter` where another hook raised before it.
        if torch.compiler.is_compiling() or not _calls() or _calls()[-1].handle is not self:
            return
        call = _calls().pop()
        if call.recorded:
            self._last = Spared() if call.collector is None else call.collector.spared - call.before
        if call.begun is not None:
            call.begun.end()


class _Forward:
    """The hooks in force, from here to `end`."""

    def __init__(self, left_out: frozenset[nn.Module]) -> None:
        self.collector = Collector(left_out)
        pack: Callable[..., Any] = self.collector.pack
        if top_saved_tensors_hooks is None and "torch._dynamo" in sys.modules:
            pack = torch.compiler.disable(pack)  # type: ignore[assignment] # there, a compiled part of the model would compile the hook
        self.hooks = saved_tensors_hooks(pack, unpack)
        self.hooks.__enter__()
        collector.activate(self.collector)

    def end(self) -> None:
        collector.activate(None)
        self.hooks.__exit__()
        self.collector.close()


@dataclass
class _Call:
    """One call of a model with a handle. Only the outermost begins a `_Forward`; the others look on."""

    handle: Recomputation
    begun: _Forward | None
    collector: Collector | None
    before: Spared
    recorded: bool


_local = threading.local()


def _calls() -> list[_Call]:
    """The calls under way in this thread, to which autograd's hooks are confined as well."""
    if not hasattr(_local, "calls"):
        _local.calls = []
    return _local.calls


def _others_have_hooks() -> bool:
    """Whether somebody else decides already what is kept: offloading, or a checkpoint around the whole model."""
    return top_saved_tensors_hooks is not None and top_saved_tensors_hooks(False) is not None
