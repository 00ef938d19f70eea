"""Compute a normalization together with the addition and the activation that follow it.

`norm_act` is the function; `BatchChannelNormAct` and `NormAct` are layers in the form of timm's norm-act layers.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.group import GroupNorm
from micronorm.nn.passive_hook import PassiveHook
from micronorm.nn.spec import NormSpec
from micronorm.ops.activation import IDENTITY, Activation, ActivationKind
from micronorm.ops.private_api import has_global_hooks

Act = type[nn.Module] | Callable[..., nn.Module]

FUSIBLE: tuple[type[nn.Module], ...] = (BatchChannelNorm, GroupNorm)
"""Norms whose forward takes `residual=` and `activation=`. Subclasses do not count: they may have another forward."""

ACTIVATION_LAYERS: dict[ActivationKind, type[nn.Module]] = {
    ActivationKind.RELU: nn.ReLU,
    ActivationKind.LEAKY_RELU: nn.LeakyReLU,
    ActivationKind.SILU: nn.SiLU,
}
"""torch's layer for each activation that a norm can compute."""
ACTIVATION_FUNCTIONS: dict[ActivationKind, Callable[..., Tensor]] = {
    ActivationKind.RELU: F.relu,
    ActivationKind.LEAKY_RELU: F.leaky_relu,
    ActivationKind.SILU: F.silu,
}
"""torch's function for each activation that a norm can compute."""
_KINDS: dict[Any, ActivationKind] = {
    torch.relu: ActivationKind.RELU,
    **{known: kind for table in (ACTIVATION_LAYERS, ACTIVATION_FUNCTIONS) for kind, known in table.items()},
}


def norm_act(
    norm: nn.Module,
    x: Tensor,
    act: Callable[[Tensor], Tensor] | None = None,
    *,
    residual: Tensor | None = None,
    inplace: bool = False,
) -> Tensor:
    """Return act(norm(x) + residual), computed by the norm in its own passes where possible.

    A norm of micronorm computes the addition and a ReLU, LeakyReLU or SiLU itself. Every other case runs the layers
    one by one: another norm, another activation, hooks on one of the layers, or a residual of another shape or dtype.

    Args:
        norm: the normalization layer.
        x: its input, N×C×….
        act: the activation: a layer, or a function such as `torch.nn.functional.relu`.
        residual: the tensor that is added to norm(x) before the activation.
        inplace: add with `+=`, so that the sum has the dtype of norm(x).

    Example:
        >>> x = torch.randn(1, 16, 8, 8)
        >>> norm_act(BatchChannelNorm(16), x, nn.ReLU(), residual=x).shape
        torch.Size([1, 16, 8, 8])
    """
    activation = fusible_activation(act)
    if activation is None or (residual is not None and not activation.keeps_sign):
        y = norm_act(norm, x, residual=residual, inplace=inplace)
        return y if act is None else act(y)
    # torch.fx traces with symbolic inputs, which are not tensors; it must see each layer.
    if isinstance(x, Tensor) and can_fuse(norm) and (residual is None or _is_like(residual, x)):
        if residual is None and activation.kind is ActivationKind.IDENTITY:
            return norm(x)
        # The plain string: torch.compile of torch 2.8 and older does not find a StrEnum among the keys of a dict.
        return norm(x, residual=residual, activation=activation.kind.value, negative_slope=activation.slope)
    y = norm(x)
    if residual is not None and inplace:
        y += residual
    elif residual is not None:
        y = y + residual
    return y if act is None else act(y)


def _is_like(residual: Any, x: Tensor) -> bool:
    return isinstance(residual, Tensor) and residual.shape == x.shape and residual.dtype == x.dtype


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks that need the module itself to be called.

    A `PassiveHook` does not count: it changes nothing and accepts fused calls as they come.
    """
    tables: tuple[dict[int, Any], ...] = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    # The first `any` is the fast path: this runs in every forward, and most modules have no hooks.
    return any(tables) and not all(isinstance(hook, PassiveHook) for table in tables for hook in table.values())


def can_fuse(norm: nn.Module) -> bool:
    """Return whether a norm can also compute an addition and an activation: it has no activation and no hooks."""
    if type(norm) not in FUSIBLE or norm.activation is not None or "forward" in norm.__dict__:
        return False
    return not has_hooks(norm) and not has_global_hooks()


def fusible_activation(act: Callable[[Tensor], Tensor] | None) -> Activation | None:
    """Return the activation that a norm can compute in place of `act`, or None if it cannot."""
    if act is None:
        return IDENTITY
    if isinstance(act, nn.Module) and (has_hooks(act) or "forward" in act.__dict__):
        return None
    kind = _KINDS.get(type(act) if isinstance(act, nn.Module) else act)
    if kind is None:
        return None
    return Activation(kind, act.negative_slope) if isinstance(act, nn.LeakyReLU) else Activation(kind)


def activation_inside(drop: nn.Module, act: nn.Module) -> Activation | None:
    """Return the activation that a norm-act layer computes in its norm's passes, or None if it calls `act`."""
    return fusible_activation(act) if type(drop) is nn.Identity and not has_hooks(drop) else None


class BatchChannelNormAct(BatchChannelNorm):
    """`BatchChannelNorm`, then dropout, then an activation: y = act(drop(BCN(x))).

    Arguments and state-dict keys are those of timm's norm-act layers. An nn.ReLU, nn.LeakyReLU or nn.SiLU without
    dropout is computed by the normalization.

    Args:
        num_channels: C.
        num_groups: as in `BatchChannelNorm`.
        apply_act: False leaves the activation out.
        act_layer: builds the activation.
        act_kwargs: arguments for `act_layer`.
        inplace: passed to `act_layer` if it has this argument.
        drop_layer: builds the layer between norm and activation.
        options: the other arguments of `BatchChannelNorm`, except `activation`.

    Example:
        >>> layer = BatchChannelNormAct(64, act_layer=nn.SiLU)
        >>> layer(torch.randn(1, 64, 8, 8)).shape
        torch.Size([1, 64, 8, 8])
    """

    def __init__(
        self,
        num_channels: int,
        num_groups: int | None = None,
        *,
        apply_act: bool = True,
        act_layer: Act | None = nn.ReLU,
        act_kwargs: dict[str, Any] | None = None,
        inplace: bool = True,
        drop_layer: Callable[[], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_channels, num_groups, activation=None, **options)
        self.drop = drop_layer() if drop_layer is not None else nn.Identity()
        self.act = _activation(act_layer, act_kwargs, inplace=inplace) if apply_act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override] # it has its own activation
        fused = activation_inside(self.drop, self.act)
        if fused is not None:
            return self._normalize(x, fused)
        return self.act(self.drop(self._normalize(x, IDENTITY)))


class NormAct(nn.Module):
    """Any norm, then dropout, then an activation: y = act(drop(norm(x))).

    Args:
        norm: the norm.
        drop: the layer between norm and activation, or None.
        act: the activation, or None.

    Example:
        >>> layer = NormAct(nn.GroupNorm(4, 16), act=nn.SiLU())
        >>> layer(torch.randn(1, 16, 8, 8)).shape
        torch.Size([1, 16, 8, 8])
    """

    def __init__(self, norm: nn.Module, *, drop: nn.Module | None = None, act: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm
        self.drop = nn.Identity() if drop is None else drop
        self.act = nn.Identity() if act is None else act

    @property
    def weight(self) -> Tensor | None:
        """The norm's weight: timm's models zero the `weight` of the last norm of a residual branch."""
        return getattr(self.norm, "weight", None)

    @property
    def bias(self) -> Tensor | None:
        """The norm's bias."""
        return getattr(self.norm, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        if activation_inside(self.drop, self.act) is not None:
            return norm_act(self.norm, x, self.act)
        return self.act(self.drop(self.norm(x)))


class ChannelsLast(nn.Module):
    """Apply a norm over axis 1 to an input N×…×C whose channels are the last axis.

    Args:
        norm: the norm.

    Example:
        >>> ChannelsLast(nn.GroupNorm(4, 16))(torch.randn(1, 49, 16)).shape
        torch.Size([1, 49, 16])
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(-1, 1)).movedim(1, -1)


def norm_act_layer(spec: NormSpec, act_layer: Act = nn.ReLU) -> Callable[..., nn.Module]:
    """Return a function that builds norm-act layers, for the `norm_layer=` of timm's models that expect one.

    timm accepts only types and functions there, and does not pass its activation to a function.

    Args:
        spec: the norm spec.
        act_layer: builds the activation; give that of the model.

    Returns:
        A function of the number of channels, which takes the other arguments of timm's norm-act layers as well.

    Example:
        >>> from micronorm.nn import BCN
        >>> make = norm_act_layer(BCN(groups=8), act_layer=nn.SiLU)
        >>> make(64).act
        SiLU(inplace=True)
    """

    def make(
        num_channels: int,
        *,
        apply_act: bool = True,
        act_kwargs: dict[str, Any] | None = None,
        inplace: bool = True,
        drop_layer: Callable[[], nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        norm = spec(num_channels).to(device=device, dtype=dtype)
        act = _activation(act_layer, act_kwargs, inplace=inplace) if apply_act else None
        return with_activation(norm, drop=drop_layer() if drop_layer is not None else None, act=act)

    return make


def with_activation(
    norm: nn.Module, *, drop: nn.Module | None = None, act: nn.Module | None = None
) -> BatchChannelNormAct | NormAct:
    """Combine a new norm with what follows it: `BatchChannelNormAct` for a BatchChannelNorm, otherwise `NormAct`."""
    if type(norm) is not BatchChannelNorm:
        return NormAct(norm, drop=drop, act=act)
    made: Any = norm
    made.__class__ = BatchChannelNormAct  # which adds these two children and another forward
    made.drop = nn.Identity() if drop is None else drop
    made.act = nn.Identity() if act is None else act
    return made


def _activation(act_layer: Act | None, act_kwargs: dict[str, Any] | None, *, inplace: bool) -> nn.Module:
    if act_layer is None:
        return nn.Identity()
    try:
        return act_layer(**{"inplace": inplace, **(act_kwargs or {})})
    except TypeError:  # GELU and its like have no such argument
        return act_layer(**(act_kwargs or {}))
