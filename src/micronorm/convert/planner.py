"""Decide what becomes of every convolution and normalization of one model, from its data flow."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.convert.carry import build, carries, computed_inside, fit, zero_initialized
from micronorm.convert.flow import Flow, Node, trace_flow
from micronorm.convert.flow.graph import one_element_per_channel, passes_scale
from micronorm.convert.flow.trace import by_order
from micronorm.convert.fusion import Fusions, activation_name, find_fusions
from micronorm.convert.plan import BATCH_STATISTICS, Decision, Plan
from micronorm.convert.pooling import can_pool
from micronorm.convert.residual import last_norms
from micronorm.convert.rules import SourceNorm, describe_norm, looks_like_a_norm, refuse_reparameterized
from micronorm.convert.surgery import is_rewritten, names_of
from micronorm.nn.bcn import BCN, BatchChannelNorm
from micronorm.nn.group import GroupNorm
from micronorm.nn.norm_act import FUSIBLE, BatchChannelNormAct, activation_inside
from micronorm.nn.reparameterized import Reparameterized
from micronorm.nn.spec import GroupedSpec, NormSpec, WeightSpec
from micronorm.nn.weight import CONVOLUTIONS, counterpart_kind, is_standardized_by_timm

Filter = Callable[[nn.Module, str], bool]

_CONVERTED = "already converted"
"""How the reason begins for a layer that is already what the options ask for."""
_SETTINGS = ("num_groups", "statistics", "rate")


@dataclass(eq=False, kw_only=True)
class Planner:
    """One model and the options of its conversion. `plan` makes the decisions, in the order of the model."""

    model: nn.Module
    norm: NormSpec | None
    weight: WeightSpec | None
    filter: Filter | None
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

    def plan(self, example_inputs: Any) -> Plan:
        """Return the plan. Norms come first: a convolution is standardized if its output reaches a converted norm."""
        flow = trace_flow(self.model, self._is_leaf, example_inputs=example_inputs, pairs=self._could_pair)
        norms = {module: self._decide_norm(module, flow) for module in self.names if self._is_norm(module)}
        targets = {module for module, decision in norms.items() if self._removes_scale(module, decision)}
        convolutions = {
            module: self._decide_convolution(module, flow, targets)
            for module in self.names
            if isinstance(module, CONVOLUTIONS)
        }
        decisions = [
            (norms | convolutions)[module] for module in self.names if module in norms or module in convolutions
        ]
        if self.zero_init_residual:
            decisions = self._with_zero_start(decisions, flow)
        fusions, pools = Fusions(), []
        if self.fuse:
            fusions = find_fusions(self.model, self._fusible(decisions))
            pools = [module for module in self.names if self.allowed[module] and can_pool(module)]
        if not fusions.fused or all(map(is_rewritten, fusions.blocks)):
            self._refuse_no_change(decisions)
        refuse_reparameterized((d.name, d.module) for d in decisions if d.make is not None)
        return Plan(self.model, [_with_fusion(d, fusions) for d in decisions], flow, fusions.blocks, pools)

    def _fusible(self, decisions: list[Decision]) -> list[nn.Module]:
        """Return the norms that will be able to compute what follows them."""
        converted = {d.module for d in decisions if d.make is not None and d.role == "norm"}

        def is_fusible(module: nn.Module) -> bool:
            if module not in converted or self.norm is None:
                return type(module) in FUSIBLE and self.allowed[module]
            old = self.norms[module]
            return type(self.norm(old.channels)) in FUSIBLE and not old.tail and not old.channels_last

        return list(filter(is_fusible, self.names))

    def _with_zero_start(self, decisions: list[Decision], flow: Flow) -> list[Decision]:
        """Return the decisions with a zero start for the last norm of each residual branch."""
        norms = {d.module for d in decisions if d.role == "norm" and self._removes_scale(d.module, d)}
        ends = last_norms(flow, set(filter(self._can_start_at_zero, norms)))
        if not ends:
            hint = "; pass example_inputs for the real data flow" if flow.method == "order" else ""
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

    def _could_pair(self, first: nn.Module, second: nn.Module) -> bool:
        norm = self.norms.get(second)
        return norm is not None and isinstance(first, CONVOLUTIONS) and first.out_channels == norm.channels

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

    def _decide_norm(self, module: nn.Module, flow: Flow) -> Decision:
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
        frozen = self._frozen_source(old, flow)
        if frozen is not None:
            remark = BATCH_STATISTICS if old.family == "batch" else ""
            return leave(f"keeps its function: it is behind {frozen.label}, which is frozen{remark}")
        return self._convert_norm(old, self.norm, flow)

    def _frozen_source(self, old: SourceNorm, flow: Flow) -> Node | None:
        """Return a convolution before the norm if both belong to the frozen part of the model, otherwise None.

        They do if the nearest layers with parameters before the norm are all frozen. A norm with a trainable weight
        counts only right behind the convolution: further away, as after the addition of a pre-activation network, it
        begins the part that trains.
        """
        weight = old.tensor("weight")
        trains = isinstance(weight, nn.Parameter) and weight.requires_grad

        def passes(node: Node) -> bool:
            return isinstance(node.module, nn.Identity) if trains else not self._parameters(node)

        before = [node for call in self._calls(old.module, flow) for node in flow.upstream(call, passes)]
        if any(parameter.requires_grad for node in before for parameter in self._parameters(node)):
            return None
        return next((node for node in before if isinstance(node.module, CONVOLUTIONS)), None)

    def _parameters(self, node: Node) -> list[nn.Parameter]:
        if node.module is not None:
            return list(node.module.parameters())
        return [self.parameters[name] for name in node.reads if name in self.parameters]

    def _calls(self, module: nn.Module, flow: Flow) -> list[Node]:
        """Return the calls of a norm; for one that the data flow does not reach, its place in the registration."""
        return flow.calls.get(module) or [node for node in self._registered if node.module is module]

    def _convert_norm(self, old: SourceNorm, wanted: NormSpec, flow: Flow) -> Decision:
        calls = flow.calls.get(old.module, [])
        inputs = [node for call in calls for node in call.inputs]
        one_element = bool(inputs) and all(one_element_per_channel(node, flat=old.takes_flat) for node in inputs)
        spec, remarks = fit(wanted, old, one_element=one_element)
        groups = spec.groups_for(old.channels) if isinstance(spec, GroupedSpec) else None
        built = spec(old.channels, dims=old.dims)
        remarks += self._remarks(old, built, groups)
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

    def _remarks(self, old: SourceNorm, built: nn.Module, groups: int | None) -> list[str]:
        """Return remarks on what the new norm takes over from the old one."""
        weight, mean = old.tensor("weight"), old.tensor("running_mean")
        if not isinstance(self.norm, BCN) or groups is None:
            return _affine_remarks(old, built)
        if mean is None:
            carried = "affine carried over; " if weight is not None else ""
            return [f"{carried}no statistics to carry: estimates start at (0, 1), mn.calibrate sets them"]
        remarks = ["statistics and affine carried over" if weight is not None else "statistics carried over, no affine"]
        if weight is not None and not weight.is_meta and not bool(weight.detach().ne(0).any()):
            if zero_initialized(old, groups) is not None:
                return ["statistics carried over; weight is all zero: γ^b = 1, γ^c = 0, β^c = its bias"]
            remarks.append("weight is all zero but the bias varies within groups: carried as it is")
        if getattr(old.module, "process_group", None) is not None:
            remarks.append("was synchronized over a group of its own: give it to mn.attach(process_group=…)")
        return remarks

    def _neighbour(self, inputs: list[Node]) -> Tensor:
        """Return a tensor on the device of the layer's input, for layers without tensors of their own."""
        before = [node.module.weight for node in inputs if isinstance(node.module, CONVOLUTIONS)]
        floating = (p for p in (*before, *self.model.parameters()) if p.is_floating_point())
        return next(floating, torch.empty(0))

    # --- convolutions ------------------------------------------------------------------------------------------------

    def _decide_convolution(self, module: Any, flow: Flow, targets: set[nn.Module]) -> Decision:
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
            return decide(None, "keeps its function: it is frozen")
        calls = flow.calls.get(module, [])
        if not calls and flow.method != "order":
            follower = next((n.module for n in self._registered if n.inputs and n.inputs[0].module is module), None)
            if follower not in targets or follower in flow.calls:
                return decide(None, "not reached by the data flow")
            label = f"{type(follower).__name__} {self.names[follower][0]!r}"
            return self._convert_convolution(
                module, kind, f"not reached by the data flow, but registered before {label}"
            )
        meets = [
            node
            for call in calls
            for node in flow.downstream(call, lambda n: passes_scale(n) and n.module not in targets)
        ]
        norm = next((node for node in meets if node.module in targets), None)
        if norm is None:
            where = " and ".join(dict.fromkeys(node.label for node in meets[:2]))
            where = "it is the model's output" if where in ("", "output") else f"it goes to {where}"
            return decide(None, f"its output meets no converted norm: {where}")
        if any(node.name == "output" and node.module is None for call in calls for node in flow.consumers[call]):
            return decide(None, f"its output meets {norm.label}, but is an output of the model too")
        return self._convert_convolution(module, kind, f"its output meets {norm.label}")

    @cached_property
    def _registered(self) -> list[Node]:
        """The layers in the order of registration, for branches that the data flow does not reach."""
        return by_order(self.model, self._is_leaf, self._could_pair)

    def _convert_convolution(self, module: nn.Module, kind: str, reason: str) -> Decision:
        assert self.weight is not None
        if is_standardized_by_timm(module):
            reason += "; timm's standardization goes on as ours, eps kept"
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
        frozen = not any(p.requires_grad for p in self.model.parameters())
        hint = ". Every parameter of the model is frozen; convert first, then freeze" if frozen else ""
        ours = any(d.reason.startswith(_CONVERTED) for d in decisions)
        why = "nothing to convert: the model is already converted" if ours else "nothing to convert"
        raise ValueError(f"{why}. Looked at {seen}{more}{hint}")


def _affine_remarks(old: SourceNorm, built: nn.Module) -> list[str]:
    """Return remarks on the affine of a norm that becomes `built`, a layer which may have no place for it."""
    names = [name for name in ("weight", "bias") if old.tensor(name) is not None]
    kept = [name for name in names if carries(built, old, name)]
    if kept == names:
        return ["affine carried over" if names else "no affine to carry over"]
    lost = " and ".join(name for name in names if name not in kept)
    dropped = f"{lost} dropped: {type(built).__name__} has none of that shape"
    return [f"{kept[0]} carried over", dropped] if kept else [dropped]


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
