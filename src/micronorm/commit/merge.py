"""The commit: merge the windows of many layers across ranks and move their estimates, without a device sync.

Layers of one mode, device, dtype and process group form a bucket and move together. Suffix _l: one number per layer
of a bucket. Vectors without suffix run over the channels of all its layers.
"""

import contextlib
import math
import warnings
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from micronorm.commit.survey import Survey
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.window import Window
from micronorm.ops.bcn import Sums, move_by_window, shift_sums
from micronorm.ops.moments import Moments, wide_dtype
from micronorm.ops.private_api import foreach_add_, foreach_copy_, foreach_mul_, foreach_norm


class _Layout(NamedTuple):
    """The indices of n, s₁ and s₂ in the joined windows of a bucket, and the layer of each channel."""

    elements: Tensor
    first: Tensor
    second: Tensor
    layer: Tensor


@lru_cache(maxsize=64)
def _layout(channels: tuple[int, ...], device: torch.device) -> _Layout:
    counts, firsts, seconds, layers = [], [], [], []
    start = 0
    for i, c in enumerate(channels):
        counts.append(start)
        firsts.extend(range(start + 1, start + 1 + c))
        seconds.extend(range(start + 1 + c, start + 1 + 2 * c))
        layers.extend([i] * c)
        start += 1 + 2 * c
    return _Layout(*(torch.tensor(t, dtype=torch.int64, device=device) for t in (counts, firsts, seconds, layers)))


@torch.no_grad()
def commit(windows: Sequence[Window], *, skip: Tensor | None = None) -> None:
    """Move the estimates of these layers by their windows, then empty the windows.

    The operations on the device are the same in each commit, so that a CUDA graph can contain them.

    Args:
        windows: the windows of the layers, in an order that all ranks share.
        skip: on the device; if it is not zero, nothing moves and the windows keep their sums.
    """
    _find_data_parallel(windows)
    buckets: dict[tuple, list[Window]] = {}
    for window in _one_per_buffer(windows):
        layer: BatchChannelNorm = window.layer
        group = _process_group(window)
        if layer.statistics == "step" or (layer.statistics == "sequential" and group is not None):
            kind = layer.statistics, layer.bias_correction
            buckets.setdefault((*kind, window.device, layer.running_mean.dtype, group), []).append(window)
    for (statistics, *_, group), bucket in buckets.items():
        if group is not None:
            _agree(bucket, group)
        (_commit_step if statistics == "step" else _average)(bucket, group, skip)
    _advance_others([w for w in windows if w.layer.warm_steps and w.layer.statistics != "step"], skip)
    for window in windows:
        window.restart()


def _one_per_buffer(windows: Sequence[Window]) -> list[Window]:
    """Return one window per buffer. Shallow copies share their buffers; the first window takes over their sums."""
    chosen: dict[int, Window] = {}
    for window in windows:
        first = chosen.setdefault(id(window.layer.running_mean), window)
        if first is not window:
            first.absorb(window)
    return list(chosen.values())


def _commit_step(windows: Sequence[Window], group: Any, skip: Tensor | None) -> None:
    layers: list[BatchChannelNorm] = [window.layer for window in windows]
    channels = tuple(window.channels for window in windows)
    device = windows[0].device
    layout = _layout(channels, device)
    flat = torch.cat([window.sums for window in windows])
    reference = torch.cat([window.reference for window in windows])
    old = Moments(
        torch.cat([layer.running_mean for layer in layers]), torch.cat([layer.running_var for layer in layers])
    )
    count_l = flat[layout.elements]
    sums = Sums(count_l[layout.layer], flat[layout.first], flat[layout.second])
    # From here on around the estimates: they may have changed in mid-window, and ranks may have other references.
    sums = shift_sums(sums, reference - old.mean)
    skip = torch.zeros(1, dtype=flat.dtype, device=device) if skip is None else skip.to(flat).reshape(1)
    if group is not None:
        # The flag is summed too: if one rank skips the step, nothing moves on any rank.
        merged = _all_reduce(torch.cat([count_l, sums.first, sums.second, skip]), group, windows)
        count_l, first, second, skip = merged.split([len(windows), len(sums.first), len(sums.second), 1])
        sums = Sums(count_l[layout.layer], first, second)
    rate_l = torch.stack([window.device_rate for window in windows])
    corrected = layers[0].bias_correction
    seen_l = torch.stack([layer.estimates_weight for layer in layers]).to(rate_l) if corrected else None
    if seen_l is not None:
        # The estimates are averages with these weights: r for this window, (1 − r)·seen for all before it.
        seen_l = torch.lerp(seen_l, torch.ones_like(seen_l), rate_l)
        rate_l = torch.where(seen_l > 0, rate_l / seen_l, 0.0)
    rate = rate_l[layout.layer]
    new = Moments(*(e.to(old.mean.dtype) for e in move_by_window(old, sums, rate, mixture=corrected)))
    # A number that is not finite in the buffers' dtype drops the whole window of its layer.
    broken = (new.mean.isfinite() & new.var.isfinite()).logical_not()
    broken_l = torch.zeros_like(count_l).index_add_(0, layout.layer, broken.to(count_l.dtype)) > 0
    taken_l = (count_l > 0) & ~broken_l & (skip == 0)
    taken = taken_l[layout.layer]
    mean, var = (torch.where(taken, after, before) for before, after in zip(old, new, strict=True))
    reference = torch.where(skip == 0, mean.to(reference.dtype), reference)  # a skipped step keeps its window
    foreach_copy_([layer.running_mean for layer in layers], list(mean.split(channels)))
    foreach_copy_([layer.running_var for layer in layers], list(var.split(channels)))
    foreach_copy_([window.reference for window in windows], list(reference.split(channels)))
    lost = (broken_l & (skip == 0)).to(torch.int64).split(1)
    foreach_add_([window.lost[1:] for window in windows], list(lost))
    foreach_mul_([window.sums for window in windows], (skip != 0).to(flat.dtype).squeeze())
    for i, layer in enumerate(layers):
        if seen_l is not None:
            weight = layer.estimates_weight
            weight.copy_(torch.where(taken_l[i], seen_l[i].to(weight.dtype), weight))
        if layer.warm_steps:
            _advance_blend(layer, taken_l[i], None)


def _average(windows: Sequence[Window], group: Any, skip: Tensor | None) -> None:
    """Average the estimates of "sequential" layers over the ranks, each of which has scanned its own samples."""
    layers: list[BatchChannelNorm] = [window.layer for window in windows]
    buffers = [buffer for layer in layers for buffer in (layer.running_mean, layer.running_var)]
    flat = torch.cat(buffers).to(wide_dtype(windows[0].device))
    mean = _all_reduce(flat, group, windows) / dist.get_world_size(group)
    foreach_copy_(
        buffers, [m.to(b.dtype) for m, b in zip(mean.split([b.numel() for b in buffers]), buffers, strict=True)]
    )


def _advance_others(windows: Sequence[Window], skip: Tensor | None) -> None:
    """Advance the blends of layers in other modes than "step", on all ranks if any of them has run the layer."""
    buckets: dict[tuple, list[Window]] = {}
    for window in windows:
        group = _process_group(window)
        if group is not None:
            buckets.setdefault((window.device, group), []).append(window)
        elif window.forwards:
            _advance_blend(window.layer, torch.ones((), dtype=torch.bool, device=window.device), skip)
    for (device, group), bucket in buckets.items():
        _agree(bucket, group)
        ran = torch.tensor([window.forwards for window in bucket], dtype=wide_dtype(device), device=device)
        skipped = torch.zeros_like(ran[:1]) if skip is None else skip.to(ran).reshape(1)
        *taken, stays = _all_reduce(torch.cat([ran, skipped]), group, bucket) > 0
        for window, runs in zip(bucket, taken, strict=True):
            _advance_blend(window.layer, runs & ~stays, None)


def _advance_blend(layer: BatchChannelNorm, taken: Tensor, skip: Tensor | None) -> None:
    """Move α from k/K to (k+1)/K if this commit was taken."""
    if skip is not None:
        taken = taken & (skip.reshape(()).to(taken.device) == 0)
    steps = layer.warm_steps
    # Counted in whole steps, so that K commits end at exactly one.
    after = ((layer.blend * steps).round() + 1).clamp(max=steps) / steps
    layer.blend.copy_(torch.where(taken, after, layer.blend))


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _find_data_parallel(windows: Sequence[Window]) -> None:
    """Note the DistributedDataParallel module around each layer. Search once, and again if that module was deleted."""
    if not _distributed() or all(w.searched and (w.data_parallel is None or w.data_parallel()) for w in windows):
        return
    around = {}
    for wrapper in Survey.make().modules:
        if isinstance(wrapper, DistributedDataParallel):
            around.update((id(module), weakref.ref(wrapper)) for module in wrapper.modules())
    for window in windows:
        window.searched, window.data_parallel = True, around.get(id(window.layer))


def _process_group(window: Window) -> Any:
    """Return the group to merge over, or None if this rank is alone.

    Raises:
        RuntimeError: inside `Join`, where ranks that have no samples left do not take part in commits.
    """
    group = window.control.process_group
    if group is None or not _distributed():
        return None
    if group is ...:
        wrapper = None if window.data_parallel is None else window.data_parallel()
        group = dist.group.WORLD if wrapper is None else wrapper.process_group
        if wrapper is not None and wrapper._join_config.enable and dist.get_world_size(group) > 1:
            raise RuntimeError(
                f"{window.describe()} cannot merge its statistics inside torch.distributed.algorithms.Join: ranks that "
                "have run out of samples do not step. Leave Join and give such ranks empty batches, or call "
                "mn.attach(model, process_group=None) so that each rank keeps statistics of its own"
            )
    return group if dist.get_world_size(group) > 1 else None


def _names(windows: Sequence[Window]) -> str:
    shown = [window.describe() for window in windows[:4]]
    return ", ".join(shown) + (f" and {len(windows) - 4} more" if len(windows) > 4 else "")


@contextlib.contextmanager
def _naming(windows: Sequence[Window]) -> Iterator[None]:
    """Name the layers if a collective fails, as it does at the timeout when a rank does not take part."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"merging the statistics of {_names(windows)} across ranks failed: every rank of the group must step its "
            "optimizer as often as the others, also one that saw no samples (or pass mn.attach(process_group=...))"
        ) from error


def _all_reduce(flat: Tensor, group: Any, windows: Sequence[Window]) -> Tensor:
    with _naming(windows):
        dist.all_reduce(flat, group=group)
    return flat


def _agree(windows: Sequence[Window], group: Any) -> None:
    """Compare the ranks at the first two commits of a list of layers: the lists, and whether they train one model.

    Raises:
        RuntimeError: on every rank, if the ranks are about to merge different lists of layers.
    """
    mine = tuple((window.layer.statistics, window.channels) for window in windows)
    done = min(window.agreements.get((group, mine), 0) for window in windows)
    # Twice, because parameters are still equal after a first step at a learning rate of zero.
    if done >= 2 or (done and windows[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with _naming(windows):
        dist.all_gather_object(everyone, (mine, _fingerprint(windows)), group=group)
    if any(other != mine for other, _ in everyone):
        counts = ", ".join(f"rank {rank}: {len(other)} layers" for rank, (other, _) in enumerate(everyone))
        raise RuntimeError(
            f"ranks step with different lists of BatchChannelNorm layers ({counts}); here {_names(windows)}. Build the "
            "same model and the same optimizer groups on every rank, or give mn.attach a process_group."
        )
    prints = [numbers for _, numbers in everyone if numbers is not None]
    if len(prints) == len(everyone) and any(_differ(numbers, prints[0]) for numbers in prints):
        warnings.warn(
            f"the statistics of {_names(windows)} are merged over {len(everyone)} ranks, but the parameters of these "
            "layers differ between the ranks. If every rank trains a model of its own, call "
            "mn.attach(model, process_group=None); if groups of ranks train a model each, pass the group, or wrap the "
            "model in DistributedDataParallel, whose group is used.",
            UserWarning,
            stacklevel=2,
        )
        done = 2  # warn once
    for window in windows:
        window.agreements[group, mine] = done + 1


def _fingerprint(windows: Sequence[Window]) -> list[float] | None:
    """Return the lengths of the layers' parameters; None if they need not be equal on all ranks or are sharded."""
    if any(window.control.process_group is not ... or window.data_parallel is not None for window in windows):
        return None
    parameters = [p for window in windows for p in window.layer.parameters(recurse=False)]
    sizes = {size for window in windows for size in (window.channels, window.layer.num_groups)}
    if any(type(p) is not torch.nn.Parameter or p.numel() not in sizes for p in parameters):
        return None
    return torch.stack([norm.double() for norm in foreach_norm(parameters)]).tolist()


def _differ(numbers: list[float], others: list[float]) -> bool:
    pairs = zip(numbers, others, strict=False)
    return len(numbers) != len(others) or any(not math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) for a, b in pairs)
