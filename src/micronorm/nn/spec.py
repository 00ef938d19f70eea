"""Specs: small immutable values that say which layer to build. They stand where other libraries take strings.

A norm spec called with a channel count builds the layer, so it fits every `norm_layer=` argument of torchvision. timm
accepts only types, functions and partials there: give it the layer's class, or `mn.nn.norm_act_layer(spec)` for models
with norm and activation in one layer. A weight spec called with a plain layer builds its counterpart around the same
parameters.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import nn

from micronorm.ops.group import choose_groups


@dataclass(frozen=True)
class NormSpec(ABC):
    """Build one normalization layer for a channel count: `mn.GN(groups=8)(64)`.

    The fields of a spec are the arguments that all its layers share. Specs compare and hash by value. A subclass is a
    frozen dataclass with `__call__`. If it has a `__post_init__`, that calls `super().__post_init__()` first.
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
    def __call__(self, num_channels: int, *, dims: int = 2) -> Any:
        """Return the layer for N×C×… inputs with `dims` spatial dimensions (0 for N×C)."""


@dataclass(frozen=True)
class LayerSpec(NormSpec):
    """A norm spec whose fields are keyword arguments of one class, `layer`, for inputs of any rank."""

    layer: ClassVar[type[nn.Module]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self(1)  # the layer checks the arguments

    def __call__(self, num_channels: int, *, dims: int = 2) -> Any:
        """Return the layer. It takes any number of spatial dimensions, so `dims` has no effect."""
        return self.layer(num_channels=num_channels, **vars(self))


@dataclass(frozen=True)
class GroupedSpec(LayerSpec):
    """A norm spec with a number of groups, which `mn.functional.choose_groups` fits to each layer.

    Args:
        groups: the number of groups. A layer whose channels do not divide into so many gets fewer.
        min_channels_per_group: a group must have at least so many channels for `groups` to be taken.
    """

    groups: int = 32
    min_channels_per_group: int = 2

    def __call__(self, num_channels: int, *, dims: int = 2) -> Any:
        """Return the layer. It takes any number of spatial dimensions, so `dims` has no effect."""
        options = {
            name: value for name, value in vars(self).items() if name not in ("groups", "min_channels_per_group")
        }
        return self.layer(num_channels=num_channels, num_groups=self.groups_for(num_channels), **options)

    def groups_for(self, num_channels: int) -> int:
        """Return the number of groups of a layer with `num_channels` channels."""
        return choose_groups(num_channels, groups=self.groups, min_channels_per_group=self.min_channels_per_group)


@dataclass(frozen=True)
class WeightSpec(ABC):
    """Build the reparameterized counterpart of a convolution or linear layer: `mn.WS()(conv)`.

    The counterpart holds the same parameter objects, so an optimizer made before still updates them.
    """

    @abstractmethod
    def __call__(self, layer: nn.Module) -> nn.Module:
        """Return the counterpart of `layer`, with the same parameter objects."""
