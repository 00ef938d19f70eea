"""A model put back exactly to where it was, for looks that run it at other weights or again and again."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from micronorm.nn.window import Window
from micronorm.ops.private_api import preserve_version


class Rewind:
    """Remembers a model as it stands; `back` puts it there again, to the bit and as often as it is called.

    Parameters, buffers (also those that a forward replaced or made), what BatchChannelNorm layers gathered, and the
    random states of torch, numpy and Python. Not `.grad`, which these looks leave alone, and not what a layer of
    somebody else's keeps in plain attributes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors = [t.detach() for t in (*model.parameters(), *model.buffers())]
        self._places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
        windows = (getattr(module, "_window", None) for module in model.modules())
        self._windows = [window for window in windows if isinstance(window, Window)]
        self._tensors += [t for window in self._windows for t in (window.sums, window.lost)]
        self._copies = [t.clone() for t in self._tensors]
        self._counts = [(w.forwards, list(w.passes), w.lost_seen, w.warned) for w in self._windows]
        self._cuda = sorted({t.device.index for t in self._tensors if t.device.type == "cuda"})
        self._random = self._random_states()

    @torch.no_grad()
    def back(self) -> None:
        """Put everything back."""
        for place, before in self._places:
            place.clear()
            place.update(before)
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copy)
        for window, (forwards, passes, lost_seen, warned) in zip(self._windows, self._counts, strict=True):
            window.ticket[0] = forwards
            window.passes.clear()
            window.passes.extend(passes)
            window.lost_seen, window.warned = lost_seen, warned
        of_torch, of_cuda, of_numpy, of_python = self._random
        torch.set_rng_state(of_torch)
        for device, state in zip(self._cuda, of_cuda, strict=True):
            torch.cuda.set_rng_state(state, device)
        numpy.random.set_state(of_numpy)
        random.setstate(of_python)

    def _random_states(self) -> tuple[Tensor, list[Tensor], Any, Any]:
        cuda = [torch.cuda.get_rng_state(device) for device in self._cuda]
        return torch.get_rng_state(), cuda, numpy.random.get_state(), random.getstate()


@contextlib.contextmanager
def rewinding(model: nn.Module) -> Iterator[Rewind]:
    """Whatever happens in this block, the model leaves it as it came.

    A backward pass that is still to come for an earlier forward works as if nothing had happened: parameters and
    buffers keep their version counters with their values. A graph that was made in the block is not to be kept beyond
    it.

    Example:
        >>> norm = nn.BatchNorm1d(3)
        >>> with rewinding(norm):
        ...     _ = norm(torch.randn(4, 3) + 1)
        >>> norm.running_mean
        tensor([0., 0., 0.])
    """
    rewind = Rewind(model)
    with contextlib.ExitStack() as stack:
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_inference():
                # Sound, since to the bit what autograd has saved is there again. One by one: older versions take no
                # several.
                stack.enter_context(preserve_version(tensor))
        try:
            yield rewind
        finally:
            rewind.back()
