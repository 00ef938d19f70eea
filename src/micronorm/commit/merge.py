"""The commit: merge the windows of many layers and move their estimates, without a device sync.

Layers of one mode, device, dtype and process group form a bucket and move together. Suffix _l: one number per layer
of a bucket. Vectors without suffix run over the channels of all its layers.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from micronorm.commit.ranks import agree, all_reduce, find_data_parallel, process_group
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.window import Window
from micronorm.ops.bcn import Sums, move_by_window, shift_sums
from micronorm.ops.moments import Moments, wide_dtype
from micronorm.ops.private_api import foreach_add_, foreach_copy_


@lru_cache(maxsize=64)
def _layer_index(channels: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the layer of each channel of a bucket."""
    return torch.tensor([i for i, c in enumerate(channels) for _ in range(c)], dtype=torch.int64, device=device)


@torch.no_grad()
def commit(windows: Sequence[Window], *, skip: Tensor | None = None) -> None:
    """Move the estimates of these layers by their windows, then empty the windows.

    The operations on the device are the same in each commit, so that a CUDA graph can contain them.

    Args:
        windows: the windows of the layers, in an order that all ranks share.
        skip: on the device; if it is not zero, nothing moves and the windows keep their sums.
    """
    find_data_parallel(windows)
    buckets: dict[tuple, list[Window]] = {}
    for window in _one_per_buffer(windows):
        layer: BatchChannelNorm = window.layer
        group = process_group(window)
        if layer.statistics == "step" or (layer.statistics == "sequential" and group is not None):
            kind = layer.statistics, layer.bias_correction
            buckets.setdefault((*kind, window.device, layer.running_mean.dtype, group), []).append(window)
    for (statistics, *_, group), bucket in buckets.items():
        if group is not None:
            agree(bucket, group)
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
    layer_index = _layer_index(channels, windows[0].device)
    old = Moments(
        torch.cat([layer.running_mean for layer in layers]), torch.cat([layer.running_var for layer in layers])
    )
    count_l, first, second = (torch.cat(parts) for parts in zip(*(window.split for window in windows), strict=True))
    # The estimates may have changed in mid-window, and the references may differ between ranks.
    references = [window.reference for window in windows]
    _, first, second = shift_sums(Sums(count_l[layer_index], first, second), torch.cat(references) - old.mean)
    skip = torch.zeros_like(count_l[:1]) if skip is None else skip.to(count_l).reshape(1)
    if group is not None:  # merged over the ranks: if any of them skips this step, nothing moves on any rank
        parts = count_l, first, second, skip
        count_l, first, second, skip = all_reduce(torch.cat(parts), group, windows).split(list(map(len, parts)))
    sums = Sums(count_l[layer_index], first, second)
    rate_l = torch.stack([window.device_rate for window in windows])
    corrected = layers[0].bias_correction
    seen_l = torch.stack([layer.estimates_weight for layer in layers]).to(rate_l) if corrected else None
    if seen_l is not None:
        # The estimates are averages with these weights: r for this window, (1 − r)·seen for all before it.
        seen_l = torch.lerp(seen_l, torch.ones_like(seen_l), rate_l)
        rate_l = torch.where(seen_l > 0, rate_l / seen_l, 0.0)
    rate = rate_l[layer_index]
    new = Moments(*(e.to(old.mean.dtype) for e in move_by_window(old, sums, rate, mixture=corrected)))
    # A number that is not finite in the buffers' dtype drops the whole window of its layer.
    broken = (new.mean.isfinite() & new.var.isfinite()).logical_not()
    broken_l = torch.zeros_like(count_l).index_add_(0, layer_index, broken.to(count_l.dtype)) > 0
    taken_l = (count_l > 0) & ~broken_l & (skip == 0)
    taken = taken_l[layer_index]
    mean, var = (torch.where(taken, after, before) for before, after in zip(old, new, strict=True))
    reference = torch.where(skip == 0, mean, torch.cat(references))  # a skipped step keeps its window
    foreach_copy_([layer.running_mean for layer in layers], list(mean.split(channels)))
    foreach_copy_([layer.running_var for layer in layers], list(var.split(channels)))
    foreach_copy_(references, list(reference.split(channels)))
    lost = (broken_l & (skip == 0)).to(torch.int64).split(1)
    foreach_add_([window.lost[1:] for window in windows], list(lost))
    # Chosen, not multiplied by zero: sums that overflowed would become NaN and drop every later window.
    kept = torch.cat([window.sums for window in windows])
    kept = torch.where(skip == 0, 0.0, kept).split([len(window.sums) for window in windows])
    foreach_copy_([window.sums for window in windows], list(kept))
    if seen_l is not None:
        weights = [layer.estimates_weight for layer in layers]
        before = torch.stack(weights)
        foreach_copy_(weights, list(torch.where(taken_l, seen_l.to(before.dtype), before).unbind()))
    for i, layer in enumerate(layers):
        if layer.warm_steps:
            _advance_blend(layer, taken_l[i], None)


def _average(windows: Sequence[Window], group: Any, skip: Tensor | None) -> None:
    """Average the estimates of "sequential" layers over the ranks, each of which has scanned its own samples."""
    layers: list[BatchChannelNorm] = [window.layer for window in windows]
    buffers = [buffer for layer in layers for buffer in (layer.running_mean, layer.running_var)]
    flat = torch.cat(buffers).to(wide_dtype(windows[0].device))
    mean = all_reduce(flat, group, windows) / dist.get_world_size(group)
    foreach_copy_(
        buffers, [m.to(b.dtype) for m, b in zip(mean.split([b.numel() for b in buffers]), buffers, strict=True)]
    )


def _advance_others(windows: Sequence[Window], skip: Tensor | None) -> None:
    """Advance the blends of layers in other modes than "step", on all ranks if any of them has run the layer."""
    buckets: dict[tuple, list[Window]] = {}
    for window in windows:
        group = process_group(window)
        if group is not None:
            buckets.setdefault((window.device, group), []).append(window)
        elif window.forwards:
            _advance_blend(window.layer, torch.ones((), dtype=torch.bool, device=window.device), skip)
    for (device, group), bucket in buckets.items():
        agree(bucket, group)
        ran = torch.tensor([window.forwards for window in bucket], dtype=wide_dtype(device), device=device)
        skipped = torch.zeros_like(ran[:1]) if skip is None else skip.to(ran).reshape(1)
        *taken, stays = all_reduce(torch.cat([ran, skipped]), group, bucket) > 0
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
