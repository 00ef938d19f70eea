"""`mn.calibrate`: set running statistics to the exact moments of each norm's input over some batches."""

import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from micronorm.convert.surgery import eval_mode
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.ops.moments import Moments, merge, moments, pool, wide_dtype
from micronorm.ops.private_api import BatchNormBase


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> int:
    """Set the running statistics of every norm to the mean and variance of its input on `batches`.

    The result is that of all elements together, however they are divided into batches or ranks. The model runs in eval
    mode, so that the input of each layer depends on the present statistics of the layers before it. If those change
    much, call `calibrate` again. Frozen layers are set too.

    Args:
        model: any model with BatchChannelNorm or torch's BatchNorm layers.
        batches: the inputs: tensors, or tuples or lists whose first entry is the input (images and labels of a loader).
        forward: forward(model, batch) calls the model on other kinds of batches.

    Returns:
        The number of batches on this rank.

    Raises:
        TypeError: if `model` is not a module, or `batches` is a tensor.
        ValueError: if the model has no running statistics, if the batches reach no norm, or if the statistics are not
            finite. The model is not changed then.

    Example:
        >>> norm = BatchChannelNorm(4, 2)
        >>> calibrate(norm, [torch.zeros(1, 4, 2, 2), torch.ones(3, 4, 2, 2)])
        2
        >>> norm.running_mean, norm.running_var
        (tensor([0.7500, 0.7500, 0.7500, 0.7500]), tensor([0.1875, 0.1875, 0.1875, 0.1875]))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"calibrate(model, batches): the model comes first, got {type(model).__name__}")
    if isinstance(batches, Tensor):
        raise TypeError(
            f"batches must be an iterable of batches, got one tensor of {tuple(batches.shape)}; write [batch]"
        )
    norms = {
        module: _InputMoments(name)
        for name, module in model.named_modules()
        if isinstance(module, BatchChannelNorm | BatchNormBase) and module.running_mean is not None
    }
    if not norms:
        raise ValueError("no layer with running statistics in the model; there is nothing to calibrate")
    count = 0
    with torch.no_grad(), eval_mode(model), ExitStack() as hooks:
        for module, inputs in norms.items():
            hooks.callback(module.register_forward_pre_hook(inputs.observe, with_kwargs=True).remove)
        for batch in batches:
            (forward or _call)(model, batch)
            count += 1
    _merge_ranks(list(norms.values()), next(iter(norms)).running_mean.device)  # type: ignore[union-attr]
    unused = [inputs.name for inputs in norms.values() if inputs.data is None]
    if len(unused) == len(norms):
        raise ValueError("the batches reached no norm: there were none, or they were empty. Nothing was changed")
    if unused:
        warnings.warn(
            f"{len(unused)} norms had no input in eval mode and keep their statistics: {', '.join(unused[:4])}",
            stacklevel=2,
        )
    # All statistics are checked before the first is written.
    found = {module: inputs.result(module) for module, inputs in norms.items() if inputs.data is not None}
    for module, (mean, var) in found.items():
        layer: Any = module
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(var)
        if isinstance(module, BatchChannelNorm):
            module._window.clear()  # it was gathered around the old statistics
    return count


def _call(model: nn.Module, batch: Any) -> Any:
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


class _InputMoments:
    """The merged moments of one layer's input."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.data: Moments | None = None

    def observe(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the input of one call: a forward pre-hook of the layer."""
        x: Tensor = (args[0] if args else next(iter(kwargs.values()))).detach()
        if x.numel() == 0:
            return
        elements = x.numel() // x.shape[1]
        self.add(pool(moments(x), dim=0), elements)

    def add(self, new: Moments, count: int) -> None:
        """Add `count` elements per channel, given by their moments."""
        total = self.count + count
        self.data = new if self.data is None else merge(self.data, new, share=count / total)
        self.count = total

    def result(self, module: Any) -> Moments:
        """Return the statistics as the layer stores them: the unbiased variance for BatchNorm, the biased for BCN.

        Raises:
            ValueError: they are not finite in the layer's dtype.
        """
        assert self.data is not None
        unbiased = not isinstance(module, BatchChannelNorm) and self.count > 1
        var = self.data.var * (self.count / (self.count - 1) if unbiased else 1)
        found = Moments(self.data.mean.to(module.running_mean.dtype), var.to(module.running_var.dtype))
        if not all(bool(torch.isfinite(m).all()) for m in found):
            raise ValueError(f"the input of {self.name!r} has no finite statistics in its dtype. Nothing was changed")
        return found


def _merge_ranks(layers: list[_InputMoments], device: torch.device) -> None:
    """Merge the moments of all ranks, in the order of ranks, so that all ranks write the same statistics."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    channels = [0 if inputs.data is None else inputs.data.mean.numel() for inputs in layers]
    sizes = torch.tensor(channels, device=device)
    dist.all_reduce(sizes, dist.ReduceOp.MAX)
    mine = []
    for inputs, size in zip(layers, sizes.tolist(), strict=True):
        zero = torch.zeros(size, dtype=wide_dtype(device), device=device)
        mean, var = (zero, zero) if inputs.data is None else inputs.data
        mine.append(torch.cat([zero.new_tensor([float(inputs.count)]), mean, var]))
    flat = torch.cat(mine)
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    for inputs in layers:
        inputs.data, inputs.count = None, 0
    for row in gathered:
        for inputs, part in zip(layers, row.split([1 + 2 * size for size in sizes.tolist()]), strict=True):
            count, mean, var = int(part[0]), *part[1:].chunk(2)
            if count:
                inputs.add(Moments(mean, var), count)
