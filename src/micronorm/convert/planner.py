"""Decide what becomes of every convolution and normalization of one model, from its data flow."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from micronorm.convert.flow import Node, last_norms, one_element_per_channel, passes_scale
from micronorm.convert.fusion import Fusions, activation_name, find_fusions
from micronorm.convert.known_blocks import MAX_POOL, Block, can_pool
from micronorm.convert.norms import (
    SourceNorm,
    build,
    carry_remarks,
    computed_inside,
    describe_norm,
    fit,
    looks_like_a_norm,
)
from micronorm.convert.surgery import is_rewritten, names_of
from micronorm.convert.trace import trace_flow
from micronorm.nn.bcn import BCN, BatchChannelNorm
from micronorm.nn.group import GroupNorm
from micronorm.nn.norm_act import FUSIBLE, BatchChannelNormAct, activation_inside
from micronorm.nn.reparameterized import Reparameterized
from micronorm.nn.spec import GroupedSpec, NormSpec, WeightSpec
from micronorm.nn.weight import CONVOLUTIONS, counterpart_kind, is_standardized_by_timm

Filter = Callable[[nn.Module, str], bool]

BATCH_STATISTICS = "; in train mode a BatchNorm uses the batch's statistics, so keep it in eval mode"
"""How the reason ends for a BatchNorm that stays behind a frozen convolution."""
_CONVERTED = "already converted"
"""How the reason begins for a layer that is already what the options ask for."""
_FROZEN = "keeps its function:"
"""How the reason begins for a frozen layer, and for a norm behind one."""
_SETTINGS = ("num_groups", "statistics", "rate")


@dataclass(frozen=True)
class Decision:
    """What becomes of one layer.

    Attributes:
        names: every name under which the layer is registered.
        role: "norm" or "convolution".
        type: the class of the layer.
        becomes: the new layer, in words; None if the layer stays.
        reason: why.
        module: the layer.
        make: builds the new layer; None if the layer stays.
        fused: what a norm of micronorm computes together with itself, one entry for each block that calls it.
        unfused: why it computes nothing more.
        inside: the activation that a norm-act layer computes in its norm's passes.
        zero: whether the layer ends a residual branch and starts at zero.
    """

    names: tuple[str, ...]
    role: Literal["norm", "convolution"]
    type: str
    becomes: str | None
    reason: str
    module: nn.Module = field(repr=False)
    make: Callable[[], nn.Module] | None = field(repr=False, default=None)
    fused: tuple[str, ...] = ()
    unfused: tuple[str, ...] = ()
    inside: str | None = None
    zero: bool = False

    @property
    def name(self) -> str:
        """Return the first of the layer's names."""
        return self.names[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as plain values."""
        fields = ("name", "names", "role", "type", "becomes", "reason", "fused", "unfused", "inside", "zero")
        return {name: getattr(self, name) for name in fields}


@dataclass(eq=False, kw_only=True)
class Planner:
    """One model and the options of its conversion, which are those of `mn.plan`."""

    model: nn.Module
    norm: NormSpec | None
    weight: WeightSpec | None
    filter: Filter | None
    example_inputs: Any
    absorb: bool
    warm_steps: int
    layer_norm: bool
    fuse: bool
    zero_init_residual: bool

    def __post_init__(self) -> None:
        self.names = {module: tuple(names) for module, names in names_of(self.model).items()}
        self.allowed = {
            module: self.filter is None or bool(self.filter(module, names[0])) for module, names in self.names.items()
        }
        self.parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self.norms = {module: old for module in self.names if (old := describe_norm(module)) is not None}
        self.flow = trace_flow(self.model, self._is_leaf, example_inputs=self.example_inputs)
        if self.flow.method == "order":
            self.flow = replace(self.flow, nodes=self._registered)

    def decide(self) -> tuple[list[Decision], dict[nn.Module, Block]]:
        """Return the decisions in the order of the model, and the modules that get another forward.

        Norms come first: a convolution is standardized if its output reaches a converted norm.
        """
        made = {module: self._decide_norm(module) for module in self.names if self._is_norm(module)}
        targets = {module for module, decision in made.items() if self._removes_scale(module, decision)}
        made |= {m: self._decide_convolution(m, targets) for m in self.names if isinstance(m, CONVOLUTIONS)}
        decisions = [made[module] for module in self.names if module in made]
        if self.zero_init_residual:
            decisions = self._with_zero_start(decisions)
        fusions, pools = Fusions(), {}
        if self.fuse:
            fusions = find_fusions(self.model, self._fusible(decisions))
            pools = {module: MAX_POOL for module in self.names if self.allowed[module] and can_pool(module)}
        if not fusions.fused or all(map(is_rewritten, fusions.blocks)):
            self._refuse_no_change(decisions)
        _refuse_reparameterized(decisions)
        return [_with_fusion(decision, fusions) for decision in decisions], fusions.blocks | pools

    def _fusible(self, decisions: list[Decision]) -> list[nn.Module]:
        """Return the norms that will be able to compute what follows them."""
        converted = {d.module for d in decisions if d.make is not None and d.role == "norm"}

        def is_fusible(module: nn.Module) -> bool:
            if module not in converted or self.norm is None:
                return type(module) in FUSIBLE and self.allowed[module]
            old = self.norms[module]
            return type(self.norm(old.channels)) in FUSIBLE and not old.tail and not old.channels_last

        return list(filter(is_fusible, self.names))

    def _with_zero_start(self, decisions: list[Decision]) -> list[Decision]:
        """Return the decisions with a zero start for the last norm of each residual branch."""
        norms = {d.module for d in decisions if d.role == "norm" and self._removes_scale(d.module, d)}
        ends = last_norms(self.flow, set(filter(self._can_start_at_zero, norms)))
        if not ends:
            hint = "; pass example_inputs for the real data flow" if self.flow.method == "order" else ""
            raise ValueError(
                "zero_init_residual=True, but the data flow has no residual branch that ends in a trainable norm, "
                f"as x + norm(conv(...)) does{hint}"
            )
        reason = "ends a residual branch: starts at zero"
        return [replace(d, zero=True, reason=f"{d.reason}; {reason}") if d.module in ends else d for d in decisions]

    def _can_start_at_zero(self, module: Any) -> bool:
        """Return whether a norm is trainable and has no activation, whose gradient at zero may be zero."""
        weight = getattr(module, "weight", None)
        frozen = isinstance(weight, nn.Parameter) and not weight.requires_grad
        plain = isinstance(getattr(module, "act", None), nn.Identity | None)
        return self.allowed[module] and not frozen and plain and getattr(module, "activation", None) is None

    # --- norms -------------------------------------------------------------------------------------------------------

    def _is_norm(self, module: nn.Module) -> bool:
        return module in self.norms or looks_like_a_norm(module) or isinstance(module, BatchChannelNorm)

    def _is_leaf(self, module: nn.Module) -> bool:
        return self._is_norm(module) or isinstance(module, CONVOLUTIONS)

    def _removes_scale(self, module: nn.Module, decision: Decision) -> bool:
        """Return whether a convolution before this norm may be standardized: the norm is, or becomes, `self.norm`."""
        if decision.make is not None:
            return True
        if self.norm is None:
            known = isinstance(module, BatchChannelNorm) or (
                module in self.norms and self.norms[module].family != "layer"
            )
            return known and self.allowed[module]
        return self._is_asked_for(module)

    def _is_asked_for(self, module: nn.Module) -> bool:
        if isinstance(module, BatchChannelNorm):
            return isinstance(self.norm, BCN)
        if self.norm is None or module not in self.norms or self.norms[module].tail:
            return False
        old = self.norms[module]
        wanted = self.norm(old.channels, dims=old.dims)
        groups = [getattr(m, "num_groups", None) for m in (wanted, module)]
        # Our GroupNorm computes the same as torch's.
        kinds = [nn.GroupNorm if type(m) is GroupNorm else type(m) for m in (wanted, module)]
        return kinds[0] is kinds[1] and groups[0] == groups[1]

    def _compared(self, module: nn.Module) -> str:
        """Return whether a norm of the requested class has the requested settings, too; eps may be the old norm's."""
        if isinstance(module, BatchChannelNorm) and isinstance(self.norm, BCN):
            pairs = {name: [getattr(m, name) for m in (module, self.norm(module.num_channels))] for name in _SETTINGS}
            others = [f"{name}={own!r} and not {wanted!r}" for name, (own, wanted) in pairs.items() if own != wanted]
            if others:
                return f"it stays, with {', '.join(others)}; for other settings convert the original model"
        return "it is the requested norm"

    def _decide_norm(self, module: nn.Module) -> Decision:
        leave = partial(Decision, self.names[module], "norm", type(module).__name__, None, module=module)
        if not self.allowed[module]:
            return leave("left out by the filter")
        if self._is_asked_for(module):
            inside = activation_inside(module.drop, module.act) if isinstance(module, BatchChannelNormAct) else None
            return leave(f"{_CONVERTED}: {self._compared(module)}", inside=inside and activation_name(inside))
        if isinstance(module, BatchChannelNorm):
            return leave(f"{_CONVERTED}: it stays; for another norm convert the original model")
        if self.norm is None:
            return leave("norm=None")
        old = self.norms.get(module)
        if old is None:
            return leave(f"the forward of {type(module).__name__} is not known")
        if old.family == "layer" and not self.layer_norm:
            return leave("a layer norm normalizes each sample by itself; layer_norm=True converts it")
        frozen = self._frozen_source(old)
        if frozen is not None:
            remark = BATCH_STATISTICS if old.family == "batch" else ""
            return leave(f"{_FROZEN} it is behind {frozen.label}, which is frozen{remark}")
        return self._convert_norm(old, self.norm)

    def _frozen_source(self, old: SourceNorm) -> Node | None:
        """Return a convolution before the norm if both belong to the frozen part of the model, otherwise None.

        They do if the nearest layers with parameters before the norm are all frozen. A norm with a trainable weight
        counts only right behind the convolution: further away, as after the addition of a pre-activation network, it
        begins the part that trains.
        """
        weight = old.tensor("weight")
        trains = isinstance(weight, nn.Parameter) and weight.requires_grad

        def passes(node: Node) -> bool:
            return isinstance(node.module, nn.Identity) if trains else not self._parameters(node)

        # A norm that the data flow does not reach has a place in the registration.
        calls = self.flow.calls.get(old.module) or [node for node in self._registered if node.module is old.module]
        before = [node for call in calls for node in self.flow.upstream(call, passes)]
        if any(parameter.requires_grad for node in before for parameter in self._parameters(node)):
            return None
        return next((node for node in before if isinstance(node.module, CONVOLUTIONS)), None)

    def _parameters(self, node: Node) -> list[nn.Parameter]:
        if node.module is not None:
            return list(node.module.parameters())
        return [self.parameters[name] for name in node.reads if name in self.parameters]

    def _convert_norm(self, old: SourceNorm, wanted: NormSpec) -> Decision:
        inputs = [node for call in self.flow.calls.get(old.module, []) for node in call.inputs]
        flat = isinstance(old.module, nn.BatchNorm1d | nn.SyncBatchNorm)  # the input may be N×C
        one_element = bool(inputs) and all(one_element_per_channel(node, flat=flat) for node in inputs)
        spec, remarks = fit(wanted, old, one_element=one_element)
        groups = spec.groups_for(old.channels) if isinstance(spec, GroupedSpec) else None
        built = spec(old.channels, dims=old.dims)
        remarks += carry_remarks(old, built)
        if self.warm_steps and old.tensor("running_mean") is None:
            remarks.append("no warm start: there are no statistics to start from")
        weight = old.tensor("weight")
        trainable = weight.requires_grad if isinstance(weight, nn.Parameter) else True
        if not trainable:
            remarks.append("stays frozen, and its estimates do not move")
        if old.family == "frozen":
            start = "starts from its old function and " if self.warm_steps else ""
            remarks.append(f"was frozen; {start}trains from here on, as the layer before it does")
        inside, unfused = computed_inside(built, old)
        name = type(built).__name__ + ("Act" if old.tail and isinstance(built, BatchChannelNorm) else "")
        shape = f"{old.channels}/{groups}" if groups is not None else f"{old.channels}"
        return Decision(
            self.names[old.module],
            "norm",
            type(old.module).__name__,
            f"{name}({shape})",
            "; ".join(remarks),
            old.module,
            partial(build, spec, old, like=self._neighbour(inputs), trainable=trainable, warm_steps=self.warm_steps),
            inside=inside,
            unfused=unfused if self.fuse else (),
        )

    def _neighbour(self, inputs: list[Node]) -> Tensor:
        """Return a tensor on the device of the layer's input, for layers without tensors of their own."""
        before = [node.module.weight for node in inputs if isinstance(node.module, CONVOLUTIONS)]
        floating = (p for p in (*before, *self.model.parameters()) if p.is_floating_point())
        return next(floating, torch.empty(0))

    # --- convolutions ------------------------------------------------------------------------------------------------

    def _decide_convolution(self, module: Any, targets: set[nn.Module]) -> Decision:
        decide = partial(Decision, self.names[module], "convolution", type(module).__name__, module=module)
        if not self.allowed[module]:
            return decide(None, "left out by the filter")
        if self.weight is None:
            return decide(None, "weight=None")
        if isinstance(module, Reparameterized):
            return decide(None, f"{_CONVERTED}: its weight is reparameterized")
        kind = counterpart_kind(module)
        if kind is None:
            return decide(None, f"the forward of {type(module).__name__} is not known")
        if module.weight.numel() // module.out_channels < 2:
            return decide(None, "fan-in 1: one weight per output channel has nothing to standardize")
        if not module.weight.requires_grad:
            return decide(None, f"{_FROZEN} it is frozen")
        calls = self.flow.calls.get(module, [])
        if not calls and self.flow.method != "order":
            follower = next((n.module for n in self._registered if n.inputs and n.inputs[0].module is module), None)
            if follower not in targets or follower in self.flow.calls:
                return decide(None, "not reached by the data flow")
            label = f"{type(follower).__name__} {self.names[follower][0]!r}"
            return self._convert_convolution(
                module, kind, f"not reached by the data flow, but registered before {label}"
            )

        def passes(node: Node) -> bool:
            return passes_scale(node) and node.module not in targets

        meets = [node for call in calls for node in self.flow.downstream(call, passes)]
        norm = next((node for node in meets if node.module in targets), None)
        if norm is None:
            where = " and ".join(dict.fromkeys(node.label for node in meets[:2]))
            where = "it is the model's output" if where in ("", "output") else f"it goes to {where}"
            return decide(None, f"its output reaches no converted norm: {where}")
        if any(node.name == "output" and node.module is None for call in calls for node in self.flow.consumers[call]):
            return decide(None, f"its output reaches {norm.label}, but is an output of the model too")
        return self._convert_convolution(module, kind, f"its output reaches {norm.label}")

    @cached_property
    def _registered(self) -> list[Node]:
        """Return the layers in the order of registration, for branches that the data flow does not reach.

        The input of a norm is the layer before it, if that is a convolution with as many channels.
        """
        nodes: list[Node] = []
        for name, module in self.model.named_modules():
            if next(module.children(), None) is None or self._is_leaf(module):
                norm, last = self.norms.get(module), nodes[-1] if nodes else None
                before = last.module if last is not None else None
                pair = norm and isinstance(before, CONVOLUTIONS) and before.out_channels == norm.channels
                nodes.append(Node(name, module, (last,) if last is not None and pair else ()))
        return nodes

    def _convert_convolution(self, module: nn.Module, kind: str, reason: str) -> Decision:
        assert self.weight is not None
        if is_standardized_by_timm(module):
            reason += "; replaces timm's standardization and keeps its eps"
        elif self.absorb:
            reason += "; mean and scale absorbed"
        make = partial(_reparameterize, self.weight, module, absorb=self.absorb)
        becomes = f"{type(self.weight).__name__}{kind}"
        return Decision(self.names[module], "convolution", type(module).__name__, becomes, reason, module, make)

    def _refuse_no_change(self, decisions: list[Decision]) -> None:
        if any(decision.make is not None or decision.zero for decision in decisions):
            return
        if not decisions:
            kinds = sorted({type(module).__name__ for module in self.names})[:8]
            raise ValueError(f"nothing to convert: no convolution and no normalization among {', '.join(kinds)}")
        seen = "; ".join(f"{d.name or '(the model)'} ({d.type}): {d.reason}" for d in decisions[:4])
        more = f"; and {len(decisions) - 4} more" if len(decisions) > 4 else ""
        ours = any(d.reason.startswith(_CONVERTED) for d in decisions)
        hints = []
        if any(d.reason.startswith(_FROZEN) for d in decisions):
            hints.append("Frozen layers stay; to convert them, convert first and freeze afterwards")
        if self.norm is not None and not self.norms and not ours:
            hints.append(
                "The model has no norm that conversion replaces (BatchNorm, GroupNorm, InstanceNorm, LayerNorm)"
            )
        hint = "".join(f". {hint}" for hint in hints)
        why = "nothing to convert: the model is already converted" if ours else "nothing to convert"
        raise ValueError(f"{why}. Looked at {seen}{more}{hint}")


def _with_fusion(decision: Decision, fusions: Fusions) -> Decision:
    """Return the decision with what fusing adds to it."""
    fused, unfused = (tuple(table.get(decision.module, ())) for table in (fusions.fused, fusions.unfused))
    remarks = list(dict.fromkeys(fused))
    if decision.inside is not None:
        remarks.append(f"with the {decision.inside} inside the layer")
    reason = "; ".join([decision.reason, *remarks])
    return replace(decision, reason=reason, fused=fused, unfused=unfused or decision.unfused)


def _reparameterize(spec: WeightSpec, module: nn.Module, *, absorb: bool) -> nn.Module:
    made: Any = spec(module)
    if absorb:
        made.absorb()
    return made


def _refuse_reparameterized(decisions: list[Decision]) -> None:
    """Raise if the weight of a layer to be replaced is computed by a parametrization, which would be lost."""
    found = []
    for name, module in ((d.name, d.module) for d in decisions if d.make is not None):
        weight = module._parameters.get("weight")
        if parametrize.is_parametrized(module):
            found.append(f"{name!r} ({', '.join(type(p[0]).__name__ for p in module.parametrizations.values())})")  # type: ignore[union-attr, index]
        elif isinstance(module, CONVOLUTIONS) and weight is None:
            found.append(
                f"{name!r} (its weight is computed by a hook, as old weight_norm, spectral_norm and pruning do)"
            )
        elif isinstance(weight, nn.parameter.UninitializedParameter):
            found.append(f"{name!r} (lazy: run one forward first)")
    if found:
        raise ValueError(
            f"these layers have a parametrization: {', '.join(found)}. Remove it "
            "(torch.nn.utils.parametrize.remove_parametrizations, torch.nn.utils.remove_weight_norm, prune.remove) or "
            "leave them out with filter="
        )
