"""Specs: small immutable values that say which layer to build. Other libraries use strings for this.

A norm spec called with a channel count builds the layer, so it fits every `norm_layer=` argument of torchvision. timm
accepts only types, functions and partials there: give it the layer's class, or `mn.nn.norm_act_layer(spec)` for models
with norm and activation in one layer. A weight spec called with a plain layer builds its counterpart around the same
parameters.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from torch import nn

from micronorm.ops.group import choose_groups


@dataclass(frozen=True)
class NormSpec:
    """Build a normalization layer for a number of channels: `mn.GN(groups=8)(64)`.

    Specs compare and hash by value. To add a normalization, subclass as a frozen dataclass. Its fields are the
    arguments that all layers of a network share. Set `layer` to a class that takes `num_channels` and the fields as
    keyword arguments, for N×C×… inputs of any rank; or override `__call__`. A `__post_init__` calls
    `super().__post_init__()` first. See `docs/add_a_normalization.md`.

    Example:
        >>> import torch
        >>> class Scale(nn.Module):
        ...     def __init__(self, num_channels, *, start=1.0):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.full((num_channels, 1, 1), start))
        ...
        ...     def forward(self, x):
        ...         return x * self.weight
        >>> @dataclass(frozen=True)
        ... class ScaleSpec(NormSpec):
        ...     layer = Scale
        ...     start: float = 1.0
        >>> ScaleSpec(start=0.5)(64).weight.shape
        torch.Size([64, 1, 1])
    """

    layer: ClassVar[type[nn.Module] | None] = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, nn.Module):
                spec = f"mn.{type(self).__name__}"
                raise TypeError(
                    f"{spec}({field.name}=...) got a module, {type(value).__name__}. A norm spec builds a layer for a "
                    f"number of channels: did you mean {spec}()(num_channels)?"
                )
        if self.layer is not None:
            self(1)  # the layer checks the arguments

    def __call__(self, num_channels: int, *, dims: int = 2) -> Any:
        """Return the layer for N×C×… inputs with `dims` spatial dimensions (0 for N×C).

        `layer` takes inputs of any rank, so `dims` has no effect unless a subclass overrides this.
        """
        if self.layer is None:
            raise TypeError(f"{type(self).__name__} must set `layer` or override `__call__`")
        return self.layer(num_channels=num_channels, **vars(self))


@dataclass(frozen=True)
class GroupedSpec(NormSpec):
    """A norm spec with a number of groups, which `mn.functional.choose_groups` fits to each layer.

    Args:
        groups: the number of groups. A layer whose channels do not divide into so many gets fewer.
        min_channels_per_group: a group must have at least so many channels for `groups` to be taken.
    """

    groups: int = 32
    min_channels_per_group: int = 2

    def __call__(self, num_channels: int, *, dims: int = 2) -> Any:
        """Return the layer. It takes any number of spatial dimensions, so `dims` has no effect."""
        assert self.layer is not None
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

    Example:
        >>> from micronorm.nn import WS
        >>> conv = nn.Conv2d(3, 8, 3)
        >>> WS()(conv).weight is conv.weight
        True
    """

    @abstractmethod
    def __call__(self, layer: nn.Module) -> nn.Module:
        """Return the counterpart of `layer`, with the same parameter objects."""


SPECS: dict[str, type[NormSpec] | type[WeightSpec]] = {}
"""Every spec class by its name, for command lines and tables of results: `SPECS["BCN"]` is `mn.BCN`."""

Spec = TypeVar("Spec", bound=type[NormSpec] | type[WeightSpec])


def register(spec: Spec) -> Spec:
    """Add a spec class to `mn.nn.SPECS` and return it, so that this can be used as a decorator.

    Command lines then find the spec by its name, and `micronorm bench` times a norm spec as a method. `mn.observe` and
    `micronorm diagnose` measure its layers if their class has `num_channels` and a method `normalized(x)`. This method
    returns the output without weight and bias.

    Args:
        spec: a subclass of NormSpec or WeightSpec.

    Returns:
        The same class.

    Raises:
        TypeError: if `spec` is not a subclass of NormSpec or WeightSpec.
        ValueError: if micronorm itself has a spec of that name.

    Example:
        >>> @register
        ... @dataclass(frozen=True)
        ... class NoNorm(NormSpec):
        ...     def __call__(self, num_channels, *, dims=2):
        ...         return nn.Identity()
        >>> SPECS.pop("NoNorm") is NoNorm
        True
    """
    if not (isinstance(spec, type) and issubclass(spec, NormSpec | WeightSpec)):
        raise TypeError(f"register a subclass of mn.NormSpec or mn.nn.WeightSpec, got {spec!r}")
    known = SPECS.get(spec.__name__, spec)
    if known is not spec and known.__module__.startswith("micronorm."):
        raise ValueError(f"micronorm has a spec named {spec.__name__}; give yours another name")
    SPECS[spec.__name__] = spec
    return spec
