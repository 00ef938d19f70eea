"""Specs: small immutable values that say what to build. They stand where other libraries pass strings.

A norm spec called with a channel count builds the layer, so it fits every `norm_layer=` argument of torchvision. timm
takes no callables there but types, functions and partials: the layer's class, or `mn.nn.norm_act_layer(spec)` where its
model keeps norm and activation in one. A weight spec called with a plain layer builds its counterpart around the same
parameters.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn

from micronorm.ops.group import choose_groups


@dataclass(frozen=True)
class NormSpec(ABC):
    """Builds one normalization layer for a channel count."""

    @abstractmethod
    def __call__(self, num_channels: int, *, dims: int = 2) -> nn.Module:
        """The layer for N×C×… inputs with `dims` spatial dimensions (0 for N×C)."""


@dataclass(frozen=True)
class GroupedSpec(NormSpec):
    """A norm spec with a number of groups; `choose_groups` fits it to each layer."""

    groups: int = 32
    min_channels_per_group: int = 2

    def __post_init__(self) -> None:
        self.groups_for(1)  # refuses bad values where they are written, not layers later

    def groups_for(self, num_channels: int) -> int:
        """The group count of a layer with `num_channels` channels."""
        return choose_groups(num_channels, groups=self.groups, min_channels_per_group=self.min_channels_per_group)


@dataclass(frozen=True)
class WeightSpec(ABC):
    """Builds the reparameterized counterpart of a convolution or linear layer."""

    @abstractmethod
    def __call__(self, layer: nn.Module) -> nn.Module:
        """The counterpart of `layer`, holding the same parameter objects."""
