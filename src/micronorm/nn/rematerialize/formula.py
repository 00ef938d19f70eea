"""How a tensor that was not kept is computed again: the same operations on the same numbers, so the same bits."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from micronorm.ops.private_api import storage_of_weak_pointer


class Held:
    """A tensor that is kept, and the version it has: values written over it later would not be those of the forward.

    Autograd makes the same comparison for what it saves, but not where hooks are in force.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # with its graph it would be a cycle: an operation may save its own output
        self.version = tensor._version

    @property
    def intact(self) -> bool:
        """Whether nothing was written over it since."""
        return self.tensor._version == self.version

    def value(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was modified in place since the forward.
        """
        if not self.intact:
            raise RuntimeError(
                f"a tensor needed for the backward pass was modified by an inplace operation: {self.tensor.dtype} of "
                f"shape {list(self.tensor.shape)} is at version {self.tensor._version}, expected version "
                f"{self.version}. Write `x = x + 1` for `x += 1` where x is the input of a layer."
            )
        return self.tensor


class Layout(NamedTuple):
    """Where the elements of a tensor lie in its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """The layout of a tensor."""
        return cls(tensor.shape, tensor.stride(), int(tensor.storage_offset()))


class Home(NamedTuple):
    """The output of a normalization, from which formulas set out."""

    storage: StorageWeakRef
    """While it is held, no other storage takes the same address."""
    address: int
    version: int


class Formula:
    """A tensor as compute(*sources, *numbers).

    Args:
        compute: gives a new tensor each time.
        sources: tensors as large as the result: kept ones, or formulas in their turn.
        numbers: small tensors, which nobody else need keep.
        cost: how many normalizations are applied, those of the sources included.
        home: the normalization's output that this one is or follows.
        steps: how many operations lie between the two.
    """

    def __init__(
        self,
        compute: Callable[..., Tensor],
        sources: tuple["Held | Formula", ...],
        numbers: tuple[Tensor, ...],
        *,
        cost: int,
        home: Home,
        steps: int = 0,
    ) -> None:
        self.compute, self.sources, self.numbers = compute, sources, numbers
        self.cost, self.home, self.steps = cost, home, steps
        self._alive: tuple[StorageWeakRef, Layout, torch.dtype] | None = None

    def fresh(self) -> Tensor:
        """The tensor in memory of its own."""
        with torch.no_grad():
            return self.compute(*(source.value() for source in self.sources), *self.numbers)

    def value(self, layout: Layout | None = None) -> Tensor:
        """The tensor, shared with those who asked before as long as one of them still has it."""
        if self._alive is not None:
            ref, known, dtype = self._alive
            # By the storage: autograd hands on tensors of its own, which share nothing else with what it was given.
            storage = storage_of_weak_pointer(ref.cdata)
            if storage is not None and (layout is None or layout == known):
                return torch.empty(0, dtype=dtype, device=storage.device).set_(
                    storage, known.offset, known.size, known.stride
                )
        result = self.fresh()
        if layout is not None and Layout.of(result) != layout:
            laid = torch.empty_strided(layout.size, layout.stride, dtype=result.dtype, device=result.device)
            result = laid.copy_(result)
        self._alive = StorageWeakRef(result.untyped_storage()), Layout.of(result), result.dtype
        return result

    def all_numbers(self) -> list[Tensor]:
        """The small tensors of this formula and of those it contains."""
        inner = [n for source in self.sources if isinstance(source, Formula) for n in source.all_numbers()]
        return [*self.numbers, *inner]


class Saved:
    """What autograd is given to keep in place of a tensor: the same one, or the formula of one and a view of it."""

    __slots__ = ("__weakref__", "content", "view", "whole")

    def __init__(self, content: Held | Formula, whole: Layout | None = None, view: Layout | None = None) -> None:
        self.content, self.whole, self.view = content, whole, view

    def unpack(self) -> Tensor:
        """The tensor that was saved."""
        if isinstance(self.content, Held):
            return self.content.value()
        tensor = self.content.value(self.whole)
        return tensor if self.view is None or self.view == self.whole else tensor.as_strided(*self.view)


def unpack(saved: Saved) -> Tensor:
    """The second of autograd's hooks."""
    return saved.unpack()
