"""A plan: what becomes of every convolution and normalization of a model, and why."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from micronorm.convert.flow import Flow
from micronorm.convert.surgery import replace, set_forward

Forward = Callable[..., Any]

_INSIDE = "norms with the activation inside the layer"  # of timm and its like
_JOINING = "convolutions that add another branch's gradient"
_POOLED = "max-pooling layers by kernel on a GPU"
_RARE = (_INSIDE, _JOINING, _POOLED)  # told where there are any


@dataclass(frozen=True)
class Decision:
    """What becomes of one layer. `becomes` is None where it stays; `names` are all it is registered under.

    For norms of ours `fused` says with what the layer is computed together, one entry per call, and `unfused` why it is
    not. `inside` is the activation that a norm with one of its own computes in its passes. A convolution `joins` where
    its backward adds the gradient of another branch that takes its input.
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
    joins: bool = False

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    def to_dict(self) -> dict[str, Any]:
        """The decision as plain values."""
        fields = ("name", "names", "role", "type", "becomes", "reason", "fused", "unfused", "inside", "joins")
        return {name: getattr(self, name) for name in fields}


class Plan:
    """Every decision of a conversion, before it is made. Print it, `to_dict()` it, `apply()` it.

    Attributes:
        decisions: one `Decision` per convolution and normalization, in the order of the model.
        pairing: how the data flow was learned: "fx" (symbolic), "execution" (a run) or "order" (of registration: a
            guess); `pairing_detail` says on what it ran, or why nothing better was possible.
    """

    def __init__(
        self,
        model: nn.Module,
        decisions: list[Decision],
        flow: Flow,
        forwards: Mapping[nn.Module, Forward],
        *,
        pools: int = 0,
    ) -> None:
        self.decisions = decisions
        self._forwards = dict(forwards)
        self._pools = pools
        self.pairing, self.pairing_detail = flow.method, flow.detail
        self._model: nn.Module | None = model

    @property
    def totals(self) -> dict[str, int]:
        """How many norms and convolutions are converted and left, norms fused, and what is told where there is any."""
        counts = {
            f"{role}s {what}": sum(
                d.role == role and (d.becomes is not None) == (what == "converted") for d in self.decisions
            )
            for role in ("norm", "convolution")
            for what in ("converted", "left")
        }
        return counts | {
            "norms fused": sum(bool(d.fused) for d in self.decisions),
            _INSIDE: sum(d.inside is not None for d in self.decisions),
            _JOINING: sum(d.joins for d in self.decisions),
            _POOLED: self._pools,
        }

    def apply(self) -> nn.Module:
        """Make the conversion, in place, and return the model. All or nothing: a failure leaves the model as it was."""
        model = self._model
        if model is None:
            raise RuntimeError("this plan has been applied; make a new one with mn.plan(model)")
        present = set(model.modules())
        changes = [(d, d.make) for d in self.decisions if d.make is not None]
        gone = [d.name for d, _ in changes if d.module not in present]
        gone += [type(module).__name__ for module in self._forwards if module not in present]
        if gone:
            raise RuntimeError(f"the model has changed since the plan was made, at {gone[:3]}; make a new one")
        replacements = {decision.module: make() for decision, make in changes}
        forwards, self._forwards = self._forwards, {}
        self._model = None  # applied, and not kept alive by the plan
        model = replace(model, replacements)
        for module, forward in forwards.items():
            set_forward(module, forward)
        return model

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, for JSON."""
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
        """The totals and the pairing, and why norms are not fused, in two or three lines."""
        detail = f" ({self.pairing_detail})" if self.pairing_detail else ""
        totals = ", ".join(f"{count} {what}" for what, count in self.totals.items() if count or what not in _RARE)
        lines = [totals, f"paired by {self.pairing}{detail}"]
        reasons = Counter(d.unfused[0] for d in self.decisions if d.unfused and not d.fused)
        if reasons:
            lines.append("not fused: " + "; ".join(f"{count} ({why})" for why, count in reasons.most_common()))
        return "\n".join(lines)
