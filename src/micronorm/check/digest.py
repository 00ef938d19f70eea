"""Tensors as few numbers that still tell whether two of them agree, sample by sample.

A tensor is kept as fixed random projections of its rows, along its first axis and (where it is not too large) its
second: linear, so that "equal", "the rows of the parts after one another" and "the sum of the parts" can all be read
from them. Two rows that differ have equal projections with probability zero; the memory is a few numbers per row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

PROJECTIONS = 6
_CHUNK = 4096
_MAX_ROWS = 4096  # per sample: beyond it the rows of a sample are taken together
_MAX_SECOND_AXIS = 2**22  # elements: sequence-first activations are smaller than this, images need no second axis


@dataclass(frozen=True, eq=False)
class Leaf:
    """One tensor: its shape, and projections by rows of axis 0 and axis 1 (None where not kept)."""

    shape: tuple[int, ...]
    first: Tensor | None
    second: Tensor | None


Tree = Leaf | list["Tree"] | dict[str, "Tree"] | None


@dataclass(frozen=True)
class Match:
    """How a tensor of the whole run and those of the parts compare.

    `status`: "agree", "differ", or "shape" where no way of putting the parts together gives the whole's shape.
    `layout`: the way that fits best, "axis 0" or "axis 1" (the parts after one another), "strided", "shared" (all the
    same) or "sum". `error` is relative to the largest projection.
    """

    status: str
    error: float = 0.0
    layout: str = ""
    path: tuple[str | int, ...] = ()
    whole: tuple[int, ...] = ()
    parts: tuple[tuple[int, ...], ...] = ()


AGREE = Match("agree")


def pack(value: Any, samples: int, depth: int = 4) -> Tree:
    """The tensors of a module's inputs or output, digested; what holds none becomes None."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return [pack(t, 1, 0) for t in value.unbind()]
        if value.layout is not torch.strided or value.device.type == "meta" or value.is_complex():
            return pack(torch.view_as_real(value), samples, 0) if value.is_complex() else None
        return _digest(value.detach(), samples)
    if depth == 0 or isinstance(value, (str, bytes, nn.Module, type)):
        return None
    if isinstance(value, (list, tuple)):
        return [pack(v, samples, depth - 1) for v in value]
    if isinstance(value, Mapping):
        return {str(k): pack(v, samples, depth - 1) for k, v in value.items()}
    # torchvision's ImageList, detectron2's Instances, dataclasses: containers of tensors by attribute.
    attributes = getattr(value, "__dict__", None)
    return {k: pack(v, samples, depth - 1) for k, v in attributes.items()} if attributes else None


@torch.no_grad()
def _digest(x: Tensor, samples: int) -> Leaf:
    shape = tuple(x.shape)
    x = x.reshape(1) if x.ndim == 0 else x
    rows = x.shape[0]
    if rows <= _MAX_ROWS * samples:
        first = _project(x.reshape(rows, -1) if x.numel() else x.new_zeros(rows, 1))
    else:
        first = _project(x.reshape(samples, -1)) if rows % samples == 0 else None
    second = None
    if x.ndim >= 2 and 0 < x.numel() <= _MAX_SECOND_AXIS and x.shape[1] <= _MAX_ROWS:
        second = _project(x.transpose(0, 1).reshape(x.shape[1], -1))
    return Leaf(shape, first, second)


@lru_cache(maxsize=8)
def _signs(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(20)
    return torch.randn(_CHUNK, PROJECTIONS, generator=generator, dtype=torch.float64).to(device)


@lru_cache(maxsize=64)
def _weights(chunks: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(21)
    return torch.randn(chunks, PROJECTIONS, generator=generator, dtype=torch.float64).to(device)


def _project(x: Tensor) -> Tensor:
    """Rows × n to rows × PROJECTIONS, by a random matrix that is a product: n may be millions."""
    x = x.to(torch.float64)
    rows, n = x.shape
    if n <= PROJECTIONS:
        return x.clone()
    signs, whole = _signs(x.device), n // _CHUNK
    if whole == 0:
        return x @ signs[:n]
    weights = _weights(whole + 1, x.device)
    y = ((x[:, : whole * _CHUNK].reshape(rows, whole, _CHUNK) @ signs) * weights[:whole]).sum(1)
    rest = x[:, whole * _CHUNK :]
    return y + (rest @ signs[: rest.shape[1]]) * weights[whole]


# --- comparison ------------------------------------------------------------------------------------------------------


def compare(whole: Tree, parts: Sequence[Tree], sizes: Sequence[int], *, tol: float, noise: Tree = None) -> Match:
    """The first tensor of `whole` that the parts (of so many samples each) do not make up; or agreement.

    `noise` is the whole of a run perturbed by rounding: what moves there may move here.
    """
    if isinstance(whole, Leaf):
        leaves = [p for p in parts if isinstance(p, Leaf)]
        if len(leaves) != len(parts):
            return AGREE
        return _compare_leaf(whole, leaves, sizes, tol, noise if isinstance(noise, Leaf) else None)
    if isinstance(whole, dict):
        noise = noise if isinstance(noise, dict) else {}
        rows = [
            (k, w, [p.get(k) if isinstance(p, dict) else None for p in parts], sizes, noise.get(k))
            for k, w in whole.items()
        ]
    elif isinstance(whole, list):
        rows = _match_lists(whole, [p if isinstance(p, list) else [] for p in parts], sizes, noise)
    else:
        return AGREE
    best = AGREE
    for path, w, ps, n, quiet in rows:
        found = compare(w, ps, n, tol=tol, noise=quiet)
        if found.status != "agree":
            return replace(found, path=(path, *found.path))
        best = max(best, found, key=lambda m: m.error)
    return best


def _match_lists(whole: list, parts: Sequence[list], sizes: Sequence[int], noise: Tree) -> list[tuple]:
    quiet = noise if isinstance(noise, list) and len(noise) == len(whole) else [None] * len(whole)
    if all(len(p) == len(whole) for p in parts):
        columns = [[p[i] for p in parts] for i in range(len(whole))]
        return [(i, w, columns[i], sizes, quiet[i]) for i, w in enumerate(whole)]
    flat = [entry for p in parts for entry in p]
    if len(flat) == len(whole):  # one entry per sample
        return [(i, w, [flat[i]], [1], quiet[i]) for i, w in enumerate(whole)]
    return []


def _compare_leaf(whole: Leaf, parts: Sequence[Leaf], sizes: Sequence[int], tol: float, noise: Leaf | None) -> Match:
    shapes = tuple(p.shape for p in parts)
    best: tuple[float, str] | None = None
    for layout in LAYOUTS:
        pair = aligned(whole, parts, sizes, layout)
        if pair is None:
            continue
        error = relative(*pair)
        if noise is not None and noise.shape == whole.shape and noise.first is not None and whole.first is not None:
            error = max(0.0, error - min(64 * relative(whole.first, noise.first), max(1e-6, tol)))
        if best is None or error < best[0]:
            best = error, layout
    if best is None:
        comparable = whole.first is not None and all(p.first is not None for p in parts)
        return Match("shape", float("inf"), "", (), whole.shape, shapes) if comparable else AGREE
    return Match("agree" if best[0] <= tol else "differ", *best, (), whole.shape, shapes)


LAYOUTS = ("axis 0", "axis 1", "strided", "shared", "sum")


def aligned(whole: Leaf, parts: Sequence[Leaf], sizes: Sequence[int], layout: str) -> tuple[Tensor, Tensor] | None:
    """Projections of the whole and of the parts put together in one way, or None where that is not possible."""
    same = all(p.shape == whole.shape for p in parts)
    if layout == "axis 1":
        rest = {(s[:1], s[2:]) for s in (whole.shape, *(p.shape for p in parts))}
        seconds = [p.second for p in parts if p.second is not None]
        if whole.second is None or len(seconds) != len(parts) or len(rest) != 1:
            return None
        return _equal_shapes(whole.second, torch.cat(seconds))
    firsts = [p.first for p in parts if p.first is not None]
    if (
        whole.first is None
        or len(firsts) != len(parts)
        or len({s[1:] for s in (whole.shape, *(p.shape for p in parts))}) != 1
    ):
        return None
    if layout == "axis 0" and whole.shape:
        return _equal_shapes(whole.first, torch.cat(firsts))
    if layout == "strided" and whole.shape:  # time-major rows, (t·N + sample)
        steps = whole.shape[0] // sum(sizes)
        if steps < 2 or any(p.shape[0] != steps * n for p, n in zip(parts, sizes, strict=True)):
            return None
        if len(whole.first) != whole.shape[0] or any(len(f) != p.shape[0] for f, p in zip(firsts, parts, strict=True)):
            return None
        columns = [f.reshape(steps, n, -1) for f, n in zip(firsts, sizes, strict=True)]
        return _equal_shapes(whole.first, torch.cat(columns, 1).reshape(whole.first.shape))
    if layout == "shared" and same:
        return whole.first.repeat(len(parts), 1), torch.cat(firsts)
    if layout == "sum" and same:
        return whole.first, torch.stack(firsts).sum(0)
    return None


def _equal_shapes(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    return (a, b) if a.shape == b.shape else None


def relative(expected: Tensor, actual: Tensor) -> float:
    """The largest deviation relative to the largest entry; entries that are not finite on both sides agree."""
    if expected.numel() == 0:
        return 0.0
    both = ~expected.isfinite() & ~actual.isfinite()
    deviation = torch.where(both, 0.0, (expected - actual).abs()).nan_to_num(nan=torch.inf).max().item()
    if deviation == 0:
        return 0.0
    size = torch.where(expected.isfinite(), expected.abs(), 0.0).max().item()
    return deviation / size if size else float("inf")


def bounds(sizes: Sequence[int]) -> list[slice]:
    """The slices of consecutive pieces of these sizes."""
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def leaf_at(tree: Tree, path: Sequence[str | int]) -> Leaf | None:
    """The tensor under a `Match.path`."""
    for step in path:
        if isinstance(tree, list) and isinstance(step, int):
            tree = tree[step] if step < len(tree) else None
        else:
            tree = tree.get(str(step)) if isinstance(tree, dict) else None
    return tree if isinstance(tree, Leaf) else None
