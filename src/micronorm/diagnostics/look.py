"""One pass over data that looks at every normalization of a network, and leaves the network as it was."""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from micronorm.convert.surgery import refuse_wrappers
from micronorm.diagnostics.channels import positives
from micronorm.diagnostics.followers import Followers
from micronorm.diagnostics.norms import NormLayer, fits, read_norm
from micronorm.diagnostics.seen import NormLook, Seen
from micronorm.nn.bcn import BatchChannelNorm

__all__ = ["NormLook", "Statistics", "look"]

Statistics = Literal["estimates", "batch"]

_WRAPPERS = {
    "DistributedDataParallel": "look at model.module",
    "DataParallel": "look at model.module",
    "FullyShardedDataParallel": "look at the model before it is sharded",
    "FSDPModule": "look at the model before it is sharded",
    "OptimizedModule": "look at the model that was compiled, model._orig_mod: compiled code may call no hooks",
    "ScriptModule": "look at the model before it is scripted",
}


def look(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    statistics: Statistics = "estimates",
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> dict[str, NormLook]:
    """Run the model over batches and tell what each of its normalizations did to them, by name.

    Looked at are group, layer, instance, batch and batch-channel normalization: torch's classes and those that descend
    from them, timm's with an activation, and our own. The activation is the first that a norm's output meets, directly
    or after an addition, as a module or as a function. It cannot be seen behind a view, a product or a cast, and is
    absent where a norm stands before a convolution or an attention: there `active` is the share of positive outputs of
    the norm itself. Forwards that `mn.convert` has fused run unfused meanwhile, to the same results.

    The model runs in eval mode without gradients. It is left as found: training flags, parameters, gradients, buffers,
    windows of Batch-Channel Normalization, hooks, and the random states of torch, numpy and Python.

    Args:
        model: the model; not one in DDP, FSDP or torch.compile.
        batches: what the model is called on: a tensor each, or a tuple or list whose first entry is one (a data
            loader's images and labels).
        statistics: `"estimates"`: batch normalization uses its running statistics, as in eval mode. `"batch"`: it
            normalizes by the batch's own moments, as it does in training (and BCN of `statistics="batch"` likewise);
            dropout stays off. Use it where running statistics are fresh.
        forward: forward(model, batch), for other batches: dictionaries, detectors' lists.

    Returns:
        The looks by the modules' names, in the order of the first call. Norms that no batch reached are absent.

    Raises:
        ValueError: there is no such layer in the model, or no batch reached one.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU())
        >>> seen = look(model, [torch.randn(4, 3, 8, 8)])["1"]
        >>> seen.activation, seen.stat_diff.shape, seen.samples, seen.positions
        ('relu', torch.Size([2]), 4, 144)
    """
    refuse_wrappers(model, _WRAPPERS)
    _check_arguments(model, batches, statistics)
    # Of a module under two names the first: its calls are one layer's.
    norms = {name: norm for name, module in model.named_modules() if (norm := read_norm(module)) is not None}
    if not norms:
        raise ValueError(
            f"no group, layer, instance, batch or batch-channel normalization in this {type(model).__name__}: there is "
            "nothing to look at"
        )
    tensors = [*model.parameters(), *model.buffers()]
    seen: dict[str, Seen] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_random_states({t.device for t in tensors}))
        stack.enter_context(_untouched(model))
        model.eval()
        if statistics == "batch":
            for norm in norms.values():
                _use_batch(norm)
        stack.enter_context(torch.no_grad())
        followers = Followers()
        for name, norm in norms.items():
            stack.callback(_Watch(name, norm, followers, seen).close)
        for batch in batches:
            with followers:
                (forward or _call)(model, batch)
        looks = {name: one.look() for name, one in seen.items()}
    if not looks:
        raise ValueError("the batches reached no normalization: there were none, they were empty, or it is not used")
    return looks


def _check_arguments(model: nn.Module, batches: object, statistics: object) -> None:
    if isinstance(batches, Tensor):
        raise TypeError(
            f"batches must be an iterable of batches, got one tensor of {tuple(batches.shape)}; write [batch]"
        )
    if statistics not in ("estimates", "batch"):
        raise ValueError(f'statistics must be "estimates" or "batch", got {statistics!r}')
    compiled = [name for name, m in model.named_modules() if getattr(m, "_compiled_call_impl", None) is not None]
    if compiled:
        where = ", ".join(name or "the model" for name in compiled[:4])
        raise ValueError(f"{where}: compiled by .compile(), whose code may call no hooks; look before compiling")


def _call(model: nn.Module, batch: Any) -> Any:
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


# --- leaving no trace ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _random_states(devices: Iterable[torch.device]) -> Iterator[None]:
    python, numpy_state = random.getstate(), np.random.get_state()
    cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    with torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Training flags, buffers and windows are put back."""
    modules = list(model.modules())
    training = [module.training for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    windows = [module._window for module in modules if isinstance(module, BatchChannelNorm)]
    # The forwards get copies, and the model its own tensors again: a graph may have saved them, and would notice a
    # write even if it was undone.
    copies: dict[int, Tensor] = {}
    for module, own in zip(modules, buffers, strict=True):
        for name, buffer in own.items():
            if buffer is not None:
                module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
    for window in windows:
        window.paused += 1
    try:
        yield
    finally:
        for window in windows:
            window.paused -= 1
        for module, flag, own in zip(modules, training, buffers, strict=True):
            module.training = flag
            module._buffers.clear()
            module._buffers.update(own)


def _use_batch(norm: NormLayer) -> None:
    own_batch = norm.family == "batch-channel" and norm.module.statistics == "batch"
    if norm.family == "batch" or own_batch:
        norm.module.training = True  # frozen ones have no use for it


# --- the hooks -------------------------------------------------------------------------------------------------------


class _Watch:
    """The hooks on one norm. They hold off fusion: a norm that somebody looks at is called, and called plainly."""

    def __init__(self, name: str, norm: NormLayer, followers: Followers, table: dict[str, Seen]) -> None:
        self.name, self.norm, self.followers, self.table = name, norm, followers, table
        self.inside = 0
        self.raw = False
        module = norm.module
        self.handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, with_kwargs=True),
        ]
        # timm's norms, and ours in their place, hold what follows them; its first part is given the norm's own output.
        children = [getattr(module, child, None) for child in ("drop", "act")]
        held = next((child for child in children if isinstance(child, nn.Module)), None)
        if held is not None:
            self.handles.append(held.register_forward_pre_hook(self._between))

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self.handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inside, self.raw = 0, False
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not fits(self.norm, x):
            return
        assert isinstance(x, Tensor)
        seen = self.table.setdefault(self.name, Seen(self.norm))
        with self.followers.resting():
            seen.take(self.norm.channels_first(x.detach()))
        self.inside = 1

    def _between(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.inside and not self.raw and args and isinstance(args[0], Tensor):
            self.raw = True
            self._take_output(args[0])

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self.inside:
            return
        self.inside = 0
        if self.raw or not isinstance(output, Tensor):
            return
        kind = kwargs.get("activation") or getattr(module, "activation", None)
        residual = kwargs.get("residual")
        if not isinstance(kind, str):
            kind = None
        if kind is None and residual is None:
            self._take_output(output)
            return
        # Somebody asked for both at once: what it gave is counted, and the norm alone is computed once more.
        seen, axis = self.table[self.name], self.norm.axis
        with self.followers.resting():
            alone = output
            if residual is not None:
                alone = type(module).forward(module, args[0] if args else next(iter(kwargs.values())))
            seen.give(alone, axis)
            counts = positives(output, axis=axis)
        if kind is not None:
            seen.activate(kind, residual is not None, counts)
        else:
            self.followers.follow(output, axis, lambda name, _, found: seen.activate(name, True, found))

    def _take_output(self, y: Tensor) -> None:
        seen, axis = self.table[self.name], self.norm.axis
        with self.followers.resting():
            seen.give(y, axis)
        self.followers.follow(y, axis, seen.activate)
