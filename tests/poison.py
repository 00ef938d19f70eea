"""Memory that nobody has written holds NaN, integers their largest: what a kernel leaves out shows."""

from collections.abc import Iterable
from types import ModuleType

import pytest
import torch


class Poisoned:
    """torch, but that memory which nobody has written holds NaN.

    It stands for torch in one module only: torch itself remembers its constructors, and would remember others for good.
    """

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *args, **kwargs):
        return _spoil(torch.empty(*args, **kwargs))

    def empty_like(self, *args, **kwargs):
        return _spoil(torch.empty_like(*args, **kwargs))


def _spoil(made: torch.Tensor) -> torch.Tensor:
    return made.fill_(torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).max)


def poison_memory(monkeypatch: pytest.MonkeyPatch, modules: Iterable[ModuleType]) -> None:
    """Poison what these modules allocate until the test is over; for eager code only."""
    for module in modules:
        monkeypatch.setattr(module, "torch", Poisoned())
    new_empty = torch.Tensor.new_empty

    def poisoned(*args, **kwargs):
        made = new_empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
