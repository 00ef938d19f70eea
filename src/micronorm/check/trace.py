"""Record the calls of every module of a private copy, and compare those of a whole step with those of its parts.

A tensor is stored as random projections of its rows, along its first axis and, if it is small enough, its second. The
projections are linear. They therefore show whether two tensors are equal, whether the whole is the concatenation of the
parts, and whether it is their sum. A tensor needs a few numbers per row.
"""

import contextlib
import math
import random
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from micronorm.nn.checkpointing import inside_backward

LOSS = "loss"
PROJECTIONS = 6
_CHUNK = 4096
# Sequence-first activations have fewer elements and a shorter second axis, and images do not need the second axis.
_MAX_SECOND_AXIS = 2**22
_MAX_SECOND_ROWS = 4096

# Deep networks amplify rounding, and a gradient that cancels to zero consists of rounding. A tensor may differ by this
# factor times its change when every parameter moves by one unit in the last place ...
ROUNDING = 64.0
# ... but by no more than this, relative to its maximum or to the largest gradient. Otherwise a chaotic model would
# pass with any fault.
MOST_ROUNDING = 1e-6

TreePath = tuple[str | int, ...]


@dataclass(frozen=True, eq=False)
class Leaf:
    """The projections of one tensor: a row per index of axis 0 and, unless `second` is None, per index of axis 1."""

    shape: tuple[int, ...]
    first: Tensor
    second: Tensor | None


Tree = Leaf | list["Tree"] | dict[str, "Tree"] | None


@dataclass(frozen=True)
class Match:
    """The result of comparing a tensor of the whole run with the tensors of the parts.

    `status` is "agree", "differ", or "shape" if the parts cannot be combined into the whole's shape. `error` is
    relative to the largest projection, for the best way to combine them.
    """

    status: Literal["agree", "differ", "shape"]
    error: float = 0.0
    path: TreePath = ()
    whole: tuple[int, ...] = ()
    parts: tuple[tuple[int, ...], ...] = ()


AGREE = Match("agree")


# --- projections of tensors ------------------------------------------------------------------------------------------


def pack(value: Any, depth: int = 4) -> Tree:
    """Return the projections of all tensors in a module's inputs or output, in the same nesting."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return [pack(t, 0) for t in value.unbind()]
        if value.is_complex():
            return pack(torch.view_as_real(value), 0)
        if value.layout is not torch.strided or value.device.type == "meta":
            return None
        return _project_tensor(value.detach())
    if depth == 0 or isinstance(value, (str, bytes, nn.Module, type)):
        return None
    if isinstance(value, (list, tuple)):
        return [pack(v, depth - 1) for v in value]
    if isinstance(value, Mapping):
        return {str(k): pack(v, depth - 1) for k, v in value.items()}
    # Containers that hold tensors as attributes: torchvision's ImageList, detectron2's Instances, dataclasses.
    attributes = getattr(value, "__dict__", None)
    return {k: pack(v, depth - 1) for k, v in attributes.items()} if attributes else None


@torch.no_grad()
def _project_tensor(x: Tensor) -> Leaf:
    shape = tuple(x.shape)
    x = x.reshape(1) if x.ndim == 0 else x
    first, second = _project(x.reshape(len(x), -1) if x.numel() else x.new_zeros(len(x), 1)), None
    if x.ndim >= 2 and 0 < x.numel() <= _MAX_SECOND_AXIS and x.shape[1] <= _MAX_SECOND_ROWS:
        second = _project(x.transpose(0, 1).reshape(x.shape[1], -1))
    return Leaf(shape, first, second)


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
    for key, w, ps, n, perturbed in rows:
        found = compare(w, ps, n, tol=tol, noise=perturbed)
        if found.status != "agree":
            return replace(found, path=(key, *found.path))
        best = max(best, found, key=lambda m: m.error)
    return best


def _match_lists(whole: list, parts: Sequence[list], sizes: Sequence[int], noise: Tree) -> list[tuple]:
    perturbed = noise if isinstance(noise, list) and len(noise) == len(whole) else [None] * len(whole)
    if all(len(p) == len(whole) for p in parts):
        return [(i, w, [p[i] for p in parts], sizes, perturbed[i]) for i, w in enumerate(whole)]
    flat = [entry for p in parts for entry in p]
    if len(flat) == len(whole):  # one entry per sample
        return [(i, w, [flat[i]], [1], perturbed[i]) for i, w in enumerate(whole)]
    return []


def _compare_leaf(whole: Leaf, parts: Sequence[Leaf], sizes: Sequence[int], tol: float, noise: Leaf | None) -> Match:
    shapes = tuple(p.shape for p in parts)
    allowance = 0.0
    if noise is not None and noise.shape == whole.shape:
        allowance = min(ROUNDING * _relative(whole.first, noise.first), max(MOST_ROUNDING, tol))
    errors = [max(0.0, _relative(*pair) - allowance) for pair in _alignments(whole, parts, sizes)]
    if not errors:
        return Match("shape", math.inf, (), whole.shape, shapes)
    return Match("agree" if min(errors) <= tol else "differ", min(errors), (), whole.shape, shapes)


def _alignments(whole: Leaf, parts: Sequence[Leaf], sizes: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the projections of the whole, and those of the parts combined, for every way that fits the shapes."""
    shapes = [whole.shape, *(p.shape for p in parts)]
    rows, columns = [p.first for p in parts], [p.second for p in parts if p.second is not None]
    if len({shape[1:] for shape in shapes}) == 1:
        if sum(map(len, rows)) == len(whole.first):  # concatenated
            yield whole.first, torch.cat(rows)
        if len(set(shapes)) == 1:  # all equal, or a sum
            yield whole.first.repeat(len(parts), 1), torch.cat(rows)
            yield whole.first, torch.stack(rows).sum(0)
        steps = whole.shape[0] // sum(sizes) if whole.shape else 0
        if steps > 1 and all(len(p.first) == steps * n for p, n in zip(parts, sizes, strict=True)):
            # Rows in time-major order, (time · samples + sample).
            by_time = [p.first.reshape(steps, n, -1) for p, n in zip(parts, sizes, strict=True)]
            joined = torch.cat(by_time, 1).flatten(0, 1)
            if joined.shape == whole.first.shape:
                yield whole.first, joined
    fits = len({(s[:1], s[2:]) for s in shapes}) == 1 and len(columns) == len(parts)
    if fits and whole.second is not None and sum(map(len, columns)) == len(whole.second):
        yield whole.second, torch.cat(columns)  # concatenated along the second axis


def _relative(expected: Tensor, actual: Tensor) -> float:
    error, size = deviation(expected, actual)
    return error / size if size else math.inf if error else 0.0


def deviation(expected: Tensor, actual: Tensor) -> tuple[float, float]:
    """Return the largest deviation and the largest entry. Entries that are not finite on both sides agree.

    The deviation is infinite if shapes differ, or if an entry is finite on one side only.
    """
    if expected.shape != actual.shape:
        return math.inf, 1.0
    if expected.numel() == 0:
        return 0.0, 0.0
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (expected, actual))
    a, b = a.to(torch.float64), b.to(torch.float64)
    both = ~a.isfinite() & ~b.isfinite()
    error = torch.where(both, 0.0, (a - b).abs()).nan_to_num(nan=math.inf).max().item()
    return error, torch.where(a.isfinite(), a.abs(), 0.0).max().item()


def is_finite(tree: Tree) -> bool:
    """Return whether every tensor is finite."""
    if isinstance(tree, Leaf):
        return bool(tree.first.isfinite().all())
    if isinstance(tree, (list, dict)):
        return all(map(is_finite, tree.values() if isinstance(tree, dict) else tree))
    return True


# --- calls -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Call:
    """One call of a module, or of the loss function at the root.

    `index` counts the calls of one module in one part. `before` and `after` are fingerprints of the random states.
    """

    name: str
    type: str
    index: int = 0
    inputs: Tree = None
    output: Tree = None
    children: list["Call"] = field(default_factory=list)
    before: int = 0
    after: int = 0
    ended: bool = False

    @property
    def draws(self) -> bool:
        """Return whether the call's own code, without its children, drew random numbers."""
        inner = [state for child in self.children for state in (child.before, child.after)]
        states = [self.before, *inner, self.after]
        return any(a != b for a, b in zip(states[::2], states[1::2], strict=True))


@dataclass(eq=False)
class Trace:
    """The calls of one part, as a tree and by module. `open` lists the running calls, also after an exception."""

    samples: int
    root: Call
    by_name: dict[str, list[Call]] = field(default_factory=dict)
    open: list[Call] = field(default_factory=list)

    def calls(self, name: str) -> list[Call]:
        """Return the calls of one module, or the call of the loss if no module has its name."""
        return self.by_name.get(name, [self.root] if name == LOSS else [])

    def first_not_finite(self) -> Call | None:
        """Return the first, innermost call with finite inputs and an output that is not finite."""

        def search(call: Call) -> Call | None:
            for child in call.children:
                if is_finite(child.inputs) and not is_finite(child.output):
                    return search(child) or child
            return None

        return search(self.root)


class Tracer:
    """Record all calls of a private copy by hooks. Forwards that a backward pass recomputes are not recorded."""

    def __init__(self, names: dict[nn.Module, str], devices: Sequence[torch.device]) -> None:
        self.names, self.devices = names, devices
        self.traces: list[Trace] = []
        self.coarsest = torch.finfo(torch.float64).eps  # of all dtypes that modules computed in
        self._packed: dict[int, tuple[weakref.ref, int, Tree]] = {}
        self._hooks = [
            hook
            for module in self.names
            for hook in (
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave, with_kwargs=True),
            )
        ]

    def close(self) -> None:
        """Remove the hooks. Their reference cycle would keep the copy in memory until the next garbage collection."""
        for hook in self._hooks:
            hook.remove()
        self.names = {}

    @contextlib.contextmanager
    def part(self, samples: int) -> Iterator[Trace]:
        """Record one evaluation of the loss."""
        trace = Trace(samples, Call(LOSS, "loss function", before=_random_fingerprint(self.devices)))
        trace.open.append(trace.root)
        self.traces.append(trace)
        yield trace
        trace.root.after = _random_fingerprint(self.devices)
        trace.open.clear()
        self._packed.clear()

    def note_dtype(self, tensor: Tensor) -> None:
        """Remember the coarsest dtype, which limits how closely two runs can agree."""
        if tensor.is_floating_point() or tensor.is_complex():
            self.coarsest = max(self.coarsest, torch.finfo(tensor.dtype).eps)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if inside_backward() or not self.traces or not self.traces[-1].open:
            return
        trace = self.traces[-1]
        calls = trace.by_name.setdefault(self.names[module], [])
        inputs = self._pack([*args, kwargs])
        call = Call(self.names[module], type(module).__name__, len(calls), inputs)
        calls.append(call)
        trace.open[-1].children.append(call)
        trace.open.append(call)
        call.before = call.after = _random_fingerprint(self.devices)

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if inside_backward() or not self.traces:
            return
        trace = self.traces[-1]
        name = self.names[module]
        depth = next((i for i in reversed(range(len(trace.open))) if trace.open[i].name == name), 0)
        if depth:  # calls above `depth` ended in an exception that the model caught
            call = trace.open[depth]
            call.ended = True
            call.after = _random_fingerprint(self.devices)
            call.output = self._pack(output)
            del trace.open[depth:]

    def _pack(self, value: Any) -> Tree:
        """Pack tensors, each once: the output of one module is the input of the next."""
        if isinstance(value, (list, tuple)):
            return [self._pack(v) for v in value]
        if not isinstance(value, Tensor):
            return pack(value)
        self.note_dtype(value)
        known = self._packed.get(id(value))
        if known is not None and known[0]() is value and known[1] == value._version:
            return known[2]
        tree = pack(value)
        self._packed[id(value)] = (weakref.ref(value), value._version, tree)
        return tree


def _random_fingerprint(devices: Sequence[torch.device]) -> int:
    """Return a number that changes when code draws from one of the global generators."""
    states = [torch.get_rng_state()] + [torch.cuda.get_rng_state(d) for d in devices if d.type == "cuda"]
    _, keys, position, *_ = np.random.get_state()
    return hash((*(s.numpy().tobytes() for s in states), random.getstate(), np.asarray(keys).tobytes(), position))
