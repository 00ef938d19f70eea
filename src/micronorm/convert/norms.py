"""Which layers of torch, timm and torchvision conversion recognises as norms, and the layers that replace them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from micronorm.convert.fusion import activation_name
from micronorm.convert.surgery import adopt_hooks
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.group import GroupNorm
from micronorm.nn.norm_act import FUSIBLE, ChannelsLast, activation_inside, has_hooks, with_activation
from micronorm.nn.spec import GroupedSpec, NormSpec
from micronorm.ops.private_api import BatchNormBase, InstanceNormBase

Family = Literal["batch", "frozen", "group", "instance", "layer"]

_FAMILIES: dict[type[nn.Module] | str, Family] = {
    BatchNormBase: "batch",
    nn.SyncBatchNorm: "batch",
    nn.GroupNorm: "group",
    GroupNorm: "group",
    InstanceNormBase: "instance",
    nn.LayerNorm: "layer",
    # Layers of timm and torchvision with their own forward, by name because the libraries may not be installed.
    "timm.layers.norm_act.BatchNormAct2d": "batch",
    "timm.layers.norm_act.SyncBatchNormAct": "batch",
    "timm.layers.norm_act.FrozenBatchNormAct2d": "frozen",
    "timm.layers.norm_act.GroupNormAct": "group",
    "timm.layers.norm_act.GroupNorm1Act": "group",
    "timm.layers.norm.GroupNorm": "group",
    "timm.layers.norm.GroupNorm1": "group",
    "timm.layers.norm.LayerNorm": "layer",
    "timm.layers.norm.LayerNorm2d": "layer",
    "timm.layers.norm.LayerNormFp32": "layer",
    "timm.layers.norm.LayerNorm2dFp32": "layer",
    "timm.layers.norm_act.LayerNormAct": "layer",
    "timm.layers.norm_act.LayerNormAct2d": "layer",
    "torchvision.models.convnext.LayerNorm2d": "layer",
}
_CHANNELS_FIRST = ("LayerNorm2d", "LayerNorm2dFp32", "LayerNormAct2d")


@dataclass(frozen=True)
class SourceNorm:
    """A normalization layer to be converted.

    Attributes:
        module: the layer.
        family: the kind of normalization.
        channels: C.
        dims: the number of spatial dimensions; 2 if its class does not fix it.
        eps: ε.
        tail: the layers that it applies after normalizing, by their attribute (timm's `drop`, `act` and `aa`).
        channels_last: whether the channels are the last axis.
    """

    module: nn.Module
    family: Family
    channels: int
    dims: int
    eps: float
    tail: dict[str, nn.Module]
    channels_last: bool = False

    def tensor(self, name: str) -> Tensor | None:
        """Return weight, bias, running_mean or running_var; None if the layer does not have it."""
        return getattr(self.module, name, None)


def _computed_as(module: nn.Module) -> Iterator[type[nn.Module] | str]:
    """Yield the module's class and the base classes with the same forward, each also by its full name."""
    for base in type(module).__mro__:
        if getattr(base, "forward", None) is type(module).forward:
            yield from (base, f"{base.__module__}.{base.__qualname__}")


def describe_norm(module: nn.Module) -> SourceNorm | None:
    """Return the description of a normalization layer; None for other layers and for unknown computations."""
    layer: Any = module
    kinds = list(_computed_as(module))
    family: Family | None = next((_FAMILIES[kind] for kind in kinds if kind in _FAMILIES), None)
    if type(module).__name__ == "FrozenBatchNorm2d" and isinstance(getattr(module, "running_var", None), Tensor):
        family = "frozen"  # torchvision's and detectron2's
    if family is None or "forward" in vars(module) or (family == "layer" and len(layer.normalized_shape) != 1):
        return None
    if family == "layer":
        channels = layer.normalized_shape[0]
    elif family == "frozen":
        channels = layer.running_var.numel()
    else:
        channels = layer.num_channels if family == "group" else layer.num_features
    dims = 1 if isinstance(layer, nn.InstanceNorm1d) else 2
    dims = 3 if isinstance(layer, nn.BatchNorm3d | nn.InstanceNorm3d) else dims
    parts = {name: getattr(layer, name, None) for name in ("drop", "act", "aa")}
    tail = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    last = family == "layer" and not any(str(kind).endswith(_CHANNELS_FIRST) for kind in kinds)
    return SourceNorm(module, family, channels, dims, float(layer.eps), tail, channels_last=last)


def looks_like_a_norm(module: nn.Module) -> bool:
    """Return whether the layer's class descends from a norm of torch."""
    return isinstance(module, tuple(kind for kind in _FAMILIES if isinstance(kind, type)))


# --- the new layer ---------------------------------------------------------------------------------------------------

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

    If the old layer has no tensors, the new one gets the device and dtype of `like`. Parameters that the old layer
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


def carry_remarks(old: SourceNorm, built: nn.Module) -> list[str]:
    """Return remarks on the parameters and statistics that `built`, the new norm, has from the old one."""
    weight, mean = old.tensor("weight"), old.tensor("running_mean")
    if not isinstance(built, BatchChannelNorm):
        return _affine_remarks(old, built)
    if mean is None:
        carried = "affine carried over; " if weight is not None else ""
        return [f"{carried}no statistics to carry: estimates start at (0, 1), mn.calibrate sets them"]
    remarks = ["statistics and affine carried over" if weight is not None else "statistics carried over, no affine"]
    if weight is not None and not weight.is_meta and not bool(weight.detach().ne(0).any()):
        if zero_initialized(old, built.num_groups) is not None:
            return ["statistics carried over; weight is all zero: γ^b = 1, γ^c = 0, β^c = its bias"]
        remarks.append("weight is all zero but the bias varies within groups: carried as it is")
    if getattr(old.module, "process_group", None) is not None:
        remarks.append("was synchronized over a group of its own: give it to mn.attach(process_group=…)")
    return remarks


def _affine_remarks(old: SourceNorm, built: nn.Module) -> list[str]:
    """Return remarks on the affine of a norm that becomes `built`, a layer which may have no place for it."""
    names = [name for name in ("weight", "bias") if old.tensor(name) is not None]
    kept = [name for name in names if carries(built, old, name)]
    if kept == names:
        return ["affine carried over" if names else "no affine to carry over"]
    lost = " and ".join(name for name in names if name not in kept)
    dropped = f"{lost} dropped: {type(built).__name__} has none of that shape"
    return [f"{kept[0]} carried over", dropped] if kept else [dropped]


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


def zero_weight(norm: nn.Module) -> nn.Parameter:
    """Return the parameter that is zero if a norm starts at zero: its weight, or the group weight of BatchChannelNorm.

    With a channel weight of zero, BatchChannelNorm would divide by sqrt(eps) and multiply its gradients by hundreds.

    Raises:
        ValueError: if the layer has no weight.
    """
    wanted = "group_weight" if any(isinstance(module, BatchChannelNorm) for module in norm.modules()) else "weight"
    weight = next((p for name, p in norm.named_parameters() if name.rpartition(".")[2] == wanted), None)
    if weight is None:
        raise ValueError(f"zero_init_residual=True needs a norm with a weight, but {type(norm).__name__} has none")
    return weight
