"""Standardization of a list of weights by one launch for the forward and one for the backward.

All weights of a call must be on one device, have one dtype and dense rows; `standardize.py` checks this.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from micronorm.ops.moments import compute_dtype
from micronorm.ops.runtime import on_device
from micronorm.ops.weight import tables


def outputs(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return tensors for `forward` to write to."""
    return [torch.empty_like(w, dtype=dtype) for w in weights]


def forward(
    weights: Sequence[Tensor],
    outs: Sequence[Tensor],
    *,
    center: bool,
    scale: bool,
    eps: float,
    lasting: bool = False,
) -> Tensor:
    """Write Ŵ of each weight to a given tensor.

    Args:
        weights: O×…, of one dtype.
        outs: the tensors to write to, with the weights' strides; all of one floating dtype.
        center: subtract the mean.
        scale: divide by the standard deviation.
        eps: added inside the root.
        lasting: `outs` are the same tensors in every call.

    Returns:
        The statistics that `backward` needs: 3×ΣO, the rows of `packed.RowStat`.
    """
    kernels = _kernels()
    columns, channels = _columns(weights)
    wide = compute_dtype(weights[0].dtype)
    stats = torch.empty(3, channels, dtype=wide, device=weights[0].device)
    options = {"EPS": float(eps), "CENTER": center, "SCALE": scale, "WIDE": kernels.DTYPES[wide]}
    with on_device(weights[0].device):
        if len(weights) == 1:
            grid, shape, tile = _one(weights[0], channels)
            kernels.forward_one[grid](weights[0], outs[0], stats, *shape, **options, **tile)
            return stats
        blocks = _blocks(weights, columns)
        addresses = tables.lasting_addresses(outs) if lasting else tables.addresses_of(outs)
        types = {"W": kernels.DTYPES[weights[0].dtype], "OUT": kernels.DTYPES[outs[0].dtype]}
        kernels.forward_many[(len(blocks),)](blocks, addresses, stats, channels, **options, **types, **_MANY)
    return stats


def backward(
    grads: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    stats: Tensor,
    *,
    center: bool,
    scale: bool,
) -> list[Tensor | None]:
    """Return the gradient of each weight, in its dtype and strides, or None if its output has no gradient."""
    kernels = _kernels()
    columns, channels = _columns(weights)
    used = [i for i, g in enumerate(grads) if g is not None]
    result: list[Tensor | None] = [None] * len(weights)
    if not used:
        return result
    ws = [weights[i] for i in used]
    gs = [_laid_out_as(g, w) for g, w in zip((g for g in grads if g is not None), ws, strict=True)]
    dws = [torch.empty_like(w) for w in ws]
    options = {"CENTER": center, "SCALE": scale, "WIDE": kernels.DTYPES[stats.dtype]}
    with on_device(stats.device):
        if len(ws) == 1:
            grid, shape, tile = _one(ws[0], channels)
            column = stats[:, columns[used[0]] :]
            kernels.backward_one[grid](ws[0], gs[0], dws[0], column, *shape, **options, **tile)
        else:
            blocks = _blocks(ws, [columns[i] for i in used])
            addresses = tables.addresses_of([*gs, *dws])
            types = {"W": kernels.DTYPES[ws[0].dtype], "G": kernels.DTYPES[gs[0].dtype]}
            kernels.backward_many[(len(blocks),)](
                blocks, addresses, len(ws), stats, channels, **options, **types, **_MANY
            )
    for i, dw in zip(used, dws, strict=True):
        result[i] = dw
    return result


def _kernels() -> Any:
    """Import the kernels, and Triton with them, on first use."""
    from micronorm.ops.weight import kernels

    return kernels


_MANY = {
    "KINDS": tables.KINDS,
    "NARROW": tables.NARROW,
    "TILE": tables.TILE,
    "SHORT": tables.SHORT,
    "SHORT_ROWS": tables.SHORT_ROWS,
    "LONG": tables.LONG,
    "num_warps": 8,
}


def _columns(weights: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where each weight's statistics begin, and the total number of output channels."""
    columns, channels = [], 0
    for w in weights:
        columns.append(channels)
        channels += w.shape[0]
    return columns, channels


def _one(w: Tensor, channels: int) -> tuple[tuple[int], tuple[int, int, int], dict[str, int | bool]]:
    """Return grid, sizes and tile for a launch over one weight; the statistics have `channels` columns."""
    height = w.shape[0]
    fan_in = w.numel() // height
    width = max(1 << (fan_in - 1).bit_length(), 16)
    long = width > tables.NARROW << (tables.KINDS - 1)
    width = tables.LONG if long else width
    # A single layer has few rows: smaller tiles make more programs.
    rows = 1 if long else max(tables.TILE // 2 // width, 1)
    tile = {"R": rows, "C": width, "LONG": long, "num_warps": 4 if width <= 2048 else 8}
    return (-(-height // rows),), (channels, height, fan_in), tile


def _blocks(weights: Sequence[Tensor], columns: Sequence[int]) -> Tensor:
    shapes = ((w.data_ptr(), w.shape[0], w.numel()) for w in weights)
    key = ("blocks", weights[0].device, weights[0].dtype, *shapes, *columns)
    return tables.kept(key, lambda: tables.block_records(weights, columns))


def _laid_out_as(g: Tensor, w: Tensor) -> Tensor:
    """Return `g` in the strides of `w`, at an address from which 16 bytes can be read at a time."""
    if g.data_ptr() % 16 == 0 and (g.stride() == w.stride() or (g.is_contiguous() and w.is_contiguous())):
        return g
    return torch.empty_like(w, dtype=g.dtype).copy_(g)
