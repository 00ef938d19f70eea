"""Build the new normalization layer with the parameters and statistics of the old one."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.convert.fusion import activation_name
from micronorm.convert.rules import SourceNorm
from micronorm.convert.surgery import adopt_hooks
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.norm_act import FUSIBLE, ChannelsLast, activation_inside, has_hooks, with_activation
from micronorm.nn.spec import GroupedSpec, NormSpec

# With one number per channel, a group of few channels is normalized to little more than signs; see `fit`.
_CHANNELS_WHERE_ONE_ELEMENT = 16


def fit(spec: NormSpec, norm: SourceNorm, *, one_element: bool) -> tuple[NormSpec, list[str]]:
    """Return the spec for one layer, and remarks on how it differs from `spec`."""
    remarks = []
    if one_element and isinstance(spec, GroupedSpec):
        most = min(spec.groups, norm.channels // _CHANNELS_WHERE_ONE_ELEMENT)
        groups = next((g for g in range(most, 1, -1) if norm.channels % g == 0), 1)
        spec = replace(spec, groups=groups, min_channels_per_group=1)
        remarks.append(
            f"one element per channel: {groups} group{'s' * (groups > 1)} of {norm.channels // groups} channels"
        )
    default = type(spec).__dataclass_fields__.get("eps")
    if default is not None and spec.eps == default.default != norm.eps:  # type: ignore[attr-defined]
        spec = replace(spec, eps=norm.eps)  # type: ignore[call-arg]
        remarks.append(f"eps {norm.eps:g} kept")
    return spec, remarks


def zero_initialized(norm: SourceNorm, groups: int) -> Tensor | None:
    """Return the constant output, one number per group, of a norm whose weight is all zero; None for other norms.

    Such a norm starts a residual branch at a constant. With γ^b = 0 its group variance would be 0, and the division by
    sqrt(ε) would multiply its gradient by hundreds.
    """
    weight, bias = norm.tensor("weight"), norm.tensor("bias")
    if weight is None or weight.is_meta or bool(weight.detach().ne(0).any()):
        return None
    if bias is None:
        return weight.new_zeros(groups)
    by_group = bias.detach().unflatten(0, (groups, -1))
    return by_group[:, 0].clone() if bool(by_group.eq(by_group[:, :1]).all()) else None


def build(spec: NormSpec, norm: SourceNorm, *, like: Tensor, trainable: bool, warm_steps: int) -> nn.Module:
    """Build the layer of `spec` with the parameters, statistics, hooks and modes of `norm`, which is not changed.

    `like` has the device and dtype of the new layer, for an old layer without tensors. Parameters that the old layer
    did not have require gradients if `trainable`. The layer becomes BCN over `warm_steps` optimizer steps.
    """
    reference = next((t for t in (norm.tensor("weight"), norm.tensor("running_var")) if t is not None), like)
    with torch.device(reference.device):
        bare = spec(norm.channels, dims=norm.dims)
    if not isinstance(bare, nn.Module):
        raise TypeError(f"{spec} must build an nn.Module for {norm.channels} channels, got {type(bare).__name__}")
    bare.to(reference.dtype)
    whole = _with_tail(bare, norm.tail) if norm.tail else bare
    made = whole if isinstance(whole, BatchChannelNorm) else bare
    if isinstance(made, BatchChannelNorm):
        _carry_into_bcn(made, norm)
        if warm_steps and norm.tensor("running_mean") is not None:
            made.warm(warm_steps)
    else:
        _carry(made, norm, ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"))
    inherited = set(norm.module.parameters())  # these keep their requires_grad, those of an activation included
    for parameter in made.parameters():
        if parameter not in inherited:
            parameter.requires_grad_(trainable)
    if norm.channels_last:
        whole = ChannelsLast(whole)
    whole.train(norm.module.training)
    adopt_hooks(whole, norm.module)
    return whole


def _with_tail(made: nn.Module, tail: dict[str, nn.Module]) -> nn.Module:
    act = tail.get("act")
    if "aa" in tail:
        act = nn.Sequential(act if act is not None else nn.Identity(), tail["aa"])
    return with_activation(made, drop=tail.get("drop"), act=act)


def computed_inside(made: nn.Module, norm: SourceNorm) -> tuple[str | None, tuple[str, ...]]:
    """Return the name of the activation that `made`, built for a norm-act layer, computes in its passes; or why not."""
    act, drop = norm.tail.get("act"), norm.tail.get("drop", nn.Identity())
    if type(made) not in FUSIBLE or act is None or type(act) is nn.Identity:
        return None, ()
    activation = None if "aa" in norm.tail else activation_inside(drop, act)
    if activation is not None:
        return activation_name(activation), ()
    if "aa" in norm.tail:
        return None, ("its layer blurs after the activation",)
    if type(drop) is not nn.Identity:
        return None, (f"{type(drop).__name__} stands between it and its activation",)
    if has_hooks(act):
        return None, (f"the {type(act).__name__} inside its layer has hooks",)
    return None, (f"norms do not compute the {type(act).__name__} inside its layer",)


def carries(made: nn.Module, norm: SourceNorm, name: str) -> bool:
    """Return whether the new layer takes a tensor of the old one: both have it, with the same shape."""
    old, new = norm.tensor(name), getattr(made, name, None)
    return old is not None and isinstance(new, Tensor) and old.shape == new.shape


def _carry_into_bcn(made: BatchChannelNorm, norm: SourceNorm) -> None:
    _carry(made, norm, ("running_mean", "running_var"))
    made.update_estimates_weight()
    constant = zero_initialized(norm, made.num_groups)
    if constant is None:
        _carry(made, norm, ("weight", "bias"))
        return
    with torch.no_grad():  # γ^b = 1 and β^b = 0 as in every new layer
        made.group_weight.zero_()
        made.group_bias.copy_(constant)


def _carry(made: nn.Module, norm: SourceNorm, names: tuple[str, ...]) -> None:
    """Move parameters as the same objects, so that tied ones stay tied, and copy buffers."""
    layer: Any = made
    for name in names:
        if not carries(made, norm, name):
            continue
        old, new = norm.tensor(name), getattr(layer, name)
        if isinstance(old, nn.Parameter) and isinstance(new, nn.Parameter):
            layer._parameters[name] = old
        else:
            with torch.no_grad():
                new.copy_(old)
