"""Specs: small immutable values that say what to build. They stand where other libraries pass strings.

A norm spec called with a channel count builds the layer, so it fits every `norm_layer=` argument of torchvision. timm
takes no callables there but types, functions and partials: the layer's class, or `mn.nn.norm_act_layer(spec)` where its
model keeps norm and activation in one. A weight spec called with a plain layer builds its counterpart around the same
parameters.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

from torch import nn

from micronorm.ops.group import choose_groups


@dataclass(frozen=True)
class NormSpec(ABC):
    """Builds one normalization layer for a channel count.

    Its arguments are those that all layers share; the channel count comes with the call: `mn.GN(groups=8)(64)`. Specs
    compare and hash by value. A subclass is a frozen dataclass with `__call__`; where it checks its arguments it calls
    `super().__post_init__()` first.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, nn.Module):
                spec = f"mn.{type(self).__name__}"
                raise TypeError(
                    f"{spec}({field.name}=...) got a module, {type(value).__name__}. A norm spec builds a layer for a "
                    f"number of channels: did you mean {spec}()(num_channels)?"
                )

    @abstractmethod
    def __call__(self, num_channels: int, *, dims: int = 2) -> nn.Module:
        """The layer for N×C×… inputs with `dims` spatial dimensions (0 for N×C)."""


@dataclass(frozen=True)
class GroupedSpec(NormSpec):
    """A norm spec with a number of groups, which `mn.functional.choose_groups` fits to each layer.

    Args:
        groups: the number wanted; a layer whose channels do not divide into so many gets fewer.
        min_channels_per_group: how many channels a group must have at least for `groups` to be taken.
    """

    groups: int = 32
    min_channels_per_group: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.groups_for(1)  # refuses bad values where they are written, not layers later

    def groups_for(self, num_channels: int) -> int:
        """The group count of a layer with `num_channels` channels."""
        return choose_groups(num_channels, groups=self.groups, min_channels_per_group=self.min_channels_per_group)


@dataclass(frozen=True)
class WeightSpec(ABC):
    """Builds the reparameterized counterpart of a convolution or linear layer: `mn.WS()(conv)`.

    The counterpart holds the same parameter objects, so an optimizer made before still moves them.
    """

    @abstractmethod
    def __call__(self, layer: nn.Module) -> nn.Module:
        """The counterpart of `layer`, holding the same parameter objects."""
