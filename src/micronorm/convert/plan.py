"""`mn.plan` and `mn.convert`: check the options, decide what becomes of every layer, and carry it out."""

import inspect
import warnings
from collections import Counter
from typing import Any, TypeVar, cast

from torch import nn

from micronorm.convert.known_blocks import MAX_POOL
from micronorm.convert.norms import zero_weight
from micronorm.convert.planner import BATCH_STATISTICS, Filter, Planner
from micronorm.convert.surgery import WRAPPERS, refuse_wrappers, replace, set_forward
from micronorm.nn.bcn import BCN
from micronorm.nn.fingerprint import mark_plain
from micronorm.nn.inputs import check_count, check_flag
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.nn.weight import CONVOLUTIONS, CWN, WS
from micronorm.nn.window import list_names

Model = TypeVar("Model", bound=nn.Module)

_ALWAYS = ("norms converted", "norms left", "convolutions converted", "convolutions left")


class Plan:
    """Every decision of a conversion. Print it, take it as a dictionary with `to_dict()`, carry it out with `apply()`.

    Attributes:
        decisions: one `Decision` per convolution and normalization, in the order of the model.
        pairing: how the data flow was found: "fx" (symbolic tracing), "execution" (a run) or "order" (a guess from the
            order of registration).
        pairing_detail: what the model was run on, or why a better way was not possible.
    """

    def __init__(self, planner: Planner) -> None:
        decisions, blocks = planner.decide()
        self.decisions = decisions
        self.pairing, self.pairing_detail = planner.flow.method, planner.flow.detail
        count = Counter(f"{d.role}s {'left' if d.becomes is None else 'converted'}" for d in decisions)
        self.totals: dict[str, int] = {
            **{what: count[what] for what in _ALWAYS},
            "norms fused": sum(bool(d.fused) for d in decisions),
            "norms with the activation inside the layer": sum(d.inside is not None for d in decisions),
            "max-pooling layers by kernel on a GPU": sum(block is MAX_POOL for block in blocks.values()),
            "residual branches that start at zero": sum(d.zero for d in decisions),
        }
        """How many norms and convolutions are converted and left, norms fused, and layers handled in other ways."""
        self._pending = planner.model, blocks

    def apply(self) -> nn.Module:
        """Convert the model in place and return it. If this fails, the model stays as it was.

        Warn of BatchNorms that stay behind frozen convolutions: in training mode they break the law of cuts.

        Raises:
            RuntimeError: if the plan was applied already, or the model has changed since the plan was made.
        """
        if self._pending is None:
            raise RuntimeError("this plan has been applied; make a new one with mn.plan(model)")
        model, blocks = self._pending
        present = set(model.modules())
        changes = [(d, d.make) for d in self.decisions if d.make is not None]
        missing = [d.name for d, _ in changes if d.module not in present]
        missing += [type(module).__name__ for module in blocks if module not in present]
        if missing:
            raise RuntimeError(f"the model has changed since the plan was made, at {missing[:3]}; make a new one")
        replacements = {decision.module: make() for decision, make in changes}
        zeroed = [zero_weight(replacements.get(d.module, d.module)) for d in self.decisions if d.zero]
        self._pending = None  # the plan does not keep the model alive
        model = replace(model, replacements)
        for weight in zeroed:
            nn.init.zeros_(weight)
        for decision in self.decisions:
            if decision.role == "convolution" and decision.make is None and isinstance(decision.module, CONVOLUTIONS):
                mark_plain(decision.module)
        for module, block in blocks.items():
            set_forward(module, block.forward, block.method)
        self._warn_of_batch_statistics()
        return model

    def _warn_of_batch_statistics(self) -> None:
        names = [d.name for d in self.decisions if d.reason.endswith(BATCH_STATISTICS)]
        if names:
            warnings.warn(
                f"{list_names(names)}: BatchNorm stays, because the convolution before it is frozen. In training mode "
                "it uses the statistics of each micro-batch, and a step depends on its split. Call .eval() on these "
                "layers after every model.train().",
                UserWarning,
                stacklevel=3,
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, for JSON."""
        return {
            "pairing": self.pairing,
            "pairing_detail": self.pairing_detail,
            "totals": self.totals,
            "decisions": [decision.to_dict() for decision in self.decisions],
        }

    def __str__(self) -> str:
        rows = [("name", "type", "becomes", "reason")]
        rows += [(d.name or "(the model)", d.type, d.becomes or "stays", d.reason) for d in self.decisions]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]])
            for row in rows
        ]
        return "\n".join([*lines, self.summary()])

    __repr__ = __str__

    def summary(self) -> str:
        """Return the totals, the pairing, and why norms are not fused, in two or three lines."""
        detail = f" ({self.pairing_detail})" if self.pairing_detail else ""
        totals = ", ".join(f"{n} {what}" for what, n in self.totals.items() if n or what in (*_ALWAYS, "norms fused"))
        lines = [totals, f"convolutions and norms paired by {self.pairing}{detail}"]
        reasons = Counter(d.unfused[0] for d in self.decisions if d.unfused and not d.fused)
        if reasons:
            lines.append("not fused: " + "; ".join(f"{count} ({why})" for why, count in reasons.most_common()))
        return "\n".join(lines)


def plan(
    model: nn.Module,
    norm: NormSpec | None = BCN(),  # noqa: B008  (specs are immutable)
    weight: WeightSpec | None = WS(),  # noqa: B008
    *,
    filter: Filter | None = None,
    example_inputs: Any = None,
    absorb: bool | None = None,
    warm_steps: int = 0,
    layer_norm: bool = False,
    fuse: bool = True,
    zero_init_residual: bool = False,
) -> Plan:
    """Decide what becomes of every normalization and convolution of `model`. Nothing changes until `apply()`.

    Every BatchNorm (also synchronized or frozen), GroupNorm and InstanceNorm becomes the layer of `norm`, with its
    affine and running statistics. A convolution becomes the layer of `weight` if its output reaches such a norm;
    classifiers and predictors stay as they are. So do frozen convolutions and the norms behind them.

    Args:
        model: any torch.nn.Module that is not wrapped (DDP, FSDP) or compiled.
        norm: the norm spec; None keeps the norms and converts the convolutions before them.
        weight: the weight spec; None keeps the convolutions.
        filter: filter(module, name) returns whether a layer may be converted.
        example_inputs: inputs to run the model on if torch.fx cannot trace it: a tuple of arguments, a dictionary of
            keyword arguments, or the one argument.
        absorb: keep each convolution's old mean and scale, so that it starts as the same function (WS only).
        warm_steps: start as the pretrained network and become BCN over this many optimizer steps; implies `absorb`.
        layer_norm: convert layer norms too.
        fuse: let norms compute the addition and the activation that follow them, in nn.Sequential and in known blocks
            (`docs/kernels.md`), and let kernels compute max-pooling on a GPU. Outputs and gradients are the same,
            except that in half precision the kernels round once where separate operations round each time. A model
            that already has our norms can be converted just for this, for example after unpickling.
        zero_init_residual: start the last norm of each residual branch at zero (BCN: `group_weight`, others: `weight`),
            so that each block starts as its shortcut. Deep networks that train from scratch need it.

    Returns:
        A plan that prints as a table with a reason for each layer. `plan.apply()` converts the model.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if options contradict each other, the model is wrapped, nothing would change, or
            `zero_init_residual` finds no residual branch.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1))
        >>> print(plan(model))
        name  type         becomes                 reason
        0     Conv2d       WSConv2d                its output reaches BatchNorm2d '1'
        1     BatchNorm2d  BatchChannelNorm(16/4)  statistics and affine carried over; with the ReLU after it
        3     Conv2d       stays                   its output reaches no converted norm: it is the model's output
        1 norms converted, 0 norms left, 1 convolutions converted, 1 convolutions left, 1 norms fused
        convolutions and norms paired by fx
    """
    refuse_wrappers(model, dict.fromkeys(WRAPPERS, "convert first, then wrap or compile the converted model"))
    check_flag("layer_norm", layer_norm)
    check_flag("fuse", fuse)
    check_flag("zero_init_residual", zero_init_residual)
    if zero_init_residual and warm_steps:
        raise ValueError(
            "warm_steps starts as the pretrained network, zero_init_residual starts its branches at zero: use only one"
        )
    _check_filter(filter)
    absorb = _check_options(norm, weight, absorb=absorb, warm_steps=warm_steps)
    planner = Planner(
        model=model,
        norm=norm,
        weight=weight,
        filter=filter,
        example_inputs=example_inputs,
        absorb=absorb,
        warm_steps=warm_steps,
        layer_norm=layer_norm,
        fuse=fuse,
        zero_init_residual=zero_init_residual,
    )
    return Plan(planner)


def convert(
    model: Model,
    norm: NormSpec | None = BCN(),  # noqa: B008
    weight: WeightSpec | None = WS(),  # noqa: B008
    *,
    filter: Filter | None = None,
    example_inputs: Any = None,
    absorb: bool | None = None,
    warm_steps: int = 0,
    layer_norm: bool = False,
    fuse: bool = True,
    zero_init_residual: bool = False,
) -> Model:
    """Convert `model` in place. Arguments and errors are those of `mn.plan`.

    Returns:
        The model, or the new layer if the model itself is a layer that was replaced.

    Example:
        >>> convert(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)))
        Sequential(
          (0): WSConv2d(3, 16, kernel_size=(3, 3), stride=(1, 1), eps=1e-05)
          (1): BatchChannelNorm(16, num_groups=4, statistics='step', rate='lr', eps=1e-05)
        )
    """
    made = plan(
        model,
        norm,
        weight,
        filter=filter,
        example_inputs=example_inputs,
        absorb=absorb,
        warm_steps=warm_steps,
        layer_norm=layer_norm,
        fuse=fuse,
        zero_init_residual=zero_init_residual,
    )
    return cast(Model, made.apply())  # the model itself, unless the model is a single norm


def _check_filter(filter: Filter | None) -> None:
    """Raise TypeError if the filter cannot be called with a module and a name."""
    if filter is None:
        return
    try:
        inspect.signature(filter).bind(nn.Identity(), "name")
    except TypeError as error:
        raise TypeError(f"filter is called as filter(module, name), got {filter!r}: {error}") from error


def _check_options(norm: NormSpec | None, weight: WeightSpec | None, *, absorb: bool | None, warm_steps: int) -> bool:
    """Raise if options contradict each other; return whether to absorb."""
    for name, spec, kind in (("norm", norm, NormSpec), ("weight", weight, WeightSpec)):
        if spec is not None and not isinstance(spec, kind):
            named = f"{spec.__name__}()" if isinstance(spec, type) and issubclass(spec, kind) else ""
            usual = "mn.BCN() or mn.GN()" if kind is NormSpec else "mn.WS()"
            hint = f"did you mean mn.{named}?" if named else f"write {usual}"
            raise TypeError(f"{name} must be a spec or None, got {spec!r}; {hint}")
    if norm is None and weight is None:
        raise ValueError("norm=None and weight=None leave nothing to convert")
    if absorb and not isinstance(weight, WS):
        raise ValueError(
            f"absorb=True stores the means and scales that WS removes; it needs weight=mn.WS(), got {weight}"
        )
    if not warm_steps:
        return bool(absorb)
    check_count("warm_steps", warm_steps)
    if not isinstance(norm, BCN):
        raise ValueError(f"warm_steps blends from BatchNorm to BCN; it needs norm=mn.BCN(), got {norm}")
    if norm.eps != BCN().eps:
        raise ValueError(f"warm_steps keeps the eps of the pretrained network; leave out eps={norm.eps} of mn.BCN")
    if absorb is False and isinstance(weight, WS):
        raise ValueError("warm_steps starts as the pretrained network, which needs absorb=True; leave out absorb=False")
    if isinstance(weight, CWN):
        raise ValueError("warm_steps starts as the pretrained network, but CWN drops its kernels' means; use mn.WS()")
    return isinstance(weight, WS)
