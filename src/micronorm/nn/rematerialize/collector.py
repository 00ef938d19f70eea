"""One forward pass seen by autograd's hooks: which of the tensors it saves need not be kept.

A tensor is known by its storage and its version, never by its values: what is written in place counts it up, and what
was noted no longer applies. Writing behind autograd's back (through `.data`) is not seen here, nor by autograd.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from micronorm.nn.rematerialize.followers import ADD, UNARY, addition, then
from micronorm.nn.rematerialize.formula import Formula, Held, Home, Layout, Saved

# An output whose residual would be computed again with a residual of its own that would be, and so on, costs more with
# each block. At two every third output of a chain of residual blocks is kept.
MAX_COST = 2
# Operations between a normalization and what follows it: residual, activation, and room for a few more.
_MAX_STEPS = 8


@dataclass
class Spared:
    """Activations that a forward pass did not keep.

    Example:
        >>> print(Spared(tensors=33, bytes=1_100_000_000))
        33 activations not kept: 1.02 GiB
    """

    tensors: int = 0
    bytes: int = 0
    """Of the activations, less what is kept to compute them again."""

    def copy(self) -> "Spared":
        """The present state of a count that goes on."""
        return Spared(self.tensors, self.bytes)

    def __sub__(self, earlier: "Spared") -> "Spared":
        return Spared(self.tensors - earlier.tensors, self.bytes - earlier.bytes)

    def __str__(self) -> str:
        size, unit = float(self.bytes), "bytes"
        for larger in ("KiB", "MiB", "GiB"):
            if abs(size) < 999.5:  # three digits say no more, and 1,000 would be written 1e+03
                break
            size, unit = size / 1024, larger
        digits = f"{size:.3g}" if abs(size) < 999.5 else f"{size:.0f}"
        return f"{self.tensors} activation{'s' * (self.tensors != 1)} not kept: {digits} {unit}"


class _Entry(NamedTuple):
    """A tensor that has a formula: what its storage holds, whole, at this version."""

    formula: Formula
    storage: StorageWeakRef  # while it is held, no other storage takes the same address
    version: int
    layout: Layout
    dtype: torch.dtype


class Collector:
    """Notes formulas during one forward, and answers autograd's first hook with them.

    `left_out` are the layers whose outputs are kept all the same.
    """

    def __init__(self, left_out: frozenset[nn.Module] = frozenset()) -> None:
        self.left_out = left_out
        self.spared = Spared()
        self._entries: dict[int, _Entry] = {}
        self._saved: dict[int, list[weakref.ref[Saved]]] = {}
        # By node and output: what autograd knows of a tensor that is in nobody's hands any more.
        self._results: dict[tuple[Any, int], Formula | weakref.ref[Saved]] = {}
        self._counted: dict[int, Any] = {}  # with the objects themselves, whose ids would be given away again

    def pack(self, tensor: Tensor) -> Saved:
        """What autograd is to keep of a tensor it saves."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return Saved(Held(tensor))
        key = tensor.untyped_storage()._cdata
        entry = self._entry_of(tensor) or self._follow(tensor)
        if entry is not None:
            self._spare(entry)
            return Saved(entry.formula, entry.layout, Layout.of(tensor))
        saved = Saved(Held(tensor))
        self._saved.setdefault(key, []).append(weakref.ref(saved))
        if tensor.grad_fn is not None:
            self._results[tensor.grad_fn, tensor.output_nr] = weakref.ref(saved)
        return saved

    def remember(
        self, y: Tensor, compute: Callable[..., Tensor], sources: tuple[Tensor, ...], numbers: tuple[Tensor, ...]
    ) -> None:
        """Note that y = compute(*sources, *numbers), unless keeping what that takes would spare nothing."""
        self._forget_the_dead()
        if type(y) is not Tensor or y.grad_fn is None or not _fills_its_storage(y):
            return
        inputs = [self._find(source) for source in sources]
        address = y.untyped_storage()._cdata
        home = Home(StorageWeakRef(y.untyped_storage()), address, y._version)
        numbers = tuple(number.detach() for number in numbers)
        formula = self._formula(compute, inputs, numbers, home=home, steps=0, cost=1)
        if formula is None:
            return
        entry = self._enter(y, formula)
        # An operation that saves its own output has done so before anyone could say how to compute it.
        for saved in self._saved_of(address):
            assert isinstance(saved.content, Held)
            if saved.content.version == y._version:
                self._spare(entry)
                saved.whole, saved.view = entry.layout, Layout.of(saved.content.tensor)
                saved.content = formula

    def close(self) -> None:
        """Let go of the graph: its nodes hold the hooks, which hold this object."""
        for table in (self._entries, self._saved, self._results, self._counted):
            table.clear()

    # --- what is known of a tensor -------------------------------------------------------------------------------

    def _entry_of(self, tensor: Tensor) -> _Entry | None:
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        fits = entry is not None and entry.version == tensor._version and entry.dtype == tensor.dtype
        return entry if fits else None

    def _saved_of(self, key: int) -> list[Saved]:
        """What autograd keeps as it is of this storage."""
        saved = [ref() for ref in self._saved.get(key, ())]
        return [s for s in saved if s is not None and isinstance(s.content, Held)]

    def _find(self, tensor: Tensor) -> Formula | Held | None:
        """How a formula may refer to a tensor without keeping what would not be kept anyway."""
        if type(tensor) not in (Tensor, nn.Parameter):
            return None
        entry = self._entry_of(tensor) or self._follow(tensor)
        if entry is not None:
            return entry.formula if entry.layout == Layout.of(tensor) else None
        return Held(tensor) if self._saved_of(tensor.untyped_storage()._cdata) else None

    def _follow(self, tensor: Tensor) -> _Entry | None:
        """The entry of a tensor whose node leads back to a formula."""
        if tensor.grad_fn is None or not _fills_its_storage(tensor):
            return None
        formula = self._result_of(tensor.grad_fn, tensor.output_nr)
        if not isinstance(formula, Formula) or not formula.steps:
            return None
        home = formula.home
        # Each operation in place counts the version up by one; more than that was written behind autograd's back.
        at_home = tensor.untyped_storage()._cdata == home.address
        expected = tensor._version == home.version + formula.steps if at_home else tensor._version < formula.steps
        return self._enter(tensor, formula) if expected else None

    def _result_of(self, node: Any, output: int, steps: int = 0) -> Formula | Held | None:
        """What is known of an operation's output, by the node that autograd recorded for it."""
        known = self._results.get((node, output))
        if isinstance(known, Formula):
            return known
        if known is not None:
            saved = known()
            content = None if saved is None else saved.content
            return None if isinstance(content, Held) and not content.intact else content
        formula = None if node is None or steps > _MAX_STEPS else self._followed(node, steps + 1)
        if formula is not None:
            self._results[node, output] = formula
        return formula

    def _followed(self, node: Any, steps: int) -> Formula | None:
        """The formula of an operation's output, where the operation is one of `followers.py`."""
        name = node.name()
        if name != ADD and name not in UNARY:
            return None
        inputs = [self._result_of(origin, output, steps) for origin, output in node.next_functions]
        first = next((i for i in inputs if isinstance(i, Formula)), None)
        if first is None:
            return None
        if name == ADD:
            return self._formula(addition(node), inputs, (), home=first.home, steps=first.steps + 1, cost=0)
        # On memory of its own, not on `first.value()`: that may be in other hands too, and this writes in place.
        compute = partial(then, UNARY[name](node), first.compute)
        return Formula(compute, first.sources, first.numbers, cost=first.cost, home=first.home, steps=first.steps + 1)

    # --- keeping account -----------------------------------------------------------------------------------------

    def _formula(
        self,
        compute: Callable[..., Tensor],
        inputs: list[Formula | Held | None],
        numbers: tuple[Tensor, ...],
        *,
        home: Home,
        steps: int,
        cost: int,
    ) -> Formula | None:
        """The formula, unless an input is unknown or it would take too many normalizations."""
        known = tuple(i for i in inputs if i is not None)
        total = cost + sum(i.cost for i in known if isinstance(i, Formula))
        if len(known) < len(inputs) or total > MAX_COST:
            return None
        return Formula(compute, known, numbers, cost=total, home=home, steps=steps)

    def _enter(self, tensor: Tensor, formula: Formula) -> _Entry:
        storage = tensor.untyped_storage()
        entry = _Entry(formula, StorageWeakRef(storage), tensor._version, Layout.of(tensor), tensor.dtype)
        self._entries[storage._cdata] = entry
        self._results[tensor.grad_fn, tensor.output_nr] = formula
        return entry

    def _spare(self, entry: _Entry) -> None:
        """Count an activation that is not kept, once, and what is kept in its place."""
        if id(entry.formula) in self._counted:
            return
        self._counted[id(entry.formula)] = entry.formula
        self.spared.tensors += 1
        self.spared.bytes += entry.layout.size.numel() * entry.dtype.itemsize
        for number in entry.formula.all_numbers():
            storage = number.untyped_storage()
            if id(number) not in self._counted and not self._saved_of(storage._cdata):
                self._counted[id(number)] = number
                self.spared.bytes -= storage.nbytes()

    def _forget_the_dead(self) -> None:
        """Drop the entries of tensors that are gone: nobody can save them any more."""
        for key in [key for key, entry in self._entries.items() if entry.storage.expired()]:
            del self._entries[key]


def _fills_its_storage(tensor: Tensor) -> bool:
    """Whether the tensor is all its storage holds, so that every view of the storage is a view of it."""
    return not tensor.storage_offset() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize


class _Local(threading.local):
    """Of a thread; with an attribute of the class, because to find out that there is none takes longest."""

    collector: Collector | None = None


_local = _Local()


def active(layer: nn.Module | None = None) -> Collector | None:
    """The collector of this thread's forward; None outside one, in compiled code, and for a layer that is left out."""
    if torch.compiler.is_compiling():
        return None
    collector = _local.collector
    return None if collector is None or layer in collector.left_out else collector


def activate(collector: Collector | None) -> None:
    """Make this the collector of this thread's forward."""
    _local.collector = collector


def remember(
    y: Tensor, compute: Callable[..., Tensor], sources: tuple[Tensor, ...], numbers: tuple[Tensor, ...] = ()
) -> None:
    """Tell the forward that runs under `recompute`, if one does, how y can be computed again, to the bit.

    Call it after the operation has saved its tensors, with the sources it saved: y is not kept where autograd keeps
    these anyway.

    Args:
        y: a normalization's output, with its graph.
        compute: compute(*sources, *numbers) gives y in new memory of the same layout. It runs in the backward pass,
            without grad mode, and may hold no large tensors itself.
        sources: the tensors of y's size that it takes: the input, a residual.
        numbers: the small ones. Copies: parameters and estimates move on.

    Example:
        >>> x = torch.ones(2, 3, requires_grad=True)
        >>> remember(x * 2, lambda x: x * 2, (x,))  # no forward under way: nothing to note
    """
    collector = active()
    if collector is not None:
        collector.remember(y, compute, sources, numbers)
