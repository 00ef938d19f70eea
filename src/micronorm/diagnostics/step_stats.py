"""The statistics of one observed optimizer step, recorded by hooks that change nothing.

Everything is summed over micro-batches by counts, so it does not depend on how the step was cut. The numbers stay on
their devices until `StepRecorder.read` transfers them at once.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.diagnostics.lipschitz import GradientSum, Shares, layer_shares, observe_weight, weight_layers
from micronorm.diagnostics.norm_stats import norm_row
from micronorm.diagnostics.norms import NormLayer, NormMoments, as_norm_layer, count_positive, rare_channels
from micronorm.nn.checkpointing import inside_backward
from micronorm.nn.passive_hook import PassiveHook
from micronorm.nn.reparameterized import Reparameterized
from micronorm.ops.bcn import batch_channel_norm
from micronorm.ops.moments import Moments, as_ncs, compute_dtype, moments, wide_dtype
from micronorm.ops.private_api import functorch_transforms_active

Row = dict[str, Any]


def observable_weights(model: nn.Module) -> dict[str, Any]:
    """Return the layers whose weights can be observed. A sharded model has none: reading a shard needs all ranks."""
    sharded = any(hasattr(parameter, "placements") for parameter in model.parameters())
    return {} if sharded else weight_layers(model)


# --- norms -----------------------------------------------------------------------------------------------------------


class NormSums(NormMoments):
    """The moments and the positive outputs of one norm, summed over forwards."""

    def __init__(self, norm: NormLayer) -> None:
        super().__init__(norm)
        self._positive: Tensor | None = None
        self._outputs = 0  # per channel

    def add_forward(self, x: Tensor, output: Tensor, *, alone: bool) -> None:
        """Add one forward. `alone` says that the forward did not add a residual to the output."""
        x = self.norm.channels_first(x)
        data = _moments(x)
        self.add_input(x, data)
        y = self.norm.channels_first(output) if alone else _own_output(self.norm, x, data)
        if y is not None and y.shape == x.shape:
            positive = count_positive(y)
            self._positive = positive if self._positive is None else self._positive + positive
            self._outputs += x.numel() // x.shape[1]

    def tensors(self) -> list[Tensor]:
        """Return what `row` needs, on the device."""
        return [*self.moments, *(() if self._positive is None else (self._positive,))]

    def row(self, numbers: Sequence[Tensor]) -> Row:
        """Return the row of kind "norm" of `micronorm.records`, given the numbers on the host."""
        row = norm_row(type(self.norm.module).__name__, self.norm.groups, *self.halves(numbers[:2]), eps=self.norm.eps)
        if len(numbers) > 2:
            active = numbers[2] / self._outputs
            row |= {
                "active": float(active.mean()),
                "dead": int((active == 0).sum()),
                "rare": int(rare_channels(active).sum()),
            }
        return row


def _moments(x: Tensor) -> Moments:
    """Return the moments of x; on a GPU by one launch, which is accurate enough for an observation."""
    if x.device.type == "cpu":
        return moments(x)
    var, mean = torch.var_mean(as_ncs(x).to(compute_dtype(x.dtype)), -1, correction=0)
    wide = wide_dtype(x.device)
    return Moments(mean.to(wide), var.to(wide))


def _own_output(norm: NormLayer, x: Tensor, data: Moments) -> Tensor | None:
    """Return the norm's output without the residual that its forward added, or None if the family is not known."""
    layer = norm.module
    if norm.family == "group":
        return torch.group_norm(x, layer.num_groups, layer.weight, layer.bias, layer.eps)
    if norm.family != "batch-channel":
        return None
    estimates = None if norm.uses_batch else norm.estimates()
    affine = (layer.weight, layer.bias, layer.group_weight, layer.group_bias)
    options: dict[str, Any] = {"groups": layer.num_groups, "eps": float(layer.eps), "blend": layer.blend}
    return batch_channel_norm(x, estimates, *affine, **options, data=data)


# --- one step --------------------------------------------------------------------------------------------------------


class StepRecorder:
    """Record the norms and weights of a model during one step.

    Args:
        model: the model, without a wrapper.
        is_active: returns whether the present forward counts.
    """

    def __init__(self, model: nn.Module, *, is_active: Callable[[], bool]) -> None:
        self.model, self._is_active = model, is_active
        self.norms: dict[str, NormSums] = {}
        self.gradients: dict[str, GradientSum] = {}
        self.weights = observable_weights(model)
        self.forwards = 0  # of norms; of the model if it has no norms
        self.computed = 0  # the forwards that the computed statistics cover; 0 before `compute`
        self.names: list[str] = []
        self._with_grad: nn.Parameter | None = None  # a parameter that got a gradient since the last step
        self._stops: list[Callable[[], None]] = []
        for name, module in model.named_modules():
            self.names.append(name)
            norm = as_norm_layer(module)
            if norm is not None:
                self.norms[name] = NormSums(norm)
                hook = PassiveHook(self._norm_hook(name))
                self._stops.append(module.register_forward_hook(hook, with_kwargs=True).remove)
        for name, layer in self.weights.items():
            if isinstance(layer, Reparameterized):
                self.gradients[name] = GradientSum()
                self._stops.append(observe_weight(layer, self._weight_hook(name)))
                self._stops.append(self.gradients[name].close)
                if layer.weight.is_leaf and layer.weight.requires_grad:
                    self._stops.append(layer.weight.register_post_accumulate_grad_hook(self._after_grad).remove)
        if not self.norms:
            self._stops.append(model.register_forward_hook(PassiveHook(self._model_hook)).remove)

    def _norm_hook(self, name: str) -> Callable[..., None]:
        def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if torch.compiler.is_compiling() or not self._is_active() or inside_backward():
                return
            sums = self.norms[name]
            x = args[0] if args else kwargs.get("input", kwargs.get("x"))
            if not isinstance(x, Tensor) or not sums.norm.accepts(x) or _has_no_values(x):
                return
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                sums.add_forward(x.detach(), output.detach(), alone=kwargs.get("residual") is None)
            self.forwards += 1

        return observe

    def _weight_hook(self, name: str) -> Callable[[Tensor], None]:
        def observe(weight: Tensor) -> None:
            if self._is_active():
                self._forget_skipped_step()
                self.gradients[name].watch(weight)

        return observe

    def _model_hook(self, module: nn.Module, args: Any, output: Any) -> None:
        self.forwards += self._is_active() and not torch.compiler.is_compiling()

    def _after_grad(self, parameter: nn.Parameter) -> None:
        self._with_grad = parameter

    def _forget_skipped_step(self) -> None:
        """Clear the gradients of a step that a GradScaler skipped: no hook ran, but `zero_grad` was called."""
        if self._with_grad is not None and self._with_grad.grad is None and not inside_backward():
            self._with_grad = None
            self.clear_gradients()

    def clear(self) -> None:
        """Forget everything recorded. The hooks stay."""
        for name, sums in self.norms.items():
            self.norms[name] = NormSums(sums.norm)
        self.clear_gradients()
        self.forwards = 0

    def clear_gradients(self) -> None:
        """Forget the recorded gradients, and what was computed from them."""
        self.computed = 0
        for gradient in self.gradients.values():
            gradient.total = None

    def compute(self, *, scale: Tensor | None, weights: bool) -> None:
        """Compute the statistics of the forwards so far on their devices, without waiting for them.

        Args:
            scale: the loss scale of the gradients, or None.
            weights: whether to compute statistics of the weights, which the optimizer must not have changed yet.
        """
        self.computed = self.forwards
        self._scale = [] if scale is None else [scale]
        self._tensors = {name: sums.tensors() for name, sums in self.norms.items() if sums.count}
        self._methods: dict[str, str] = {}
        for name, layer in self.weights.items() if weights else ():
            weight = layer.weight.detach()
            total = self.gradients[name].total if name in self.gradients else layer.weight.grad
            if total is not None and layer.weight.grad is not None:
                self._methods[name], shares = layer_shares(layer, total)
                # The norm of the parameter's own gradient: that of the effective weight may carry a loss scale.
                norms = [torch.linalg.vector_norm(t, dtype=compute_dtype(t.dtype)) for t in (weight, layer.weight.grad)]
                self._tensors[name] = [torch.stack(shares), *norms]

    def read(self) -> dict[str, Row]:
        """Return the rows of `compute` by layer. This waits for the devices once."""
        flat = iter(_to_host([t for tensors in (self._scale, *self._tensors.values()) for t in tensors]))
        scale = float(next(flat)) if self._scale else 1.0
        rows: dict[str, Row] = {}
        stale = False
        for name, tensors in self._tensors.items():
            numbers = [next(flat) for _ in tensors]
            if name not in self._methods:
                rows[name] = self.norms[name].row(numbers)
                continue
            shares, norm, grad = Shares(*numbers[0]), float(numbers[1]), float(numbers[2])
            rows[name] = {"kind": "weight", "weight": self._methods[name], **shares.totals()}
            rows[name] |= {"norm": norm, "grad": grad / scale}
            stale |= math.isfinite(grad) and not bool(shares.square.isfinite().all())
        # The sums may still hold gradients of a skipped step, then also for layers where they are finite.
        left_out = self.gradients if stale else ()
        return {name: rows[name] for name in self.names if name in rows and name not in left_out}

    def close(self) -> None:
        """Remove the hooks."""
        while self._stops:
            self._stops.pop()()


def _has_no_values(x: Tensor) -> bool:
    """Return whether x is symbolic, or belongs to a forward that is being captured and runs later."""
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return x.is_meta or capturing or functorch_transforms_active()


def _to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in float64 on the CPU, by one transfer per device."""
    found = list(tensors)
    for device in {tensor.device for tensor in tensors}:
        places = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        flat = torch.cat([tensors[i].reshape(-1).to(wide_dtype(device)) for i in places]).to("cpu", torch.float64)
        for i, values in zip(places, flat.split([tensors[i].numel() for i in places]), strict=True):
            found[i] = values.reshape(tensors[i].shape)
    return found
