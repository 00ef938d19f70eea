"""`mn.calibrate`: the exact statistics of what each norm sees, over as many batches as are given."""

import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from micronorm.nn.bcn import BatchChannelNorm
from micronorm.ops.moments import Moments, merge, moments, pool, wide_dtype
from micronorm.ops.private_api import BatchNormBase


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> int:
    """Set the running statistics of every norm that has them to the mean and variance of what it sees on `batches`.

    Counts are merged: the result is that of all the elements together, however they were cut into batches or ranks, and
    not an average of the batches' variances. The model runs in eval mode, so each layer sees what its predecessors give
    with the statistics they have now; where those change much, a second call comes closer to the fixed point. Frozen
    layers are set too.

    Args:
        model: any model with BatchChannelNorm or torch's BatchNorm layers.
        batches: what the model is called on: a tensor each, or a tuple or list whose first entry is one (a data
            loader's images and labels).
        forward: forward(model, batch), for other batches: dictionaries, detectors' lists.

    Returns:
        how many batches there were (on this rank).

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
        module: _Seen(name)
        for name, module in model.named_modules()
        if isinstance(module, BatchChannelNorm | BatchNormBase) and module.running_mean is not None
    }
    if not norms:
        raise ValueError("no layer with running statistics in the model; there is nothing to calibrate")
    training = {module: module.training for module in model.modules()}
    count = 0
    with torch.no_grad(), ExitStack() as hooks:
        for module, seen in norms.items():
            hooks.callback(module.register_forward_pre_hook(seen.look, with_kwargs=True).remove)
        try:
            model.eval()
            for batch in batches:
                (forward or _call)(model, batch)
                count += 1
        finally:
            for module, flag in training.items():
                module.training = flag
    _merge_ranks(list(norms.values()), next(iter(norms)).running_mean.device)  # type: ignore[union-attr]
    unseen = [seen.name for seen in norms.values() if seen.data is None]
    if len(unseen) == len(norms):
        raise ValueError("the batches reached no norm: there were none, or they were empty. Nothing was changed")
    if unseen:
        warnings.warn(
            f"{len(unseen)} norms saw nothing in eval mode and keep their statistics: {', '.join(unseen[:4])}",
            stacklevel=2,
        )
    found = [(module, seen) for module, seen in norms.items() if seen.data is not None]
    for module, seen in found:  # all of them before the first is written
        seen.check(module)
    for module, seen in found:
        seen.write(module)
    return count


def _call(model: nn.Module, batch: Any) -> Any:
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


class _Seen:
    """The merged moments of what one layer was given."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.data: Moments | None = None

    def look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook: what the layer is about to be given."""
        x: Tensor = (args[0] if args else next(iter(kwargs.values()))).detach()
        if x.numel() == 0:
            return
        elements = x.numel() // x.shape[1]
        self.add(pool(moments(x), dim=0), elements)

    def add(self, new: Moments, count: int) -> None:
        """Take up `count` elements of each channel, given by their moments."""
        total = self.count + count
        self.data = new if self.data is None else merge(self.data, new, share=count / total)
        self.count = total

    def result(self, module: Any) -> Moments:
        """The statistics as the layer keeps them: BatchNorm the unbiased variance, BCN the biased one."""
        assert self.data is not None
        unbiased = not isinstance(module, BatchChannelNorm) and self.count > 1
        var = self.data.var * (self.count / (self.count - 1) if unbiased else 1)
        return Moments(self.data.mean.to(module.running_mean.dtype), var.to(module.running_var.dtype))

    def check(self, module: Any) -> None:
        """Refuse statistics that the layer's buffers cannot hold."""
        if not all(bool(torch.isfinite(m).all()) for m in self.result(module)):
            raise ValueError(f"what {self.name!r} saw has no finite statistics in its dtype. Nothing was changed")

    def write(self, module: Any) -> None:
        """Into the layer's running statistics; what a window has gathered around the old ones is dropped."""
        mean, var = self.result(module)
        module.running_mean.copy_(mean)
        module.running_var.copy_(var)
        if isinstance(module, BatchChannelNorm):
            module._window.clear()


def _merge_ranks(layers: list[_Seen], device: torch.device) -> None:
    """Every rank's moments merged, in the order of ranks, so that all write the same."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    channels = [0 if seen.data is None else seen.data.mean.numel() for seen in layers]
    sizes = torch.tensor(channels, device=device)
    dist.all_reduce(sizes, dist.ReduceOp.MAX)
    mine = []
    for seen, size in zip(layers, sizes.tolist(), strict=True):
        zero = torch.zeros(size, dtype=wide_dtype(device), device=device)
        mean, var = (zero, zero) if seen.data is None else seen.data
        mine.append(torch.cat([zero.new_tensor([float(seen.count)]), mean, var]))
    flat = torch.cat(mine)
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    for seen in layers:
        seen.data, seen.count = None, 0
    for row in gathered:
        for seen, part in zip(layers, row.split([1 + 2 * size for size in sizes.tolist()]), strict=True):
            count, mean, var = int(part[0]), *part[1:].chunk(2)
            if count:
                seen.add(Moments(mean, var), count)
