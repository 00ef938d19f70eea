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
from micronorm.ops.private_api import foreach_add_, foreach_copy_, foreach_zero_


@lru_cache(maxsize=64)
def _places(channels: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the layer of each channel of a bucket, and where its n, s₁ and s₂ are in the sums of all windows."""
    layer, sums, start = [], [], 0
    for i, count in enumerate(channels):
        layer += [i] * count
        sums += [(start, start + 1 + c, start + 1 + count + c) for c in range(count)]
        start += 1 + 2 * count
    return torch.tensor(layer, device=device), torch.tensor(sums, device=device).T.contiguous()


@torch.no_grad()
def commit(windows: Sequence[Window], *, skip: Tensor | None = None) -> None:
    """Move the estimates of these layers by their windows, then empty the windows.

    The operations on the device are the same in each commit, so that a CUDA graph can contain them.

    Args:
        windows: the windows of the layers, in an order that all ranks share.
        skip: on the device; if it is not zero, nothing moves and the windows keep their sums.
    """
    find_data_parallel(windows)
    owners: dict[int, Window] = {}
    buckets: dict[tuple, list[Window]] = {}
    for window in windows:
        layer: BatchChannelNorm = window.layer
        mean, statistics = layer.running_mean, layer.statistics
        owner = owners.setdefault(id(mean), window)
        if owner is not window:  # shallow copies share their buffers; the first window takes over their sums
            owner.absorb(window)
            continue
        group = process_group(window)
        if statistics == "step" or (statistics == "sequential" and group is not None):
            key = (statistics, layer.bias_correction, window.device, mean.dtype, group)
            buckets.setdefault(key, []).append(window)
    for (statistics, *_, group), bucket in buckets.items():
        if group is not None:
            agree(bucket, group)
        (_commit_step if statistics == "step" else _average)(bucket, group, skip)
    _advance_others([w for w in windows if w.layer.warm_steps and w.layer.statistics != "step"], skip)
    for window in windows:
        window.restart()


def _commit_step(windows: Sequence[Window], group: Any, skip: Tensor | None) -> None:
    layers: list[BatchChannelNorm] = [window.layer for window in windows]
    channels = tuple(window.channels for window in windows)
    layer_index, places = _places(channels, windows[0].device)
    buffers = [layer.running_mean for layer in layers] + [layer.running_var for layer in layers]
    references, gathered = [window.reference for window in windows], [window.sums for window in windows]
    old, old_reference, old_sums = torch.cat(buffers).unflatten(0, (2, -1)), torch.cat(references), torch.cat(gathered)
    # The estimates may have changed in mid-window, and the references may differ between ranks.
    sums = shift_sums(Sums(*old_sums[places]), old_reference - old[0])
    skip = None if skip is None else skip.to(old_sums).reshape(1)
    if group is not None:  # merged over the ranks: if any of them skips this step, nothing moves on any rank
        parts = (*sums, torch.zeros_like(old_sums[:1]) if skip is None else skip)
        *merged, skip = all_reduce(torch.cat(parts), group, windows).split([len(part) for part in parts])
        sums = Sums(*merged)
    rate_l, seen_l = _rates(windows, layers)
    moved = move_by_window(Moments(*old), sums, rate_l[layer_index], mixture=seen_l is not None)
    new = torch.stack(moved).to(old.dtype)
    # A number that is not finite in the buffers' dtype drops the whole window of its layer.
    broken = new.isfinite().all(0).logical_not().to(rate_l.dtype)
    broken_l = torch.zeros_like(rate_l).index_add_(0, layer_index, broken) > 0
    taken = (sums.elements > 0) & ~broken_l[layer_index]
    if skip is not None:
        taken, broken_l = taken & (skip == 0), broken_l & (skip == 0)
    new = torch.where(taken, new, old)
    reference = new[0].to(old_reference.dtype)
    foreach_copy_(buffers, new.flatten().split(channels * 2))
    foreach_add_([window.lost_windows for window in windows], broken_l.to(torch.int64).split(1))
    if skip is None:
        foreach_zero_(gathered)
    else:  # a skipped step keeps its window
        reference = torch.where(skip == 0, reference, old_reference)
        # Chosen, not multiplied by zero: sums that overflowed would become NaN and drop every later window.
        foreach_copy_(gathered, torch.where(skip == 0, 0.0, old_sums).split([1 + 2 * c for c in channels]))
    foreach_copy_(references, reference.split(channels))
    if seen_l is not None or any(layer.warm_steps for layer in layers):
        _advance(layers, [own[0] for own in taken.split(channels)], seen_l)


def _rates(windows: Sequence[Window], layers: Sequence[BatchChannelNorm]) -> tuple[Tensor, Tensor | None]:
    """Return the rate of each layer, and with bias correction the weight of all windows in its new estimates."""
    rate_l = torch.cat([window.device_rate for window in windows])
    if not layers[0].bias_correction:
        return rate_l, None
    # The estimates are averages with these weights: r for this window, (1 − r)·seen for all before it.
    seen_l = torch.stack([layer.estimates_weight for layer in layers]).to(rate_l)
    seen_l = torch.lerp(seen_l, torch.ones_like(seen_l), rate_l)
    return torch.where(seen_l > 0, rate_l / seen_l, 0.0), seen_l


def _advance(layers: Sequence[BatchChannelNorm], taken: list[Tensor], seen_l: Tensor | None) -> None:
    """Write the weights of bias correction, if given, and move the blends, of the layers whose commit was taken."""
    if seen_l is not None:
        weights = [layer.estimates_weight for layer in layers]
        old_l = torch.stack(weights)
        foreach_copy_(weights, torch.where(torch.stack(taken), seen_l.to(old_l.dtype), old_l).unbind())
    for layer, own in zip(layers, taken, strict=True):
        if layer.warm_steps:
            _advance_blend(layer, own, None)


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
