"""Norms with what follows them: timm keeps norm, dropout and activation in one layer, so ours must fit in its place."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.nn.bcn import BatchChannelNorm, Statistics
from micronorm.nn.group import GroupNorm, InstanceNorm
from micronorm.nn.passive_hook import PassiveHook
from micronorm.nn.spec import NormSpec
from micronorm.ops.activation import Activation

Act = type[nn.Module] | Callable[..., nn.Module]

FUSIBLE: tuple[type[nn.Module], ...] = (BatchChannelNorm, GroupNorm, InstanceNorm)
"""Norms whose forward takes `residual=` and `activation=`; exactly these, a subclass may have a forward of its own."""


class BatchChannelNormAct(BatchChannelNorm):
    """`BatchChannelNorm`, then dropout, then an activation, with the arguments and state-dict keys of timm's norm-acts.

    y = act(drop(BCN(x))). A plain nn.ReLU, nn.LeakyReLU or nn.SiLU without dropout is
    fused into the normalization.

    Args:
        num_channels: C.
        num_groups: as in `BatchChannelNorm`.
        apply_act: without it the activation is the identity.
        act_layer: builds the activation.
        act_kwargs: arguments for `act_layer`.
        inplace: handed to `act_layer` where it takes it.
        drop_layer: builds the layer between norm and activation.
        statistics: as in `BatchChannelNorm`, like all the others.

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
        statistics: Statistics = "step",
        rate: float | str = "lr",
        micro_batch: int = 1,
        eps: float = 1e-5,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_channels,
            num_groups,
            statistics=statistics,
            rate=rate,
            micro_batch=micro_batch,
            eps=eps,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        self.drop = drop_layer() if drop_layer is not None else nn.Identity()
        self.act = _activation(act_layer, act_kwargs, inplace=inplace) if apply_act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override] # it has its own activation
        """act(drop(BCN(x)))."""
        fused = activation_inside(self.drop, self.act)
        if fused is not None:
            return self._normalize(x, fused)
        return self.act(self.drop(self._normalize(x, Activation())))


class NormAct(nn.Module):
    """Any norm, then dropout, then an activation: y = act(drop(norm(x))).

    A plain nn.ReLU, nn.LeakyReLU or nn.SiLU without dropout is handed to a norm that can take it.

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
        """The norm's: timm's models zero the `weight` of the last norm of a residual branch."""
        return getattr(self.norm, "weight", None)

    @property
    def bias(self) -> Tensor | None:
        """The norm's."""
        return getattr(self.norm, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """act(drop(norm(x)))."""
        if takes_over(self.norm):
            fused = activation_inside(self.drop, self.act)
            if fused is not None:
                return self.norm(x, activation=fused.kind, negative_slope=fused.slope)
        return self.act(self.drop(self.norm(x)))


class ChannelsLast(nn.Module):
    """A norm over axis 1, applied to an input whose channels are the last axis: N×…×C, as layer norms over tokens have.

    Example:
        >>> ChannelsLast(nn.GroupNorm(4, 16))(torch.randn(1, 49, 16)).shape
        torch.Size([1, 49, 16])
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """norm(x) with the channels moved to axis 1 and back."""
        return self.norm(x.movedim(-1, 1)).movedim(1, -1)


def norm_act_layer(spec: NormSpec, act_layer: Act = nn.ReLU) -> Callable[..., nn.Module]:
    """A function that builds norm-with-activation layers, for the `norm_layer=` of timm's models that want one.

    timm takes types and functions there, no other callables, and gives a function no activation.

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
    """One layer of a fresh norm and what follows it: `BatchChannelNormAct` for BatchChannelNorm, else `NormAct`."""
    if type(norm) is not BatchChannelNorm:
        return NormAct(norm, drop=drop, act=act)
    made = BatchChannelNormAct(
        norm.num_channels,
        norm.num_groups,
        apply_act=False,
        statistics=norm.statistics,
        rate=norm.rate,
        micro_batch=norm.micro_batch,
        eps=norm.eps,
        backend=norm.backend,
        device=norm.weight.device,
        dtype=norm.weight.dtype,
    )
    made.drop = nn.Identity() if drop is None else drop
    made.act = nn.Identity() if act is None else act
    return made


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
    # The first `any` is the fast path: every forward asks, and most modules have no hooks.
    return any(tables) and not all(isinstance(hook, PassiveHook) for table in tables for hook in table.values())


def takes_over(norm: Any) -> bool:
    """Whether a norm may compute what follows it: it does nothing of the kind yet, and nobody looks at its output.

    Example:
        >>> takes_over(GroupNorm(4, 16)), takes_over(nn.GroupNorm(4, 16))
        (True, False)
    """
    return type(norm) in FUSIBLE and norm.activation is None and not has_hooks(norm) and "forward" not in norm.__dict__


def activation_inside(drop: nn.Module, act: nn.Module) -> Activation | None:
    """The activation of a norm-act that its norm computes in its own passes: one it can, with no dropout before it.

    Example:
        >>> activation_inside(nn.Identity(), nn.ReLU()), activation_inside(nn.Dropout(), nn.ReLU())
        (Activation(kind='relu', slope=0.01), None)
    """
    return fusible_activation(act) if type(drop) is nn.Identity and not has_hooks(drop) else None


def fusible_activation(module: nn.Module) -> Activation | None:
    """The activation that a module stands for, where a normalization can take it over; None where it cannot.

    Example:
        >>> fusible_activation(nn.SiLU())
        Activation(kind='silu', slope=0.01)
    """
    if has_hooks(module) or "forward" in vars(module):
        return None
    if type(module) is nn.LeakyReLU:
        return Activation("leaky_relu", module.negative_slope)
    kind = {nn.ReLU: "relu", nn.SiLU: "silu"}.get(type(module))
    return None if kind is None else Activation(kind)


def _activation(act_layer: Act | None, act_kwargs: dict[str, Any] | None, *, inplace: bool) -> nn.Module:
    if act_layer is None:
        return nn.Identity()
    try:
        return act_layer(**{"inplace": inplace, **(act_kwargs or {})})
    except TypeError:  # GELU and its like have no such argument
        return act_layer(**(act_kwargs or {}))
