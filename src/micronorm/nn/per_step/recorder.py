"""Replace normalized activations among the tensors that autograd saves by formulas that compute them again.

During a forward under `mn.recompute`, a normalization layer calls `Recorder.remember(y, compute, sources, numbers)` to
state that y = compute(*sources, *numbers). Its sources are tensors that autograd keeps anyway, such as the layer's
input. When a later operation saves y, `Recorder.pack` stores the formula instead, and the backward pass evaluates it.

A tensor is recognised by its storage and its version counter. Each in-place write raises the version, also under
`torch.no_grad`, so a modified tensor is saved as it is. The one operation that is followed is ReLU, see
`Recorder._relu_of`. Writes through `.data` do not raise the version and are not noticed.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from micronorm.ops.private_api import top_saved_tensors_hooks

MAX_NORMS = 2
"""How many normalizations may be computed again for one tensor.

The output of a residual block depends on the output of the block before it. Without a limit, each block would compute
all earlier blocks again. With two, every third block output of a chain is kept.
"""


@dataclass
class Spared:
    """The activations that a forward pass did not keep."""

    tensors: int = 0
    bytes: int = 0
    """The size of the activations, less the tensors kept to compute them again."""

    def __str__(self) -> str:
        plural = "" if self.tensors == 1 else "s"
        return f"{self.tensors} activation{plural} not kept: {self.bytes / 2**20:.1f} MiB"


class Layout(NamedTuple):
    """Where the elements of a tensor lie in its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """Return the layout of a tensor."""
        return cls(tensor.shape, tensor.stride(), int(tensor.storage_offset()))


class Kept:
    """A saved tensor, with the version it had. Autograd compares versions itself, but not under saved-tensor hooks."""

    def __init__(self, tensor: Tensor) -> None:
        # Detached: an operation may save its own output, whose graph would then contain itself.
        self.tensor = tensor.detach()
        self.version = tensor._version

    def value(self) -> Tensor:
        """Return the tensor, or raise RuntimeError if it was modified in place since it was saved."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor needed for the backward pass was modified by an inplace operation: {self.tensor.dtype} of "
                f"shape {list(self.tensor.shape)} is at version {self.tensor._version}, expected version "
                f"{self.version}. Write `x = x + 1` for `x += 1` where x is the input of a layer."
            )
        return self.tensor


class Formula(NamedTuple):
    """How to compute a tensor again: compute(*sources, *numbers)."""

    compute: Callable[..., Tensor]
    sources: tuple["Kept | Formula", ...]
    """Tensors of about the result's size: kept ones, or formulas in turn."""
    numbers: tuple[Tensor, ...]
    """Small tensors, kept for this formula."""
    norms: int
    """How many normalizations it computes, including those of its sources."""

    def value(self) -> Tensor:
        """Return the tensor in new memory."""
        with torch.no_grad():
            return self.compute(*(source.value() for source in self.sources), *self.numbers)

    def all_numbers(self) -> list[Tensor]:
        """Return the small tensors of this formula and of its sources."""
        inner = [n for source in self.sources if isinstance(source, Formula) for n in source.all_numbers()]
        return [*self.numbers, *inner]


class _Remembered(NamedTuple):
    """The formula of a tensor that fills its storage, valid for one version of that storage."""

    formula: Formula
    tensor: weakref.ref[Tensor]
    storage: StorageWeakRef
    """Held so that no other storage gets the same address."""
    version: int
    layout: Layout
    dtype: torch.dtype


class Saved:
    """What autograd stores in place of a tensor: the tensor, or a formula of its storage and a view of the result."""

    def __init__(self, content: Kept | Formula, whole: Layout | None = None, view: Layout | None = None) -> None:
        self.content, self.whole, self.view = content, whole, view

    def unpack(self) -> Tensor:
        """Return the tensor that was saved."""
        tensor = self.content.value()
        if self.whole is None or self.view is None:
            return tensor
        if Layout.of(tensor) != self.whole:
            tensor = torch.empty_strided(*self.whole[:2], dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        return tensor if self.view == self.whole else tensor.as_strided(*self.view)


class Recorder:
    """Collect the formulas of one forward pass, and use them in `pack`. Its saved-tensor hooks last until `close`.

    Args:
        owner: the handle whose model is being called.
        excluded: layers whose outputs are kept.
    """

    def __init__(self, owner: object, excluded: frozenset[nn.Module] = frozenset()) -> None:
        self.owner = owner
        self.excluded = excluded
        self.calls = 1
        """How many calls of the owner's model are under way: a model may call itself."""
        self.spared = Spared()
        # Formulas by the address of the tensor's storage, and by the graph node and output that made the tensor.
        self._by_storage: dict[int, _Remembered] = {}
        self._by_node: dict[tuple[Any, int], _Remembered] = {}
        self._saved: dict[int, list[weakref.ref[Saved]]] = {}
        # What `spared` contains, by address. The objects are kept so that no address is used again.
        self._counted: dict[int, Any] = {}
        pack: Callable[..., Any] = self.pack
        if top_saved_tensors_hooks is None and "torch._dynamo" in sys.modules:
            # In torch 2.6 and 2.7 a compiled part of the model would compile the hook.
            pack = torch.compiler.disable(pack)  # type: ignore[assignment]
        self._hooks = saved_tensors_hooks(pack, Saved.unpack)
        self._hooks.__enter__()

    def pack(self, tensor: Tensor) -> Saved:
        """Return what autograd stores for a tensor it saves: the first of the saved-tensor hooks."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return Saved(Kept(tensor))
        found = self._lookup(tensor)
        if found is not None:
            self._count(found)
            return Saved(found.formula, found.layout, Layout.of(tensor))
        saved = Saved(Kept(tensor))
        self._saved.setdefault(tensor.untyped_storage()._cdata, []).append(weakref.ref(saved))
        return saved

    def remember(
        self, y: Tensor, compute: Callable[..., Tensor], sources: tuple[Tensor, ...], numbers: tuple[Tensor, ...] = ()
    ) -> None:
        """Record how to recompute y bit for bit: y = compute(*sources, *numbers).

        Call it after the operation has saved its tensors. The formula is used only if autograd keeps the sources, too.

        Args:
            y: the output of a normalization layer, with its graph.
            compute: returns y in new memory, of the same layout. It runs in the backward pass without grad mode, and
                must not hold large tensors itself.
            sources: the tensors of y's size that it reads: the input, a residual.
            numbers: the small tensors. Give copies: parameters and estimates change before the backward.
        """
        self._drop_freed()
        if type(y) is not Tensor or y.grad_fn is None or not _fills_its_storage(y):
            return
        inputs = tuple(i for i in map(self._as_input, sources) if i is not None)
        norms = 1 + sum(i.norms for i in inputs if isinstance(i, Formula))
        if len(inputs) < len(sources) or norms > MAX_NORMS:
            return
        found = self._add(y, Formula(compute, inputs, tuple(number.detach() for number in numbers), norms))
        # An operation that saves its own output did so before this call.
        for saved in self._kept_in(y.untyped_storage()._cdata):
            assert isinstance(saved.content, Kept)
            if saved.content.version == y._version:
                self._count(found)
                saved.whole, saved.view = found.layout, Layout.of(saved.content.tensor)
                saved.content = found.formula

    def close(self) -> None:
        """Remove the hooks, and release the graph: its nodes hold the hooks, which hold this object."""
        self._hooks.__exit__()
        for table in (self._by_storage, self._by_node, self._saved, self._counted):
            table.clear()

    def _lookup(self, tensor: Tensor) -> _Remembered | None:
        """Return the formula of the storage of `tensor`, if the tensor has the version the formula was made for."""
        found = self._by_storage.get(tensor.untyped_storage()._cdata)
        if found is not None and found.version == tensor._version and found.dtype == tensor.dtype:
            return found
        return self._relu_of(tensor)

    def _relu_of(self, tensor: Tensor) -> _Remembered | None:
        """Return a new formula if `tensor` is relu(y) for a remembered y that is unchanged.

        ReLU saves its result before it returns, so this is called while its argument y is still alive. A version never
        falls: if y has the remembered version now, ReLU read the remembered values. In place, y and the result are the
        same tensor, and its version is one higher. Any other write gives another version.
        """
        node = tensor.grad_fn
        if node is None or node.name() != "ReluBackward0" or not _fills_its_storage(tensor):
            return None
        before = self._by_node.get(node.next_functions[0])
        y = None if before is None else before.tensor()
        if before is None or y is None:
            return None
        in_place = tensor.untyped_storage()._cdata == y.untyped_storage()._cdata
        versions = (tensor._version, y._version)
        if versions != ((before.version + 1, before.version + 1) if in_place else (0, before.version)):
            return None
        formula = before.formula

        def compute(*tensors: Tensor) -> Tensor:
            return formula.compute(*tensors).relu_()

        return self._add(tensor, formula._replace(compute=compute))

    def _add(self, tensor: Tensor, formula: Formula) -> _Remembered:
        storage = tensor.untyped_storage()
        found = _Remembered(
            formula,
            weakref.ref(tensor),
            StorageWeakRef(storage),
            tensor._version,
            Layout.of(tensor),
            tensor.dtype,
        )
        self._by_storage[storage._cdata] = found
        self._by_node[tensor.grad_fn, tensor.output_nr] = found
        return found

    def _as_input(self, tensor: Tensor) -> Formula | Kept | None:
        """Return how a formula may refer to `tensor`; None if that would keep a tensor which is not kept otherwise."""
        if type(tensor) not in (Tensor, nn.Parameter):
            return None
        found = self._lookup(tensor)
        if found is not None:
            return found.formula if found.layout == Layout.of(tensor) else None
        return Kept(tensor) if self._kept_in(tensor.untyped_storage()._cdata) else None

    def _kept_in(self, address: int) -> list[Saved]:
        """Return what autograd keeps of a storage."""
        saved = [ref() for ref in self._saved.get(address, ())]
        return [s for s in saved if s is not None and isinstance(s.content, Kept)]

    def _count(self, found: _Remembered) -> None:
        """Add an activation to `spared`, once, and subtract the numbers that are kept in its place."""
        if id(found.formula) in self._counted:
            return
        self._counted[id(found.formula)] = found.formula
        self.spared.tensors += 1
        self.spared.bytes += found.layout.size.numel() * found.dtype.itemsize
        for number in found.formula.all_numbers():
            storage = number.untyped_storage()
            if storage._cdata not in self._counted and not self._kept_in(storage._cdata):
                self._counted[storage._cdata] = number
                self.spared.bytes -= storage.nbytes()

    def _drop_freed(self) -> None:
        """Remove the records of tensors whose storage is freed."""
        self._by_storage = {key: found for key, found in self._by_storage.items() if not found.storage.expired()}
        self._by_node = {key: found for key, found in self._by_node.items() if not found.storage.expired()}


def _fills_its_storage(tensor: Tensor) -> bool:
    """Return whether the tensor is all its storage contains, so that every view of the storage is a view of it."""
    return not tensor.storage_offset() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize


class _Local(threading.local):
    recorder: Recorder | None = None


_local = _Local()


def active(layer: nn.Module | None = None) -> Recorder | None:
    """Return the recorder of this thread's forward pass.

    Returns None outside of a forward under `mn.recompute`, in compiled code, and for a layer that is excluded.
    """
    if torch.compiler.is_compiling():
        return None
    recorder = _local.recorder
    return None if recorder is None or layer in recorder.excluded else recorder


def activate(recorder: Recorder | None) -> None:
    """Make this the recorder of this thread's forward pass."""
    _local.recorder = recorder
