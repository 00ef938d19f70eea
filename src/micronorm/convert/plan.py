"""A plan: what becomes of every convolution and normalization of a model, and why."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from micronorm.convert.flow import Flow
from micronorm.convert.known_blocks import Block
from micronorm.convert.pooling import use_kernel
from micronorm.convert.residual import zero_weight
from micronorm.convert.surgery import replace, set_forward
from micronorm.nn.fingerprint import mark_plain
from micronorm.nn.weight import CONVOLUTIONS
from micronorm.nn.window import list_names

BATCH_STATISTICS = "; in train mode a BatchNorm uses the batch's statistics, so keep it in eval mode"
"""How the reason ends for a BatchNorm that stays behind a frozen convolution."""
_INSIDE = "norms with the activation inside the layer"
_POOLS = "max-pooling layers by kernel on a GPU"
_ZERO = "residual branches that start at zero"


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
        """The first of its names."""
        return self.names[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as plain values."""
        fields = ("name", "names", "role", "type", "becomes", "reason", "fused", "unfused", "inside", "zero")
        return {name: getattr(self, name) for name in fields}


class Plan:
    """Every decision of a conversion. Print it, take it as a dictionary with `to_dict()`, carry it out with `apply()`.

    Attributes:
        decisions: one `Decision` per convolution and normalization, in the order of the model.
        pairing: how the data flow was found: "fx" (symbolic tracing), "execution" (a run) or "order" (a guess from the
            order of registration).
        pairing_detail: what the model was run on, or why a better way was not possible.
    """

    def __init__(
        self,
        model: nn.Module,
        decisions: list[Decision],
        flow: Flow,
        blocks: Mapping[nn.Module, Block],
        pools: Iterable[nn.Module] = (),
    ) -> None:
        self.decisions = decisions
        self.pairing, self.pairing_detail = flow.method, flow.detail
        pools = list(pools)
        self.totals: dict[str, int] = {
            **{
                f"{role}s {what}": sum(
                    d.role == role and (d.becomes is not None) == (what == "converted") for d in decisions
                )
                for role in ("norm", "convolution")
                for what in ("converted", "left")
            },
            "norms fused": sum(bool(d.fused) for d in decisions),
            _INSIDE: sum(d.inside is not None for d in decisions),
            _POOLS: len(pools),
            _ZERO: sum(d.zero for d in decisions),
        }
        """How many norms and convolutions are converted and left, norms fused, and layers handled in other ways."""
        self._pending: tuple[nn.Module, Mapping[nn.Module, Block], list[nn.Module]] | None = (model, blocks, pools)

    def apply(self) -> nn.Module:
        """Convert the model in place and return it. If this fails, the model stays as it was.

        Warn of BatchNorms that stay behind frozen convolutions: in training mode they break the law of cuts.

        Raises:
            RuntimeError: if the plan was applied already, or the model has changed since the plan was made.
        """
        if self._pending is None:
            raise RuntimeError("this plan has been applied; make a new one with mn.plan(model)")
        model, blocks, pools = self._pending
        present = set(model.modules())
        changes = [(d, d.make) for d in self.decisions if d.make is not None]
        missing = [d.name for d, _ in changes if d.module not in present]
        missing += [type(module).__name__ for module in (*blocks, *pools) if module not in present]
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
        for pool in pools:
            use_kernel(pool)
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
        totals = ", ".join(
            f"{count} {what}" for what, count in self.totals.items() if count or what not in (_INSIDE, _POOLS, _ZERO)
        )
        lines = [totals, f"paired by {self.pairing}{detail}"]
        reasons = Counter(d.unfused[0] for d in self.decisions if d.unfused and not d.fused)
        if reasons:
            lines.append("not fused: " + "; ".join(f"{count} ({why})" for why, count in reasons.most_common()))
        return "\n".join(lines)
