"""Standardization of a list of weights by one launch for the forward and one for the backward.

All weights of a call must be on one device, have one dtype and dense rows; `standardize.py` checks this.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from micronorm.ops.moments import compute_dtype
from micronorm.ops.runtime import on_device, on_its_device
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
    first, out = weights[0], outs[0]
    columns, channels = _columns(weights)
    wide = compute_dtype(first.dtype)
    stats = torch.empty(3, channels, dtype=wide, device=first.device)
    kind = (first.device, first.dtype, out.dtype, wide, center, scale, float(eps))
    if len(weights) == 1:
        _start(first, _one("forward_one", channels, channels, first.numel(), *kind), out, stats)
        return stats
    with on_device(first.device):
        blocks = _blocks(weights, columns)
        addresses = tables.lasting_addresses(outs) if lasting else tables.addresses_of(outs)
        _many("forward_many", len(blocks), (channels,), *kind)(blocks, addresses, stats)
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
    columns, channels = _columns(weights)
    used = [i for i, g in enumerate(grads) if g is not None]
    result: list[Tensor | None] = [None] * len(weights)
    if not used:
        return result
    ws = [weights[i] for i in used]
    gs = [_laid_out_as(g, w) for g, w in zip((g for g in grads if g is not None), ws, strict=True)]
    dws = [torch.empty_like(w) for w in ws]
    kind = (stats.device, ws[0].dtype, gs[0].dtype, stats.dtype, center, scale)
    if len(ws) == 1:
        own = stats if len(weights) == 1 else stats[:, columns[used[0]] :]
        plan = _one("backward_one", channels, ws[0].shape[0], ws[0].numel(), *kind)
        _start(ws[0], plan, gs[0], dws[0], own)
    else:
        with on_device(stats.device):
            blocks = _blocks(ws, [columns[i] for i in used])
            addresses = tables.addresses_of([*gs, *dws])
            _many("backward_many", len(blocks), (len(ws), channels), *kind)(blocks, addresses, stats)
    for i, dw in zip(used, dws, strict=True):
        result[i] = dw
    return result


@on_its_device
def _start(first: Tensor, plan: Any, *others: Tensor) -> None:
    """Launch a plan of `_one` on its tensors."""
    plan(first, *others)


# --- the launches, which are made once and kept -----------------------------------------------------------------------

_MANY = {
    "KINDS": tables.KINDS,
    "NARROW": tables.NARROW,
    "TILE": tables.TILE,
    "SHORT": tables.SHORT,
    "SHORT_ROWS": tables.SHORT_ROWS,
    "LONG": tables.LONG,
}


@lru_cache(maxsize=4096)
def _one(kernel: str, channels: int, height: int, size: int, *kind: Any) -> Any:
    """Return the launch over one weight of `size` elements; the statistics have `channels` columns."""
    fan_in = size // height
    width = max(1 << (fan_in - 1).bit_length(), 16)
    long = width > tables.NARROW << (tables.KINDS - 1)
    width = tables.LONG if long else width
    # A single layer has few rows: smaller tiles make more programs.
    rows = 1 if long else max(tables.TILE // 2 // width, 1)
    tile = {"R": rows, "C": width, "LONG": long}
    return _launch(kernel, -(-height // rows), (channels, height, fan_in), tile, 4 if width <= 2048 else 8, *kind)


@lru_cache(maxsize=256)
def _many(kernel: str, blocks: int, sizes: tuple[int, ...], *kind: Any) -> Any:
    """Return the launch over many weights in `blocks` of rows."""
    return _launch(kernel, blocks, sizes, _MANY, 8, *kind)


def _launch(
    kernel: str,
    programs: int,
    sizes: tuple[int, ...],
    tile: dict[str, Any],
    warps: int,
    device: torch.device,
    weight: torch.dtype,
    other: torch.dtype,
    wide: torch.dtype,
    center: bool,
    scale: bool,
    eps: float = 0.0,
) -> Any:
    """Return a launch; `other` is the dtype of Ŵ or of its gradient. Imports the kernels, and Triton with them."""
    from micronorm.ops.launch import Launch
    from micronorm.ops.weight import kernels

    types = {"W": weight, "OUT": other, "G": other, "WIDE": wide}
    constants = tile | {name: kernels.DTYPES[dtype] for name, dtype in types.items()}
    constants |= {"EPS": eps, "CENTER": center, "SCALE": scale}
    return Launch(getattr(kernels, kernel), programs, sizes, constants, warps)


def _columns(weights: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where each weight's statistics begin, and the total number of output channels."""
    columns, channels = [], 0
    for w in weights:
        columns.append(channels)
        channels += w.shape[0]
    return columns, channels


def _blocks(weights: Sequence[Tensor], columns: Sequence[int]) -> Tensor:
    shapes = ((w.data_ptr(), w.shape[0], w.numel()) for w in weights)
    key = ("blocks", weights[0].device, weights[0].dtype, *shapes, *columns)
    return tables.kept(key, lambda: tables.block_records(weights, columns))


def _laid_out_as(g: Tensor, w: Tensor) -> Tensor:
    """Return `g` in the strides of `w`, at an address from which 16 bytes can be read at a time."""
    if g.data_ptr() % 16 == 0 and (g.stride() == w.stride() or (g.is_contiguous() and w.is_contiguous())):
        return g
    return torch.empty_like(w, dtype=g.dtype).copy_(g)
