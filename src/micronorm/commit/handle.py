"""`mn.attach` and its handle: explicit control over the BatchChannelNorm layers of one model."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from micronorm.commit.hook import group_rate, limited, refresh_rate
from micronorm.commit.merge import commit
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.bcn_state import warn_of_zero_weights
from micronorm.nn.gather import BATCH_MOMENTUM
from micronorm.nn.inputs import check_count, check_rate
from micronorm.nn.window import MAX_FORWARDS, Control, Window


@dataclass(frozen=True)
class LayerReport:
    """One layer's line of `Handle.report`."""

    name: str
    statistics: str
    rate: float | None
    """The rate of the next commit. If only an optimizer that is not attached has it: that of the last commit, or None
    before the first."""
    forwards: int
    """Training forwards since the last commit."""
    elements: int
    """Elements per channel in these forwards, over which the next commit averages."""
    lost_samples: int
    """Samples left out so far because their statistics were not finite."""
    lost_windows: int
    """Windows dropped whole so far because the estimates they would give were not finite."""

    @property
    def steps(self) -> float | None:
        """Return 1/rate: about how many optimizer steps the estimates average over."""
        return None if self.rate is None else (1 / self.rate if self.rate else float("inf"))


class Report(list[LayerReport]):
    """A list of `LayerReport`, one per layer of a handle. It prints as a table."""

    def __str__(self) -> str:
        rows = [("layer", "statistics", "rate", "1/rate = steps looked back", "forwards", "elements", "lost")]
        for r in self:
            rate = "no step yet" if r.rate is None else f"{r.rate:.3g}"
            steps = "" if r.steps is None else f"{r.steps:.3g}"
            lost = f"{r.lost_samples} samples, {r.lost_windows} windows"
            rows.append((r.name, r.statistics, rate, steps, str(r.forwards), str(r.elements), lost))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)


class Handle:
    """Explicit control over the BatchChannelNorm layers of one model, if it has any; returned by `mn.attach`.

    The handle keeps the layers alive. Its settings remain in force until `detach`, also if the handle is deleted.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        *,
        rate: float | str | None = None,
        process_group: Any = ...,
        max_forwards: int = MAX_FORWARDS,
    ) -> None:
        layers = {name: module for name, module in model.named_modules() if isinstance(module, BatchChannelNorm)}
        held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        if optimizers and layers and not any(_holds(held, layer) for layer in layers.values()):
            raise ValueError(
                f"the optimizer holds {len(held)} parameters, but the weight of none of the model's {len(layers)} "
                f"BatchChannelNorm layers (the first is {next(iter(layers))!r}); build it from model.parameters()"
            )
        refs = tuple(weakref.ref(o) for o in optimizers)
        self._layers = list(layers.values())  # windows have only weak references to them
        self.windows: list[Window] = [layer._window for layer in self._layers]
        self._controls: list[Control] = []
        for (name, layer), window in zip(layers.items(), self.windows, strict=True):
            control = Control(name or type(layer).__name__, rate, process_group=process_group)
            control.max_forwards, control.handle = max_forwards, weakref.ref(self)
            if _holds(held, layer):
                control.learning_rate = partial(_current_learning_rate, refs, weakref.ref(window))
                control.optimizers = refs
            window.attach(control)
            self._controls.append(control)
        warn_of_zero_weights(self._zero_weights())

    def __repr__(self) -> str:
        shown = ", ".join(control.name for control in self._controls[:3]) + (", …" if len(self._controls) > 3 else "")
        attached = any(control in window.controls for control, window in zip(self._controls, self.windows, strict=True))
        return f"<Handle of BatchChannelNorm layers {shown}{'' if attached else '; detached'}>"

    def commit(self) -> None:
        """Move the estimates by the windows, for loops that update parameters without a torch.optim optimizer.

        It does nothing after an optimizer has committed, because the windows are then empty. As with an optimizer, a
        layer that was frozen in mid-window keeps its estimates and its window.
        """
        self.refresh()
        commit([window for window in self.windows if window.layer.is_trainable()])

    def refresh(self) -> None:
        """Write the current rates to the device. Call it before replaying a CUDA graph that contains a commit."""
        for window in self.windows:
            # A commit in another mode uses no rate: "batch" has its momentum, "sequential" moves in the forward.
            if window.layer.statistics == "step" and window.layer.is_trainable():
                refresh_rate(window, window.known_rate())

    def discard(self) -> None:
        """Empty the windows, for example after an exception in the middle of a step."""
        for window in self.windows:
            window.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within this block, training forwards change neither windows nor estimates."""
        for window in self.windows:
            window.paused += 1
        try:
            yield
        finally:
            for window in self.windows:
                window.paused -= 1

    def report(self) -> Report:
        """Return what each layer gathered and lost, and how fast its estimates move. Reads the device.

        Warn of layers that lost something since the last warning and of layers whose weight is all zero.
        """
        rows = Report()
        warn_of_zero_weights(self._zero_weights())
        for window in self.windows:
            window.warn_of_losses()
            layer: BatchChannelNorm = window.layer
            rate = window.rate if isinstance(window.rate, float) else None
            if rate is None and layer.statistics == "batch":
                rate = BATCH_MOMENTUM
            elif rate is None and window.control.learning_rate is not None:
                rate = float(limited(window.control.learning_rate()))
            elif rate is None:
                # The rate of the last commit. It starts at zero, so a zero counts only if a commit wrote it.
                last = float(window.device_rate)
                rate = last if last or window.written_rate is not None else None
            lost_samples, lost_windows = window.lost.tolist()
            rows.append(
                LayerReport(
                    window.describe(),
                    layer.statistics,
                    rate,
                    window.forwards,
                    int(window.split.elements),
                    lost_samples,
                    lost_windows,
                )
            )
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return what was gathered and not yet committed, on the CPU, for a checkpoint between two steps."""
        return {
            # Measured from the estimates, which the checkpoint contains, and not from each rank's reference.
            "sums": [torch.cat(window.sums_around(window.layer.running_mean)).cpu() for window in self.windows],
            "lost": [window.lost.to("cpu", copy=True) for window in self.windows],
            "forwards": [window.forwards for window in self.windows],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, for the same layers in the same order."""
        sizes = [len(sums) for sums in state["sums"]]
        if sizes != [len(window.sums) for window in self.windows]:
            raise ValueError(
                f"the checkpoint has the windows of {len(sizes)} layers, the model has {len(self.windows)}, or they "
                "differ in channels; build the model the checkpoint was made with"
            )
        for window, sums, lost, forwards in zip(
            self.windows, state["sums"], state["lost"], state["forwards"], strict=True
        ):
            window.clear()
            window.sums.copy_(sums)
            window.lost.copy_(lost)
            window.counter[0] = forwards

    def detach(self) -> None:
        """Undo this `attach`: settings become those of the last other `attach` in force, or the defaults.

        Optimizers that hold the layers go on committing them.
        """
        for window, control in zip(self.windows, self._controls, strict=True):
            window.controls[:] = [c for c in window.controls if c is not control]

    def _zero_weights(self) -> list[str]:
        pairs = zip(self._controls, self._layers, strict=True)
        return [control.name for control, layer in pairs if layer.has_zero_weight()]


def attach(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    rate: float | str | None = None,
    process_group: Any = ...,
    max_forwards: int = MAX_FORWARDS,
) -> Handle:
    """Control the BatchChannelNorm layers of a model explicitly.

    Most loops do not need this: an optimizer that holds a layer's weight commits when it steps. Use it for
    `"sequential"` layers with `rate="lr"`, which need the learning rate in the forward; for loops that update
    parameters by hand; and for another rate, process group or limit.

    Args:
        model: the module whose layers to control. Messages call the layers by their names in it.
        optimizer: one or several optimizers. `"lr"` means their learning rate, and only they commit these layers.
        rate: `"lr"` or a float in [0, 1], instead of the layers' own.
        process_group: the ranks whose windows are merged. By default the group of the DistributedDataParallel module
            around the model, or all ranks without DDP. Give None to merge nothing.
        max_forwards: how many forwards a layer may gather without a commit before it raises an error.

    Returns:
        A handle with `commit()`, `discard()`, `paused()`, `report()` and `detach()`.

    Raises:
        ValueError: the model has no BatchChannelNorm, or the optimizer holds none of their weights.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), BatchChannelNorm(8))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> handle = attach(model, optimizer)
        >>> _ = model(torch.randn(2, 3, 8, 8))
        >>> handle.report()[0].elements
        72
    """
    if not any(isinstance(module, BatchChannelNorm) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} holds no BatchChannelNorm among its {sum(1 for _ in model.modules())} modules; "
            "call mn.convert(model) first"
        )
    if rate is not None and rate != "lr":
        rate = check_rate(rate)
    check_count("max_forwards", max_forwards)
    optimizers = _optimizers(optimizer)
    return Handle(model, optimizers, rate=rate, process_group=process_group, max_forwards=max_forwards)


def merge_states(like: Sequence[dict[str, Any]], states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of the states of several ranks. Without `states`, return zeros in the shape of `like[0]`."""
    if not states:
        return {name: [value - value for value in values] for name, values in like[0].items()}
    return {
        name: [sum(values[1:], values[0]) for values in zip(*(s[name] for s in states), strict=True)]
        for name in like[0]
    }


def _holds(held: set[int], layer: BatchChannelNorm) -> bool:
    return any(id(p) in held for p in layer.weight_parameters())


def _current_learning_rate(optimizers: Iterable[weakref.ref], window: weakref.ref[Window]) -> float | Tensor:
    """Return the learning rate of the parameter group that holds the layer's weight, as `group_rate` does."""
    target = window()
    assert target is not None
    own = {id(parameter) for parameter in target.layer.weight_parameters()}
    for optimizer in filter(None, (ref() for ref in optimizers)):
        for group in optimizer.param_groups:
            if any(id(parameter) in own for parameter in group["params"]):
                return group_rate(target, group, optimizer)
    raise RuntimeError(f"no attached optimizer holds the weight of {target.describe()} any more; call mn.attach again")


def _optimizers(optimizer: Any) -> list[Any]:
    if optimizer is None:
        return []
    several = isinstance(optimizer, Iterable) and not hasattr(optimizer, "param_groups")
    given = list(optimizer) if several else [optimizer]
    if not given or not all(hasattr(o, "param_groups") for o in given):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or several of them, got {optimizer!r}")
    return given
