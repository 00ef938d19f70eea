"""Where a step can be taken back to: buffers, windows and random states as they were when it began.

Parameters and optimizer state are not in it: they move in the optimizer's step alone, and that is not taken back.
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from micronorm.commit.transaction import Transaction
from micronorm.ops.private_api import foreach_copy_


class RandomState:
    """The states of all generators a training run may draw from: torch's on CPU and GPU, numpy's and Python's."""

    @staticmethod
    def get(device: torch.device) -> dict[str, Any]:
        """The states as tensors and plain values, which `torch.load(weights_only=True)` reads."""
        words_of_numpy: Any = numpy.random.get_state(legacy=True)
        kind, keys, position, has_gauss, gauss = words_of_numpy
        version, words, next_gauss = random.getstate()
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            "numpy": [kind, torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(gauss)],
            "python": [version, torch.tensor(words), next_gauss],
        }

    @staticmethod
    def seed(seed: int, device: torch.device) -> None:
        """Begin anew: Python's and numpy's generators start from the machine's entropy otherwise."""
        torch.manual_seed(seed)  # on the GPU too, when it is first used
        numpy.random.seed(seed % 2**32)
        random.seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)

    @staticmethod
    def set(state: dict[str, Any], device: torch.device) -> None:
        """Put back what `get` gave. A state without a GPU leaves the GPU's generator alone."""
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], device)
        kind, keys, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, gauss))
        version, words, next_gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), next_gauss))


class Savepoint:
    """The beginning of a step.

    Buffers are copied at every `take`, whatever they are: a BatchNorm moves its running statistics in the forward, and
    a micro-batch that is repeated must not count twice. A forward may also put another tensor in a buffer's place, or
    make its first one.
    """

    def __init__(self, model: nn.Module, transaction: Transaction, device: torch.device) -> None:
        self.model = model
        self.transaction = transaction
        self.device = device
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._places: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        self._cuda: Tensor | None = None
        self.take()  # so that the memory it needs is taken now, and not by a step that may have run out of it

    def take(self) -> None:
        """Remember this moment."""
        self._places = [(module._buffers, dict(module._buffers)) for module in self.model.modules()]
        buffers = self._buffers = [buffer.detach() for buffer in self.model.buffers()]
        if [(b.shape, b.device, b.dtype) for b in buffers] != [(c.shape, c.device, c.dtype) for c in self._copies]:
            self._copies = [torch.empty_like(b) for b in buffers]
        if buffers:
            foreach_copy_(self._copies, buffers)
        self.transaction.begin()
        self._torch, self._numpy, self._python = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
        self._cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to the moment remembered; it stays remembered."""
        for place, before in self._places:
            place.clear()
            place.update(before)
        if self._copies:
            foreach_copy_(self._buffers, self._copies)
        self.transaction.roll_back()
        torch.set_rng_state(self._torch)
        numpy.random.set_state(self._numpy)
        random.setstate(self._python)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self.device)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors of an optimizer's state, such as its momentum."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
