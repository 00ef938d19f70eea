"""The bytes a forward leaves behind, counted by the storages that are still alive, whoever holds them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Storages(TorchDispatchMode):
    """Follows every storage that an operation returns, but for those of `known` tensors."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self) -> int:
        """The bytes of those that are not freed yet."""
        return sum(size for ref, size in self.seen.values() if not ref.expired())


def forward(model: nn.Module, x: Tensor) -> tuple[Tensor, Storages]:
    """The sum over the model's output, and what is alive because of it."""
    with Storages([*model.parameters(), *model.buffers(), x]) as storages:
        loss = model(x).sum()
    return loss, storages


def kept(model: nn.Module, x: Tensor) -> int:
    """What one forward keeps for its backward."""
    loss, storages = forward(model, x)
    assert loss.requires_grad
    return storages.alive()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of one forward and backward, of x too where it wants one."""
    inputs = [*model.parameters(), *([x] if x.requires_grad else [])]
    for tensor in inputs:
        tensor.grad = None
    model(x).square().sum().backward()
    return [tensor.grad for tensor in inputs if tensor.grad is not None]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether all are equal to the bit."""
    return len(first) == len(second) and all(map(torch.equal, first, second))
