"""Find the optimizers and modules of this process. Layers have no references to the networks they are part of."""

import gc
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer


class Survey(NamedTuple):
    """The optimizers and modules of this process."""

    optimizers: list[Optimizer]
    modules: list[nn.Module]

    @classmethod
    def make(cls) -> "Survey":
        """Look through all objects that Python's garbage collector tracks. Takes about 0.1 s, so call it rarely."""
        survey = cls([], [])
        for candidate in gc.get_objects():
            kind = type(candidate)  # isinstance would also run code of proxies
            if issubclass(kind, Optimizer):
                survey.optimizers.append(candidate)
            elif issubclass(kind, nn.Module):
                survey.modules.append(candidate)
        return survey

    def name_of(self, layer: nn.Module) -> str:
        """Return the layer's name in the largest module that contains it, or "" if it stands alone."""
        parents = {id(child): (name, m) for m in self.modules for name, child in list(m._modules.items())}
        names: list[str] = []
        while id(layer) in parents and len(names) < 100:  # the limit is for modules that contain themselves
            name, layer = parents[id(layer)]
            names.insert(0, name)
        return ".".join(names)
