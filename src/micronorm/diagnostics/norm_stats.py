"""`measure_norms`: statistics of every normalization layer of a model over some batches."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from micronorm.commit.snapshot import preserved
from micronorm.convert.calibrate import call_model, check_batches
from micronorm.convert.surgery import eval_mode, refuse_wrappers
from micronorm.diagnostics.activations import ActivationTracker
from micronorm.diagnostics.norms import (
    RARE,
    Family,
    NormLayer,
    NormMoments,
    as_norm_layer,
    count_positive,
    distance_to_bn,
    rare_channels,
    refuse_compiled,
    stat_diff,
)
from micronorm.ops.moments import Moments, moments

StatisticsSource = Literal["estimates", "batch"]


@dataclass(frozen=True, eq=False)
class NormStatistics:
    """The statistics of one normalization layer over some data. Tensors are on the CPU, float64, with C numbers.

    Args:
        norm: the layer's class.
        family: "batch", "instance", "group", "layer" or "batch-channel".
        groups: the number of groups of channels that are normalized together; C for "batch" and "instance".
        samples: the number of samples, counted once per call of the layer.
        positions: the number of elements per channel, over all samples.
        grouped: mean and variance of each channel of the values that are normalized together. These are the input, or
            for BCN the input after its channel half.
        normalized: the same after normalization, without any affine transformation.
        positive: each channel's share of outputs above 0, before any activation.
        negative: each channel's share of outputs below 0.
        active: each channel's share of positive outputs of the activation; `positive` if no activation was found.
        activation: the first activation function after the layer, such as "relu"; None if none was found.
        residual: whether something was added to the output before the activation.
        by_estimates: whether the layer normalized by its running estimates.
        trained_by_estimates: whether the layer does so in training too: BCN in "step" and "sequential" mode.
        eps: the layer's eps.
        not_finite: the names of what is not finite: "input", parameters, estimates in use, "output".
        not_finite_channels: which channels of the output are not finite somewhere (C booleans).
    """

    norm: str
    family: Family
    groups: int
    samples: int
    positions: int
    grouped: Moments
    normalized: Moments
    positive: Tensor
    negative: Tensor
    active: Tensor
    activation: str | None
    residual: bool
    by_estimates: bool
    trained_by_estimates: bool
    eps: float
    not_finite: tuple[str, ...]
    not_finite_channels: Tensor

    @property
    def channels(self) -> int:
        """Return C."""
        return self.active.numel()

    @property
    def stat_diff(self) -> Tensor:
        """Return StatDiff (label `eq:sd`) of each group: G numbers, all 0 for batch and instance normalization."""
        return stat_diff(*self.grouped, self.groups)

    @property
    def dead(self) -> Tensor:
        """Return which channels are never active (C booleans).

        After an addition, a channel counts only if the norm's own output is negative in 99 % of positions. Otherwise
        the other summand keeps the channel inactive.
        """
        return (self.active == 0) & self._kept_inactive_by_norm()

    @property
    def rare(self) -> Tensor:
        """Return which channels are active in fewer than 1 % of positions, but in some; after an addition as `dead`."""
        return rare_channels(self.active) & self._kept_inactive_by_norm()

    def _kept_inactive_by_norm(self) -> Tensor:
        return self.negative > 1 - RARE if self.residual else torch.ones_like(self.active, dtype=torch.bool)

    def figures(self) -> dict[str, Any]:
        """Return the row of kind "norm" of `micronorm.records`."""
        row = norm_row(self.norm, self.groups, self.grouped, self.normalized, eps=self.eps)
        return row | {
            "active": float(self.active.mean()),
            "dead": int(self.dead.sum()),
            "rare": int(self.rare.sum()),
        }


def norm_row(norm: str, groups: int, grouped: Moments, normalized: Moments, *, eps: float) -> dict[str, Any]:
    """Return the row of kind "norm" of `micronorm.records`, without the activity of the channels."""
    differences = stat_diff(*grouped, groups)
    sigma_mean, sigma_std = distance_to_bn(*normalized, eps=eps)
    return {
        "kind": "norm",
        "norm": norm,
        "channels": normalized.mean.numel(),
        "groups": groups,
        "stat_diff": float(differences.mean()),
        "stat_diff_worst": float(differences.max()),
        "sigma_mean": sigma_mean,
        "sigma_std": sigma_std,
    }


def measure_norms(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    statistics: StatisticsSource = "estimates",
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> dict[str, NormStatistics]:
    """Run the model over batches and return the statistics of each normalization layer, by name.

    Known layers are group, layer, instance, batch and batch-channel normalization of torch, timm and this library. The
    activation is the first one after a norm, directly or after an addition, as a module or a function. It is not found
    behind a view, a product or a cast. Calls that `mn.convert` has fused run unfused here, with the same results.

    The model runs in eval mode without gradients. Training flags, parameters, gradients, buffers, windows, hooks and
    random states are the same afterwards as before.

    Args:
        model: the model, not wrapped in DDP, FSDP or torch.compile.
        batches: the inputs of the model: tensors, or tuples and lists that start with a tensor.
        statistics: `"estimates"` lets batch normalization use its running statistics, as in eval mode. `"batch"` lets
            it normalize by the moments of the batch, as in training. Use "batch" for networks that are not trained.
        forward: a function forward(model, batch) for other kinds of batches.

    Returns:
        The statistics by module name, in the order of the first call. Layers that were never called are absent.

    Raises:
        ValueError: the model has no known normalization, or no batch reached one.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU())
        >>> found = measure_norms(model, [torch.randn(4, 3, 8, 8)])["1"]
        >>> found.activation, found.stat_diff.shape, found.samples, found.positions
        ('relu', torch.Size([2]), 4, 144)
    """
    refuse_wrappers(model)
    refuse_compiled(model)
    check_batches(batches)
    if statistics not in ("estimates", "batch"):
        raise ValueError(f'statistics must be "estimates" or "batch", got {statistics!r}')
    norms = {name: norm for name, module in model.named_modules() if (norm := as_norm_layer(module)) is not None}
    if not norms:
        raise ValueError(f"{type(model).__name__} has no group, layer, instance, batch or batch-channel normalization")
    called: dict[str, _NormRecorder] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved(model, parameters=False))
        stack.enter_context(eval_mode(model))
        if statistics == "batch":
            for norm in norms.values():
                if norm.family == "batch" or (norm.family == "batch-channel" and norm.module.statistics == "batch"):
                    norm.module.training = True
        stack.enter_context(torch.no_grad())
        tracker = ActivationTracker()
        for name, norm in norms.items():
            stack.callback(_NormRecorder(name, norm, tracker, called).close)
        for batch in batches:
            with tracker:
                (forward or call_model)(model, batch)
        found = {name: recorder.statistics() for name, recorder in called.items()}
    if not found:
        raise ValueError("no batch reached a normalization; are there batches, and do they have samples?")
    return found


class _NormRecorder:
    """Record the inputs, outputs and activations of one norm by hooks.

    These hooks are not passive, so fused calls run unfused and every norm is called by itself.
    """

    def __init__(
        self, name: str, norm: NormLayer, tracker: ActivationTracker, called: dict[str, "_NormRecorder"]
    ) -> None:
        self.name, self.norm, self.tracker, self.called = name, norm, tracker, called
        self.by_estimates = norm.by_estimates
        self.moments = NormMoments(norm)
        self.samples = self.calls = self.activated = 0
        self.positive: Tensor | int = 0
        self.negative: Tensor | int = 0
        self.active: Tensor | int = 0
        self.activations: set[str] = set()
        self.residual = False
        self.finite_input: Tensor | bool = True
        self.not_finite: Tensor | bool = False
        self._inside = self._has_output = False
        module = norm.module
        self._hooks = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, with_kwargs=True),
        ]
        # Norms of timm, and our replacements, contain the layers behind them. The first one gets the norm's output.
        children = [getattr(module, child, None) for child in ("drop", "act")]
        first = next((child for child in children if isinstance(child, nn.Module)), None)
        if first is not None:
            self._hooks.append(first.register_forward_pre_hook(self._between))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    # --- hooks ---

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()), None)
        self._inside, self._has_output = self.norm.accepts(x), False
        if self._inside:
            self.called.setdefault(self.name, self)
            with self.tracker.paused():
                self._add_input(self.norm.channels_first(x.detach()))  # type: ignore[union-attr]

    def _between(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._inside and not self._has_output and args and isinstance(args[0], Tensor):
            self._has_output = True
            self._add_output(args[0])

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inside, self._inside = self._inside, False
        if not inside or self._has_output or not isinstance(output, Tensor):
            return
        activation = kwargs.get("activation") or getattr(module, "activation", None)
        activation = activation if isinstance(activation, str) else None
        residual = kwargs.get("residual")
        if activation is None and residual is None:
            self._add_output(output)
            return
        # The call also adds a residual or applies an activation. Compute the norm's own output once more.
        axis = self.norm.axis
        with self.tracker.paused():
            own = output
            if residual is not None:
                own = type(module).forward(module, args[0] if args else next(iter(kwargs.values())))
            self._count_output(own)
            counts = count_positive(output, axis=axis)
        if activation is not None:
            self._add_activation(activation, residual is not None, counts)
        else:
            self.tracker.track(output, axis, lambda name, _, found: self._add_activation(name, True, found))

    # --- sums ---

    def _add_input(self, x: Tensor) -> None:
        self.moments.add_input(x, moments(x))
        self.samples += x.shape[0]
        self.calls += 1
        self.finite_input = self.finite_input & x.isfinite().all()

    def _add_output(self, y: Tensor) -> None:
        with self.tracker.paused():
            self._count_output(y)
        self.tracker.track(y, self.norm.axis, self._add_activation)

    def _count_output(self, y: Tensor) -> None:
        axis = self.norm.axis
        self.positive = self.positive + count_positive(y, axis=axis)
        self.negative = self.negative + count_positive(-y, axis=axis)
        self.not_finite = self.not_finite | y.isfinite().logical_not().movedim(axis, 0).flatten(1).any(1)

    def _add_activation(self, name: str, added: bool, counts: Tensor) -> None:
        self.activations.add(name)
        self.residual |= added
        self.active = self.active + counts
        self.activated += 1

    def statistics(self) -> NormStatistics:
        """Return the statistics of all calls, on the CPU."""
        known = self.activated == self.calls and len(self.activations) == 1
        count = self.moments.count

        def share(counts: Tensor | int) -> Tensor:
            return torch.as_tensor(counts).cpu().to(torch.float64) / count

        on_cpu = self.moments.halves([numbers.cpu().to(torch.float64) for numbers in self.moments.moments])
        not_finite = torch.as_tensor(self.not_finite).cpu()
        held = [name for name, tensor in self.norm.tensors().items() if not tensor.isfinite().all()]
        return NormStatistics(
            type(self.norm.module).__name__,
            self.norm.family,
            self.norm.groups,
            self.samples,
            count,
            *on_cpu,
            positive=share(self.positive),
            negative=share(self.negative),
            active=share(self.active if known else self.positive),
            activation=next(iter(self.activations)) if known else None,
            residual=self.residual and known,
            by_estimates=self.by_estimates,
            trained_by_estimates=self.norm.trained_by_estimates,
            eps=self.norm.eps,
            not_finite=(*([] if self.finite_input else ["input"]), *held, *(["output"] if not_finite.any() else [])),
            not_finite_channels=not_finite.expand(self.norm.channels),
        )
