"""Store the tensors of a run in little memory, and compare those of a whole step with those of its parts.

A tensor is stored as random projections of its rows, along its first axis and, if it is small enough, its second. The
projections are linear. They therefore show whether two tensors are equal, whether the whole is the concatenation of the
parts, and whether it is their sum. A tensor needs a few numbers per row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

PROJECTIONS = 6
LAYOUTS = ("axis 0", "axis 1", "strided", "shared", "sum")
_CHUNK = 4096
_MAX_ROWS = 2**16  # a tensor with more rows than this, and than the next number per sample, is stored by sample
_MAX_ROWS_PER_SAMPLE = 4096
_MAX_SECOND_AXIS = 2**22  # elements; sequence-first activations are smaller, and images do not need the second axis
_MOST_NOISE = 1e-6  # rounding may explain at most this relative difference

TreePath = tuple[str | int, ...]


@dataclass(frozen=True, eq=False)
class Leaf:
    """The projections of one tensor.

    `first` has one row per index of axis 0 if `by_row`, otherwise one row per sample. It is None if the tensor has too
    many rows and they do not divide into samples. `second` has one row per index of axis 1, or is None. `total` is the
    projection of the flattened tensor, stored only for tensors of many rows.
    """

    shape: tuple[int, ...]
    first: Tensor | None
    second: Tensor | None
    total: Tensor | None
    by_row: bool

    @property
    def rows(self) -> Tensor:
        """Return the most detailed projections stored."""
        found = self.total if self.first is None else self.first
        assert found is not None, "a tensor of many rows has a total"
        return found


Tree = Leaf | list["Tree"] | dict[str, "Tree"] | None


@dataclass(frozen=True)
class Match:
    """The result of comparing a tensor of the whole run with the tensors of the parts.

    `status` is "agree", "differ", or "shape" if the parts cannot be combined into the whole's shape. `layout` is the
    best way to combine them: "axis 0" or "axis 1" (concatenated), "strided", "shared" (all equal) or "sum". `error` is
    relative to the largest projection.
    """

    status: Literal["agree", "differ", "shape"]
    error: float = 0.0
    layout: str = ""
    path: TreePath = ()
    whole: tuple[int, ...] = ()
    parts: tuple[tuple[int, ...], ...] = ()


AGREE = Match("agree")


# --- projections of tensors ------------------------------------------------------------------------------------------


def pack(value: Any, samples: int, depth: int = 4) -> Tree:
    """Return the projections of all tensors in a module's inputs or output, in the same nesting."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return [pack(t, 1, 0) for t in value.unbind()]
        if value.is_complex():
            return pack(torch.view_as_real(value), samples, 0)
        if value.layout is not torch.strided or value.device.type == "meta":
            return None
        return _project_tensor(value.detach(), samples)
    if depth == 0 or isinstance(value, (str, bytes, nn.Module, type)):
        return None
    if isinstance(value, (list, tuple)):
        return [pack(v, samples, depth - 1) for v in value]
    if isinstance(value, Mapping):
        return {str(k): pack(v, samples, depth - 1) for k, v in value.items()}
    # Containers that hold tensors as attributes: torchvision's ImageList, detectron2's Instances, dataclasses.
    attributes = getattr(value, "__dict__", None)
    return {k: pack(v, samples, depth - 1) for k, v in attributes.items()} if attributes else None


@torch.no_grad()
def _project_tensor(x: Tensor, samples: int) -> Leaf:
    shape = tuple(x.shape)
    x = x.reshape(1) if x.ndim == 0 else x
    rows, by_row = x.shape[0], x.shape[0] <= max(_MAX_ROWS, _MAX_ROWS_PER_SAMPLE * samples)
    first = second = None
    if by_row:
        first = _project(x.reshape(rows, -1) if x.numel() else x.new_zeros(rows, 1))
    elif rows % samples == 0:
        first = _project(x.reshape(samples, -1))
    if x.ndim >= 2 and 0 < x.numel() <= _MAX_SECOND_AXIS and x.shape[1] <= _MAX_ROWS_PER_SAMPLE:
        second = _project(x.transpose(0, 1).reshape(x.shape[1], -1))
    total = _project(x.reshape(1, -1)) if rows > _MAX_ROWS else None
    return Leaf(shape, first, second, total, by_row)


@lru_cache(maxsize=64)
def _random_matrix(rows: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, PROJECTIONS, generator=generator, dtype=torch.float64).to(device)


def _project(x: Tensor) -> Tensor:
    """Project rows × n to rows × PROJECTIONS. The random matrix is a product of two, because n may be millions."""
    x = x.to(torch.float64)
    rows, n = x.shape
    if n <= PROJECTIONS:
        return x.clone()
    inner, chunks = _random_matrix(_CHUNK, 20, x.device), n // _CHUNK
    if chunks == 0:
        return x @ inner[:n]
    outer = _random_matrix(chunks + 1, 21, x.device)
    y = ((x[:, : chunks * _CHUNK].reshape(rows, chunks, _CHUNK) @ inner) * outer[:chunks]).sum(1)
    rest = x[:, chunks * _CHUNK :]
    return y + (rest @ inner[: rest.shape[1]]) * outer[chunks]


# --- comparison of tensors -------------------------------------------------------------------------------------------


def compare(whole: Tree, parts: Sequence[Tree], sizes: Sequence[int], *, tol: float, noise: Tree = None) -> Match:
    """Return the first tensor of `whole` that the parts do not reproduce, or agreement.

    Args:
        whole: the tensors of the run in one piece.
        parts: the same tensors in each part.
        sizes: the number of samples in each part.
        tol: the allowed relative difference.
        noise: the tensors of a whole run with perturbed parameters. A tensor may differ by what moved there.
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
    for key, w, ps, n, quiet in rows:
        found = compare(w, ps, n, tol=tol, noise=quiet)
        if found.status != "agree":
            return replace(found, path=(key, *found.path))
        best = max(best, found, key=lambda m: m.error)
    return best


def _match_lists(whole: list, parts: Sequence[list], sizes: Sequence[int], noise: Tree) -> list[tuple]:
    quiet = noise if isinstance(noise, list) and len(noise) == len(whole) else [None] * len(whole)
    if all(len(p) == len(whole) for p in parts):
        return [(i, w, [p[i] for p in parts], sizes, quiet[i]) for i, w in enumerate(whole)]
    flat = [entry for p in parts for entry in p]
    if len(flat) == len(whole):  # one entry per sample
        return [(i, w, [flat[i]], [1], quiet[i]) for i, w in enumerate(whole)]
    return []


def _compare_leaf(whole: Leaf, parts: Sequence[Leaf], sizes: Sequence[int], tol: float, noise: Leaf | None) -> Match:
    shapes = tuple(p.shape for p in parts)
    allowance = 0.0
    if noise is not None and noise.shape == whole.shape:
        allowance = min(64 * relative(whole.rows, noise.rows), max(_MOST_NOISE, tol))
    errors = {}
    for layout in LAYOUTS:
        pair = aligned(whole, parts, sizes, layout)
        if pair is not None:
            errors[layout] = max(0.0, relative(*pair) - allowance)
    if errors:
        layout = min(errors, key=errors.__getitem__)
        status = "agree" if errors[layout] <= tol else "differ"
        return Match(status, errors[layout], layout, (), whole.shape, shapes)
    # Large tensors may be stored by row here and by sample there. Those cannot be compared, so they cannot disagree.
    comparable = all(p.first is not None and p.by_row == whole.by_row for p in (whole, *parts))
    return Match("shape", float("inf"), "", (), whole.shape, shapes) if comparable else AGREE


def aligned(whole: Leaf, parts: Sequence[Leaf], sizes: Sequence[int], layout: str) -> tuple[Tensor, Tensor] | None:
    """Return the projections of the whole and of the parts combined by `layout`, or None if the shapes do not fit."""
    shapes = [whole.shape, *(p.shape for p in parts)]
    if layout == "axis 1":
        if len({(s[:1], s[2:]) for s in shapes}) != 1:
            return None
        return _concatenated(whole.second, [p.second for p in parts])
    if len({s[1:] for s in shapes}) != 1:
        return None
    equal_shapes = len(set(shapes)) == 1
    same_rows = len({p.by_row for p in (whole, *parts)}) == 1
    # The number of rows in `first` depends on the number of samples in the part, which an entry of a list ignores.
    if equal_shapes and (layout != "axis 0" or len(parts) == 1):
        stored = [p.rows for p in (whole, *parts)]
        totals = [p.total for p in (whole, *parts) if p.total is not None]
        stored = totals if len({s.shape for s in stored}) > 1 else stored
        if layout in ("axis 0", "shared"):
            return stored[0].repeat(len(parts), 1), torch.cat(stored[1:])
        return (stored[0], torch.stack(stored[1:]).sum(0)) if layout == "sum" else None
    if not whole.shape or not same_rows:
        return None
    if layout == "axis 0":
        return _concatenated(whole.first, [p.first for p in parts])
    return _strided(whole, parts, sizes) if layout == "strided" and whole.by_row else None


def _concatenated(whole: Tensor | None, parts: Sequence[Tensor | None]) -> tuple[Tensor, Tensor] | None:
    given = [p for p in parts if p is not None]
    if whole is None or len(given) != len(parts) or sum(map(len, given)) != len(whole):
        return None
    return whole, torch.cat(given)


def _strided(whole: Leaf, parts: Sequence[Leaf], sizes: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    """Align rows in time-major order, (time · samples + sample)."""
    steps = whole.shape[0] // sum(sizes)
    if steps < 2 or any(p.shape[0] != steps * n for p, n in zip(parts, sizes, strict=True)):
        return None
    assert whole.first is not None
    columns = [p.first.reshape(steps, n, -1) for p, n in zip(parts, sizes, strict=True) if p.first is not None]
    joined = torch.cat(columns, 1).flatten(0, 1)
    return (whole.first, joined) if joined.shape == whole.first.shape else None


def relative(expected: Tensor, actual: Tensor) -> float:
    """Return the largest deviation over the largest entry. Entries that are not finite on both sides agree."""
    if expected.numel() == 0:
        return 0.0
    both = ~expected.isfinite() & ~actual.isfinite()
    deviation = torch.where(both, 0.0, (expected - actual).abs()).nan_to_num(nan=torch.inf).max().item()
    if deviation == 0:
        return 0.0
    size = torch.where(expected.isfinite(), expected.abs(), 0.0).max().item()
    return deviation / size if size else float("inf")


def is_finite(tree: Tree) -> bool:
    """Return whether every tensor is finite."""
    if isinstance(tree, Leaf):
        return bool(tree.rows.isfinite().all())
    if isinstance(tree, (list, dict)):
        return all(map(is_finite, tree.values() if isinstance(tree, dict) else tree))
    return True
