"""Save and restore the state of a model: buffers, windows, random states and, on request, parameters."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from micronorm.nn.bcn import BatchChannelNorm
from micronorm.ops.private_api import foreach_copy_, preserve_version


class RandomState:
    """Read, seed and restore the generators of torch (CPU and one GPU), numpy and Python."""

    @staticmethod
    def get(device: torch.device) -> dict[str, Any]:
        """Return the states as tensors and plain values, which `torch.load(weights_only=True)` can read."""
        numpy_state: Any = numpy.random.get_state(legacy=True)
        kind, keys, position, has_gauss, gauss = numpy_state
        version, words, next_gauss = random.getstate()
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            "numpy": [kind, torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(gauss)],
            "python": [version, torch.tensor(words), next_gauss],
        }

    @staticmethod
    def seed(seed: int, device: torch.device) -> None:
        """Seed every generator. Other GPUs than `device` keep their state."""
        torch.default_generator.manual_seed(seed)
        numpy.random.seed(seed % 2**32)
        random.seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)

    @staticmethod
    def set(state: dict[str, Any], device: torch.device) -> None:
        """Restore what `get` returned. A state saved without a GPU does not change the GPU's generator."""
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], device)
        kind, keys, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, gauss))
        version, words, next_gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), next_gauss))

    @staticmethod
    @contextlib.contextmanager
    def preserved(devices: Sequence[torch.device]) -> Iterator[None]:
        """Restore the generators of the CPU and of these devices when the block ends."""
        states = [(RandomState.get(device), device) for device in (torch.device("cpu"), *devices)]
        try:
            yield
        finally:
            for state, device in states:
                RandomState.set(state, device)


class Snapshot:
    """The state of a model at one moment. `restore` puts the model back to it, bit for bit, any number of times.

    A snapshot holds all buffers (a forward may also replace a buffer or register a new one), the windows of the
    BatchChannelNorm layers, and the random states. It holds neither gradients nor plain attributes of other modules.

    Args:
        model: the model to save.
        parameters: also save the parameters.
    """

    def __init__(self, model: nn.Module, *, parameters: bool = False) -> None:
        self.model = model
        self.parameters = parameters
        self._copies: list[Tensor] = []
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Save the present state. A second call reuses the memory of the first unless shapes have changed."""
        modules = list(self.model.modules())
        self._registries = [(module._buffers, dict(module._buffers)) for module in modules]
        self._windows = [module._window for module in modules if isinstance(module, BatchChannelNorm)]
        held = [*(self.model.parameters() if self.parameters else ()), *self.model.buffers()]
        self._tensors = [tensor.detach() for tensor in held]
        self._tensors += [tensor for window in self._windows for tensor in (window.sums, window.reference, window.lost)]
        if list(map(_layout, self._tensors)) != list(map(_layout, self._copies)):
            self._copies = [torch.empty_like(tensor) for tensor in self._tensors]
        if self._copies:
            foreach_copy_(self._copies, self._tensors)
        self._host_states = [window.host_state() for window in self._windows]
        devices = {tensor.device for tensor in (*self.model.parameters(), *self._tensors)}
        self._random = [(RandomState.get(device), device) for device in devices or {torch.device("cpu")}]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the model back to the state that the last `take` saved."""
        for registry, saved in self._registries:
            registry.clear()
            registry.update(saved)
        if self._copies:
            foreach_copy_(self._tensors, self._copies)
        for window, state in zip(self._windows, self._host_states, strict=True):
            window.restore_host_state(state)
        for state, device in self._random:
            RandomState.set(state, device)


@contextlib.contextmanager
def preserved(model: nn.Module, *, parameters: bool = True) -> Iterator[Snapshot]:
    """Restore parameters, buffers, windows and random states when the block ends, also after an exception.

    Without `parameters`, the block must not change the parameters. A forward that ran before the block can still run
    its backward after it, because parameters and buffers keep their version counters. A graph made inside the block
    must not be used after it.
    """
    snapshot = Snapshot(model, parameters=parameters)
    with contextlib.ExitStack() as stack:
        for tensor in (*(model.parameters() if parameters else ()), *model.buffers()):
            if not tensor.is_inference():
                # Safe: the values that autograd saved are restored to the bit. One tensor per call, because older
                # versions of torch do not accept several.
                stack.enter_context(preserve_version(tensor))
        try:
            yield snapshot
        finally:
            snapshot.restore()


def _layout(tensor: Tensor) -> tuple[torch.Size, torch.device, torch.dtype]:
    return tensor.shape, tensor.device, tensor.dtype
