"""`mn.calibrate`: set running statistics to the exact moments of each norm's input over some batches."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from micronorm.convert.surgery import eval_mode
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.ops.moments import Moments, merge, moments, pool, wide_dtype
from micronorm.ops.private_api import BatchNormBase

Forward = Callable[[nn.Module, Any], Any]


def calibrate(model: nn.Module, batches: Iterable[Any], *, forward: Forward | None = None) -> int:
    """Set the running statistics of every norm to the mean and variance of its input on `batches`.

    The norms are set in the order of the data flow: each norm's input is computed with the new statistics of all norms
    before it. The result is that of all elements together, however they are divided into batches or ranks. The model
    runs in eval mode. Frozen layers are set too.

    Do not calibrate a network that was trained with `statistics="step"` or `"sequential"` and works: in eval mode it
    computes what it learned to compute in training, also if its estimates differ from the moments of the data.
    Calibrate after the weights changed without training: averaged weights, a conversion, images of another kind.

    A single batch costs one forward. Several batches cost one pass for each norm, which ends at that norm: about L/2
    forwards of every batch for L norms. Some hundred images are enough. A loader is read again in every pass and must
    give the same images each time; the batches of an iterator are kept in memory.

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
    check_batches(batches)
    norms = [
        _Norm(name, module)
        for name, module in model.named_modules()
        if isinstance(module, BatchChannelNorm | BatchNormBase) and module.running_mean is not None
    ]
    if not norms:
        raise ValueError("no layer with running statistics in the model; there is nothing to calibrate")
    batches = list(batches) if isinstance(batches, Iterator) else batches
    with torch.no_grad(), eval_mode(model), _undone_on_error(norms):
        count = _set_in_order(norms, partial(_run, model, batches, forward or call_model), batches)
    for norm in norms:
        if isinstance(norm.module, BatchChannelNorm) and norm.calls:
            norm.module._window.clear()  # it was gathered around the old statistics
            norm.module.update_estimates_weight()
    return count


def calibration_callback(batches: int = 16, *, forward: Forward | None = None) -> Any:
    """Return a Lightning callback that calls `calibrate` after training, when callbacks have averaged the weights.

    Lightning's StochasticWeightAveraging sets new statistics for torch's BatchNorm layers only. Give this callback to
    the trainer beside it. The checkpoints of ModelCheckpoint are older; use `trainer.save_checkpoint` after the fit.

    Args:
        batches: the number of batches to take from the training loader. They are kept in memory.
        forward: as in `calibrate`, with the LightningModule as the model. By default its own forward gets the batch, or
            the first entry of a tuple or list.

    Example:
        `Trainer(callbacks=[StochasticWeightAveraging(1e-2), mn.convert.calibration_callback()])`
    """
    if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
        raise ValueError(f"batches must be a number of batches, at least 1, got {batches!r}")
    from lightning.pytorch import Callback  # slow to import, and only needed here

    class Calibration(Callback):
        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            def moved() -> Iterator[Any]:
                for batch in islice(trainer.train_dataloader, batches):
                    yield trainer.strategy.batch_to_device(batch, pl_module.device)

            calibrate(pl_module, moved(), forward=forward)

    return Calibration()


def check_batches(batches: Iterable[Any]) -> None:
    """Raise TypeError for a tensor, whose single samples would be taken for batches."""
    if isinstance(batches, Tensor):
        raise TypeError(
            f"batches must be an iterable of batches, got one tensor of {tuple(batches.shape)}; write [batch]"
        )


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch, or on the first entry of a tuple or list."""
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


class _Stop(Exception):
    """End the forward of one batch: nothing behind the present norm is needed in this pass."""


class _Norm:
    """A norm, and the merged moments of its inputs in the present pass."""

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.module = name, module
        self.calls = 0
        self.last_batch = -1
        self.repeated = False
        """Whether one forward calls the norm several times."""
        self.count = 0
        self.data: Moments | None = None

    def note_call(self, batch: int) -> None:
        """Count a call in the forward of this batch."""
        self.repeated |= self.last_batch == batch
        self.last_batch = batch
        self.calls += 1

    def add(self, new: Moments, count: int) -> None:
        """Add `count` elements per channel, given by their moments."""
        total = self.count + count
        self.data = new if self.data is None else merge(self.data, new, share=count / total)
        self.count = total

    def add_input(self, x: Tensor) -> None:
        """Add the input of one call."""
        self.add(pool(moments(x), dim=0), x.numel() // x.shape[1])

    def write(self) -> None:
        """Set the layer's statistics, with the unbiased variance for BatchNorm and the biased one for BCN.

        Raises:
            ValueError: they are not finite in the layer's dtype.
        """
        assert self.data is not None
        unbiased = not isinstance(self.module, BatchChannelNorm) and self.count > 1
        var = self.data.var * (self.count / (self.count - 1) if unbiased else 1)
        for buffer, new in ((self.module.running_mean, self.data.mean), (self.module.running_var, var)):
            if not new.to(buffer.dtype).isfinite().all():
                raise ValueError(
                    f"the input of {self.name!r} has no finite statistics in its dtype. Nothing was changed"
                )
            buffer.copy_(new)


@contextmanager
def _undone_on_error(norms: Sequence[_Norm]) -> Iterator[None]:
    """Restore all running statistics if the block raises."""
    buffers = [buffer for norm in norms for buffer in (norm.module.running_mean, norm.module.running_var)]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    except BaseException:
        for buffer, old in zip(buffers, before, strict=True):
            buffer.copy_(old)
        raise


def _run(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Forward,
    norms: Iterable[_Norm],
    observe: Callable[[int, _Norm, Tensor], None],
) -> int:
    """Run all batches, and call observe(batch number, norm, input) before each of these norms computes."""
    number = -1

    def before(norm: _Norm, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = (args[0] if args else next(iter(kwargs.values()))).detach()
        if x.numel():
            observe(number, norm, x)

    with ExitStack() as hooks:
        for norm in norms:
            hook = norm.module.register_forward_pre_hook(partial(before, norm), with_kwargs=True)
            hooks.callback(hook.remove)
        for number, batch in enumerate(batches):  # noqa: B007 - read by `before`
            with suppress(_Stop):
                forward(model, batch)
    return number + 1


def _set_in_order(norms: Sequence[_Norm], run: Callable[..., int], batches: Iterable[Any]) -> int:
    """Find the order in which the norms run, then set one after the other. Return the number of batches."""
    order: dict[_Norm, None] = {}
    alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    # With a single batch, each norm can be set on its way.
    single = alone and isinstance(batches, Sequence) and len(batches) == 1

    def discover(batch: int, norm: _Norm, x: Tensor) -> None:
        order.setdefault(norm)
        norm.note_call(batch)
        if single and not norm.repeated:
            norm.add_input(x)
            norm.write()

    def gather(batch: int, norm: _Norm, x: Tensor) -> None:
        norm.add_input(x)
        if not norm.repeated:
            raise _Stop

    count = run(norms, discover)
    found = list(order) if alone else _order_of_ranks(norms, order)
    if not found:
        raise ValueError("the batches reached no norm: give at least one batch with samples. Nothing was changed")
    unused = [norm.name for norm in norms if norm not in found]
    if unused:
        warnings.warn(
            f"{len(unused)} norms had no input in eval mode and keep their statistics: {', '.join(unused[:4])}",
            stacklevel=4,
        )
    if single and not any(norm.repeated for norm in found):
        return count
    for norm in found:
        norm.count, norm.data = 0, None
        if norm.calls:
            run([norm], gather)
        if not alone:
            _merge_ranks(norm)
        norm.write()
    return count


def _order_of_ranks(norms: Sequence[_Norm], order: Iterable[_Norm]) -> list[_Norm]:
    """Return the norms that any rank has reached, in an order that all ranks share."""
    mine = [norms.index(norm) for norm in order]
    lists: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lists, mine)
    return [norms[i] for i in dict.fromkeys(i for indices in lists for i in indices)]


def _merge_ranks(norm: _Norm) -> None:
    """Merge the moments of all ranks, in the order of ranks, so that all ranks write the same statistics."""
    like = norm.module.running_mean
    zero = torch.zeros(like.numel(), dtype=wide_dtype(like.device), device=like.device)
    mean, var = (zero, zero) if norm.data is None else norm.data
    mine = torch.cat([zero.new_tensor([float(norm.count)]), mean.to(zero), var.to(zero)])
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    norm.count, norm.data = 0, None
    for row in gathered:
        count, (mean, var) = int(row[0]), row[1:].chunk(2)
        if count:
            norm.add(Moments(mean, var), count)
