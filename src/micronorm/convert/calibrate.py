"""`mn.calibrate`: set running statistics to the exact moments of each norm's input over some batches."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from micronorm.convert.surgery import eval_mode
from micronorm.nn.batch import GhostBatchNorm
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.running import RunningNorm
from micronorm.ops.moments import Moments, merge, moments, pool
from micronorm.ops.private_api import BatchNormBase, tree_map

Forward = Callable[[nn.Module, Any], Any]
Counted = tuple[int, Moments]  # elements per channel, and their moments


def calibrate(model: nn.Module, batches: Iterable[Any], *, forward: Forward | None = None) -> int:
    """Set the running statistics of every norm to the mean and variance of its input on `batches`.

    The norms are set in the order of the data flow: each norm's input is computed with the new statistics of all norms
    before it. The result does not depend on how the elements are divided into batches or ranks. The model runs in eval
    mode. Frozen layers are set too.

    Do not calibrate a network that was trained with `statistics="step"` or `"sequential"` and works. Its training used
    the estimates that it has, and others change its function. Calibrate after weights were averaged or converted, and
    for images of another kind.

    A single batch costs one forward. Several batches cost one pass for each norm, which ends at that norm: about L/2
    forwards of every batch for L norms. Some hundred images are enough. A loader is read again in every pass and must
    give the same images each time; the batches of an iterator are kept in memory.

    Args:
        model: any model with layers that have running statistics: BatchChannelNorm, torch's BatchNorm, GhostBatchNorm,
            BatchRenorm or SwitchableNorm. A layer that trains on micro-batches gets the moments of all elements, too.
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
    norms: dict[Any, str] = {
        module: name
        for name, module in model.named_modules()
        if isinstance(module, BatchChannelNorm | BatchNormBase | RunningNorm) and module.running_mean is not None
    }
    if not norms:
        raise ValueError("the model has no layer with running statistics, such as BCN or BatchNorm; convert it first")
    batches = list(batches) if isinstance(batches, Iterator) else batches
    before = [(buffer, buffer.clone()) for norm in norms for buffer in (norm.running_mean, norm.running_var)]

    def put_back() -> None:
        for buffer, old in before:
            buffer.copy_(old)

    with torch.no_grad(), eval_mode(model):
        try:
            return _set_in_order(norms, partial(_run, model, batches, forward or call_model), batches, put_back)
        except BaseException:
            put_back()
            raise


def calibration_callback(batches: int = 16, *, forward: Forward | None = None) -> Any:
    """Return a Lightning callback that calls `calibrate` after training, when callbacks have averaged the weights.

    Lightning's StochasticWeightAveraging sets new statistics for torch's BatchNorm layers only. Give this callback to
    the trainer beside it. The checkpoints of ModelCheckpoint are older; use `trainer.save_checkpoint` after the fit.

    Args:
        batches: the number of batches to take from the training loader. They are kept in memory.
        forward: as in `calibrate`, with the LightningModule as the model. By default its own forward gets the batch, or
            the first entry of a tuple or list.

    Example:
        >>> from micronorm.convert import calibration_callback
        >>> callback = calibration_callback()  # Trainer(callbacks=[StochasticWeightAveraging(1e-2), callback])
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
    try:
        return model(batch[0] if isinstance(batch, tuple | list) else batch)
    except TypeError as error:
        if isinstance(batch, Mapping):
            error.add_note(f"the batch is a dictionary with {list(batch)}; give forward=lambda model, batch: ...")
        raise


class _Stop(Exception):
    """End the forward of one batch: nothing behind the present norm is needed in this pass."""


def _run(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Forward,
    norms: Iterable[nn.Module],
    observe: Callable[[int, Any, Tensor], None],
) -> int:
    """Run all batches, and call observe(batch number, norm, input) before each of these norms computes."""
    number = -1

    def before(norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = (args[0] if args else next(iter(kwargs.values()))).detach()
        if x.numel():
            observe(number, norm, x)

    with ExitStack() as hooks:
        for norm in norms:
            hooks.callback(norm.register_forward_pre_hook(before, with_kwargs=True).remove)
        for number, batch in enumerate(batches):  # noqa: B007 - read by `before`
            with suppress(_Stop):
                forward(model, batch)
    return number + 1


def _set_in_order(
    norms: Mapping[Any, str], run: Callable[..., int], batches: Iterable[Any], put_back: Callable[[], None]
) -> int:
    """Find the order in which the norms run, then set one after the other. Return the number of batches.

    `put_back` restores the old statistics. The second input of a norm that runs twice depends on them.
    """
    calls: Counter[tuple[int, Any]] = Counter()
    # With a single batch, each norm can be set on its way.
    single = _world_size() == 1 and isinstance(batches, Sequence) and len(batches) == 1

    def discover(batch: int, norm: Any, x: Tensor) -> None:
        calls[batch, norm] += 1
        if single and calls[batch, norm] == 1:
            _write(norm, norms[norm], [_moments(x)])

    count = run(norms, discover)
    reached = list(dict.fromkeys(norm for _, norm in calls))
    repeated = {norm for (_, norm), times in calls.items() if times > 1}  # a forward calls these several times
    listed = list(norms)
    found = [listed[i] for i in dict.fromkeys(_over_ranks([listed.index(norm) for norm in reached]))]
    if not found:
        raise ValueError("the batches reached no norm: give at least one batch with samples. Nothing was changed")
    unused = [name for norm, name in norms.items() if norm not in found]
    if unused:
        warnings.warn(
            f"{len(unused)} norms had no input in eval mode and keep their statistics: {', '.join(unused[:4])}",
            stacklevel=3,
        )
    if repeated:
        put_back()  # a single batch has set norms on its way; several batches start from the old statistics
    for norm in found if repeated or not single else ():
        parts: list[Counted] = []

        def gather(batch: int, norm: Any, x: Tensor, parts: list[Counted] = parts) -> None:
            parts.append(_moments(x))
            if norm not in repeated:
                raise _Stop

        if norm in reached:
            run([norm], gather)
        _write(norm, norms[norm], _over_ranks([_merged(parts)] if parts else []))
    for norm in found:
        if isinstance(norm, BatchChannelNorm):
            norm._window.clear()  # it was gathered around the old statistics
            norm.update_estimates_weight()
    return count


def _moments(x: Tensor) -> Counted:
    return x.numel() // x.shape[1], pool(moments(x), dim=0)


def _merged(parts: Sequence[Counted]) -> Counted:
    total, data = parts[0]
    for count, new in parts[1:]:
        total += count
        data = merge(data, new, share=count / total)
    return total, data


def _write(norm: Any, name: str, parts: Sequence[Counted]) -> None:
    """Set the statistics to the merged moments, with the unbiased variance for BatchNorm, else the biased one.

    Raises:
        ValueError: they are not finite in the layer's dtype.
    """
    count, data = _merged(parts)
    unbiased = isinstance(norm, BatchNormBase | GhostBatchNorm) and count > 1
    var = data.var * (count / (count - 1) if unbiased else 1)
    for buffer, new in ((norm.running_mean, data.mean), (norm.running_var, var)):
        if not new.to(buffer.dtype).isfinite().all():
            raise ValueError(f"the input of {name!r} has no finite statistics in its dtype. Nothing was changed")
        buffer.copy_(new)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _over_ranks(mine: list[Any]) -> list[Any]:
    """Return the entries of all ranks, in the order of ranks. Tensors of several ranks come back on the CPU."""
    if _world_size() == 1:
        return mine
    lists: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lists, tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, mine))
    return [entry for entries in lists for entry in entries]
