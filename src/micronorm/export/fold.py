"""`mn.fold`: turn a model into one of torch's own layers that computes the same in eval mode."""

import copy
from collections import OrderedDict
from functools import partial
from typing import Any

from torch import nn

from micronorm.convert.flow import Flow
from micronorm.convert.surgery import adopt_hooks, names_of, refuse_wrappers, replace, restore_forwards
from micronorm.convert.trace import trace_flow
from micronorm.export.layers import (
    REPARAMETERIZED,
    batch_norm,
    channel_affine,
    channels_out,
    group_norm,
    in_a_row,
    is_batch_norm,
    plain_layer,
)
from micronorm.nn.batch import GhostBatchNorm
from micronorm.nn.batch_renorm import BatchRenorm
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.fingerprint import unmark
from micronorm.nn.group import GroupNorm
from micronorm.nn.norm_act import ACTIVATION_LAYERS, BatchChannelNormAct, ChannelsLast, NormAct
from micronorm.nn.weight import counterpart_kind, recast
from micronorm.ops.activation import KINDS

_BCN = (BatchChannelNorm, BatchChannelNormAct)
_RUNNING = (GhostBatchNorm, BatchRenorm)
_KNOWN = REPARAMETERIZED | {*_BCN, *_RUNNING, GroupNorm, NormAct}
_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def fold(model: nn.Module, *, example_inputs: Any = None) -> nn.Module:
    """Return a new model of torch's own layers that computes what `model` computes in eval mode.

    - A layer with a reparameterized weight becomes the plain layer with the effective weight Ŵ.
    - BatchChannelNorm becomes nn.GroupNorm if its input is the output of one convolution or linear layer that nothing
      else uses. The channel normalization goes into that layer: W' = a·Ŵ and b' = a·(b − μ̂) + β^b with
      a = γ^b/sqrt(σ̂² + ε). Otherwise (DenseNet, pre-activation, a layer called twice, an unknown data flow) an
      eval-mode BatchNorm stays before the GroupNorm. It is BatchNorm1d, 2d or 3d by the rank of the input, or
      nn.SyncBatchNorm, which in eval mode accepts any rank, if the rank is unknown.
    - A layer whose warm-up has not begun (`blend` = 0) becomes a BatchNorm. A layer in mid-warm-up is refused.
    - GhostBatchNorm and BatchRenorm become BatchNorm, mn.nn.GroupNorm becomes torch's GroupNorm, and norms with an
      activation become nn.Sequential.
    - Other layers, including torch's BatchNorm, are copied.

    nn.GroupNorm raises an error for one value per group (one sample of one position with one channel per group), where
    our layers return the bias.

    Args:
        model: a model with layers of micronorm. It is not changed and shares no tensor with the new one. Hooks are not
            copied, except those of the model itself: methods of its modules, and those of torch.nn.utils.
        example_inputs: inputs to run the model on if torch.fx cannot trace it: a tuple of arguments, a dictionary of
            keyword arguments, or the one argument. They must take the path through the model that you will use.

    Returns:
        The new model, in eval mode.

    Raises:
        ValueError: a layer has no counterpart in torch (SwitchableNorm, FilterResponseNorm, EvoNorm, ChannelsLast), a
            layer is in mid-warm-up, or the model has no layer of micronorm.

    Example:
        >>> from micronorm.nn import BatchChannelNorm, WSConv2d
        >>> plain = fold(nn.Sequential(WSConv2d(3, 16, 3, bias=False), BatchChannelNorm(16), nn.ReLU()))
        >>> [type(layer).__name__ for layer in plain]
        ['Conv2d', 'GroupNorm', 'ReLU']
    """
    refuse_wrappers(model)
    _refuse_unknown(model)
    copied = bare_copy(model).eval()
    restore_forwards(copied)  # forwards that a conversion has fused call our norms
    # torch.fx does not record the outermost module as a call, so a single layer gets a container.
    whole = nn.Sequential(copied) if is_ours(copied) else copied
    flow = trace_flow(whole, _is_one_call, example_inputs=example_inputs)
    folded = _Folder(whole, flow).fold()
    if whole is not copied:
        folded = folded[0]  # type: ignore[index]
    left = [f"{name!r} ({type(module).__name__})" for name, module in folded.named_modules() if is_ours(module)]
    if left:
        raise ValueError(f"cannot be folded: {', '.join(left[:8])} are inside other layers of micronorm")
    for module in folded.modules():
        unmark(module)
    return folded.eval()


def is_ours(module: nn.Module) -> bool:
    """Return whether the module's class is one of micronorm.nn or derives from one."""
    return any(base.__module__.split(".")[:2] == ["micronorm", "nn"] for base in type(module).__mro__)


def _is_one_call(module: nn.Module) -> bool:
    return (is_ours(module) and not isinstance(module, NormAct | ChannelsLast)) or counterpart_kind(module) is not None


# --- what cannot be folded -------------------------------------------------------------------------------------------


def _refuse_unknown(model: nn.Module) -> None:
    faults = []
    layers = [(names[0], module) for module, names in names_of(model).items() if is_ours(module)]
    if not layers:
        kinds = ", ".join(sorted({type(module).__name__ for module in model.modules()})[:8])
        raise ValueError(f"nothing to fold: no layer of micronorm among {kinds}; the model can be used as it is")
    for name, module in layers:
        label = f"{name!r} ({type(module).__name__})" if name else type(module).__name__
        if type(module) not in _KNOWN:
            faults.append(f"{label} has no counterpart in torch")
        elif isinstance(module, BatchChannelNorm) and not (is_batch_norm(module) or module.blend.item() == 1):
            rest = 1 - module.blend.item()
            missing = round(rest * module.warm_steps)
            faults.append(
                f"{label} is still warming up: blend = {1 - rest:.4g}, {missing} of warm_steps = {module.warm_steps} "
                "commits are missing"
                if missing
                else f"{label} has blend = 1 - {rest:.0e}, as an averaged copy lags behind its model: call "
                "layer.blend.fill_(1) for each norm"
            )
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ValueError(f"cannot be folded: {'; '.join(faults[:3])}{more}")


# --- the copy --------------------------------------------------------------------------------------------------------


def bare_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy of the model without foreign hooks. They are not copied first: they may hold anything."""
    owned = {id(value) for module in model.modules() for value in (module, *vars(module).values())}
    memo: dict[int, Any] = {}
    kept = []
    for module in model.modules():
        for table in (vars(module).get(name) for name in _FORWARD_HOOKS):
            if table is not None:
                memo[id(table)] = OrderedDict()
                kept += [(memo[id(table)], key, hook) for key, hook in table.items() if _is_own(hook, owned)]
    made = copy.deepcopy(model, memo)
    for table, key, hook in kept:
        table[key] = copy.deepcopy(hook, memo)  # bound to the copied modules
    return made


def _is_own(hook: Any, owned: set[int]) -> bool:
    """Return whether a hook is part of the model: timm collects features by hooks, torch.nn.utils computes weights."""
    while isinstance(hook, partial):
        hook = hook.func
    owner = getattr(hook, "__self__", hook)
    return id(owner) in owned or type(owner).__module__.startswith("torch.nn.utils.")


# --- the folding -----------------------------------------------------------------------------------------------------


class _Folder:
    """Replace the layers of micronorm in a copied model, given its data flow."""

    def __init__(self, model: nn.Module, flow: Flow) -> None:
        self.model, self.flow = model, flow
        self.names = names_of(model)
        self.parameters_read = {name for node in flow.nodes for name in node.reads}
        self.replacements: dict[nn.Module, nn.Module] = {}

    def fold(self) -> nn.Module:
        for module in self.names:
            if isinstance(module, BatchChannelNorm):
                self._put(module, self._fold_bcn(module))
            elif isinstance(module, _RUNNING):
                self._put(module, batch_norm(module, self._rank(module)))
            elif type(module) is GroupNorm:
                self._put(module, _as_group_norm(module))
        for module in self.names:
            if type(module) in REPARAMETERIZED and module not in self.replacements:
                if self._is_read(module):
                    raise ValueError(
                        f"cannot be folded: {self.names[module][0]!r} ({type(module).__name__}) is called, but the "
                        "model also reads its weight or bias directly, and folding changes both"
                    )
                plain = plain_layer(module, None, name=self.names[module][0])
                assert plain is not None  # only a merged affine can be too large
                self.replacements[module] = plain
            elif isinstance(module, NormAct):
                norm = self.replacements.get(module.norm, module.norm)
                self._put(module, in_a_row(norm=norm, drop=module.drop, act=module.act))
        return replace(self.model, self.replacements)

    def _put(self, old: nn.Module, new: nn.Module) -> None:
        if _has_hooks(old):
            new = nn.Sequential(new)  # a container for the hooks: `new` may be an activation that is used elsewhere
            adopt_hooks(new, old)
        self.replacements[old] = new

    def _fold_bcn(self, norm: BatchChannelNorm) -> nn.Module:
        source = self._source(norm)
        merged = None if source is None else plain_layer(source, channel_affine(norm), name=self.names[source][0])
        if source is not None and merged is not None:
            self.replacements[source] = merged
        tail: dict[str, Any] = {"act": _activation(norm)}
        if isinstance(norm, BatchChannelNormAct):
            tail = {"drop": norm.drop, "act": norm.act}
        return in_a_row(
            batch_norm=None if merged is not None else batch_norm(norm, self._rank(norm)),
            group_norm=None if is_batch_norm(norm) else group_norm(norm),
            **tail,
        )

    def _source(self, norm: BatchChannelNorm) -> nn.Module | None:
        """Return the layer whose only use is as the norm's input, or None."""
        calls = self.flow.calls.get(norm, [])
        if self.flow.method == "order" or not self.flow.complete or len(calls) != 1:  # "order" is a guess
            return None
        call = self.flow.sole_source(calls[0])
        layer = call.module if call is not None else None
        if call is None or layer is None or len(self.flow.calls[layer]) != 1 or layer in self.replacements:
            return None
        if channels_out(layer) != norm.num_channels:
            return None
        if isinstance(layer, nn.Linear) and (call.shape is None or len(call.shape) != 2):
            return None  # in N×T×C the norm's channels are axis 1, those of a linear layer axis 2
        # A hook before the layer changes its input alone, such as the temporal shift of video networks.
        return None if _has_hooks(layer, before=False) or self._is_read(layer) else layer

    def _is_read(self, layer: nn.Module) -> bool:
        """Return whether the model uses the layer's parameters other than by calling the layer."""
        return any(f"{name}.{p}" in self.parameters_read for name in self.names[layer] for p in ("weight", "bias"))

    def _rank(self, norm: nn.Module) -> int | None:
        """Return the rank of the layer's input, or None if it is unknown or differs between calls."""
        shapes = {source.shape for call in self.flow.calls.get(norm, []) for source in call.inputs}
        found = {None if shape is None else len(shape) for shape in shapes}
        return found.pop() if len(found) == 1 else None


def _activation(norm: BatchChannelNorm) -> nn.Module | None:
    """Return the layer's own activation as a layer, or None."""
    if norm.activation is None:
        return None
    layer = ACTIVATION_LAYERS[KINDS[norm.activation]]
    return layer(norm.negative_slope) if layer is nn.LeakyReLU else layer()


def _has_hooks(module: nn.Module, *, before: bool = True) -> bool:
    return any(getattr(module, table) for table in _FORWARD_HOOKS if before or table != "_forward_pre_hooks")


def _as_group_norm(norm: Any) -> nn.GroupNorm:
    made = recast(norm, nn.GroupNorm)
    del made.backend
    return made
